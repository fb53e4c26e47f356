"""`ddtree patch` on small trees: all files or none, and the exact originals back."""

import importlib.util
import os
import stat
from pathlib import Path

import pytest
from patch_trees import (
    FILES,
    PATCHED,
    contents,
    ddtree_patch,
    snapshot,
)

from sglang_ddtree_patch.contract_check import ContractReport, Mismatch
from sglang_ddtree_patch.launch import patch as command
from sglang_ddtree_patch.patches import patcher
from sglang_ddtree_patch.patches.tree import find_tree
from sglang_ddtree_patch.patches.unified_diff import DiffSyntaxError, parse
from sglang_ddtree_patch.releases import NEWEST


def test_apply_then_revert_gives_back_the_very_same_files(root):
    before = snapshot(root)
    assert ddtree_patch("apply", "--root", root) == 0
    assert {name: (root / f"sglang/srt/{name}.py").read_bytes() for name in FILES} == PATCHED
    assert ddtree_patch("revert", "--root", root) == 0
    assert snapshot(root) == before


def test_copies_serve_where_there_are_no_hard_links(root, monkeypatch):
    def link(*_, **__):
        raise OSError("no hard links here")

    monkeypatch.setattr(os, "link", link)
    before = contents(root)
    assert ddtree_patch("apply", "--root", root) == 0
    assert ddtree_patch("revert", "--root", root) == 0
    assert contents(root) == before


def test_a_second_apply_says_so_and_changes_nothing(root, capsys):
    ddtree_patch("apply", "--root", root)
    patched = snapshot(root)
    capsys.readouterr()
    assert ddtree_patch("apply", "--root", root) == 0
    assert capsys.readouterr().out.startswith("already applied, nothing done")
    assert snapshot(root) == patched


def test_a_second_revert_says_so(root, capsys):
    before = snapshot(root)
    assert ddtree_patch("revert", "--root", root) == 0
    assert capsys.readouterr().out.startswith("not applied, nothing done")
    assert snapshot(root) == before


def test_status_follows_the_tree(root, capsys):
    assert ddtree_patch("status", "--root", root) == 1
    ddtree_patch("apply", "--root", root)
    assert ddtree_patch("status", "--root", root) == 0
    ddtree_patch("revert", "--root", root)
    assert ddtree_patch("status", "--root", root) == 1
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        "not applied", "applied", "the Python that runs this tree needs sglang-ddtree-patch installed",
        "applied", "reverted", "not applied",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "old", "new", "words"),
    [
        ("one", b"return 1", b"return 2", "hunk 2 expects '    return 1' in line 9, found '    return 2'"),
        ("two", b"y = 2\n", b"", "hunk 1 expects 'y = 2' in line 3, found the end of the file"),
        ("one", b"first", b"other", "every hunk fits, but other lines differ"),
        ("two", b"1\ny", b"1\r\ny", "hunk 1 expects 'x = 1' in line 2, found 'x = 1\\r'"),
    ],
)
def test_a_tree_that_differs_is_refused_by_file_and_hunk(root, capsys, name, old, new, words):
    path = root / f"sglang/srt/{name}.py"
    path.write_bytes(path.read_bytes().replace(old, new))
    before = snapshot(root)
    for action in ("check", "apply", "status", "revert"):
        assert ddtree_patch(action, "--root", root) == 1
        error = capsys.readouterr().err
        assert f"{name}.py is not the file of SGLang 9.9.9: {words}" in error
        assert error.count("\n") == 1
    assert snapshot(root) == before


def test_apply_reads_and_fits_a_tree_once(root, monkeypatch):
    fitted, fit = [], patcher._fit
    monkeypatch.setattr(patcher, "_fit", lambda *asked: fitted.append(asked) or fit(*asked))
    assert ddtree_patch("apply", "--root", root) == 0
    assert len(fitted) == 1


def test_a_tree_that_would_not_serve_is_refused_before_anything_changes(root, monkeypatch, capsys):
    missing = Mismatch(NEWEST.contract[0], "no such module")
    monkeypatch.setattr(command, "check_releases", lambda root, version: ContractReport(version, (missing,)))
    before = snapshot(root)
    for dry_run in ([], ["--dry-run"]):
        assert ddtree_patch("apply", *dry_run, "--root", root) == 1
        assert capsys.readouterr().err.startswith("ddtree patch: nothing was changed: SGLang 9.9.9 does not")
    assert snapshot(root) == before


def test_a_version_that_is_no_text_is_read_as_far_as_it_goes(root, capsys):
    (root / "sglang/version.py").write_bytes(b'# caf\xe9\n__version__ = "9.9.8"\n')
    assert ddtree_patch("status", "--root", root) == 1
    assert "SGLang 9.9.8 at" in capsys.readouterr().out


def test_a_missing_file_is_named(root, capsys):
    (root / "sglang/srt/two.py").unlink()
    assert ddtree_patch("apply", "--root", root) == 1
    assert "two.py is missing, and SGLang 9.9.9 has it" in capsys.readouterr().err


def test_an_edit_since_apply_is_never_overwritten(root, capsys):
    ddtree_patch("apply", "--root", root)
    (root / "sglang/srt/two.py").write_bytes(b"mine\n")
    edited = snapshot(root)
    assert ddtree_patch("revert", "--root", root) == 1
    assert "two.py was changed since it was patched" in capsys.readouterr().err
    assert snapshot(root) == edited


