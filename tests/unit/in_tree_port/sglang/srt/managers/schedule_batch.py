"""Requests, and the batch they run in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode


@dataclass
class Req:
    origin_input_ids: list[int]
    output_ids: list[int] = field(default_factory=list)


@dataclass
class ScheduleBatch:
    reqs: list[Req]
    req_to_token_pool: Any
    token_to_kv_pool_allocator: Any
    forward_mode: ForwardMode = ForwardMode.EXTEND
    req_pool_indices: torch.Tensor = None
    seq_lens: torch.Tensor = None
    input_ids: torch.Tensor = None
    positions: torch.Tensor = None
    out_cache_loc: torch.Tensor = None
    spec_info: Any = None

    def alloc(self, starts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Slots for positions start to end of every request, entered in the page table."""
        table, allocator = self.req_to_token_pool.req_to_token, self.token_to_kv_pool_allocator
        if allocator.page_size == 1:
            slots = allocator.alloc(int((ends - starts).sum()))
        else:
            last = table[self.req_pool_indices, (starts - 1).clamp(min=0)]
            slots = allocator.alloc_extend(starts, ends, last)
        assign_req_to_token(table, self.req_pool_indices, starts, ends, slots)
        return slots


def assign_req_to_token(table, req_pool_indices, starts, ends, slots) -> None:
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = slots[taken : taken + end - start].to(table.dtype)
        taken += end - start
