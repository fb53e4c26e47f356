"""Rounds of changing widths say what stock says, and what is counted of them adds up."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from serving import ENVIRONMENT, Answer, Oracle, ask_all, ddtree_flags, differences, used_tokens
from test_metrics import Metrics
from test_request_features import CONSTRAINED, PENALIZED, PROCESSED, SAMPLED, assert_log_probs_agree

from sglang_ddtree_patch.launch.server_process import ServerProcess
from sglang_ddtree_patch.launch.server_template import ServerTemplate
from sglang_ddtree_patch.settings import WIDTHS_VARIABLE
from sglang_ddtree_patch.widths.policy import choices

WIDTH = 33
# Of each kind; the oracle remembers its answers.
REQUESTS = [*SAMPLED[2:5], *PENALIZED[2:6], *CONSTRAINED[3:], *PROCESSED[::2]]
FORCED = {"DDTREE_TEST_WIDTHS": "1"}
SERVERS = {
    "every round another, page 1": (1, FORCED, ()),
    "every round another, page 16, synchronous": (16, FORCED, ("--disable-overlap-schedule",)),
    "as the policy says, page 16": (16, {}, ()),
}


@pytest.fixture(scope="module")
def expected(stock_gqa: Oracle) -> dict[str, Answer]:
    return stock_gqa.answers(REQUESTS, one_by_one=True)


@pytest.fixture(scope="module", params=SERVERS.values(), ids=SERVERS)
def server(
    request: pytest.FixtureRequest, template: ServerTemplate, expected: dict, tmp_path_factory
) -> Iterator[ServerProcess]:
    page, widths, flags = request.param
    reference = tmp_path_factory.mktemp("planted") / "sequences.json"
    reference.write_text(json.dumps([[*r.input_ids, *expected[r.name].tokens] for r in REQUESTS[::2]]))
    environment = {
        **ENVIRONMENT, **widths, WIDTHS_VARIABLE: "auto", "DDTREE_TEST_PLANT": str(reference),
    }  # fmt: skip
    arguments = ddtree_flags(
        "tiny-gqa", page, WIDTH, *flags, "--enable-custom-logit-processor", "--enable-metrics"
    )
    with ServerProcess(arguments, environment=environment, launcher=template.launch, grace=0) as started:
        yield started
        assert used_tokens(started) == 0


def test_every_kind_of_request_says_the_tokens_of_stock(server: ServerProcess, expected: dict) -> None:
    before = Metrics(server)
    answers = ask_all(server, REQUESTS, stagger=0.02)
    assert not differences(expected, answers)
    for request in SAMPLED[2:5]:
        assert_log_probs_agree(expected[request.name], answers[request.name])
    planted = [answers[request.name].meta for request in REQUESTS[::2]]
    rounds = sum(meta["spec_verify_ct"] for meta in planted)
    assert sum(meta["spec_num_correct_drafts"] for meta in planted) > rounds

    after = Metrics(server)
    rounds = sum(answer.meta["spec_verify_ct"] for answer in answers.values())
    assert after["ddtree_nodes_count"] - before["ddtree_nodes_count"] == rounds
    run = after.by_label("ddtree_rounds_total", "width")
    assert set(run) <= {str(width) for width in choices(WIDTH)}
    if server.environment.get("DDTREE_TEST_WIDTHS"):
        assert set(run) == {str(width) for width in choices(WIDTH)}
    # Nodes are at most the rows, so they tell that widths differed from round to round.
    assert 1 < after["ddtree_nodes_sum"] / after["ddtree_nodes_count"] < WIDTH
    assert after["ddtree_round_seconds_count"] == sum(run.values())
