"""Commit: accepted rows become the front of the block, in the target's pool and in the drafter's.

Row ``i`` of the block was written to the slot of position ``prefix + i`` whatever its depth, and its key
is stored rotated, so moving row ``a_k`` to offset ``k`` is all it takes. Paths grow along the block
(``a_k >= k``), slots are ordinary page-allocated positions, and the request's page table never changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_ddtree_patch.kernels.accept.walk import AcceptedPath, accept_greedy
from sglang_ddtree_patch.kernels.device import has_kernels
from sglang_ddtree_patch.kernels.tree.build import TokenTree
from sglang_ddtree_patch.round.slots import RoundSlots

if TYPE_CHECKING:  # its kernels need Triton, which is imported where they run
    from sglang_ddtree_patch.kernels.commit import RowBuffers


class TargetKVCommit:
    """Moves accepted rows in one KV pool: one launch where the layout is known, else the pool's own move.

    A hybrid's pool is two, one of full and one of window layers, with slots of their own: a launch each.
    """

    def __init__(self, pool: Any):
        self._pool = pool
        self._parts: list[RowBuffers] | None = None
        parts = [pool.full_kv_pool, pool.swa_kv_pool] if type(pool) is SWAKVPool else [pool]
        known = [buffers for part in parts if (buffers := row_buffers(part))]
        # ROCm's pools may lay blocks out otherwise.
        if len(known) == len(parts) and has_kernels(known[0][0].device):
            from sglang_ddtree_patch.kernels.commit import RowBuffers

            self._parts = [RowBuffers.of(buffers) for buffers in known]

    @property
    def is_recordable(self) -> bool:
        """Whether moves may be recorded into a CUDA graph: those of ours, which are one launch."""
        return self._parts is not None

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


@dataclass(frozen=True)
class VerifiedBlock:
    """The blocks of a batch behind their verify: what was tried, and where it lies."""

    tokens: torch.Tensor  # [batch, width] int64
    parents: torch.Tensor  # [batch, width] int64
    prefix_lens: torch.Tensor  # [batch], committed lengths
    slots: torch.Tensor  # [batch, at least width] int64, contiguous: slots of the block in the target's pool
    draft_slots: torch.Tensor  # [batch, path] int64, contiguous: of its front, in the drafter's pool
    positions: torch.Tensor  # [batch * path] int64, of the front
    hidden_states: torch.Tensor  # [at least batch * width, size]


def commit_block(
    worker: Any, move_rows: TargetKVCommit, block: VerifiedBlock, predictions: torch.Tensor
) -> AcceptedPath:
    """Walk the trees along ``predictions`` [batch, width], move the accepted rows' KV, feed the drafter.

    Shapes alone decide what is launched, so all of it may be recorded into a CUDA graph.

    Args:
        worker: the DFLASH worker that owns the draft model (`DDTreeWorker`).
        move_rows: of the target's pool.
        block: what verify left.
        predictions: the target's token after every row.
    """
    path = block.draft_slots.shape[1]
    accepted = accept_greedy(block.tokens, block.parents, predictions, path, block.prefix_lens)
    move_rows(block.slots, accepted)
    worker._append_target_hidden_to_draft_kv_by_loc(
        target_hidden=path_hidden_states(block.hidden_states, accepted),
        cache_loc=block.draft_slots.flatten(),
        cache_loc_2d=block.draft_slots,
        positions=block.positions,
        commit_lens=accepted.commit_lengths,
    )
    return accepted


def planned_block(
    worker: Any, tree: TokenTree, slots: RoundSlots, prefix_lens: torch.Tensor, hidden_states: torch.Tensor
) -> VerifiedBlock:
    """The blocks of a round as it was planned.

    Args:
        worker: the `DDTreeWorker`.
        tree: what was verified.
        slots: of the round.
        prefix_lens: [batch], committed lengths.
        hidden_states: that the verify left.
    """
    sizes, translator = worker.sizes, worker.model_runner.kv_index_translator
    path = sizes.of_width(tree.width).path
    return VerifiedBlock(
        tokens=tree.tokens,
        parents=tree.parents,
        prefix_lens=prefix_lens,
        slots=slots.plan.write_ids(translator).view(-1, sizes.slots),
        draft_slots=worker._draft_write_ids(slots.plan).view(-1, sizes.slots)[:, :path].contiguous(),
        positions=slots.positions[:, :path].flatten(),
        hidden_states=hidden_states,
    )
