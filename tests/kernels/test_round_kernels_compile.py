"""The kernels around the two forwards compile for GPUs that are not here, to what their docstrings say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "compile_round_kernels.py"


@pytest.fixture(scope="module")
def reports() -> list[dict]:
    """The script's reports, from a Python in which Triton compiles instead of interpreting."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return [json.loads(line) for line in run.stdout.splitlines()]


def of_kernel(reports: list[dict], kernel: str) -> list[dict]:
    found = [report for report in reports if report["kernel"] == kernel]
    assert {tuple(report["capability"]) for report in found} >= {(8, 0), (9, 0), (10, 0), (12, 0)}
    return found


def test_logits_are_read_16_bytes_at_a_time(reports):
    for report in of_kernel(reports, "scan"):
        assert report["widest_load"] == 16, report


def test_a_row_of_the_tree_takes_three_reductions_of_one_instruction(reports):
    for report in of_kernel(reports, "tree"):
        outside_the_loop = 3  # depths within reach, nodes, deepest row
        assert report["reductions"] == 3 + outside_the_loop, report


def test_a_step_of_the_walk_takes_one_reduction_of_one_instruction(reports):
    for report in of_kernel(reports, "accept"):
        assert report["reductions"] == 1, report


def test_a_commit_reads_every_row_before_it_writes_any(reports):
    for report in of_kernel(reports, "commit"):
        assert report["order"] == ["load", "barrier", "store"], report


def test_the_masks_of_a_level_are_written_before_the_next_level_reads_them(reports):
    for report in of_kernel(reports, "tree"):
        assert report["order"][-4:] == ["store", "barrier", "load", "store"], report
        assert report["order"].count("barrier") == 1
