"""`ddtree patch` on trees that carry a DDTREE port of their own: both locks open, or nothing is touched.

The toy engine in tests/unit/in_tree_port runs the patched port; the sources of an SGLang release that ports
build on show that the seams are found there too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from patch_trees import contents, ddtree_patch, snapshot
from sglang_wheels import unpack

from sglang_ddtree_patch.patches.unified_diff import parse

PORT = Path(__file__).parent / "in_tree_port"
REPOSITORY = Path(__file__).parents[2]
WORKER = "sglang/srt/speculative/dflash_worker.py"
ARGUMENTS = "sglang/srt/server_args.py"
REGISTRY = "sglang/srt/layers/attention/attention_registry.py"

TREE = {"speculative_algorithm": "DDTREE"}
FLASH = {"attention_backend": "flash"}  # reads pages, skips masks


@pytest.fixture
def port(tmp_path) -> Path:
    """A copy of the toy engine."""
    ignored = shutil.ignore_patterns("__pycache__")
    return Path(shutil.copytree(PORT, tmp_path / "port", ignore=ignored))


def generate(root: Path, *settings: dict) -> list[dict]:
    """What becomes of each of the settings on the engine in `root`."""
    environment = {**os.environ, "PYTHONPATH": f"{root}:{REPOSITORY}", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(root / "generate.py"), json.dumps(settings)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def edit(root: Path, name: str, old: str, new: str) -> None:
    source = (root / name).read_text()
    assert old in source
    (root / name).write_text(source.replace(old, new))


def test_the_port_is_locked_before_and_right_on_pages_of_one_slot(port):
    right, paged, masked = generate(port, TREE, {**TREE, "page_size": 16}, {**TREE, **FLASH})
    assert (right["is_right"], right["leaked_pages"]) == (True, 0)
    assert paged["error"].startswith("DDTREE currently requires --page-size 1 because")
    assert masked["error"].startswith("DDTREE serves with --attention-backend triton alone")


def test_a_patched_port_generates_the_same_at_any_page_size_and_before_any_backend(port):
    before = snapshot(port)
    assert ddtree_patch("apply", "--root", port) == 0
    settings = [
        TREE,
        {**TREE, **FLASH},
        {**TREE, "page_size": 16},
        {**TREE, **FLASH, "page_size": 16},
        {**TREE, **FLASH, "page_size": 64, "speculative_num_draft_tokens": 13},
        {"speculative_algorithm": "DFLASH", **FLASH, "page_size": 16},
    ]
    outcomes = generate(port, *settings)
    assert [(outcome["is_right"], outcome["leaked_pages"]) for outcome in outcomes] == [(True, 0)] * 6
    # The tree is what saves rounds: one token a round would take 47.
    assert max(outcome["rounds"] for outcome in outcomes) < 20
    assert ddtree_patch("revert", "--root", port) == 0
    assert snapshot(port) == before


def test_check_and_status_say_what_was_found_and_how_the_tree_stands(port, capsys):
    before = snapshot(port)
    assert ddtree_patch("check", "--root", port) == 0
    printed = capsys.readouterr().out
    assert "not applied: SGLang 0.5.12 with a DDTREE of its own at" in printed
    assert re.search(rf"lock: {WORKER}, line \d+, demands pages of one slot", printed)
    assert re.search(rf"lock: {ARGUMENTS}, line \d+, demands the Triton backend", printed)
    assert ddtree_patch("status", "--root", port) == 1
    assert snapshot(port) == before
    ddtree_patch("apply", "--root", port)
    assert ddtree_patch("status", "--root", port) == 0
    patched = snapshot(port)
    assert ddtree_patch("apply", "--root", port) == 0
    assert "already applied, nothing done" in capsys.readouterr().out
    assert snapshot(port) == patched


def test_a_dry_run_prints_a_diff_that_is_recognized_once_applied_by_hand(port, capfdbinary):
    before = contents(port)
    assert ddtree_patch("apply", "--dry-run", "--root", port) == 0
    diff = parse(capfdbinary.readouterr().out)
    assert contents(port) == before
    assert sorted(file.path for file in diff) == [REGISTRY, ARGUMENTS, WORKER]
    for file in diff:
        (port / file.path).write_bytes(file.apply((port / file.path).read_bytes()))
    assert ddtree_patch("status", "--root", port) == 0
    assert b"applied with another tool" in capfdbinary.readouterr().out


def test_line_ends_stay_and_line_numbers_do_not_matter(port):
    for name in (WORKER, ARGUMENTS, REGISTRY):
        data = b"# Ours.\n\n\n" + (port / name).read_bytes()
        (port / name).write_bytes(data.replace(b"\n", b"\r\n"))
    before = snapshot(port)
    assert ddtree_patch("apply", "--root", port) == 0
    for name in (WORKER, ARGUMENTS, REGISTRY):
        assert b"\n" not in (port / name).read_bytes().replace(b"\r\n", b"")
    assert generate(port, {**TREE, **FLASH, "page_size": 16})[0]["is_right"]
    assert ddtree_patch("revert", "--root", port) == 0
    assert snapshot(port) == before


def test_a_port_without_a_lock_on_its_backend_is_patched_and_that_is_said(port, capsys):
    edit(port, ARGUMENTS, "not in (", "not in SUPPORTED + (")
    assert ddtree_patch("check", "--root", port) == 0
    assert "no lock on the Triton backend was found" in capsys.readouterr().out


REFUSALS = {
    "no lock on the page size": (
        WORKER, "self.page_size != 1", "self.page_size != ONE", "no refusal of page sizes other than 1",
    ),
    "a lock that tests something else too": (
        WORKER, "self.page_size != 1", "self.page_size != 1 or self.width > 64",
        ": a lock that tests something else too",
    ),
    "a lock with another branch": (
        WORKER, "            verify_input = self._build_ddtree",
        "            else:\n                pass\n            verify_input = self._build_ddtree",
        ": a lock with another branch behind it",
    ),
    "no place for backends": (
        REGISTRY, "def attn_backend_wrapper(", "def wrap(",
        "0 functions attn_backend_wrapper(runner, backend), not one",
    ),
    "no call that commits": (WORKER, "verify_input.verify(", "self._finish(", "no call X.verify(batch=..."),
    "a statement that shares its line": (
        REGISTRY, "    return full_attn_backend", "    _ = 1; return full_attn_backend",
        ": another statement shares the line",
    ),
    "another engine": (
        "sglang/srt/layers/attention/base_attn_backend.py", "def init_cuda_graph_state(self, max_bs",
        "def init_cuda_graph_state(self, bs", "AttentionBackend.init_cuda_graph_state: expected (max_bs, ",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "old", "new", "words"), REFUSALS.values(), ids=REFUSALS)
def test_a_port_that_is_not_understood_is_left_alone_and_said_why(port, capsys, name, old, new, words):
    edit(port, name, old, new)
    before = snapshot(port)
    assert ddtree_patch("apply", "--root", port) == 1
    error = capsys.readouterr().err
    assert words in error
    assert "docs/patches.md says how to do it by hand" in error
    assert error.count("\n") == 1
    assert snapshot(port) == before


def test_a_file_of_the_port_that_cannot_be_parsed_is_named(port, capsys):
    edit(port, WORKER, "class DFlashWorker:", "class DFlashWorker(:")
    assert ddtree_patch("check", "--root", port) == 1
    assert "dflash_worker.py cannot be parsed" in capsys.readouterr().err


def test_a_release_with_a_port_of_its_own_never_gets_the_releases_diff(port, capsys):
    """Both would register DDTREE."""
    (port / "sglang/srt/plugins").mkdir()
    stock = unpack("0.5.22", port.parent / "stock", "plugins/__init__.py")
    shutil.copy(stock / "sglang/srt/plugins/__init__.py", port / "sglang/srt/plugins")
    assert ddtree_patch("apply", "--dry-run", "--root", port) == 0
    assert "plugins/__init__.py" not in capsys.readouterr().out


# The engine that ports build on.


@pytest.fixture(scope="module")
def real_engine(tmp_path_factory) -> Path:
    """The last release with dflash_worker.py, and in it the two locks, as a port would put them."""
    root = unpack("0.5.12.post1", tmp_path_factory.mktemp("engine"), ".py")
    edit(
        root, WORKER,
        "        self._warned_sampling_fallback = False\n        self._logged_first_verify = False\n",
        "        self._warned_sampling_fallback = False\n"
        "        self._logged_first_verify = False\n"
        '        self.is_ddtree = server_args.speculative_algorithm == "DDTREE"\n'
        "        if self.is_ddtree and self.page_size != 1:\n"
        '            raise ValueError("DDTREE currently requires --page-size 1")\n',
    )  # fmt: skip
    edit(
        root, ARGUMENTS, '        if self.speculative_algorithm == "DFLASH":\n',
        '        if self.speculative_algorithm == "DDTREE":\n'
        '            if self.attention_backend != "triton":\n'
        '                self.attention_backend = "triton"\n'
        '        if self.speculative_algorithm in ("DFLASH", "DDTREE"):\n',
    )  # fmt: skip
    return root


def test_the_seams_are_found_in_the_release_that_ports_build_on(real_engine, capfdbinary):
    before = contents(real_engine)
    assert ddtree_patch("apply", "--root", real_engine) == 0
    patched = {name: (real_engine / name).read_text() for name in (WORKER, ARGUMENTS, REGISTRY)}
    for name, source in patched.items():
        compile(source, name, "exec")
    assert "page_size != 1:\n            raise" not in patched[WORKER]
    assert ") = committing(verify_input, batch, self.page_size)(\n" in patched[WORKER]
    assert 'self.attention_backend = "triton"' not in patched[ARGUMENTS].split('== "DDTREE":')[1][:200]
    assert "full_attn_backend = in_front_of(runner, full_attn_backend)\n" in patched[REGISTRY]
    assert ddtree_patch("revert", "--root", real_engine) == 0
    assert contents(real_engine) == before
