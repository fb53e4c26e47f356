"""`ddtree patch` that fails or is killed at any moment: nothing is lost, and the next run puts it right."""

import os
import shutil
import signal
import subprocess
import sys

import pytest
from patch_trees import contents, ddtree_patch, snapshot

# Runs the command in a process that kills itself at one call of the named function of `os`.
KILLED = """
import argparse, os, signal, sys
from pathlib import Path
from sglang_ddtree_patch.contract_check import ContractReport
from sglang_ddtree_patch.launch import patch
from sglang_ddtree_patch.patches.releases import known_releases
diffs, function, moment, when, *words = sys.argv[1:]
patch.known_releases = lambda: known_releases(Path(diffs))
patch.check_releases = lambda root, version: ContractReport(version, ())
original, calls = getattr(os, function), []
def killing(*given, **named):
    calls.append(given)
    fatal = len(calls) == int(moment)
    if fatal and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    result = original(*given, **named)
    if fatal:
        os.kill(os.getpid(), signal.SIGKILL)
    return result
setattr(os, function, killing)
parser = argparse.ArgumentParser()
patch.add_parser(parser.add_subparsers())
arguments = parser.parse_args(["patch", *words])
sys.exit(arguments.run(arguments))
"""
# Every write lies between two of these calls. Of apply: keep two originals, stage two files, write the
# manifest, put it in place, put two files in place.
MOMENTS = [
    ("apply", "link", 1, "before"),
    ("apply", "link", 2, "before"),
    ("apply", "replace", 1, "before"),
    ("apply", "replace", 1, "after"),
    ("apply", "replace", 2, "after"),
    ("apply", "replace", 3, "after"),
    ("revert", "replace", 1, "before"),
    ("revert", "replace", 1, "after"),
    ("revert", "unlink", 1, "after"),
]


@pytest.mark.parametrize("failing", range(1, 4))
def test_a_failure_half_way_restores_every_byte(root, monkeypatch, capsys, failing):
    before, replace, calls = snapshot(root), os.replace, []

    def fail(source, target):
        calls.append(target)
        if len(calls) == failing:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    assert ddtree_patch("apply", "--root", root) == 1
    assert capsys.readouterr().err == "ddtree patch: [Errno 28] No space left on device\n"
    assert snapshot(root) == before


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: "-".join(map(str, moment)))
def test_whatever_kill_9_leaves_is_completed_by_apply_and_undone_by_revert(root, releases, moment):
    action, function, call, when = moment
    before = snapshot(root)
    if action == "revert":
        ddtree_patch("apply", "--root", root)
    words = [releases, function, call, when, action, "--root", root]
    run = subprocess.run([sys.executable, "-c", KILLED, *map(str, words)], capture_output=True, timeout=60)
    assert run.returncode == -signal.SIGKILL, run.stderr
    shutil.copytree(root, root.parent / "second", symlinks=True)

    assert ddtree_patch("revert", "--root", root) == 0
    assert snapshot(root) == before

    second = root.parent / "second"  # a copy of what was left, where copies stand for hard links
    assert ddtree_patch("apply", "--root", second) == 0
    assert ddtree_patch("status", "--root", second) == 0
    assert ddtree_patch("revert", "--root", second) == 0
    assert contents(second) == before[0]


def test_a_half_applied_tree_is_called_that(root, releases, capsys):
    words = [releases, "replace", 2, "after", "apply", "--root", root]
    subprocess.run([sys.executable, "-c", KILLED, *map(str, words)], capture_output=True, timeout=60)
    for action in (["status"], ["check"], ["apply", "--dry-run"]):
        assert ddtree_patch(*action, "--root", root) == 1
        assert capsys.readouterr().out.startswith("half applied: ")
