"""A patched SGLang that discovers no plugin serves DDTREE, with the tokens of stock SGLang.

Both releases that DDTREE serves on: the installed one, and the wheel of the other on PYTHONPATH, which runs
with the same dependencies.
"""

from __future__ import annotations

import importlib.util
import shutil
import zipfile
from pathlib import Path

import pytest
from serving import ENVIRONMENT, Oracle, Request, ask_all, ddtree_flags, differences, text_tokens
from sglang_wheels import unpack, wheel

from sglang_ddtree_patch import cli
from sglang_ddtree_patch.launch.server_process import ServerProcess
from sglang_ddtree_patch.launch.sglang_install import installed_sglang
from sglang_ddtree_patch.releases import SUPPORTED_VERSIONS


def linked_copy(folder: Path) -> Path:
    """The installed SGLang again, as links but for the folder that is patched; returns what holds it."""
    stock = Path(importlib.util.find_spec("sglang").submodule_search_locations[0])
    package = folder / "sglang"
    (package / "srt").mkdir(parents=True)
    for entry in [*stock.iterdir(), *(stock / "srt").iterdir()]:
        if entry not in (stock / "srt", stock / "srt" / "plugins"):
            (package / entry.relative_to(stock)).symlink_to(entry)
    shutil.copytree(stock / "srt" / "plugins", package / "srt" / "plugins")
    return folder


def make_tree(version: str, folder: Path) -> Path:
    return linked_copy(folder) if version == installed_sglang() else unpack(version, folder)


def differing_from_wheel(root: Path, version: str) -> list[str]:
    """Files of the wheel that are not, byte for byte, in the tree; and what is there besides."""
    with zipfile.ZipFile(wheel(version)) as archive:
        expected = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    changed = [name for name, data in expected.items() if (root / name).read_bytes() != data]
    found = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    added = [name for name in found - set(expected) if "__pycache__" not in name]
    return changed + added


@pytest.mark.parametrize("version", SUPPORTED_VERSIONS)
def test_a_patched_tree_serves_ddtree_where_no_plugin_is_discovered(
    stock_gqa: Oracle, tmp_path: Path, version: str
) -> None:
    root = make_tree(version, tmp_path / "vendored")
    assert cli.main(["patch", "apply", "--root", str(root)]) == 0
    requests = [
        Request(f"length {n}", text_tokens("tiny-gqa", n), 24, {"ignore_eos": True}) for n in (1, 17)
    ]
    expected = stock_gqa.answers(requests)
    environment = {**ENVIRONMENT, "PYTHONPATH": str(root), "SGLANG_PLUGINS": "none-of-them"}
    # Started by itself: the warm process has the installed SGLang in memory.
    with ServerProcess(ddtree_flags("tiny-gqa", 16, 8), environment=environment, grace=0) as server:
        assert server.get_json("/get_server_info")["version"] == version
        answers = ask_all(server, requests)
    assert not differences(expected, answers)
    assert sum(answer.meta["spec_num_correct_drafts"] for answer in answers.values()) > 0

    assert cli.main(["patch", "revert", "--root", str(root)]) == 0
    assert [path.name for path in root.iterdir() if path.name.startswith(".")] == []
    if version == installed_sglang():
        name = "srt/plugins/__init__.py"
        stock = Path(importlib.util.find_spec("sglang").submodule_search_locations[0])
        assert (root / "sglang" / name).read_bytes() == (stock / name).read_bytes()
    else:
        assert differing_from_wheel(root, version) == []
