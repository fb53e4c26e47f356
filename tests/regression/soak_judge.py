"""Judges the answers of a soak by stock SGLang's to the same requests, by the bf16 rule.

Stock is asked everything once, many requests at a time. Where its tokens and ours part, prefills of prompt
and stock's answer say by how much two stock forwards of that prefix differ in the gap between the top two
tokens (tests/server/bf16_rule.py): on stock's own kernels and on other ones, and from its decode, where that
chose by the logits alone. The noise of one request is the most over its places. Answers here may be two
tokens long, over which little noise shows, so a difference beyond that is held to the noise of all requests
that were looked at, and is a mismatch beyond this.

Of a request that draws by a seed the oracle's choice is the largest sum of log-prob over temperature and the
noise that seed, position and token give. The gap is then the difference of those sums, times the temperature.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bf16_rule import ROUNDING, Place, first_difference, gap_noise, gap_to, places_of
from soak_client import SoakAnswer, send_all
from soak_mix import SoakRequest

from sglang_ddtree_patch.launch.server_process import ServerProcess

TOP = 5  # tokens whose log-probs stock says of each place
PROMPT_PLACES = 64  # of the prompt's end, whose noise is looked at too
AT_ONCE = 64
WORD = 0xFFFFFFFF
CONTROLS = 500  # answers that are made wrong on purpose


@dataclass(frozen=True)
class Difference:
    """Where an answer leaves stock's."""

    request: SoakRequest
    at: int
    expected: tuple[int, ...]  # stock's answer
    found: int  # the token in its place
    gap: float | None  # how much likelier stock's token is; None: the one found is none of its top
    # Of stock's answer while decoding, as the prefills see them; none where rules of the request change them.
    decoded: tuple[Place, ...] = ()


@dataclass
class Judged:
    """What came out, in numbers for the record."""

    by_kind: dict[str, Counter] = field(default_factory=dict)
    differing: int = 0
    allowed_by_own_noise: int = 0
    allowed_by_noise_of_all: list[dict[str, Any]] = field(default_factory=list)
    another_stock_forward_says_so_too: int = 0
    mismatches: list[dict[str, Any]] = field(default_factory=list)
    noise_of_all: float = 0.0
    median_noise: float = 0.0
    controls: dict[str, Any] = field(default_factory=dict)


