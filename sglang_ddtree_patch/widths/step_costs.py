"""What a round costs on this server, by batch size, context and width: running medians of rounds that ran.

Costs are kept in cells of about equal batch size and context. A cell that has not seen a width yet takes
its neighbours' cost for it, scaled by how they differ at the widths both have seen.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from statistics import median

# Enough for a median that a compilation or a busy moment does not move, few enough to follow changes.
SAMPLES = 15
# Fewer are not trusted alone.
FEW = 3
# What neighbours say is put together again after so many samples.
REMAKE = 32

Cell = tuple[int, int]


def cell_of(batch: int, context: int) -> Cell:
    """Where a round belongs.

    Args:
        batch: requests, at least 1.
        context: tokens of all their prefixes.
    """
    # Half octaves of the batch, octaves of the context above what any kernel reads in passing.
    return round(2 * math.log2(batch)), int(math.log2(1 + context / 1024))


class StepCosts:
    """Seconds of a round, as far as rounds have told."""

    def __init__(self):
        self._samples: dict[tuple[Cell, int], deque[float]] = {}
        self._medians: defaultdict[Cell, dict[int, float]] = defaultdict(dict)
        self._added = 0
        self._elsewhere: dict[Cell, tuple[int, dict[int, float]]] = {}  # made after so many samples

    def add(self, cell: Cell, width: int, seconds: float) -> None:
        samples = self._samples.setdefault((cell, width), deque(maxlen=SAMPLES))
        samples.append(seconds)
        self._medians[cell][width] = median(samples)
        self._added += 1

    def seconds(self, cell: Cell) -> dict[int, float]:
        """The estimates, by width; without the widths that no cell has seen.

        The first rounds of a shape may have compiled kernels: as long as there are few, the lower of the
        cell's own estimate and its neighbours' counts, so that a width is not given up for them.
        """
        own = self._medians[cell]
        known = {width for width in own if len(self._samples[cell, width]) >= FEW}
        elsewhere = self._neighbours(cell)
        if known >= elsewhere.keys():
            return own
        scale = _scale(own, elsewhere)
        costs = {width: scale * cost for width, cost in elsewhere.items()}
        for width, cost in own.items():
            costs[width] = cost if width in known else min(cost, costs.get(width, cost))
        return costs

    def _neighbours(self, cell: Cell) -> dict[int, float]:
        """Costs as the nearest cell has them; its missing ones from the next nearest, in its measure."""
        made_after, costs = self._elsewhere.get(cell, (-REMAKE, {}))
        if self._added - made_after < REMAKE:
            return costs
        others = [other for other in self._medians if other != cell]
        others.sort(key=lambda other: (abs(other[0] - cell[0]) + abs(other[1] - cell[1]), other))
        costs = {}
        for other in others:
            theirs = self._medians[other]
            scale = _scale(costs, theirs)
            costs |= {width: scale * cost for width, cost in theirs.items() if width not in costs}
        self._elsewhere[cell] = self._added, costs
        return costs


def _scale(ours: dict[int, float], theirs: dict[int, float]) -> float:
    """How much larger ours are, at the widths that both have."""
    ratios = [ours[width] / theirs[width] for width in ours.keys() & theirs.keys()]
    return median(ratios) if ratios else 1.0
