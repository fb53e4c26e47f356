"""Slots of a round in one Triton launch, as `kernels/slots.py` defines them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

POINTERS = (
    "slot_table", "request_ids", "prefix_lens", "root_tokens", "block_ids", "slots", "positions",
)  # fmt: skip


@triton.jit(do_not_specialize=["row_stride", "draft", "count"], do_not_specialize_on_alignment=POINTERS)
def _next_slots(
    slot_table, request_ids, prefix_lens, root_tokens, block_ids, slots, positions, row_stride, draft, count,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program (request)."""
    request = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    position = tl.load(prefix_lens + request).to(tl.int64) + column
    row = slot_table + tl.load(request_ids + request).to(tl.int64) * row_stride
    is_slot = column < count
    slot = tl.load(row + position, mask=is_slot, other=0)
    tl.store(slots + request * count + column, slot.to(tl.int64), mask=is_slot)
    tl.store(positions + request * draft + column, position, mask=column < draft)
    tl.store(block_ids + request * draft, tl.load(root_tokens + request))


def next_slots_triton(
    slot_table: torch.Tensor,
    request_ids: torch.Tensor,
    prefix_lens: torch.Tensor,
    root_tokens: torch.Tensor,
    block_ids: torch.Tensor,
    count: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`next_slots` by the kernel: arguments and result are described there."""
    batch, draft = block_ids.shape
    slots = torch.empty((batch, count), dtype=torch.int64, device=slot_table.device)
    positions = torch.empty((batch, draft), dtype=torch.int64, device=slot_table.device)
    _next_slots[(batch,)](
        slot_table, request_ids, prefix_lens, root_tokens, block_ids, slots, positions,
        slot_table.stride(0), draft, count, COLUMNS=triton.next_power_of_2(count), num_warps=1,
    )  # fmt: skip
    return slots, positions
