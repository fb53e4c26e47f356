"""The GPU soak's mix and judge, in small on the CPU, where every difference from stock is one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy

import pytest
from gpu_soak import Slice, corpus, run_slice
from serving import ENVIRONMENT, Oracle, ddtree_flags
from soak_client import SoakAnswer
from soak_judge import Judge
from soak_memory import MemoryMeter
from soak_mix import KINDS, SoakRequest, requests_of, shapes

from sglang_ddtree_patch.launch.server_process import ServerProcess
from sglang_ddtree_patch.launch.server_template import ServerTemplate

VOCABULARY = 768
REQUESTS = requests_of(0, shapes(36, longest_prompt=90, longest_answer=16), corpus())


@pytest.fixture(scope="module")
def answered(template: ServerTemplate) -> Iterator[tuple[list[SoakAnswer], Slice]]:
    flags = ddtree_flags("tiny-gqa", 16, 17)
    with ServerProcess(flags, environment=ENVIRONMENT, launcher=template.launch, grace=0) as server:
        yield run_slice(server, MemoryMeter(server.pid, None), REQUESTS, at_once=16)


def test_a_slice_is_answered_as_by_stock_and_leaves_nothing(
    answered: tuple[list[SoakAnswer], Slice], stock_gqa: Oracle
) -> None:
    answers, measured = answered
    assert {request.kind for request in REQUESTS} == set(KINDS)
    assert (measured.answered, measured.leaked_tokens) == (len(REQUESTS), 0)
    assert measured.memory.resident > 100
    judged = Judge(stock_gqa.server, stock_gqa.server).judge(REQUESTS, answers)
    assert not judged.mismatches
    assert judged.differing == 0
    assert sum(counts["judged"] for counts in judged.by_kind.values()) > 0.8 * len(REQUESTS)


def test_every_wrong_token_is_a_mismatch(answered: tuple[list[SoakAnswer], Slice], stock_gqa: Oracle) -> None:
    spoiled, wrong = spoil(answered[0])
    judged = Judge(stock_gqa.server, stock_gqa.server).judge(REQUESTS, spoiled)
    assert {line["request"] for line in judged.mismatches} == wrong
    assert judged.controls["refused_by"]["all noise"] == judged.controls["wrong_answers"] > 10
    # Of a seeded draw too the oracle knows by how much its token leads.
    gaps = [line["gap"] for line in judged.mismatches if line["kind"] == "seeded"]
    assert gaps
    assert min(gaps) > 0


def spoil(answers: Sequence[SoakAnswer]) -> tuple[list[SoakAnswer], set[str]]:
    """The answers with another last token, and which of them are judged."""
    spoiled, wrong = [], set()
    for request, answer in zip(REQUESTS, answers, strict=True):
        replies = deepcopy(answer.replies)
        for reply in replies:
            if reply["output_ids"]:
                reply["output_ids"][-1] = (reply["output_ids"][-1] + 1) % VOCABULARY
                wrong |= {request.name} if request.is_judged else set()
        spoiled.append(SoakAnswer(replies, answer.error))
    return spoiled, wrong


def test_slices_ask_the_same_shapes_about_other_text() -> None:
    asked, text = shapes(200), corpus()
    one, other = (requests_of(number, asked, text) for number in (1, 2))

    def shape(request: SoakRequest) -> tuple:
        sampling = {name: value for name, value in request.sampling.items() if name != "sampling_seed"}
        return request.kind, len(request.prompt), sampling

    assert list(map(shape, one)) == list(map(shape, other))
    assert not any(a.prompt == b.prompt for a, b in zip(one, other, strict=True) if len(a.prompt) > 4)
