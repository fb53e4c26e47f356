"""Penalties on every branch: each row of the block is penalized for what its own branch would have said.

A penalty depends on the tokens said so far: the request's, through the root, and the row's ancestors and
the row itself. With ``n`` the number of times a token was said, its logit ``l`` becomes

    l - frequency * n - presence * [n > 0]                   then, where n > 0,
    l * repetition if that is negative, else l / repetition

and a stop token is impossible until ``min_new_tokens`` are said. All rows of a request share the counts
through the root, which is one pass over the logits; a row differs from that only at the few tokens of its
branch, whose logits are computed again from what they were.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_ddtree_patch.kernels.tree.build import TokenTree, unpack_masks


@dataclass(frozen=True)
class Penalties:
    """The penalties of a batch, and what its requests have said through their roots."""

    counts: torch.Tensor  # [batch, vocabulary] int32: how often each token was said
    said: torch.Tensor  # [batch] int64: how many tokens were said
    frequency: torch.Tensor  # [batch] float32
    presence: torch.Tensor  # [batch] float32
    repetition: torch.Tensor  # [batch] float32
    min_new_tokens: torch.Tensor  # [batch] int64
    # [batch, vocabulary] float32, -inf at the tokens that end the request; None if none waits for them
    stop_tokens: torch.Tensor | None

    def additive(self) -> torch.Tensor:
        """What is added to the logits that follow the roots: [batch, vocabulary] float32."""
        added = _additive(self.counts, self.frequency[:, None], self.presence[:, None])
        if self.stop_tokens is not None:
            added += torch.where((self.said < self.min_new_tokens)[:, None], self.stop_tokens, 0.0)
        return added

    def scaling(self) -> torch.Tensor:
        """By what the logits that follow the roots are multiplied or divided: [batch, vocabulary]."""
        return torch.where(self.counts > 0, self.repetition[:, None], 1.0)


def penalize_rows(logits: torch.Tensor, tree: TokenTree, penalties: Penalties, longest: int) -> None:
    """Apply the penalties to every row, in place.

    Args:
        logits: [batch * width, vocabulary].
        tree: the block.
        penalties: of the batch.
        longest: depth that no row exceeds.
    """
    batch, width = tree.tokens.shape
    logits = logits.view(batch, width, -1)
    branch, is_said = branch_tokens(tree, longest)
    before = logits.gather(2, branch)

    frequency, presence, repetition = (
        value[:, None, None] for value in (penalties.frequency, penalties.presence, penalties.repetition)
    )
    logits.add_(_additive(penalties.counts[:, None], frequency, presence))
    _scale(logits, penalties.scaling()[:, None])

    same = (branch[:, :, :, None] == branch[:, :, None, :]) & is_said[:, :, None, :]
    counts = penalties.counts.gather(1, branch.flatten(1)).view(branch.shape) + same.sum(-1)
    penalized = (before + _additive(counts, frequency, presence)).to(before.dtype)
    _scale(penalized, torch.where(counts > 0, repetition, 1.0))
    logits.scatter_(2, branch, penalized)

    if penalties.stop_tokens is None:
        return
    may_not_stop = (penalties.said[:, None] + tree.depths) < penalties.min_new_tokens[:, None]
    logits.add_(torch.where(may_not_stop[:, :, None], penalties.stop_tokens[:, None], 0.0))


def branch_tokens(tree: TokenTree, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of every row's branch behind the root, itself included, in order.

    Returns:
        tokens [batch, width, longest] int64, the root's token past the row's depth, and whether each is
        one of the branch, bool of the same shape.
    """
    batch, width = tree.tokens.shape
    # Each ancestor goes to its depth; the root and what a row does not see go to place 0, which is cut off.
    place = torch.where(unpack_masks(tree.masks), tree.depths[:, None, :], 0)
    tokens = tree.tokens[:, :1, None].repeat(1, width, longest + 1)
    tokens.scatter_(2, place, tree.tokens[:, None, :].expand(batch, width, width))
    is_said = torch.arange(longest, device=tokens.device) < tree.depths[:, :, None]
    return tokens[:, :, 1:], is_said


def _additive(counts: torch.Tensor, frequency: torch.Tensor, presence: torch.Tensor) -> torch.Tensor:
    return -(counts * frequency) - torch.where(counts > 0, presence, 0.0)


def _scale(logits: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiply negative logits and divide the others, in place. A factor of 1 changes no bit."""
    is_negative = logits < 0
    logits.mul_(torch.where(is_negative, factor, 1.0))
    logits.div_(torch.where(is_negative, 1.0, factor))
