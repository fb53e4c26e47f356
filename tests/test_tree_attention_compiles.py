"""Tree attention compiles for GPUs that are not here, within the shared memory they have."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def compiled(script: str, *arguments: str) -> list[dict]:
    """A script's reports, from a Python in which Triton compiles instead of interpreting."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, str(TESTS / script), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.parametrize("arguments", [("--tight",), pytest.param((), marks=pytest.mark.gpu, id="all")])
def test_configurations_fit_the_shared_memory_of_their_gpus(arguments):
    reports = compiled("compile_tree_attention.py", *arguments)
    assert len(reports) >= 6
    for report in reports:
        assert report["shared"] <= report["allowed"], report


@pytest.mark.parametrize("arguments", [("--tight",), pytest.param((), marks=pytest.mark.gpu, id="all")])
def test_finishing_tiles_leave_room_for_a_second_program(arguments):
    """They are bound by latency: two to a multiprocessor hide some of it."""
    reports = compiled("compile_finish.py", *arguments)
    assert len(reports) >= 3
    for report in reports:
        assert report["shared"] <= report["allowed"] // 2, report
