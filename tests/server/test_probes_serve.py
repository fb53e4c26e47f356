"""`ddtree probe` against real servers, ours and stock, and `ddtree bench context` with servers of its own."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import ENVIRONMENT, Oracle, ddtree_flags

from sglang_ddtree_patch import cli
from sglang_ddtree_patch.launch.bench import run as bench_run
from sglang_ddtree_patch.launch.server_process import ServerProcess
from sglang_ddtree_patch.launch.server_template import ServerTemplate

# One candidate a position leaves a chain of the drafter's block: 8 of the verify's 16 rows are nodes.
WIDTH, NODES = 16, 8
# Keys and values of 2 heads, 64 wide, float32, in 4 layers of tiny-gqa and 4 of its drafter.
POSITION_BYTES = 2 * 2 * 64 * 4 * (4 + 4)


@pytest.fixture(scope="module")
def ddtree(template: ServerTemplate) -> Iterator[ServerProcess]:
    flags = ddtree_flags("tiny-gqa", 16, WIDTH, "--context-length", "1536", "--enable-metrics")
    environment = {**ENVIRONMENT, "SGLANG_DDTREE_TOPK": "1"}
    with ServerProcess(flags, environment=environment, launcher=template.launch, grace=0) as server:
        yield server


def probe(server: ServerProcess, file: Path, *arguments: str) -> tuple[int, dict]:
    code = cli.main(["probe", *arguments, "--url", server.url, "--json", str(file)])
    return code, json.loads(file.read_text()) if file.exists() else {}


def test_commit_counts_what_a_ddtree_server_commits(ddtree: ServerProcess, tmp_path: Path) -> None:
    arguments = ("commit", "--contexts", "256", "1024", "--new-tokens", "48")
    code, found = probe(ddtree, tmp_path / "commit.json", *arguments)
    assert code == 0
    assert found["server"]["algorithm"] == "DDTREE"
    assert found["server"]["backend"] == "ddtree-verify"
    assert [(row["text"], row["context"]) for row in found["rows"]] == [
        ("predictable", 256), ("prose", 256), ("predictable", 1024), ("prose", 1024),
    ]  # fmt: skip
    for row in found["rows"]:
        # Predictable text is whole sentences, of 40 tokens here.
        assert row["prompt_tokens"] == pytest.approx(row["context"], rel=0.2)
        assert row["generated"] == 48
        assert row["drafted"] == row["rounds"] * (WIDTH - 1)
        # What is committed and what is accepted are counted apart; the last round may run over the end.
        commits = round(row["mean_commit_length"] * row["rounds"])
        accepted = round(row["mean_accepted_depth"] * row["rounds"])
        assert commits == 47
        assert commits - row["rounds"] <= accepted <= commits + 7 - row["rounds"]
        assert row["nodes"] == NODES  # as the server's metrics count them
    assert [verdict["context"] for verdict in found["verdicts"]] == [
        row["prompt_tokens"] for row in found["rows"] if row["text"] == "predictable"
    ]


def test_gpu_times_a_ddtree_server_and_says_what_a_cpu_lacks(ddtree: ServerProcess, tmp_path: Path) -> None:
    arguments = ("gpu", "--contexts", "256", "1024", "--seconds", "1", "--copy-rate", "10")
    code, found = probe(ddtree, tmp_path / "gpu.json", *arguments)
    assert code == 0
    assert found["lacks"] == ["GPU load: the server runs on a CPU"]
    prefill, decode = found["rows"][2:]
    assert (prefill["phase"], decode["phase"]) == ("prefill", "decode")
    # The shorter prompt is in the cache by then, and the salt kept anything else from being there.
    assert 0 < prefill["tokens"] < prefill["prompt_tokens"]
    committed = decode["tokens_per_second"] * decode["step_milliseconds"] / 1e3
    assert committed == pytest.approx(decode["accept_length"] + 1, rel=0.25)
    a_position = decode["kv_bytes"] / decode["prompt_tokens"]
    assert a_position == pytest.approx(POSITION_BYTES, rel=0.1)
    assert decode["limit_fraction"] == pytest.approx(decode["kv_gb_s"] / 10, rel=0.01, abs=1e-4)


def test_a_stock_server_has_no_commits_to_probe_but_steps(
    stock_gqa: Oracle, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "commit.json"
    assert probe(stock_gqa.server, file, "commit") == (1, {})
    (line,) = capsys.readouterr().err.splitlines()
    assert "decodes without speculation" in line
    driven = ("gpu", "--seconds", "0.5", "--copy-rate", "10")
    code, found = probe(stock_gqa.server, tmp_path / "gpu.json", *driven)
    assert code == 0
    decode = found["rows"][-1]
    assert decode["prompt_tokens"] < 512  # its context
    assert decode["accept_length"] == 0
    assert decode["tokens_per_second"] * decode["step_milliseconds"] == pytest.approx(1000, rel=0.02)


def test_context_measures_real_servers_side_by_side(
    template: ServerTemplate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_run, "ServerTemplate", lambda _: contextlib.nullcontext(template))
    file = tmp_path / "context.json"
    arguments = [
        "bench", "context", "--model", "tiny-gqa", "--algorithms", "plain", "ddtree", "--contexts", "64",
        "9999999", "--new-tokens", "16", "--repeats", "1", "--page-size", "16", "--json", str(file),
        "--max-total-tokens", "2048", "--context-length", "512",
    ]  # fmt: skip
    assert cli.main(arguments) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["algorithm"], row["backend"], row["page_size"], row["context"]) for row in rows] == [
        ("plain", "torch_native", 1, 64), ("plain", "torch_native", 1, 480),
        ("ddtree", "ddtree-verify", 16, 64), ("ddtree", "ddtree-verify", 16, 480),
    ]  # fmt: skip
    assert all(row["step_milliseconds"] > 0 and row["limit_fraction"] is None for row in rows)
