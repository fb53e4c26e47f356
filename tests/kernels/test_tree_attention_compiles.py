"""Tree attention compiles for GPUs that are not here, within the shared memory they have."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
HOPPER_SHARED = 232_448  # bytes of shared memory a program may have
HOPPER_MULTIPROCESSOR = 233_472  # bytes of a multiprocessor, of which each program takes 1 KiB more


def compiled(script: str, *arguments: str) -> list[dict]:
    """A script's reports, from a Python in which Triton compiles instead of interpreting."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, str(HERE / script), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.parametrize("arguments", [("--tight",), pytest.param((), marks=pytest.mark.gpu, id="all")])
def test_configurations_fit_the_shared_memory_of_their_gpus(arguments):
    reports = compiled("compile_tree_attention.py", *arguments)
    assert {"plain", "windowed", "e4m3", "e4m3 bits", "e5m2"} == {report["variant"] for report in reports}
    for report in reports:
        assert report["shared"] <= report["allowed"], report


def test_hopper_kernels_fit_and_are_not_serialized():
    """A warning of the assembler is how it says that wgmma runs one at a time."""
    reports = compiled("compile_tree_attention_hopper.py")
    assert len(reports) == 6
    for report in reports:
        assert report["programs"] * (report["shared"] + 1024) <= HOPPER_MULTIPROCESSOR, report
        assert report["shared"] <= HOPPER_SHARED, report
        assert report["warnings"] == [], report
        # Three consumers have 160 registers a thread, and spill outside their loop.
        assert report["spilled"] <= 512, report


@pytest.mark.parametrize("arguments", [("--tight",), pytest.param((), marks=pytest.mark.gpu, id="all")])
def test_finishing_tiles_fit_the_shared_memory_of_their_gpus(arguments):
    reports = compiled("compile_finish.py", *arguments)
    assert len(reports) >= 3
    for report in reports:
        assert report["shared"] <= report["allowed"], report
