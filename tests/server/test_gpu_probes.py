"""`ddtree probe gpu` beside a server on a GPU: NVML is read, the copy measured, the step held to it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_ddtree_patch import cli
from sglang_ddtree_patch.launch.model_shapes import DUMMY_FLAGS, write_shape
from sglang_ddtree_patch.launch.probe import gpu_verdict
from sglang_ddtree_patch.launch.server_process import ServerProcess

pytestmark = pytest.mark.gpu


def test_a_gpu_that_serves_is_read_and_works(tmp_path: Path) -> None:
    write_shape("qwen3-8b-shapes", tmp_path)
    flags = [
        "--model-path", str(tmp_path / "target"), "--dtype", "bfloat16", "--page-size", "64", *DUMMY_FLAGS,
        "--attention-backend", "ddtree-verify", "--speculative-algorithm", "DDTREE",
        "--speculative-draft-model-path", str(tmp_path / "draft"), "--mem-fraction-static", "0.75",
        "--max-running-requests", "8", "--cuda-graph-max-bs-decode", "1",
    ]  # fmt: skip
    file = tmp_path / "gpu.json"
    with ServerProcess(flags, ready_timeout=400) as server:
        more = ["--contexts", "1024", "32768", "--seconds", "3", "--json", str(file)]
        assert cli.main(["probe", "gpu", "--url", server.url, *more]) == 0
    found = json.loads(file.read_text())
    assert found["lacks"] == []
    assert found["copy_gb_s"] > 300
    prefill, decode = found["rows"][2:]
    for row in (prefill, decode):
        assert row["sm_percent"] > 50
        assert 0 < row["power_watts"] <= 1.1 * row["power_limit_watts"]
        assert 0 < row["sm_mhz"] <= row["sm_mhz_most"]
    assert decode["memory_percent"] > 0
    # Random weights accept nothing, and 32k tokens of KV are read within the device's means.
    assert decode["accept_length"] < 0.5
    assert 0 < decode["limit_fraction"] < 1.5
    assert decode["verdict"] in (gpu_verdict.WORKS, gpu_verdict.PARTLY)
