"""What the drafter attends to before its block: the whole committed prefix, or the last positions of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sglang_ddtree_patch.round.block import BlockSizes


@dataclass(frozen=True)
class DraftPrefix:
    """The lengths that a forward of the drafter is planned with."""

    lens: torch.Tensor  # [batch], on the device
    host_bound: torch.Tensor  # [batch] int32, at least the lengths
    host_sum: int


def whole_prefix(batch: Any, sizes: BlockSizes) -> DraftPrefix:
    host_bound, host_sum = verify_host_bound(batch, sizes.draft)
    return DraftPrefix(batch.seq_lens, host_bound.to(torch.int32), host_sum)


def recent_prefix(worker: Any, batch: Any, plan: Any, sizes: BlockSizes) -> DraftPrefix:
    """The last ``--speculative-draft-window-size`` positions, from a page boundary on.

    They stand at the front of the drafter's own slot table, the block behind them; this writes both there.
    """
    lens = worker._compute_compact_draft_seq_lens(batch.seq_lens)
    host_bound = torch.empty(len(lens), dtype=torch.int32)
    worker._fill_compact_seq_lens_cpu_bound(
        batch_seq_lens_cpu=batch.seq_lens_cpu, nxt_kv_lens_cpu=batch.spec_info.nxt_kv_lens_cpu, out=host_bound
    )
    worker._ensure_draft_block_buffers(len(lens))
    worker._rebuild_compact_draft_cache(
        req_pool_indices=batch.req_pool_indices,
        prefix_lens=batch.seq_lens,
        draft_prefix_lens=lens,
        verify_out_cache_loc_2d=plan.write_virtual.view(-1, sizes.slots)[:, : sizes.draft].contiguous(),
        bs=len(lens),
        block_size=sizes.draft,
    )
    return DraftPrefix(lens, host_bound, int(host_bound.sum()))


def verify_host_bound(batch: Any, rows: int) -> tuple[torch.Tensor, int]:
    """An upper bound, on the host, of every request's length with ``rows`` block rows; and its sum.

    Under overlap scheduling the exact lengths are still on the device; what was reserved bounds them.
    """
    if batch.seq_lens_cpu is not None:
        bound = batch.seq_lens_cpu + rows
        return bound, int(bound.sum())
    return batch.spec_info.nxt_kv_lens_cpu, int(batch.spec_info.nxt_kv_lens_sum)
