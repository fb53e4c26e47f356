"""On a GPU rounds from CUDA graphs draft as well as rounds launched from Python.

What the graphs feed the drafter shows in nothing but the accept length: verify keeps the text right.
"""

from __future__ import annotations

import pytest
from serving import Request, ask_all, used_tokens
from test_accept_length import mean_accept_length
from test_gpu_serving import COMMON, WIDTH, committed

from sglang_ddtree_patch.launch.server_process import ServerProcess

pytestmark = pytest.mark.gpu

LEAST = 0.9  # of the accept length without graphs: near ties lead to other texts
WAYS = {
    "graphs": [],
    "graphs of two requests at most": ["--cuda-graph-max-bs-decode", "2"],
    "one round at a time": ["--disable-overlap-schedule"],
}
RECORDED = "CUDA graphs of commit"  # in the log


@pytest.mark.parametrize("model", ["tiny-gqa", "tiny-mla"])
def test_rounds_from_graphs_draft_as_well_as_rounds_without(model: str) -> None:
    case = committed(model)
    flags = [
        "--model-path", str(case.target), "--speculative-draft-model-path", str(case.draft),
        "--speculative-algorithm", "DDTREE", "--attention-backend", "ddtree-verify",
        "--speculative-num-draft-tokens", str(WIDTH), *COMMON, *case.flags,
    ]  # fmt: skip
    # Batches of every size as they come and go.
    requests = [
        Request(f"{request.name} from {start}", request.input_ids[start:], 160, {"ignore_eos": True})
        for request in case.requests
        if len(request.input_ids) > 40
        for start in (0, 9, 30)
    ]

    def accept_length(*more: str) -> tuple[float, str]:
        with ServerProcess([*flags, *more], ready_timeout=600) as server:
            lengths = [mean_accept_length(ask_all(server, requests)) for _ in range(2)]
            assert used_tokens(server) == 0
            return sum(lengths) / 2, server.log_path.read_text()

    without, log = accept_length("--disable-decode-cuda-graph")
    assert RECORDED not in log
    assert without > 1
    found = {}
    for way, more in WAYS.items():
        found[way], log = accept_length(*more)
        assert RECORDED in log, way
    print(f"{model}: {without:.2f} without graphs, {found}")
    assert min(found.values()) > LEAST * without, found
