"""Commit: accepted rows become the front of the block, in the target's pool and in the drafter's.

Row ``i`` of the block was written to the slot of position ``prefix + i`` whatever its depth, and its key
is stored rotated, so moving row ``a_k`` to offset ``k`` is all it takes. Paths grow along the block
(``a_k >= k``), slots are ordinary page-allocated positions, and the request's page table never changes.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_ddtree_patch.kernels.accept import AcceptedPath


def commit_target_kv(pool: Any, slots: torch.Tensor, accepted: AcceptedPath) -> None:
    """Move the accepted rows' KV, all layers, to the front of each request's block.

    Args:
        pool: the target's KV pool.
        slots: [batch, slots] physical slots of the block.
        accepted: the walks. Columns past a walk move a slot onto itself, which keeps the shape fixed and
            the host out of it.
    """
    path = accepted.rows.shape[1]
    pool.move_kv_cache(slots[:, :path].reshape(-1), slots.gather(1, accepted.rows).reshape(-1))


def path_hidden_states(hidden_states: torch.Tensor, accepted: AcceptedPath) -> torch.Tensor:
    """The accepted rows of ``hidden_states`` [batch, width, size], in path order: [batch * path, size]."""
    index = accepted.rows[:, :, None].expand(-1, -1, hidden_states.shape[2])
    return hidden_states.gather(1, index).flatten(0, 1)
