"""When two bf16 servers may differ: only where the target itself cannot tell its top two tokens apart.

Kernels that add in different orders round differently, so plain decoding and tree verify may break a near
tie differently, and everything behind that token then differs too. A first difference is allowed only where
the oracle holds its own token to be likelier than the one found by no more than its own noise: how far two
forwards of stock SGLang over the same prefix differ in the gap between the top two tokens, at most, over the
request's answer. The two are a decode and a prefill, either on the same kernels (FA3) or on other ones
(Triton): trees are verified by kernels of yet another shape.

How many answers a narrower rule would refuse is counted beside it: `strict` takes the noise from the
oracle's kernels alone, and from the log-probs of the tokens it has chosen, which hardly move where it is
sure of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from serving import Request

from sglang_ddtree_patch.launch.server_process import ServerProcess

TOP = 8  # tokens of each place that the oracle says the log-probs of
ROUNDING = 1e-4  # of log-probs, which are logits less a sum: gaps are whole steps of bf16 but for this

Place = Sequence[tuple[float, int]]  # log-probs and tokens, the likeliest first


@dataclass(frozen=True)
class Noise:
    """The most that two stock forwards of the same prefixes differ by, over one answer."""

    chosen: float  # in the log-prob of the token chosen, decode against prefill on the same kernels
    gap: float  # in the gap between the top two, decode against prefill on the same kernels
    gap_between_kernels: float  # the same, decode against prefill on other kernels

    @property
    def largest(self) -> float:
        return max(self.gap, self.gap_between_kernels)


@dataclass(frozen=True)
class Verdict:
    """How one answer compares; `first_difference` is None where all tokens agree."""

    name: str
    tokens: int
    first_difference: int | None
    gap: float | None  # how much likelier the oracle's token is there; None: the one found is none of its top
    noise: Noise
    # What stock's prefills, on the same kernels and on others, put first after the very same prefix.
    others_say_so_too: bool | None

    @property
    def is_lossless(self) -> bool:
        return self.is_within(self.noise.largest)

    @property
    def is_strictly_lossless(self) -> bool:
        return self.is_within(2 * self.noise.chosen)

    def is_within(self, allowed: float) -> bool:
        """Whether the tokens agree up to a gap that is no larger than that."""
        return self.first_difference is None or (self.gap is not None and self.gap <= allowed + ROUNDING)

    def as_row(self) -> dict:
        return {
            "name": self.name,
            "tokens": self.tokens,
            "first_difference": self.first_difference,
            "gap": self.gap,
            "noise_of_the_gap": self.noise.gap,
            "noise_of_the_gap_between_kernels": self.noise.gap_between_kernels,
            "noise_of_the_chosen": self.noise.chosen,
            "another_stock_forward_says_so_too": self.others_say_so_too,
            "lossless": self.is_lossless,
            "lossless_strictly": self.is_strictly_lossless,
        }


@dataclass(frozen=True)
class OracleAnswer:
    """What stock says to a request, and how sure it is of it: what answers are judged by."""

    name: str
    tokens: tuple[int, ...]
    top: tuple[Place, ...]  # of each place, while decoding
    prefilled: tuple[tuple[Place, ...], ...]  # the same places, by prefills on its own and on other kernels
    noise: Noise

    def judge(self, found: Sequence[int]) -> Verdict:
        """The verdict on the tokens `found`, which another server answered to the same request."""
        first = first_difference(self.tokens, found)
        gap = said = None
        if first is not None and first < min(len(self.tokens), len(found)):
            gap = gap_to(self.top[first], found[first])
            said = any(places[first][0][1] == found[first] for places in self.prefilled)
        return Verdict(self.name, len(self.tokens), first, gap, self.noise, said)

    @property
    def near_share(self) -> float:
        """The share of places where the second-best token would pass for the best: how blunt the rule is."""
        near = [place[0][0] - place[1][0] <= self.noise.largest + ROUNDING for place in self.top]
        return sum(near) / len(near)

    def wrong(self) -> tuple[int, ...]:
        """A wrong answer: the second-best token where the best is the surest, and so for the rest."""
        gaps = [place[0][0] - place[1][0] for place in self.top]
        at = gaps.index(max(gaps))
        return (*self.tokens[:at], self.top[at][1][1], *self.tokens[at + 1 :])


def ask_oracle(oracle: ServerProcess, other_kernels: ServerProcess, request: Request) -> OracleAnswer:
    """Ask stock for `request`, and for the log-probs of its answer once more in prefills."""
    payload = request.payload | {"return_logprob": True, "top_logprobs_num": TOP}
    reply = oracle.post_json("/generate", payload)
    tokens = tuple(reply["output_ids"])
    top = places_of(reply["meta_info"]["output_top_logprobs"])
    chosen = [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
    again, same = prefill(oracle, request, tokens)
    _, other = prefill(other_kernels, request, tokens)
    noise = Noise(
        chosen=max(abs(a - b) for a, b in zip(chosen, again, strict=True)),
        gap=gap_noise(top, same),
        gap_between_kernels=gap_noise(top, other),
    )
    return OracleAnswer(request.name, tokens, top, (same, other), noise)


def compare(
    oracle: ServerProcess, other_kernels: ServerProcess, request: Request, found: Sequence[int]
) -> Verdict:
    """Ask the stock `oracle` for `request` and judge the tokens `found` by the rule above."""
    return ask_oracle(oracle, other_kernels, request).judge(found)


def prefill(
    server: ServerProcess, request: Request, answer: Sequence[int]
) -> tuple[list[float], tuple[Place, ...]]:
    """Log-probs of the answer's tokens, and of the top of each place, in one forward of prompt and answer."""
    whole = {
        "input_ids": [*request.input_ids, *answer],
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_logprob": True,
        "top_logprobs_num": TOP,
        "logprob_start_len": len(request.input_ids) - 1,
    }
    meta = server.post_json("/generate", whole)["meta_info"]
    # The prompt's last token comes first, and has no log-prob of its own.
    chosen = [entry[0] for entry in meta["input_token_logprobs"][1:]]
    return chosen, places_of(meta["input_top_logprobs"][1:])


