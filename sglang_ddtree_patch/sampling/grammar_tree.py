"""Grammar on every branch: the tree as SGLang's grammar code walks it on the host.

A grammar is a host automaton. SGLang walks it down a verify tree, a branch at a time with roll-back, and
fills for each row the tokens that may follow; it knows a tree by first child and next sibling. The links
are made on the device and copied while the target's forward runs, which the walk waits for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask

from sglang_ddtree_patch.kernels.tree.build import TokenTree


@dataclass(frozen=True)
class GrammarOnTree:
    """A round's trees on their way to the host."""

    links: GrammarTree

    @classmethod
    def of(cls, batch: Any, tree: TokenTree) -> GrammarOnTree | None:
        """Start the copy, before the target's forward is launched; None if no request has a grammar."""
        if not batch.has_grammar:
            return None
        first_child, next_sibling = child_links(tree.parents)
        return cls(GrammarTree.from_device(first_child, next_sibling, tree.tokens))

    def mask(self, batch: Any, barrier: Callable[[], None] | None) -> Any:
        """Which tokens may follow each row (SGLang's GrammarMask), after the forward's launch.

        Args:
            batch: SGLang's ScheduleBatch of the round.
            barrier: walks the automata over the last round's tokens, where the overlap scheduler has not
                done that yet.
        """
        return build_grammar_vocab_mask(
            reqs=batch.reqs,
            tree=self.links,
            sampling_info=batch.sampling_info,
            device=batch.device,
            barrier=barrier,
        )


def child_links(parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First child and next sibling of every row, -1 for none.

    Args:
        parents: [batch, width] int64, -1 for the root and for padding.

    Returns:
        Two [batch, width] int64. Padding is nobody's child or sibling.
    """
    rows = torch.arange(parents.shape[1], device=parents.device)
    is_child = parents[:, None, :] == rows[:, None]
    is_sibling = (parents[:, None, :] == parents[:, :, None]) & (parents >= 0)[:, :, None]
    return _first(is_child), _first(is_sibling & (rows > rows[:, None]))


def _first(found: torch.Tensor) -> torch.Tensor:
    """Index of the first true element along the last dimension, -1 if there is none."""
    return torch.where(found.any(-1), found.to(torch.int8).argmax(-1), -1)
