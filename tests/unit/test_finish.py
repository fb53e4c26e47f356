"""finish.py: a round's tokens end an answer where SGLang, handed them one at a time, ends it.

SGLang's own requests and its own rule are the oracle, with the tokenizer of a committed model and one whose
bytes are tokens (as SentencePiece's are), in which what a character is depends on what follows it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.sampling.sampling_params import SamplingParams
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sglang_ddtree_patch import model_catalog
from sglang_ddtree_patch.round import finish
from sglang_ddtree_patch.round.finish import continue_from_what_was_shown, finish_where_plain_decoding_would

STOCK = Req.update_finish_state
EOS, THINK_END = 2, 20
PIECES = ["e", "n", "t", "en", "ti", " ", "\n", " =", "1", "12", "self", "."]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    model = models.BPE(
        {token: n for n, token in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def of_bytes(text: str) -> list[int]:
    return [3 + byte for byte in text.encode()]


BYTES = byte_tokenizer()
BPE = AutoTokenizer.from_pretrained(str(model_catalog.path("tiny-gqa") / "target"))
for _tokenizer in (BYTES, BPE):
    _tokenizer.additional_stop_token_ids = None
ALPHABETS = {
    "bytes": (BYTES, [EOS, *of_bytes("\né\N{PILE OF POO}"), *range(259, 259 + len(PIECES)), -1, 10**6]),
    "bpe": (BPE, [EOS, *BPE.encode("".join(PIECES)), *BPE.encode("é\N{PILE OF POO}self.x = 12\n"), 10**6]),
}
STOPS = [
    "en", "ti", "e", "1", "\n", "12", "self.", " ", "n t", "é", "\N{PILE OF POO}", finish.UNDECIDED,
]  # fmt: skip
REGEXES = ["[0-9]{2}", "en$", "^t", "self", "(n|t)\\b", "1+", "e.n"]


@dataclass
class Grammar:
    """SGLang's walk of a grammar that ends with the end-of-text token, as xgrammar's do."""

    said: list[int] = field(default_factory=list)
    finished: bool = False

    def accept(self, tokens: list[int]) -> list[int]:
        """What a round keeps of `tokens`."""
        kept = []
        for token in tokens:
            self.said.append(token)
            kept.append(token)
            if self.is_terminated():
                break
        return kept

    def is_terminated(self) -> bool:
        return EOS in self.said


def request(tokenizer: Any, has_grammar: bool = False, **params: Any) -> Req:
    sampling = SamplingParams(**params)
    sampling.normalize(tokenizer)
    made = Req("0", "", [5, 6], sampling, eos_token_ids={EOS}, vocab_size=len(tokenizer))
    made.tokenizer = tokenizer
    if has_grammar:
        made.grammar = Grammar()
    return made


def say(req: Req, tokens: list[int], rule: Any) -> None:
    """What SGLang does with a speculative round's tokens of one request."""
    if req.grammar is not None:
        tokens = req.grammar.accept(tokens)
    req.output_ids.extend(tokens)
    req.update_reasoning_tokens(list(tokens), [THINK_END])
    rule(req, len(tokens))


def say_one_by_one(req: Req, tokens: list[int]) -> None:
    """What it does without speculation: the grammar walks behind the check."""
    for token in tokens:
        if req.finished():
            return
        req.output_ids.append(token)
        req.update_reasoning_tokens(token, [THINK_END])
        STOCK(req)
        if req.grammar is not None:
            req.grammar.accept([token])


def shown(req: Req) -> dict[str, Any]:
    """What a client is told of an answer."""
    return {
        "tokens": list(req.output_ids_through_stop),
        "finish": req.finished_reason and req.finished_reason.to_json(),
        "reasoning": req.reasoning_tokens,
    }


def by_round(req: Req, new_accepted_len: int) -> None:
    finish_where_plain_decoding_would(STOCK, req, new_accepted_len)


@pytest.fixture(autouse=True)
def _ddtree(monkeypatch):
    monkeypatch.setattr(finish, "get_spec", lambda: SimpleNamespace(speculative_algorithm="DDTREE"))


@st.composite
def answers(draw: st.DrawFn):
    """(tokenizer name, request parameters, rounds)."""
    name = draw(st.sampled_from(sorted(ALPHABETS)))
    token = st.sampled_from(ALPHABETS[name][1])
    rounds = draw(st.lists(st.lists(token, min_size=1, max_size=8), min_size=1, max_size=6))
    has_grammar = draw(st.booleans())
    params = {
        "max_new_tokens": draw(st.integers(1, 30)),
        "stop": draw(st.lists(st.sampled_from(STOPS), max_size=3)),
        "stop_regex": draw(st.lists(st.sampled_from(REGEXES), max_size=2)),
        "stop_token_ids": draw(st.lists(token.filter(lambda t: 0 <= t < 700), max_size=2)),
        # With it a grammar ends otherwise on purpose (docs/limits.md).
        "ignore_eos": not has_grammar and draw(st.booleans()),
        "has_grammar": has_grammar,
    }
    return name, params, rounds


