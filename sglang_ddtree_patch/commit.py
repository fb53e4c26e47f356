"""Commit: accepted rows become the front of the block, in the target's pool and in the drafter's.

Row ``i`` of the block was written to the slot of position ``prefix + i`` whatever its depth, and its key
is stored rotated, so moving row ``a_k`` to offset ``k`` is all it takes. Paths grow along the block
(``a_k >= k``), slots are ordinary page-allocated positions, and the request's page table never changes.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_ddtree_patch.kernels.accept import AcceptedPath
from sglang_ddtree_patch.kernels.device import has_kernels
from sglang_ddtree_patch.slots import RoundSlots


class TargetKVCommit:
    """Moves accepted rows in one KV pool: one launch where the layout is known, else the pool's own move.

    A hybrid's pool is two, one of full and one of window layers, with slots of their own: a launch each.
    """

    def __init__(self, pool: Any):
        self._pool = pool
        self._parts = None
        parts = [pool.full_kv_pool, pool.swa_kv_pool] if type(pool) is SWAKVPool else [pool]
        buffers = [row_buffers(part) for part in parts]
        # ROCm's pools may lay blocks out otherwise.
        if all(buffers) and has_kernels(buffers[0][0].device):
            from sglang_ddtree_patch.kernels.commit import RowBuffers

            self._parts = [RowBuffers.of(part) for part in buffers]

    def __call__(self, slots: torch.Tensor, accepted: AcceptedPath) -> None:
        """Move the accepted rows' KV, all layers, to the front of each request's block.

        Args:
            slots: [batch, slots] physical slots of the block.
            accepted: the walks. Columns past a walk hold themselves, which keeps the shape fixed and the
                host out of it.
        """
        if self._parts is None:
            move_by_offset(self._pool, slots, accepted)
            return
        from sglang_ddtree_patch.kernels.commit import commit_rows

        commit_rows(self._parts[0], slots, accepted.rows)
        if len(self._parts) > 1:
            window_slots = self._pool.translate_loc_from_full_to_swa(slots)
            commit_rows(self._parts[1], window_slots, accepted.rows)


def move_by_offset(pool: Any, slots: torch.Tensor, accepted: AcceptedPath) -> None:
    """Commit through the pool's own move, one block offset of all requests at a time.

    A slot may be the source of one move and the target of a later one. SGLang's GPU move loads and stores
    all rows of a launch without a barrier between its warps, so moves that touch a common slot must not
    share a launch.
    """
    sources = slots.gather(1, accepted.rows)
    for offset in range(1, accepted.rows.shape[1]):
        pool.move_kv_cache(slots[:, offset].contiguous(), sources[:, offset].contiguous())


def row_buffers(pool: Any) -> list[torch.Tensor] | None:
    """The buffers of a pool whose layers are plain [slots, ...] tensors; None for any other layout.

    Exact types only: subclasses add scales or lay pages out otherwise.
    """
    if type(pool) is MHATokenToKVPool and not pool.use_hnd:
        return [*pool.k_buffer, *pool.v_buffer]
    if type(pool) is MLATokenToKVPool:
        return list(pool.kv_buffer)
    return None


def path_hidden_states(hidden_states: torch.Tensor, accepted: AcceptedPath) -> torch.Tensor:
    """The accepted rows of ``hidden_states`` in path order: [batch * path, size].

    Args:
        hidden_states: [rows, size], the blocks of the batch one after another; the forward may have padded
            it with more rows at the end.
        accepted: the walks.
    """
    # Not index_select, which takes a slow kernel for 16 rows or fewer: one request's path.
    return hidden_states[accepted.block_rows.flatten()]


def feed_drafter(worker: Any, slots: RoundSlots, hidden_states: torch.Tensor, accepted: AcceptedPath) -> None:
    """Write the drafter's KV of the committed positions from the target's hidden states.

    Args:
        worker: the DFLASH worker that owns the draft model (`DDTreeWorker`).
        slots: of the round.
        hidden_states: as for `path_hidden_states`.
        accepted: the walks.
    """
    path = accepted.rows.shape[1]
    written = worker._draft_write_ids(slots.plan).view(-1, worker.sizes.slots)[:, :path].contiguous()
    worker._append_target_hidden_to_draft_kv_by_loc(
        target_hidden=path_hidden_states(hidden_states, accepted),
        cache_loc=written.flatten(),
        cache_loc_2d=written,
        positions=slots.positions[:, :path].flatten(),
        commit_lens=accepted.commit_lengths,
    )
