"""Rounds of changing widths on a GPU: every width in CUDA graphs, bf16, equal to stock by the bf16 rule."""

from __future__ import annotations

import re

import pytest
from bf16_rule import compare
from serving import ask_all, used_tokens
from test_gpu_serving import COMMON, committed, planting, started
from test_metrics import Metrics

from sglang_ddtree_patch.settings import WIDTHS_VARIABLE
from sglang_ddtree_patch.widths.policy import choices

pytestmark = pytest.mark.gpu

WIDTH = 33


@pytest.mark.parametrize("forced", [True, False], ids=["every round another", "as the policy says"])
@pytest.mark.parametrize("name", ["tiny-gqa", "tiny-mla"])
def test_changing_widths_equal_stock_by_the_bf16_rule(name: str, forced: bool) -> None:
    case = committed(name)
    stock = ["--model-path", str(case.target), *COMMON, *case.flags]
    ours = [*stock, "--draft", str(case.draft), "--width", str(WIDTH)]
    ours += ["--enable-metrics", "--decode-log-interval", "1"]
    environment = {WIDTHS_VARIABLE: "auto"}
    if forced:
        environment |= planting(DDTREE_TEST_WIDTHS="1")
    with started(ours, stock, environment) as (server, oracle, other):
        for _ in range(3):
            answers = ask_all(server, case.requests)
            verdicts = [
                compare(oracle, other, request, answers[request.name].tokens) for request in case.requests
            ]
            assert all(verdict.is_lossless for verdict in verdicts), verdicts
        assert used_tokens(server) == 0
        run = Metrics(server).by_label("ddtree_rounds_total", "width")
        log = server.log_path.read_text()
    print(run)
    assert set(run) == {str(width) for width in choices(WIDTH)}
    graphs = re.findall(r"Decode batch.*cuda graph: (\w+)", log)
    assert set(graphs) == {"True"}, "a width ran outside its graphs"
