"""Where the next positions of every request lie, and the root of the drafter's block.

A request's slots stand in its row of the slot table, position by position; a round writes the ones behind
its committed length. On NVIDIA GPUs that is one launch of `kernels/slots_kernel.py`; the code here is what
that is tested against, and what runs everywhere else.
"""

from __future__ import annotations

import torch

from sglang_ddtree_patch.kernels.device import has_kernels


def next_slots(
    slot_table: torch.Tensor,
    request_ids: torch.Tensor,
    prefix_lens: torch.Tensor,
    root_tokens: torch.Tensor,
    block_ids: torch.Tensor,
    count: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Look up the slots of a round and start the drafter's block.

    Args:
        slot_table: [requests, positions] int32.
        request_ids: [batch] integers, rows of the table.
        prefix_lens: [batch] integers, committed lengths.
        root_tokens: [batch] int64, the last committed token of each request.
        block_ids: [batch, draft] int64, written: the first column becomes the root tokens.
        count: slots a request, at least ``draft``.

    Returns:
        slots: [batch, count] int64, of positions ``prefix``, ``prefix + 1``, ...
        positions: [batch, draft] int64, the first of those positions.
    """
    if has_kernels(slot_table.device):
        from sglang_ddtree_patch.kernels.slots_kernel import next_slots_triton

        return next_slots_triton(slot_table, request_ids, prefix_lens, root_tokens, block_ids, count)
    return next_slots_torch(slot_table, request_ids, prefix_lens, root_tokens, block_ids, count)


def next_slots_torch(
    slot_table: torch.Tensor,
    request_ids: torch.Tensor,
    prefix_lens: torch.Tensor,
    root_tokens: torch.Tensor,
    block_ids: torch.Tensor,
    count: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`next_slots` in plain PyTorch, on any device."""
    block_ids[:, 0] = root_tokens
    positions = prefix_lens.long()[:, None] + torch.arange(count, device=slot_table.device)
    slots = slot_table[request_ids.long()[:, None], positions].long()
    return slots, positions[:, : block_ids.shape[1]].contiguous()
