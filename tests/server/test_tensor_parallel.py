"""Two ranks build the same trees and draw the same tokens: those of stock SGLang on one.

Gloo sums what the ranks add in another order than one rank does, so that log-probs agree within rounding.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import (
    ENVIRONMENT,
    Answer,
    Oracle,
    Request,
    ask_all,
    ddtree_flags,
    differences,
    text_tokens,
    used_tokens,
)

from sglang_ddtree_patch.launch.server_process import ServerProcess
from sglang_ddtree_patch.launch.server_template import ServerTemplate

SEEDED = {"temperature": 0.9, "sampling_seed": 7}
# Biases that leave nothing of the logits between them: the target's own choice is a tie in every row.
TIE = {"logit_bias": {"40": 1e9, "41": 1e9}}
RULES = [{}, SEEDED, {**SEEDED, "top_k": 20, "top_p": 0.9}, TIE, {"repetition_penalty": 1.2}, {}]
REQUESTS = [
    Request(f"{n}", text_tokens("tiny-gqa", 5 + 17 * n, start=9 * n), 32, {"ignore_eos": True, **rule})
    for n, rule in enumerate(RULES)
]
UNSEEDED = [
    Request(f"unseeded {n}", text_tokens("tiny-gqa", 30), 40, {"temperature": 1.2, "ignore_eos": True})
    for n in range(3)
]


@pytest.fixture(scope="module")
def expected(stock_gqa: Oracle) -> dict[str, Answer]:
    return stock_gqa.answers(REQUESTS, one_by_one=True)


@pytest.fixture(scope="module")
def server(template: ServerTemplate, expected: dict, tmp_path_factory) -> Iterator[ServerProcess]:
    """Half of the requests find their answers planted, so that paths are long."""
    reference: Path = tmp_path_factory.mktemp("planted") / "sequences.json"
    reference.write_text(json.dumps([[*r.input_ids, *expected[r.name].tokens] for r in REQUESTS[::2]]))
    environment = {
        **ENVIRONMENT,
        "DDTREE_TEST_PLANT": str(reference),
        "DDTREE_TEST_UNEVEN_RANKS": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",  # SGLang asks for it where there are more ranks than NUMA nodes
    }
    flags = ddtree_flags("tiny-gqa", 16, 17, "--tp-size", "2")
    with ServerProcess(flags, environment=environment, launcher=template.launch, grace=0) as started:
        yield started


def test_two_ranks_say_the_tokens_of_stock(server: ServerProcess, expected: dict[str, Answer]) -> None:
    answers = ask_all(server, REQUESTS)
    assert not differences(expected, answers)
    assert set(answers[REQUESTS[3].name].tokens) == {40}
    assert sum(answer.meta["spec_num_correct_drafts"] for answer in answers.values()) > 60
    assert used_tokens(server) == 0


def test_ranks_that_draw_by_chance_draw_alike(server: ServerProcess, expected: dict[str, Answer]) -> None:
    """Else the ranks would hold different texts, and the requests beside them would go wrong or hang."""
    answers = ask_all(server, [*UNSEEDED, *REQUESTS])
    assert not differences(expected, {request.name: answers[request.name] for request in REQUESTS})
    assert len({answers[request.name].tokens for request in UNSEEDED}) > 1
    assert used_tokens(server) == 0
