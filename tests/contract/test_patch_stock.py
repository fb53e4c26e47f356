"""The diffs that come with the package, on the files of the installed SGLang."""

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest
from patch_trees import ddtree_patch, snapshot

from sglang_ddtree_patch.contract import CONTRACT
from sglang_ddtree_patch.patches.releases import known_releases
from sglang_ddtree_patch.patches.unified_diff import parse

PLUGINS = "sglang/srt/plugins/__init__.py"


@pytest.fixture
def stock(tmp_path) -> Path:
    """The files that the diffs and the contract speak of."""
    package = Path(importlib.util.find_spec("sglang").submodule_search_locations[0])
    modules = {attribute.module.replace(".", "/") for attribute in CONTRACT}
    files = {name for module in modules for name in (f"{module}.py", f"{module}/__init__.py")}
    for name in (PLUGINS, "sglang/_version.py", *files):
        if not (package.parent / name).is_file():
            continue
        target = tmp_path / "stock" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(package.parent / name, target)
    return tmp_path / "stock"


@pytest.mark.parametrize("version", ["0.5.22", "0.5.23"])
def test_the_release_is_told_from_the_tree(stock, capsys, version):
    text = (stock / "sglang/_version.py").read_text().replace("0.5.23", version)
    (stock / "sglang/_version.py").write_text(text)
    before = snapshot(stock)
    assert ddtree_patch("apply", "--root", stock) == 0
    assert f"applied: SGLang {version}" in capsys.readouterr().out
    source = (stock / PLUGINS).read_text()
    compile(source, PLUGINS, "exec")
    assert source.index("import load\n") < source.index("load()\n\n") < source.index(".apply_hooks()\n")
    assert ddtree_patch("revert", "--root", stock) == 0
    assert snapshot(stock) == before


def test_another_release_that_would_serve_keeps_its_name(stock, capsys):
    text = (stock / "sglang/_version.py").read_text().replace("0.5.23", "0.5.24")
    (stock / "sglang/_version.py").write_text(text)
    assert ddtree_patch("apply", "--root", stock) == 0
    assert capsys.readouterr().out.startswith("applied: SGLang 0.5.24 at ")


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_a_tree_in_which_the_plugin_would_not_serve_is_left_alone(stock, capsys, more):
    worker = stock / "sglang/srt/speculative/dflash_worker_v2.py"
    worker.write_text(worker.read_text().replace("class DFlashWorkerV2", "class DFlashWorkerV3"))
    before = snapshot(stock)
    assert ddtree_patch("apply", "--root", stock, *more) == 1
    printed = capsys.readouterr()
    assert (
        "nothing was changed: SGLang 0.5.23 does not match what sglang-ddtree-patch relies on" in printed.err
    )
    assert "dflash_worker_v2.DFlashWorkerV2" in printed.err
    assert printed.out == ""
    assert snapshot(stock) == before


def test_hashes_cover_exactly_the_files_of_the_diffs():
    releases = known_releases()
    assert [release.version for release in releases] == ["0.5.23", "0.5.22"]
    for release in releases:
        assert sorted(release.originals) == sorted(file.path for file in release.files)


@pytest.mark.parametrize("tool", [["git", "apply", "--check"], ["patch", "-p1", "--dry-run", "-i"]])
@pytest.mark.parametrize("release", known_releases(), ids=lambda release: release.version)
def test_other_tools_take_the_diffs_too(stock, tool, release):
    if shutil.which(tool[0]) is None:
        pytest.skip(f"no {tool[0]} here")
    for diff in release.diffs:
        run = subprocess.run([*tool, str(diff)], cwd=stock, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout + run.stderr


def test_a_tree_patched_by_another_tool_is_recognized(stock, capsys):
    (diff,) = known_releases()[0].diffs
    (file,) = parse(diff.read_bytes())
    (stock / PLUGINS).write_bytes(file.apply((stock / PLUGINS).read_bytes()))
    before = snapshot(stock)
    assert ddtree_patch("status", "--root", stock) == 0
    assert ddtree_patch("apply", "--root", stock) == 0
    assert "already applied with another tool, nothing done" in capsys.readouterr().out
    assert ddtree_patch("revert", "--root", stock) == 1
    assert "patch -R -p1" in capsys.readouterr().err
    assert snapshot(stock) == before


def test_list_names_every_diff(capsys):
    assert ddtree_patch("list") == 0
    printed = capsys.readouterr().out
    assert all(str(diff) in printed for release in known_releases() for diff in release.diffs)


def test_check_approves_the_installed_release(capsys):
    assert ddtree_patch("check") == 0
    assert capsys.readouterr().err == ""
