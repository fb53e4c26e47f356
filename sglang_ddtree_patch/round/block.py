"""The sizes of one round. All but the width are decided once, when the server starts."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class BlockSizes:
    """How many rows, positions and slots a round uses for one request."""

    width: int  # rows of the verify block, root included
    draft: int  # B: positions of the drafter's block, root included
    candidates: int  # K: candidates a drafted position
    widest: int  # N: the largest width of any round

    def of_width(self, width: int) -> BlockSizes:
        """The sizes of a round of another width; its slots are planned as for the largest."""
        return replace(self, width=width)

    @property
    def slots(self) -> int:
        """KV slots behind the committed length that are planned for draft and verify."""
        return max(self.widest, self.draft)

    def columns(self, rows: int) -> slice | None:
        """The part of the slots that a forward over ``rows`` rows writes; None for all of them."""
        return None if rows == self.slots else slice(0, rows)

    @property
    def path(self) -> int:
        """Rows of the longest path, root included: most tokens a round can commit."""
        return min(self.width, self.draft)