def test_a_damaged_original_is_never_put_back(root, capsys):
    ddtree_patch("apply", "--root", root)
    backup = root / ".sglang-ddtree-patch/original/sglang/srt/two.py"
    backup.write_bytes(b"damaged\n")
    patched = snapshot(root)
    assert ddtree_patch("revert", "--root", root) == 1
    assert "is no longer whole" in capsys.readouterr().err
    assert snapshot(root) == patched


def test_a_record_that_is_none_is_refused(root, capsys):
    (root / ".sglang-ddtree-patch").mkdir()
    (root / ".sglang-ddtree-patch/manifest.json").write_text("[]")
    assert ddtree_patch("apply", "--root", root) == 1
    assert "is not a record of this tool" in capsys.readouterr().err


def test_a_reinstalled_sglang_is_patched_anew(root):
    ddtree_patch("apply", "--root", root)
    for name, data in FILES.items():
        (root / f"sglang/srt/{name}.py").write_bytes(data)
    assert ddtree_patch("apply", "--root", root) == 0
    assert ddtree_patch("status", "--root", root) == 0
    ddtree_patch("revert", "--root", root)
    assert not (root / ".sglang-ddtree-patch").exists()
    assert (root / "sglang/srt/one.py").read_bytes() == FILES["one"]


def test_read_only_files_stay_read_only(root):
    path = root / "sglang/srt/one.py"
    path.chmod(0o444)
    assert ddtree_patch("apply", "--root", root) == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o444
    assert ddtree_patch("revert", "--root", root) == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o444


def test_crlf_files_keep_their_line_ends(root, capfdbinary):
    path = root / "sglang/srt/two.py"
    path.write_bytes(FILES["two"].replace(b"\n", b"\r\n"))
    before = snapshot(root)
    assert ddtree_patch("apply", "--dry-run", "--root", root) == 0
    assert b"+z = 4\r\n" in capfdbinary.readouterr().out
    assert ddtree_patch("apply", "--root", root) == 0
    assert path.read_bytes() == "# café\r\nx = 1\r\ny = 3\r\nz = 4\r\n".encode()
    assert ddtree_patch("revert", "--root", root) == 0
    assert snapshot(root) == before


@pytest.mark.parametrize("linked", ["site packages", "site packages/sglang"])
def test_a_linked_tree_is_one_tree_under_either_name(root, linked):
    link = root.parent / "elsewhere" / "sglang"
    link.parent.mkdir()
    link.symlink_to(root.parent / linked, target_is_directory=True)
    before = snapshot(root)
    assert ddtree_patch("apply", "--root", link) == 0
    assert (root / ".sglang-ddtree-patch").is_dir()
    assert [path.name for path in link.parent.iterdir()] == ["sglang"]
    assert ddtree_patch("revert", "--root", root / "sglang") == 0
    assert snapshot(root) == before


def test_a_file_linked_from_a_cache_leaves_the_cache_alone(root, capfdbinary):
    path, cached = root / "sglang/srt/two.py", root.parent / "cached.py"
    path.rename(cached)
    path.symlink_to("../../../cached.py")
    before = snapshot(root)
    assert ddtree_patch("apply", "--root", root) == 0
    assert cached.read_bytes() == FILES["two"]
    assert ddtree_patch("revert", "--dry-run", "--root", root) == 0
    assert b"+y = 2\n" in capfdbinary.readouterr().out
    assert ddtree_patch("revert", "--root", root) == 0
    assert snapshot(root) == before


def test_an_sglang_repository_is_found_by_its_root(root, tmp_path):
    (tmp_path / "repository").mkdir()
    root.rename(tmp_path / "repository" / "python")
    assert ddtree_patch("apply", "--root", tmp_path / "repository") == 0
    assert (tmp_path / "repository/python/.sglang-ddtree-patch").is_dir()


def test_a_second_run_at_the_same_time_is_refused(root, capsys):
    with find_tree(root).locked():
        assert ddtree_patch("apply", "--root", root) == 1
    assert "another ddtree patch is at work" in capsys.readouterr().err


def test_a_dry_run_prints_the_diff_and_changes_nothing(root, capfdbinary):
    before = snapshot(root)
    assert ddtree_patch("apply", "--dry-run", "--root", root) == 0
    printed = capfdbinary.readouterr().out
    assert snapshot(root) == before
    result = {Path(file.path).stem: file.apply(FILES[Path(file.path).stem]) for file in parse(printed)}
    assert result == PATCHED


@pytest.mark.parametrize("action", ["list", "check", "apply", "revert", "status"])
def test_every_action_explains_itself(action, capsys):
    with pytest.raises(SystemExit) as ended:
        ddtree_patch(action, "--help")
    assert ended.value.code == 0
    assert f"example:\n  ddtree patch {action}" in capsys.readouterr().out


def test_without_sglang_it_says_what_it_needs(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert ddtree_patch("check") == 1
    assert "SGLang is not installed in this Python: name a tree with --root DIR" in capsys.readouterr().err


def test_a_root_without_sglang_is_refused(tmp_path, capsys):
    assert ddtree_patch("apply", "--root", tmp_path) == 1
    assert capsys.readouterr().err.startswith(f"ddtree patch: no SGLang at {tmp_path}: expected srt/")


@pytest.mark.parametrize(
    "diff",
    [
        b"nothing\n",
        b"--- a/x\n+++ b/x\n",
        b"--- a/x\n+++ b/y\n@@ -1 +1 @@\n-a\n+b\n",
        b"--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+a\n",
        b"--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n a\n-b\n",
        b"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n\\ No newline at end of file\n+b\n",
    ],
)
def test_a_diff_it_cannot_read_is_an_error(diff):
    with pytest.raises(DiffSyntaxError):
        parse(diff)