@given(answers())
@settings(max_examples=400, deadline=None)
def test_a_round_ends_an_answer_where_plain_decoding_does(answer):
    name, params, rounds = answer
    tokenizer = ALPHABETS[name][0]
    ours, plain = request(tokenizer, **params), request(tokenizer, **params)
    for tokens in rounds:
        if ours.finished():
            break
        before = len(ours.output_ids)
        say(ours, tokens, by_round)
        say_one_by_one(plain, tokens)
        assert shown(ours) == shown(plain)
        # SGLang frees KV by the tokens that the round left, shown or not.
        kept = len(ours.grammar.said) if ours.grammar else before + len(tokens)
        assert len(ours.output_ids) == kept
        assert (ours.finished_len is not None) == ours.finished()


def ids(text: str) -> list[int]:
    return BPE.encode(text, add_special_tokens=False)


ROUNDS = {
    "the earlier of two strings": (ids("en") + ids("ti"), {"stop": ["ti", "en"]}),
    "a token before a string": ([*ids("x"), EOS, *ids("ti")], {"stop": ["ti"]}),
    "a token before one outside the vocabulary": ([40, EOS, 10**6], {}),
    "a string before the limit": (ids("a ti b"), {"stop": ["ti"], "max_new_tokens": 5}),
    "the limit before a string": (ids("aaa") + ids("ti"), {"stop": ["ti"], "max_new_tokens": 1}),
    "a regex that the next token ends": (ids("en") + ids("x"), {"stop_regex": ["en$"]}),
    "thoughts behind the stop": ([*ids("x"), EOS, *ids("abc"), THINK_END], {}),
    "the end of a grammar": ([*ids("x"), EOS, *ids("ti")], {"stop": ["ti"], "has_grammar": True}),
}


@pytest.mark.parametrize("case", ROUNDS)
def test_of_two_stops_in_one_round_the_earlier_counts(case):
    tokens, params = ROUNDS[case]
    ours, plain = request(BPE, **params), request(BPE, **params)
    say(ours, tokens, by_round)
    say_one_by_one(plain, tokens)
    assert shown(ours) == shown(plain)
    assert ours.finished()


def test_a_stop_before_half_a_character_is_seen():
    """In the round's text as a whole every byte is a replacement character."""
    ours = request(BYTES, stop=["\n"])
    say(ours, [*of_bytes("\n"), *of_bytes("\N{PILE OF POO}")[:2]], by_round)
    assert shown(ours)["tokens"] == of_bytes("\n")
    assert shown(ours)["finish"] == {"type": "stop", "matched": "\n"}


def test_an_abort_keeps_what_was_said():
    ours = request(BPE, stop=["ti"])
    ours.to_finish = FINISH_ABORT("gone")
    say(ours, ids("en") + ids("ti"), by_round)
    assert shown(ours)["tokens"] == ids("en") + ids("ti")
    assert shown(ours)["finish"]["type"] == "abort"
    say(ours, ids("x"), by_round)
    assert shown(ours)["finish"]["type"] == "abort"


@pytest.mark.parametrize("algorithm", [None, "DFLASH"])
def test_another_algorithm_keeps_sglangs_rule(monkeypatch, algorithm):
    monkeypatch.setattr(finish, "get_spec", lambda: SimpleNamespace(speculative_algorithm=algorithm))
    ours, stock = (request(BPE, stop=["ti", "en"]) for _ in range(2))
    say(ours, ids("en") + ids("ti"), by_round)
    say(stock, ids("en") + ids("ti"), STOCK)
    assert shown(ours) == shown(stock)
    kept = list(ours.output_ids)
    continue_from_what_was_shown(lambda last, turn, params: None, ours, None, None)
    assert list(ours.output_ids) == kept


def test_a_session_goes_on_behind_the_stop():
    last = request(BPE, stop=["en"])
    say(last, ids("en") + ids("ti"), by_round)
    assert len(last.output_ids) > len(ids("en"))
    history = continue_from_what_was_shown(lambda last, turn: [*last.output_ids, *turn], last, [7])
    assert history == [*ids("en"), 7]


@pytest.mark.parametrize(("stops", "decodes"), [([], 0), (["\0", "\1"], 1)])
def test_a_round_without_a_stop_decodes_no_more_than_sglang_does(monkeypatch, stops, decodes):
    req, decoded, asked = request(BPE, max_new_tokens=10**6, stop=stops), [], []
    tokenizer = SimpleNamespace(
        decode=lambda tokens: decoded.append(tokens) or BPE.decode(tokens),
        eos_token_id=EOS,
        additional_stop_token_ids=None,
    )
    monkeypatch.setattr(req, "tokenizer", tokenizer)
    for _ in range(3):
        req.output_ids.extend(ids("self.value = value\n"))
        finish_where_plain_decoding_would(lambda *call: asked.append(call), req, 5)
    assert (len(decoded), asked) == (3 * decodes, [])
