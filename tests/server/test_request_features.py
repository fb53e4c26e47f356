"""What a request may ask for beyond greedy text: a DDTREE server gives the very tokens of stock SGLang.

Sampled requests carry a seed, so that even they are compared token for token, which leaves no room for a
biased draw; tests/unit/test_target_choice.py looks for one by counting. Stock answers one request at a time:
its seeded draws depend on the parameters of others in the batch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from client_view import differences as view_differences
from client_view import observe
from serving import (
    ENVIRONMENT,
    Answer,
    Oracle,
    Request,
    ask,
    ask_all,
    ddtree_flags,
    differences,
    text_tokens,
    used_tokens,
)
from sglang.srt.sampling.custom_logit_processor import (
    CustomLogitProcessor,
    DeepseekOCRNoRepeatNGramLogitProcessor,
    DisallowedTokensLogitsProcessor,
)
from tokenizers import Tokenizer
from workloads import GENERATE, Call

from sglang_ddtree_patch import model_catalog
from sglang_ddtree_patch.launch.server_process import ServerProcess
from sglang_ddtree_patch.launch.server_template import ServerTemplate

LOG_PROBS = {"return_logprob": True, "top_logprobs_num": 2}


def prompt(index: int) -> tuple[int, ...]:
    """Another one for every request: planted answers are found by their prompts."""
    return text_tokens("tiny-gqa", 20 + 13 * (index % 6), start=7 * index)


def seeded(index: int, **rule: object) -> Request:
    sampling = {"temperature": 1.0, "sampling_seed": 40 + index, "ignore_eos": True, **rule}
    return Request(f"sampled {index} {rule}", prompt(index), 48, sampling, LOG_PROBS)


def greedy(index: int, **features: object) -> Request:
    return Request(f"greedy {index} {features}", prompt(index), 48, {"ignore_eos": True, **features})


def processed(request: Request, processor: type[CustomLogitProcessor], **params: object) -> Request:
    return replace(
        request, name=f"{request.name} {processor.__name__} {params}",
        sampling={**request.sampling, "custom_params": params},
        extra={"custom_logit_processor": processor.to_str()},
    )  # fmt: skip


SAMPLED = [
    seeded(0, temperature=0.7), seeded(1, temperature=1.5), seeded(2, top_k=20), seeded(3, top_p=0.8),
    seeded(4, temperature=1.2, top_k=40, top_p=0.9, logit_bias={"17": 4.0}), seeded(5, sampling_seed=-1),
]  # fmt: skip
PENALIZED = [
    greedy(10, frequency_penalty=0.6), greedy(11, presence_penalty=0.9), greedy(12, repetition_penalty=1.3),
    greedy(13, frequency_penalty=-0.4, presence_penalty=0.3, repetition_penalty=1.1),
    seeded(14, frequency_penalty=0.5, repetition_penalty=1.2), greedy(15),
]  # fmt: skip
SCHEMA = json.dumps({
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer"}},
    "required": ["name", "count"],
})  # fmt: skip
EBNF = 'root ::= item (", " item){0,5}\nitem ::= [a-z]+ "(" [a-z]* ")"'
# With `ignore_eos` stock says one more token after the end of a grammar, which speculative rounds do not.
MAY_END = {"ignore_eos": False}
CONSTRAINED = [
    greedy(20, json_schema=SCHEMA, **MAY_END),
    greedy(21, regex="(self\\.[a-z]{1,6} = [0-9]{1,3}\n){3,6}", **MAY_END),
    greedy(22, ebnf=EBNF, **MAY_END),
    greedy(23, regex="[a-z ]{30,60}", frequency_penalty=0.7, repetition_penalty=1.2, **MAY_END),
    seeded(24, json_schema=SCHEMA, top_p=0.9, **MAY_END),
    seeded(25, regex="([a-z]{2,5}, ){4,8}[a-z]+", presence_penalty=0.5, **MAY_END),
]
PROCESSED = [
    processed(greedy(30), DeepseekOCRNoRepeatNGramLogitProcessor, ngram_size=2, window_size=200),
    processed(greedy(31), DisallowedTokensLogitsProcessor, token_ids=list(range(20, 40))),
    processed(seeded(32), DeepseekOCRNoRepeatNGramLogitProcessor, ngram_size=1, window_size=12),
    processed(
        greedy(33, frequency_penalty=0.3), DeepseekOCRNoRepeatNGramLogitProcessor, ngram_size=3,
        window_size=90,
    ),
]  # fmt: skip
UNSTOPPED = greedy(40)
FEATURES = [*SAMPLED, *PENALIZED, *CONSTRAINED, *PROCESSED]


@pytest.fixture(scope="module")
def stopped(stock_gqa: Oracle) -> list[Request]:
    """Requests that would stop at once at a token they may not stop at yet."""
    said = stock_gqa.answers([UNSTOPPED])[UNSTOPPED.name].tokens
    early, late = list(dict.fromkeys(said))[2:8:5]
    stops, first = {"stop_token_ids": [early, late]}, said.index(early)
    waits = (first, first + 1, first + 2, said.index(late) + 2)
    return [greedy(40, **stops), *(greedy(40, **stops, min_new_tokens=n) for n in waits)]


@pytest.fixture(scope="module")
def expected(stock_gqa: Oracle, stopped: list[Request]) -> dict[str, Answer]:
    return stock_gqa.answers([*FEATURES, *stopped, UNSTOPPED], one_by_one=True)


@pytest.fixture(
    scope="module",
    params=[(16, 17, ()), (64, 33, ("--disable-overlap-schedule",))],
    ids=["page16-width17", "page64-width33-synchronous"],
)
def server(
    request: pytest.FixtureRequest, template: ServerTemplate, expected: dict, tmp_path_factory
) -> Iterator[ServerProcess]:
    """Every other request finds its answer planted in the trees: long paths, with decoys beside them."""
    page, width, flags = request.param
    planted = [[*r.input_ids, *expected[r.name].tokens] for r in [*FEATURES[::2], UNSTOPPED]]
    reference: Path = tmp_path_factory.mktemp("planted") / "sequences.json"
    reference.write_text(json.dumps(planted))
    environment = {**ENVIRONMENT, "DDTREE_TEST_PLANT": str(reference)}
    arguments = ddtree_flags("tiny-gqa", page, width, *flags, "--enable-custom-logit-processor")
    with ServerProcess(arguments, environment=environment, launcher=template.launch, grace=0) as started:
        yield started
        assert used_tokens(started) == 0


def test_seeded_requests_draw_the_tokens_of_stock(server: ServerProcess, expected: dict) -> None:
    unseeded = [
        replace(r, name=f"un{r.name}", sampling={**r.sampling, "sampling_seed": None}) for r in SAMPLED
    ]
    company = [PENALIZED[5], *unseeded]
    answers = ask_all(server, [*SAMPLED, *company], stagger=0.02)
    found = {name: answer for name, answer in answers.items() if name in expected}
    assert not differences(expected, found)
    assert any(answers[f"un{r.name}"].tokens != expected[r.name].tokens for r in SAMPLED)
    assert_planted_paths_are_long(answers, SAMPLED)
    for request in SAMPLED:
        assert_log_probs_agree(expected[request.name], answers[request.name])


def test_penalized_requests_say_the_tokens_of_stock(
    server: ServerProcess, expected: dict, stopped: list[Request]
) -> None:
    answers = ask_all(server, [*PENALIZED, *stopped], stagger=0.02)
    assert not differences(expected, answers)
    assert len({answers[request.name].tokens for request in stopped}) > 1
    assert_planted_paths_are_long(answers, PENALIZED)


def test_constrained_requests_say_the_tokens_of_stock(server: ServerProcess, expected: dict) -> None:
    # Beside requests without a grammar, which the masks must leave alone.
    answers = ask_all(server, [*CONSTRAINED, *PENALIZED[:2], SAMPLED[0]], stagger=0.02)
    assert not differences(expected, answers)
    assert_planted_paths_are_long(answers, CONSTRAINED)
    for request in CONSTRAINED:
        pattern, answer = request.sampling.get("regex"), answers[request.name]
        assert pattern is None or answer.finish["type"] == "length" or re.fullmatch(pattern, answer.text)


def test_a_grammar_ends_the_answer_where_stock_says_one_token_more(
    server: ServerProcess, stock_gqa: Oracle
) -> None:
    """What docs/limits.md says of `ignore_eos`, the one place where the tokens differ on purpose."""
    request = greedy(41, regex="[a-z]{3,5}")
    stock = stock_gqa.answers([request])[request.name]
    (ours,) = ask_all(server, [request]).values()
    assert ours.tokens == stock.tokens[:-1]
    assert len(ours.tokens) < 10


def test_custom_logit_processors_see_every_branch_as_a_request_of_its_own(
    server: ServerProcess, expected: dict
) -> None:
    answers = ask_all(server, [*PROCESSED, PENALIZED[5], SAMPLED[1]], stagger=0.02)
    assert not differences(expected, answers)
    assert_planted_paths_are_long(answers, PROCESSED)
    # No token twice in a row of twelve: the processor saw what the branch had said.
    tokens = answers[PROCESSED[2].name].tokens
    assert all(tokens[i] not in tokens[max(i - 12, 0) : i] for i in range(len(tokens)))


def test_of_two_stops_within_a_round_the_earlier_counts(
    server: ServerProcess, stock_gqa: Oracle, expected: dict
) -> None:
    """Named in the other order, streamed or not; the log-probs end with the tokens."""
    said = expected[UNSTOPPED.name].tokens
    tokenizer = Tokenizer.from_file(str(model_catalog.path("tiny-gqa") / "target" / "tokenizer.json"))
    pieces = [tokenizer.decode([token]) for token in said]
    lines = []
    for n in range(2, 40, 5):
        early, late = pieces[n], pieces[n + 2]
        for stops in (
            {"stop": [late, early]},
            {"stop": [late], "stop_token_ids": [said[n]]},
            {"stop": [late], "stop_regex": [re.escape(early)]},
        ):
            sampling = {"temperature": 0, "max_new_tokens": 48, **stops}
            payload = {"input_ids": list(UNSTOPPED.input_ids), "sampling_params": sampling, **LOG_PROBS}
            call = Call(GENERATE, payload, delay=0, is_streamed=n % 2 == 0)
            stock, ours = (observe(each, call, gives_up=False) for each in (stock_gqa.server, server))
            lines += [f"{stops}{line}" for line in view_differences("", stock, ours)]
    assert not lines


def test_a_session_goes_on_behind_the_stop_within_a_round(
    server: ServerProcess, stock_gqa: Oracle, expected: dict
) -> None:
    """Its next turn must not hold what the round said behind the stop."""
    said = expected[UNSTOPPED.name].tokens
    stops = [token for n, token in enumerate(said[:40]) if token not in said[:n]][3::3]
    for stop in stops:
        turns = {}
        for each in (stock_gqa.server, server):
            session = each.post_json("/open_session", {"capacity_of_str_len": 1000})
            first = replace(
                UNSTOPPED, sampling={"stop_token_ids": [stop]},
                extra={"session_params": {"id": session}},
            )  # fmt: skip
            answer = ask(each, first)
            second = replace(
                first, input_ids=prompt(3)[:7], max_new_tokens=6,
                extra={"session_params": {"id": session, "rid": answer.meta["id"]}},
            )  # fmt: skip
            follows = ask(each, second)
            turns[each] = answer, follows, follows.meta["prompt_tokens"]
        assert turns[stock_gqa.server] == turns[server]
    assert len(stops) > 4


def assert_planted_paths_are_long(answers: dict[str, Answer], requests: list[Request]) -> None:
    meta = [answers[request.name].meta for request in requests[::2]]
    assert sum(m["spec_num_correct_drafts"] for m in meta) > 2 * sum(m["spec_verify_ct"] for m in meta)


def assert_log_probs_agree(stock: Answer, ours: Answer) -> None:
    def flat(answer: Answer) -> list:
        every = [answer.meta["output_token_logprobs"], *answer.meta["output_top_logprobs"]]
        return [entry for entries in every for entry in entries]

    assert [entry[1] for entry in flat(stock)] == [entry[1] for entry in flat(ours)]
    assert [entry[0] for entry in flat(ours)] == pytest.approx([e[0] for e in flat(stock)], abs=1e-4)
