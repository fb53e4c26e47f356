"""Two ranks build the same trees and draw the same tokens: those of stock SGLang on one.

Gloo sums what the ranks add in another order than one rank does, so that log-probs agree within rounding.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
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
from sglang_ddtree_patch.settings import AUTO, FIXED, WIDTHS_VARIABLE

SEEDED = {"temperature": 0.9, "sampling_seed": 7}
# Biases that leave nothing of the logits between them: the target's own choice is a tie in every row.
TIE = {"logit_bias": {"40": 1e9, "41": 1e9}}
RULES = [{}, SEEDED, {**SEEDED, "top_k": 20, "top_p": 0.9}, TIE, {"repetition_penalty": 1.2}, {}]


@dataclass(frozen=True)
class Case:
    """What the two ranks of one model are asked."""

    model: str
    page: int
    rules: list[dict]
    tokens: int  # of each answer
    widths: str = FIXED

    @property
    def requests(self) -> list[Request]:
        return [
            self._request(f"{n}", 5 + 17 * n, 9 * n, {"ignore_eos": True, **rule})
            for n, rule in enumerate(self.rules)
        ]

    @property
    def unseeded(self) -> list[Request]:
        sampling = {"temperature": 1.2, "ignore_eos": True}
        return [self._request(f"unseeded {n}", 30, 0, sampling) for n in range(3)]

    def _request(self, name: str, length: int, start: int, sampling: dict) -> Request:
        return Request(name, text_tokens(self.model, length, start), self.tokens, sampling)

    @property
    def tied(self) -> str:
        return str(self.rules.index(TIE))


CASES = [
    Case("tiny-gqa", 16, RULES, 32),
    # Interpreted Triton takes tenths of a second a token.
    Case("tiny-mla", 64, [{}, TIE, SEEDED], 10),
    Case("tiny-gqa", 16, RULES, 32, AUTO),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case.model}, {case.widths} widths")
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def expected(case: Case, request: pytest.FixtureRequest) -> dict[str, Answer]:
    stock: Oracle = request.getfixturevalue({"tiny-gqa": "stock_gqa", "tiny-mla": "stock_mla"}[case.model])
    return stock.answers(case.requests, one_by_one=True)


@pytest.fixture(scope="module")
def server(case: Case, template: ServerTemplate, expected: dict, tmp_path_factory) -> Iterator[ServerProcess]:
    """Half of the requests find their answers planted, so that paths are long."""
    reference: Path = tmp_path_factory.mktemp("planted") / "sequences.json"
    planted = case.requests[::2]
    reference.write_text(json.dumps([[*r.input_ids, *expected[r.name].tokens] for r in planted]))
    environment = {
        **ENVIRONMENT,
        "DDTREE_TEST_PLANT": str(reference),
        "DDTREE_TEST_UNEVEN_RANKS": "1",
        WIDTHS_VARIABLE: case.widths,
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",  # SGLang asks for it where there are more ranks than NUMA nodes
    }
    flags = ddtree_flags(case.model, case.page, 17, "--tp-size", "2")
    with ServerProcess(flags, environment=environment, launcher=template.launch, grace=0) as started:
        yield started


def test_two_ranks_say_the_tokens_of_stock(
    server: ServerProcess, case: Case, expected: dict[str, Answer]
) -> None:
    answers = ask_all(server, case.requests)
    assert not differences(expected, answers)
    assert set(answers[case.tied].tokens) == {40}
    accepted = sum(answer.meta["spec_num_correct_drafts"] for answer in answers.values())
    assert accepted > case.tokens * len(case.requests) / 4
    assert used_tokens(server) == 0


def test_ranks_that_draw_by_chance_draw_alike(
    server: ServerProcess, case: Case, expected: dict[str, Answer]
) -> None:
    """Else the ranks would hold different texts, and the requests beside them would go wrong or hang."""
    answers = ask_all(server, [*case.unseeded, *case.requests])
    assert not differences(expected, {name: answers[name] for name in expected})
    assert len({answers[request.name].tokens for request in case.unseeded}) > 1
    assert used_tokens(server) == 0