def places_of(top_logprobs: Sequence[Sequence[Sequence]]) -> tuple[Place, ...]:
    return tuple(tuple((entry[0], entry[1]) for entry in place) for place in top_logprobs)


def first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """The first place where they differ, which is behind the shorter where one is the other's beginning."""
    pairs = enumerate(zip(expected, found, strict=False))
    first = next((index for index, (one, other) in pairs if one != other), None)
    if first is None and len(expected) != len(found):
        return min(len(expected), len(found))
    return first


def gap_to(place: Place, token: int) -> float | None:
    """How much likelier the first token of a place is than `token`; None where that is not among them."""
    # Tokens that cannot be said have no log-prob.
    said = ((log_prob, one) for log_prob, one in place if log_prob is not None)
    return next((place[0][0] - log_prob for log_prob, one in said if one == token), None)


def gap_noise(places: Sequence[Place], others: Sequence[Place]) -> float:
    """How far another forward of the same prefixes moves the gap between the top two tokens, at most.

    The gap is free of what is added to all logits of a place, and of the normalization. Where the other
    forward no longer has one of the two among its top, it has moved by more than can be told; such a place
    is left out, which makes the noise smaller and the rule narrower.
    """
    moves = [0.0]
    for place, other in zip(places, others, strict=True):
        log_probs = {token: log_prob for log_prob, token in other}
        (best, first), (second, runner_up) = place[:2]
        if first in log_probs and runner_up in log_probs:
            moves.append(abs((best - second) - (log_probs[first] - log_probs[runner_up])))
    return max(move for move in moves if math.isfinite(move))
