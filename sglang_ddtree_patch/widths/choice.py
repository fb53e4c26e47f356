"""Which width each round runs with: the largest, or the one that the policy takes.

The choice is made on the host before the round is launched, by what earlier rounds have brought to the host
with their results. The tree is always built at the largest width: its first rows are the tree of any smaller
one, and its scores say what each width may expect.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from sglang_ddtree_patch.kernels.tree.build import TokenTree, expected_accept_lengths
from sglang_ddtree_patch.round.block import BlockSizes
from sglang_ddtree_patch.round.draft_prefix import verify_host_bound
from sglang_ddtree_patch.widths.agreement import Alone, Together
from sglang_ddtree_patch.widths.policy import RoundSeen, WidthPolicy, choices

logger = logging.getLogger(__name__)


class FixedWidth:
    """Every round is as wide as the last."""

    def __init__(self, sizes: BlockSizes):
        self._sizes = sizes
        self.widths = (sizes.width,)

    def choose(self, batch: Any) -> tuple[BlockSizes, int]:
        return self._sizes, 0

    def expected(self, tree: TokenTree) -> None:
        return None

    def learn(self, *round_: Any) -> None:
        pass


class ChosenWidth:
    """Every round is as wide as promises most tokens a second."""

    def __init__(self, sizes: BlockSizes, device: torch.device | str, ranks: Alone | Together):
        self.widths = choices(sizes.widest)
        self._sizes = {width: sizes.of_width(width) for width in self.widths}
        self._policy = WidthPolicy(self.widths)
        self._ranks = ranks
        self._widths = torch.tensor(self.widths, device=device)
        logger.info("DDTREE: each round chooses its width, of %s.", ", ".join(map(str, self.widths)))

    def choose(self, batch: Any) -> tuple[BlockSizes, int]:
        """The sizes of a batch's next round, and its context as `learn` wants it; waits for nothing."""
        # Tokens of all prefixes: exact, or a bound of them where the exact ones are still to come.
        _, context = verify_host_bound(batch, rows=0)
        return self._sizes[self._policy.choose(len(batch.reqs), context)], context

    def expected(self, tree: TokenTree) -> torch.Tensor:
        """Accept lengths to expect of each width, of a tree of the largest: [batch, widths] float32."""
        return expected_accept_lengths(tree, self._widths)

    def learn(
        self,
        width: int,
        context: int,
        accept_lengths: Sequence[int],
        expected: torch.Tensor | None,
        seconds: float | None,
    ) -> None:
        """Take in a round whose results have reached the host.

        Args:
            width: that it ran with.
            context: that `choose` gave with it.
            accept_lengths: of each request.
            expected: [batch, widths] of `expected`, on the host; None where nothing was drafted.
            seconds: since the round before, None where not known.
        """
        requests = len(accept_lengths)
        seen = RoundSeen(
            batch=requests,
            context=context,
            width=width,
            accept_length=sum(accept_lengths) / requests,
            expected=None if expected is None else expected.mean(0).tolist(),
            seconds=seconds,
        )
        for one in self._ranks.agreed(seen):
            self._policy.learn(one)
