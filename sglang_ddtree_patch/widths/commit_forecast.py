"""How many tokens a round of each width will commit: the drafter's own expectation, held to what came of it.

A row is accepted if all of its path is, which by the drafter's reckoning has the product of the path's
probabilities. Summed over the rows of a width that is the accept length to expect, for every width at once
(CaDDTree, arXiv 2606.01813). Drafters are sure of the wrong things, more so at depth, so each width's
expectation is multiplied by what its rounds have accepted over what was expected of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

# Weight of the newest round in the running expectation: texts change within tens of rounds.
NEWEST = 0.1
# A round that comes after others without a draft (of width 1) stands for some of them as well, so that a text
# that becomes easy is noticed after a few.
MOST_STOOD_FOR = 10
# What remains of an accepted token's weight after another round of the same width.
KEPT = 0.995
# Tokens of prior, at the ratio of all widths together: a few rounds outweigh it.
PRIOR = 4.0


class CommitForecast:
    """Expected commit lengths of the widths a server chooses from."""

    def __init__(self, widths: Sequence[int]):
        self._widths = tuple(widths)
        self._expected: list[float] | None = None  # accept lengths by width, as drafted, running mean
        self._stands_for = 0  # rounds since the last draft
        self._accepted = dict.fromkeys(widths, 0.0)
        self._foreseen = dict.fromkeys(widths, 0.0)

    def add(self, width: int, accept_length: float, expected: Sequence[float] | None, requests: int) -> None:
        """Learn from a round.

        Args:
            width: that it ran with.
            accept_length: mean over its requests.
            expected: accept length to expect of each width, as drafted, mean over its requests; None if
                nothing was.
            requests: how many there were.
        """
        self._stands_for += 1
        if expected is None:
            return
        weight = 1 - (1 - NEWEST) ** min(self._stands_for, MOST_STOOD_FOR)
        self._stands_for = 0
        pairs = zip(self._expected or expected, expected, strict=True)
        self._expected = [old + weight * (new - old) for old, new in pairs]
        foreseen = expected[self._widths.index(width)]
        self._accepted[width] = KEPT * self._accepted[width] + requests * accept_length
        self._foreseen[width] = KEPT * self._foreseen[width] + requests * foreseen

    def commit_lengths(self) -> dict[int, float]:
        """Tokens a round commits for a request, by width; before any round, one."""
        if self._expected is None:
            return dict.fromkeys(self._widths, 1.0)
        overall = (sum(self._accepted.values()) + PRIOR) / (sum(self._foreseen.values()) + PRIOR)
        lengths = []
        for width, expected in zip(self._widths, self._expected, strict=True):
            ratio = (self._accepted[width] + PRIOR * overall) / (self._foreseen[width] + PRIOR)
            lengths.append(1 + ratio * expected)
        # A wider tree holds the narrower one, so it accepts no less.
        return dict(zip(self._widths, accumulate(lengths, max), strict=True))
