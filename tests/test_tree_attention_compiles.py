"""Tree attention compiles for GPUs that are not here, within the shared memory they have."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "compile_tree_attention.py"


def compiled(*arguments: str) -> list[dict]:
    """The script's reports, from a Python in which Triton compiles instead of interpreting."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.parametrize("arguments", [("--tight",), pytest.param((), marks=pytest.mark.gpu, id="all")])
def test_configurations_fit_the_shared_memory_of_their_gpus(arguments):
    reports = compiled(*arguments)
    assert len(reports) >= 6
    for report in reports:
        assert report["shared"] <= report["allowed"], report
