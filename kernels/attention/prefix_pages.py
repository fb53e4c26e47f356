"""What a forward's prefix kernels need of its batch, from the slot table, in one launch.

Vendor kernels walk a table of pages and take int32 lengths; the tree's keys lie at the slots behind them.
All of it is the same for every layer, so it is made once a forward. Lengths are read on the device:
recorded in a CUDA graph, one launch serves every context length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

ENTRIES = 1024  # of a page table, a program


@dataclass(frozen=True)
class PrefixPages:
    """Where the keys of a batch lie. Entries of the page table behind a prefix are stale or zero."""

    page_table: torch.Tensor  # [batch, pages of a row of the slot table] int32
    lengths: torch.Tensor  # [batch] int32, committed lengths
    block_slots: torch.Tensor  # [batch, rows] int32, slots of positions prefix .. prefix + rows - 1

    @staticmethod
    def allocate(slot_table: torch.Tensor, page_size: int, batch: int, rows: int) -> PrefixPages:
        pages = triton.cdiv(slot_table.shape[1], page_size)
        # Zeros: a kernel that looks one page too far must find a page that is there.
        return PrefixPages(
            *(
                torch.zeros(shape, dtype=torch.int32, device=slot_table.device)
                for shape in ((batch, pages), (batch,), (batch, rows))
            )
        )

    def holds(self, batch: int, rows: int) -> bool:
        """Whether a batch of so many requests and rows fits."""
        return batch <= self.block_slots.shape[0] and rows == self.block_slots.shape[1]

    def first(self, batch: int) -> PrefixPages:
        """The same memory, for a smaller batch."""
        return PrefixPages(self.page_table[:batch], self.lengths[:batch], self.block_slots[:batch])


def fill_prefix_pages(
    pages: PrefixPages,
    slot_table: torch.Tensor,
    request_ids: torch.Tensor,
    prefix_lens: torch.Tensor,
    page_size: int,
) -> None:
    """Write page table, lengths and block slots of a batch.

    Args:
        pages: what is written; its shapes say batch and rows.
        slot_table: [requests, positions] int32; the slots of a page follow one another.
        request_ids: [batch] integers, rows of ``slot_table``.
        prefix_lens: [batch] integers, committed lengths.
        page_size: positions of a page.
    """
    batch, rows = pages.block_slots.shape
    programs = triton.cdiv(pages.page_table.shape[1], ENTRIES)
    _fill_prefix_pages[(batch, programs)](
        slot_table, request_ids, prefix_lens, pages.page_table, pages.lengths, pages.block_slots,
        rows, slot_table.stride(0), pages.page_table.stride(0), page_size,
        ENTRIES=ENTRIES, ROWS=triton.next_power_of_2(rows),
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["rows"], do_not_specialize_on_alignment=["request_ids", "prefix_lens", "lengths"]
)
def _fill_prefix_pages(
    slot_table, request_ids, prefix_lens, page_table, lengths, block_slots,
    rows, table_stride, pages_stride, page_size,
    ENTRIES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program: ``ENTRIES`` pages of one request; the first of a request also the rest."""
    request, part = tl.program_id(0), tl.program_id(1)
    prefix = tl.load(prefix_lens + request).to(tl.int32)
    slots = slot_table + tl.load(request_ids + request).to(tl.int64) * table_stride
    page = part * ENTRIES + tl.arange(0, ENTRIES)
    used = page < tl.cdiv(prefix, page_size)
    first_slots = tl.load(slots + page.to(tl.int64) * page_size, mask=used, other=0)
    tl.store(page_table + request.to(tl.int64) * pages_stride + page, first_slots // page_size, mask=used)
    if part == 0:
        tl.store(lengths + request, prefix)
        row = tl.arange(0, ROWS)
        block = tl.load(slots + prefix + row, mask=row < rows, other=0)
        tl.store(block_slots + request * rows + row, block, mask=row < rows)
