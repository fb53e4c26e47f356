"""`ddtree bench serve` from the command line to the file, with real servers."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from sglang_ddtree_patch import cli
from sglang_ddtree_patch.launch.bench import run as bench_run
from sglang_ddtree_patch.launch.server_template import ServerTemplate


def test_rows_of_real_servers(
    template: ServerTemplate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_run, "ServerTemplate", lambda _: contextlib.nullcontext(template))
    file = tmp_path / "serve.json"
    arguments = [
        "bench", "serve", "--model", "tiny-gqa", "--algorithms", "plain", "ddtree", "--width", "8",
        "--batch", "1", "2", "--prompts", "2", "--new-tokens", "16", "--repeats", "1", "--json", str(file),
        "--max-total-tokens", "2048", "--context-length", "512",
    ]  # fmt: skip
    assert cli.main(arguments) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["algorithm"], row["width"], row["batch"]) for row in rows] == [
        ("plain", 1, 1), ("plain", 1, 2), ("ddtree", 8, 1), ("ddtree", 8, 2),
    ]  # fmt: skip
    for row in rows:
        # Tokens a step: what each request of the batch commits, one of them its own and the rest drafted.
        tokens = row["tokens_per_second"] * row["step_milliseconds"] / 1e3
        assert tokens == pytest.approx(row["batch"] * (row["accept_length"] + 1), rel=0.25)
    assert [row["accept_length"] > 0.5 for row in rows] == [False, False, True, True]
