"""The width of the next round: the one with the best expected tokens a second.

A round of width ``w`` commits ``c(w)`` tokens a request and takes ``t(w)`` seconds, and the batch is the same
whatever the width, so the best width has the largest ``c(w) / t(w)``. Both are running estimates of earlier
rounds (commit_forecast.py, step_costs.py), so the choice is made on the host and waits for nothing.

Costs are known of what has run only, so now and then a round runs another width: each in turn while the
server is new, again where that brought no time, then one round in `EXPLORE_EVERY`, if the estimates leave
that width a chance and what it is expected to lose keeps within `MOST_LOST` of the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_ddtree_patch.widths.commit_forecast import CommitForecast
from sglang_ddtree_patch.widths.step_costs import FEW, Cell, StepCosts, cell_of

EXPLORE_EVERY = 64
# In a cell without rounds of its own, where costs are a neighbour's, so many rounds come sooner.
NEW_CELL_ROUNDS, NEW_CELL_EVERY = 64, 8
# Of the best rate: what is expected below the first is looked at by every `RARE` exploration only, and what
# is below the second by none.
PLAUSIBLE, HOPELESS, RARE = 0.7, 0.3, 16
# Share of the time that rounds of other widths than the best may lose.
MOST_LOST = 0.01
# A look that brought no time (another batch ran before it) is taken again in one round of so many.
AGAIN_EVERY = 4


@dataclass(frozen=True)
class RoundSeen:
    """A round that has reached the host."""

    batch: int
    context: int  # tokens of all prefixes, or a bound of them
    width: int
    accept_length: float  # mean over the requests
    expected: Sequence[float] | None  # by width, mean over the requests; None if nothing was drafted
    seconds: float | None  # since the round before; None if something else ran between them


def choices(widest: int) -> tuple[int, ...]:
    """The widths to choose from: 1, which drafts nothing, the powers of two, and the largest."""
    return (*(1 << power for power in range((widest - 1).bit_length())), widest)


class WidthPolicy:
    """Chooses widths for one server."""

    def __init__(self, widths: Sequence[int]):
        """
        Args:
            widths: to choose from, ascending.
        """
        self.widths = tuple(widths)
        self._costs = StepCosts()
        self._forecast = CommitForecast(self.widths)
        # Widest first: what a server that is asked little would have run.
        self._first_looks = [width for width in reversed(self.widths) for _ in range(FEW)]
        self._looks_again: list[int] = []  # widths without `FEW` times, whose last round brought none
        self._timed: Counter[int] = Counter()
        self._rounds: Counter[Cell] = Counter()
        self._explored: Counter[Cell] = Counter()
        self._last_run: dict[tuple[Cell, int], int] = {}
        self._seconds, self._lost = 0.0, 0.0  # as expected

    def choose(self, batch: int, context: int) -> int:
        """The width of the next round, which is taken to run with it.

        Args:
            batch: requests, at least 1.
            context: tokens of all prefixes, or a bound of them.
        """
        cell = cell_of(batch, context)
        self._rounds[cell] += 1
        if self._first_looks:
            width = self._first_looks.pop(0)
        elif self._looks_again and self._rounds[cell] % AGAIN_EVERY == 0:
            width = self._looks_again.pop(0)
        else:
            width = self._judge(cell)
        self._last_run[cell, width] = self._rounds[cell]
        return width

    def learn(self, seen: RoundSeen) -> None:
        """Take in a round, some rounds after it was chosen."""
        self._forecast.add(seen.width, seen.accept_length, seen.expected, seen.batch)
        if seen.seconds is None:
            if self._timed[seen.width] < FEW and seen.width not in self._looks_again:
                self._looks_again.append(seen.width)
        else:
            self._timed[seen.width] += 1
            self._costs.add(cell_of(seen.batch, seen.context), seen.width, seen.seconds)

    def _judge(self, cell: Cell) -> int:
        lengths = self._forecast.commit_lengths()
        costs = self._costs.seconds(cell)
        rates = {width: lengths[width] / cost for width, cost in costs.items()}
        if not rates:  # no round has come back
            return self.widths[-1]
        best = max(rates, key=rates.__getitem__)
        other = self._other(cell, rates, best)
        if other is not None:
            loss = costs[other] * (1 - rates[other] / rates[best])
            if self._lost + loss <= MOST_LOST * self._seconds:
                self._lost += loss
                best = other
        self._seconds += costs[best]
        return best

    def _other(self, cell: Cell, rates: dict[int, float], best: int) -> int | None:
        """A width to try instead of the best one, where it is time to: the one that ran longest ago."""
        rounds = self._rounds[cell]
        if rounds % (NEW_CELL_EVERY if rounds <= NEW_CELL_ROUNDS else EXPLORE_EVERY):
            return None
        self._explored[cell] += 1
        floor = HOPELESS if self._explored[cell] % RARE == 0 else PLAUSIBLE
        others = [w for w, rate in rates.items() if w != best and rate >= floor * rates[best]]
        return min(others, key=lambda w: self._last_run.get((cell, w), 0), default=None)
