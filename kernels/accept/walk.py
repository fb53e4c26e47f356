"""Accept: walk each tree from its root for as long as the target's own token is a child.

The counts a round produces are defined here and nowhere else:

    accept length   drafted tokens the walk took: edges from the root to the last accepted row
    commit length   tokens the round commits: accept length + 1, the last one being the bonus token,
                    which the target chose after the last accepted row
    depth           edges from the root to a row; the accept length is the last accepted row's depth

so a round always commits at least one token, and exactly one where the drafter was wrong at once.

On NVIDIA GPUs `accept_greedy` is one launch of `kernels/accept/walk_kernel.py`; the code here is what that is
tested against, and what runs everywhere else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_ddtree_patch.kernels.device import has_kernels


@dataclass(frozen=True)
class AcceptedPath:
    """What a batch of walks accepted; ``path`` columns are block offsets the rows commit to."""

    rows: torch.Tensor  # [batch, path] int64: accepted block rows, then the offset itself
    block_rows: torch.Tensor  # [batch, path] int64: the same rows, counted over the blocks of the batch
    tokens: torch.Tensor  # [batch, path] int64: committed tokens; only the first commit_lengths count
    commit_lengths: torch.Tensor  # [batch] int32
    bonus_tokens: torch.Tensor  # [batch] int64: the last committed token, root of the next tree
    new_lens: torch.Tensor | None  # [batch] int64: prefix + commit length; None where no lengths were given


def accept_greedy(
    tree_tokens: torch.Tensor,
    parents: torch.Tensor,
    predictions: torch.Tensor,
    path: int,
    prefix_lens: torch.Tensor | None = None,
) -> AcceptedPath:
    """Walk the trees of a batch along the target's argmax.

    Args:
        tree_tokens: [batch, width] int64.
        parents: [batch, width] int64, -1 for the root and for padding.
        predictions: [batch, width] int64, the target's token after each row.
        path: longest possible walk in rows, root included; at most ``width``.
        prefix_lens: [batch] integers, committed lengths; the result then carries the new ones.

    Returns:
        AcceptedPath. Past the commit length ``rows`` holds its own column, so that moving row
        ``rows[k]`` to offset ``k`` is the identity there, whatever the length.
    """
    if has_kernels(tree_tokens.device):
        from sglang_ddtree_patch.kernels.accept.walk_kernel import accept_greedy_triton

        return accept_greedy_triton(tree_tokens, parents, predictions, path, prefix_lens)
    return accept_greedy_torch(tree_tokens, parents, predictions, path, prefix_lens)


def accept_greedy_torch(
    tree_tokens: torch.Tensor,
    parents: torch.Tensor,
    predictions: torch.Tensor,
    path: int,
    prefix_lens: torch.Tensor | None = None,
) -> AcceptedPath:
    """`accept_greedy` in plain PyTorch, on any device."""
    batch, width = tree_tokens.shape
    device = tree_tokens.device
    offsets = torch.arange(path, device=device)
    rows = offsets.repeat(batch, 1)
    current = torch.zeros((batch, 1), dtype=torch.int64, device=device)
    alive = torch.ones((batch, 1), dtype=torch.bool, device=device)
    lengths = torch.ones((batch, 1), dtype=torch.int32, device=device)
    for offset in range(1, path):
        wanted = predictions.gather(1, current)
        is_next = (parents == current) & (tree_tokens == wanted)
        alive = alive & is_next.any(1, keepdim=True)
        current = torch.where(alive, is_next.to(torch.int8).argmax(1, keepdim=True), current)
        rows[:, offset : offset + 1] = torch.where(alive, current, offset)
        lengths += alive.to(torch.int32)
    lengths = lengths.squeeze(1)
    return AcceptedPath(
        rows=rows,
        block_rows=rows + width * torch.arange(batch, device=device)[:, None],
        tokens=predictions.gather(1, rows),
        commit_lengths=lengths,
        bonus_tokens=predictions.gather(1, current).squeeze(1),
        new_lens=None if prefix_lens is None else prefix_lens.long() + lengths,
    )
