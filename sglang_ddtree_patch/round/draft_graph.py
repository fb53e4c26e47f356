"""The tree inside the drafter's CUDA graphs, so that a round launches draft, candidates and tree as one.

SGLang lets a worker record more work behind the forward of every graph it captures. What is recorded there
lies in the graph's own memory, which the next replay writes anew: a round may hand it to what is launched on
the same stream before that, and to nothing else.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sglang_ddtree_patch.kernels.tree.build import TokenTree, build_token_tree


@dataclass(frozen=True)
class RecordedTree:
    """What a graph leaves of one batch."""

    candidate_tokens: torch.Tensor  # [batch, draft - 1, candidates] int64
    log_probs: torch.Tensor  # [batch, draft - 1, candidates] float32
    tree: TokenTree  # of the largest width
    expected: torch.Tensor | None  # [batch, widths] float32, where widths are chosen

    def expectation(self) -> torch.Tensor | None:
        """`expected`, to be read on the host: SGLang copies it while the next round may write here anew."""
        return None if self.expected is None else self.expected.clone()

    def tensors(self) -> list[torch.Tensor]:
        """All of them, in an order of their own."""
        every = (self.candidate_tokens, self.log_probs, *vars(self.tree).values(), self.expected)
        return [tensor for tensor in every if tensor is not None]

    def first(self, batch: int) -> RecordedTree:
        """The same memory, of the first ``batch`` requests."""
        return RecordedTree(
            self.candidate_tokens[:batch],
            self.log_probs[:batch],
            self.tree.first(batch),
            None if self.expected is None else self.expected[:batch],
        )


class RecordedTrees:
    """Records the tree into the drafter's graphs, and knows where each graph leaves it."""

    def __init__(
        self,
        candidates_of: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
        expected_of: Callable[[TokenTree], torch.Tensor | None],
        width: int,
    ):
        """
        Args:
            candidates_of: candidates and their log-probs of [batch * draft, size] hidden states.
            expected_of: accept lengths to expect of the widths to choose from, None for one width.
            width: of the trees.
        """
        self._candidates_of = candidates_of
        self._expected_of = expected_of
        self._width = width
        # By batch size, from before the capture: a graph's own memory is the next graph's too, and a verify
        # runs between the drafter's graph and the commit.
        self._kept: dict[int, RecordedTree] = {}
        # By batch size: where the graph leaves the hidden states, and what it makes of them.
        self._recorded: dict[int, tuple[torch.Tensor, RecordedTree]] = {}
        self._views: dict[int, tuple[int, RecordedTree]] = {}  # by requests: an address, and the tree there

    def record(self, runner: Any, out: Any, forward_batch: Any, num_tokens: int) -> None:
        """SGLang's hook behind the forward of a graph: runs twice to warm up, then under capture.

        Padded requests have a block of an earlier round and positions of their own: their trees are built
        like any other's, and nobody reads them.
        """
        batch = forward_batch.batch_size
        block_ids = forward_batch.input_ids.view(batch, -1)
        positions = forward_batch.positions.view(batch, -1)
        tokens, log_probs = self._candidates_of(out.hidden_states)
        tree = build_token_tree(block_ids[:, 0], tokens, log_probs, self._width, positions[:, 0])
        made = RecordedTree(tokens, log_probs, tree, self._expected_of(tree))
        if not is_capturing(block_ids.device):
            self._kept[batch] = made
        kept = self._kept[batch]
        for left, value in zip(kept.tensors(), made.tensors(), strict=True):
            left.copy_(value)
        self._recorded[batch] = out.hidden_states, kept
        self._views.clear()

    def of(self, hidden_states: torch.Tensor, requests: int) -> RecordedTree | None:
        """What the graph that has just left ``hidden_states`` recorded of its first ``requests`` requests."""
        if requests not in self._views:
            sizes = sorted(self._recorded)
            place = bisect.bisect_left(sizes, requests)  # the next larger graph is the one that ran
            if place == len(sizes):
                return None
            hidden, recorded = self._recorded[sizes[place]]
            self._views[requests] = hidden.data_ptr(), recorded.first(requests)
        address, recorded = self._views[requests]
        return recorded if address == hidden_states.data_ptr() else None


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
