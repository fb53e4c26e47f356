"""The promise of the project: the tokens of a DDTREE server are the tokens of stock SGLang.

Float32 on the CPU platform, so equality is exact. The oracle is always stock SGLang without speculation.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from serving import (
    ENVIRONMENT,
    Oracle,
    Request,
    ask,
    ask_all,
    ddtree_flags,
    differences,
    request_set,
    stopped_requests,
    text_tokens,
    used_tokens,
)

from sglang_ddtree_patch.launch.server_process import ServerProcess
from sglang_ddtree_patch.launch.server_template import ServerTemplate

# Every page size, every width, widths beside and past the page (17 > 16, 64 > 16), and each scheduler.
GQA_CASES = [
    pytest.param(1, 1, (), id="page1-width1"),
    pytest.param(1, 17, (), id="page1-width17"),
    pytest.param(16, 2, (), id="page16-width2"),
    pytest.param(16, 17, (), id="page16-width17"),
    pytest.param(16, 64, (), id="page16-width64"),
    pytest.param(64, 8, (), id="page64-width8"),
    pytest.param(64, 64, (), id="page64-width64"),
    pytest.param(32, 17, ("--disable-overlap-schedule",), id="page32-width17-synchronous"),
    pytest.param(16, 8, ("--disable-radix-cache",), id="page16-width8-no-radix"),
]


@pytest.mark.parametrize(("page", "width", "flags"), GQA_CASES)
def test_gqa_tokens_equal_stock_at_every_page_size_and_width(
    template: ServerTemplate, stock_gqa: Oracle, page: int, width: int, flags: tuple[str, ...]
) -> None:
    requests = request_set("tiny-gqa", page)
    expected = stock_gqa.answers(requests)
    base = next(request for request in requests if request.name == "shared prefix")
    requests += stopped_requests("tiny-gqa", expected[base.name], base.input_ids)
    expected = stock_gqa.answers(requests)
    arguments = ddtree_flags("tiny-gqa", page, width, *flags)
    with ServerProcess(arguments, environment=ENVIRONMENT, launcher=template.launch, grace=0) as server:
        first = ask_all(server, requests)
        assert not differences(expected, first)
        # Prefix hits: the same prompts again, then a second turn on top of the first answer.
        assert not differences(expected, ask_all(server, requests))
        turn = second_turn("tiny-gqa", base, first[base.name].tokens)
        assert not differences(stock_gqa.answers([turn]), ask_all(server, [turn]))
        assert used_tokens(server) == 0


@pytest.mark.parametrize(("page", "width"), [(1, 8), (16, 17), (64, 64)])
def test_mla_tokens_equal_stock(
    template: ServerTemplate, stock_mla: Oracle, page: int, width: int
) -> None:
    # Interpreted Triton takes tenths of a second a token, so the prompts are few and short.
    requests = [
        Request(f"length {n}", text_tokens("tiny-mla", n), 12, {"ignore_eos": True}) for n in (1, 16, 17, 70)
    ]
    expected = stock_mla.answers(requests)
    arguments = ddtree_flags("tiny-mla", page, width)
    with ServerProcess(arguments, environment=ENVIRONMENT, launcher=template.launch, grace=0) as server:
        answers = ask_all(server, requests)
        assert not differences(expected, answers)
        assert not differences(expected, ask_all(server, requests))
        assert sum(answer.meta["spec_num_correct_drafts"] for answer in answers.values()) > 0
        assert used_tokens(server) == 0


def test_log_probs_and_the_speculative_counts_agree_with_the_tokens(
    template: ServerTemplate, stock_gqa: Oracle
) -> None:
    extra = {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}
    request = replace(
        Request("log-probs", text_tokens("tiny-gqa", 50), 40, {"ignore_eos": True}), extra=extra
    )
    expected = stock_gqa.answers([request])[request.name]
    arguments = ddtree_flags("tiny-gqa", 16, 17)
    with ServerProcess(arguments, environment=ENVIRONMENT, launcher=template.launch, grace=0) as server:
        answer = ask(server, request)
    assert answer == expected
    for stock, ours in zip(
        expected.meta["output_token_logprobs"], answer.meta["output_token_logprobs"], strict=True
    ):
        assert ours[1] == stock[1]
        assert ours[0] == pytest.approx(stock[0], abs=1e-4)
    meta = answer.meta
    histogram = meta["spec_correct_drafts_histogram"]
    # One definition each (kernels/accept/walk.py): a round commits its accept length and the bonus token.
    assert sum(histogram) == meta["spec_verify_ct"]
    accepted = sum(length * rounds for length, rounds in enumerate(histogram))
    assert accepted == meta["spec_num_correct_drafts"]
    # The prefill gives the first token; the last round may overshoot max_new_tokens.
    committed = accepted + meta["spec_verify_ct"] + 1
    longest_path = 8
    assert 40 <= committed < 40 + longest_path


def second_turn(model: str, request: Request, reply: tuple[int, ...]) -> Request:
    """A conversation's next request: prompt, answer, and something new."""
    prompt = request.input_ids + reply + text_tokens(model, 10, start=900)
    return replace(request, name="second turn", input_ids=prompt)