class Judge:
    """The stock servers: the oracle, and one on other kernels."""

    def __init__(
        self,
        oracle: ServerProcess,
        other_kernels: ServerProcess,
        say: Callable[[str], None] = lambda line: None,  # what goes on
    ):
        self._oracle, self._other, self._say = oracle, other_kernels, say

    def judge(self, requests: Sequence[SoakRequest], answers: Sequence[SoakAnswer]) -> Judged:
        """All verdicts. Requests that are not judged only have to be answered."""
        outcome = Judged()
        pairs = list(zip(requests, answers, strict=True))
        for request, answer in pairs:
            counts = outcome.by_kind.setdefault(request.kind, Counter())
            counts["requests"] += 1
            counts["judged"] += request.is_judged
            if not answer.replies and not request.is_given_up:
                outcome.mismatches.append(row(request, error=answer.error))
        judged = [(request, answer) for request, answer in pairs if request.is_judged and answer.replies]
        said = self._ask_oracle([request for request, _ in judged])
        differing: list[Difference] = []
        for request, answer in judged:
            stock = said[request.name]
            if len(stock.replies) != len(answer.replies) and not request.is_given_up:
                outcome.mismatches.append(row(request, error=f"stock: {stock.error}"))
                continue
            for expected, found in zip(stock.replies, answer.replies, strict=True):
                self._compare(request, expected, found, differing, outcome)
        self._decide(differing, outcome)
        self._control([(request, said[request.name]) for request, _ in judged], outcome)
        return outcome

    def _ask_oracle(self, requests: Sequence[SoakRequest]) -> dict[str, SoakAnswer]:
        """Greedy requests and seeded ones apart: in company stock ties a seed's noise to ranks."""
        said: dict[str, SoakAnswer] = {}
        for are_seeded in (False, True):
            group = [with_log_probs(request) for request in requests if request.is_seeded == are_seeded]
            if group:
                self._say(f"stock answers {len(group)} {'seeded' if are_seeded else 'other'} requests")
                answers, _ = send_all(self._oracle.url, group, AT_ONCE, gives_up=False)
                said |= {request.name: answer for request, answer in zip(group, answers, strict=True)}
        return said

    def _compare(
        self, request: SoakRequest, expected: dict, found: dict, differing: list[Difference], outcome: Judged
    ) -> None:
        tokens, ours = expected["output_ids"], found["output_ids"]
        is_part = request.is_given_up and len(ours) < len(tokens)
        at = first_difference(tokens[: len(ours)] if is_part else tokens, ours)
        if at is None:
            # Without a tokenizer there is no text.
            ends = [(one.get("text"), one["meta_info"]["finish_reason"]) for one in (expected, found)]
            if ends[0] != ends[1] and not request.is_given_up:
                outcome.mismatches.append(row(request, error=f"stock {expected!r}, ours {found!r}"[:600]))
            return
        outcome.differing += 1
        outcome.by_kind[request.kind]["differing"] += 1
        if at >= min(len(tokens), len(ours)):
            outcome.mismatches.append(row(request, at=at, error="the answer ends elsewhere"))
            return
        places = places_of(expected["meta_info"]["output_top_logprobs"])
        gap = None if request.is_seeded else gap_to(places[at], ours[at])
        decoded = before_temperature(request, places)
        differing.append(Difference(request, at, tuple(tokens), ours[at], gap, decoded))

    def _decide(self, differing: Sequence[Difference], outcome: Judged) -> None:
        """By the noise of each request, and where that is not enough by that of all."""
        self._say(f"stock reads {len(differing)} answers that differ, with two kernels")
        same = prefills(self._oracle, differing)
        other = prefills(self._other, differing)
        undecided, noises = [], []
        for one, here, there in zip(differing, same, other, strict=True):
            noise = noise_of(one, here, there)
            noises.append(noise)
            gap = one.gap
            if one.request.is_seeded:
                gap = here.seeded_gap(one)
            outcome.another_stock_forward_says_so_too += there.chooses(one) or here.chooses(one)
            if gap is not None and gap <= noise + ROUNDING:
                outcome.allowed_by_own_noise += 1
            else:
                undecided.append((one, gap, noise))
        outcome.noise_of_all = max(noises, default=0.0)
        outcome.median_noise = sorted(noises)[len(noises) // 2] if noises else 0.0
        for one, gap, noise in undecided:
            entry = row(one.request, at=one.at, gap=gap, noise=noise)
            if gap is not None and gap <= outcome.noise_of_all + ROUNDING:
                outcome.allowed_by_noise_of_all.append(entry)
            else:
                outcome.mismatches.append(entry)

    def _control(self, said: Sequence[tuple[SoakRequest, SoakAnswer]], outcome: Judged) -> None:
        """What the rule would say of answers whose token at a random place is stock's second best."""
        draw = random.Random("controls")
        plain = [
            answer.replies[0]
            for request, answer in said
            if request.is_plain and answer.replies and answer.replies[0]["output_ids"]
        ]
        gaps = []
        for reply in draw.sample(plain, min(CONTROLS, len(plain))):
            place = draw.choice(places_of(reply["meta_info"]["output_top_logprobs"]))
            gaps.append(place[0][0] - place[1][0])
        refused = {
            name: sum(gap > noise + ROUNDING for gap in gaps)
            for name, noise in (
                ("the median noise", outcome.median_noise),
                ("all noise", outcome.noise_of_all),
            )
        }
        outcome.controls = {"wrong_answers": len(gaps), "refused_by": refused}


@dataclass(frozen=True)
class Prefilled:
    """One forward of prompt and answer: the top of the last places, and where the answer begins."""

    places: tuple[Place, ...]
    answer_at: int
    pair: Mapping[int, float]  # log-probs of stock's token and of the one found, where they part

    def seeded_gap(self, one: Difference) -> float:
        """How far stock's token leads the one found, noise of the seed included, in log-probs."""
        mine, found = one.expected[one.at], one.found
        sampling = one.request.sampling
        position = len(one.request.prompt) + one.at - 1
        of_mine, of_found = (gumbel(sampling["sampling_seed"], position, token) for token in (mine, found))
        return self.pair[mine] - self.pair[found] + sampling["temperature"] * (of_mine - of_found)

    def chooses(self, one: Difference) -> bool:
        """Whether this forward would say the token found itself."""
        if one.request.is_seeded:
            return self.seeded_gap(one) <= 0
        return one.request.is_plain and self.places[self.answer_at + one.at][0][1] == one.found


def prefills(server: ServerProcess, differing: Sequence[Difference]) -> list[Prefilled]:
    """Prompt and stock's answer of each in one forward."""
    asked = []
    for index, one in enumerate(differing):
        start = max(len(one.request.prompt) - 1 - PROMPT_PLACES, 0)
        payload = {
            "input_ids": [*one.request.prompt, *one.expected],
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            "return_logprob": True,
            "top_logprobs_num": TOP,
            "token_ids_logprob": [
                one.expected[one.at],
                one.found,
            ],  # a seed may draw what is far from the top
            "logprob_start_len": start,
        }
        asked.append(SoakRequest(str(index), "prefill", payload))
    answers, _ = send_all(server.url, asked, AT_ONCE)
    found = []
    for one, request, answer in zip(differing, asked, answers, strict=True):
        if not answer.replies:
            raise RuntimeError(f"stock does not prefill {one.request.name}: {answer.error}")
        meta = answer.replies[0]["meta_info"]
        # The first place has no log-probs: nothing stands before it.
        places = places_of(meta["input_top_logprobs"][1:])
        answer_at = len(one.request.prompt) - 1 - request.payload["logprob_start_len"]
        pair = meta["input_token_ids_logprobs"][1:][answer_at + one.at]
        found.append(Prefilled(places, answer_at, {token: log_prob for log_prob, token, _ in pair}))
    return found


def before_temperature(request: SoakRequest, places: Sequence[Place]) -> tuple[Place, ...]:
    """A decode's places up to what a prefill adds to all of one, none where the request changes logits.

    Stock divides logits by the temperature before it says log-probs of a draw.
    """
    if request.is_plain:
        return tuple(places)
    if not request.is_seeded:
        return ()
    temperature = request.sampling["temperature"]
    return tuple(tuple((temperature * said, token) for said, token in place) for place in places)


def noise_of(one: Difference, here: Prefilled, there: Prefilled) -> float:
    """By how much stock's forwards differ over one request: its prefills, and its decode from either."""
    noise = gap_noise(here.places, there.places)
    if one.decoded:
        for prefilled in (here, there):
            noise = max(noise, gap_noise(one.decoded, prefilled.places[prefilled.answer_at :]))
    return noise


def with_log_probs(request: SoakRequest) -> SoakRequest:
    """The same request, asked without a stream and with the top of each place."""
    payload = {**request.payload, "return_logprob": True, "top_logprobs_num": TOP}
    return SoakRequest(request.name, request.kind, payload)


def row(request: SoakRequest, **found: Any) -> dict[str, Any]:
    return {
        "request": request.name, "kind": request.kind, "prompt": len(request.prompt),
        "sampling": dict(request.sampling), **found,
    }  # fmt: skip


def gumbel(seed: int, position: int, token: int) -> float:
    """The noise that SGLang adds to a token's log-prob: `multinomial_with_seed` in its sampler."""
    uniform = murmur(seed & WORD, seed >> 32 & WORD, position, token) / WORD
    return -math.log(-min(math.log(uniform), -(2.0**-32))) if uniform else -math.inf


def murmur(*words: int) -> int:
    """MurmurHash3 (x86, 32 bits) of 32-bit words."""
    hashed = 0
    for word in words:
        mixed = rotate(word * 0xCC9E2D51 & WORD, 15) * 0x1B873593 & WORD
        hashed = rotate(hashed ^ mixed, 13) * 5 + 0xE6546B64 & WORD
    hashed ^= 4 * len(words)
    hashed = (hashed ^ hashed >> 16) * 0x85EBCA6B & WORD
    hashed = (hashed ^ hashed >> 13) * 0xC2B2AE35 & WORD
    return hashed ^ hashed >> 16


def rotate(word: int, bits: int) -> int:
    return (word << bits | word >> 32 - bits) & WORD
