"""What accept lengths by context say of a drafter, in words.

Predictable text is what any working drafter guesses, as long as the target goes on repeating it. So where
little of it is accepted the drafter is at fault, and where it is accepted and prose is not, the text is.
Where the target leaves it, its answer was not predictable and tells nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

HEALTHY = "healthy"
HARD = "text is hard"
UNCLEAR = "no verdict"
BROKEN_LONG = "drafter broken at long context"
BROKEN = "drafter broken"
WORST_FIRST = (BROKEN, BROKEN_LONG, UNCLEAR, HARD, HEALTHY)

# Accept lengths. A drafter that guesses less than this of a repeated sentence guesses nothing worth a round.
LEAST_PREDICTABLE = 0.5
# The part of what it accepts of predictable text at its best shorter context that a working drafter keeps.
KEPT = 0.6
# Prose that gains a token a round, or half of what predictable text gains, is not hard.
EASY_PROSE = 1.0
# The part of an answer that has to repeat the sentence for it to have been predictable.
REPEATED = 0.8


@dataclass(frozen=True)
class Pair:
    """Both texts at one context length; accept lengths are drafted tokens accepted a round."""

    context: int  # tokens of the predictable prompt
    predictable: float
    prose: float | None  # None where it could not be measured
    repeated: float  # part of the predictable answer that goes on with the sentence


@dataclass(frozen=True)
class Verdict:
    context: int
    word: str
    because: str

    def __str__(self) -> str:
        return f"{self.word}: {self.because}"


def judge(pairs: Sequence[Pair]) -> list[Verdict]:
    """A verdict for each context, shortest first."""
    verdicts: list[Verdict] = []
    best: Pair | None = None  # shorter context with the most of the predictable text accepted
    for pair in sorted(pairs, key=lambda pair: pair.context):
        verdicts.append(_judge_one(pair, best))
        works = pair.predictable >= LEAST_PREDICTABLE and pair.repeated >= REPEATED
        if works and (best is None or pair.predictable > best.predictable):
            best = pair
    return verdicts


def _judge_one(pair: Pair, best: Pair | None) -> Verdict:
    accepted = f"{pair.predictable:.2f} drafted tokens a round are accepted of predictable text"
    if pair.repeated < REPEATED:
        because = (
            f"the target itself left the repeated sentence after {pair.repeated:.0%} of its answer, so "
            "nothing that it said was sure to be guessed"
        )
        return Verdict(pair.context, UNCLEAR, because)
    if best is not None and pair.predictable < KEPT * best.predictable:
        because = f"{accepted}, where it were {best.predictable:.2f} at {best.context} tokens"
        return Verdict(pair.context, BROKEN_LONG, because)
    if pair.predictable < LEAST_PREDICTABLE:
        because = f"{accepted}: it may not be this target's drafter, or its weights did not load"
        return Verdict(pair.context, BROKEN, because)
    if pair.prose is None:
        return Verdict(pair.context, HEALTHY, f"{accepted}; prose was not measured")
    both = f"{accepted}, {pair.prose:.2f} of prose"
    if pair.prose < min(EASY_PROSE, pair.predictable / 2):
        return Verdict(pair.context, HARD, f"{both}: the drafter works, prose is not easily guessed")
    return Verdict(pair.context, HEALTHY, both)


def overall(verdicts: Sequence[Verdict]) -> str:
    """One sentence for all contexts: the worst verdict, and from where on."""
    worst = min(verdicts, key=lambda verdict: (WORST_FIRST.index(verdict.word), verdict.context))
    if worst.word in (HEALTHY, HARD):
        if len(verdicts) == 1:
            return f"{worst.word} at {worst.context} tokens, the only length measured"
        return f"{worst.word}: the drafter holds up to {max(verdict.context for verdict in verdicts)} tokens"
    return f"{worst.word}, from {worst.context} tokens on: {worst.because}"
