"""A patched SGLang that discovers no plugin serves DDTREE, with the tokens of stock SGLang."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

from serving import ENVIRONMENT, Oracle, Request, ask_all, ddtree_flags, differences, text_tokens

from sglang_ddtree_patch import cli
from sglang_ddtree_patch.launch.server_process import ServerProcess


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


def test_a_patched_tree_serves_ddtree_where_no_plugin_is_discovered(
    stock_gqa: Oracle, tmp_path: Path
) -> None:
    root = linked_copy(tmp_path / "vendored")
    assert cli.main(["patch", "apply", "--root", str(root)]) == 0
    requests = [Request(f"length {n}", text_tokens("tiny-gqa", n), 24, {"ignore_eos": True}) for n in (1, 17)]
    expected = stock_gqa.answers(requests)
    environment = {**ENVIRONMENT, "PYTHONPATH": str(root), "SGLANG_PLUGINS": "none-of-them"}
    # Started by itself: the warm process has the installed SGLang in memory.
    with ServerProcess(ddtree_flags("tiny-gqa", 16, 8), environment=environment, grace=0) as server:
        answers = ask_all(server, requests)
    assert not differences(expected, answers)
    assert sum(answer.meta["spec_num_correct_drafts"] for answer in answers.values()) > 0

    assert cli.main(["patch", "revert", "--root", str(root)]) == 0
    name = "srt/plugins/__init__.py"
    stock = Path(importlib.util.find_spec("sglang").submodule_search_locations[0])
    assert (root / "sglang" / name).read_bytes() == (stock / name).read_bytes()
    assert [path.name for path in root.iterdir()] == ["sglang"]
