"""Commit of accepted rows: KV of all layers moved to the front of each request's block in one launch.

Row ``a_k`` of a block moves to offset ``k``, for ``k = 1 .. path - 1`` in that order, in place. Paths grow
along the block, so ``a_k >= k``: no later move reads a row that an earlier one wrote. An earlier move may
read a row that a later one writes (paths like 0, 2, 5 read row 2, then write it), so the moves of one
request are ordered inside one program; programs share nothing, as each has its own request, buffer and
columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

WORD_BYTES = 8
MAX_COLUMNS = 1024  # words a program moves of a row: 8 KiB


@triton.jit
def _move_rows(
    addresses, strides, widths, slots, rows, slots_per_request,
    PATH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program (buffer, request, chunk of columns): the request's moves, one after another."""
    buffer, request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    base = tl.load(addresses + buffer).to(tl.pointer_type(tl.int64))
    stride = tl.load(strides + buffer)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    in_row = column < tl.load(widths + buffer)
    for offset in range(1, PATH):
        row = tl.load(rows + request * PATH + offset)
        source = tl.load(slots + request * slots_per_request + row)
        target = tl.load(slots + request * slots_per_request + offset)
        moves = in_row & (row != offset)
        words = tl.load(base + source * stride + column, mask=moves)
        tl.store(base + target * stride + column, words, mask=moves)


@dataclass(frozen=True)
class RowBuffers:
    """Where the rows of every layer lie: one entry a buffer, in 64-bit words."""

    addresses: torch.Tensor  # [buffers] int64
    strides: torch.Tensor  # [buffers] int64, from one slot to the next
    widths: torch.Tensor  # [buffers] int64, of a row
    widest: int

    @classmethod
    def of(cls, buffers: Sequence[torch.Tensor]) -> RowBuffers:
        """Describe KV buffers of shape [slots, ...] whose rows are contiguous.

        Raises:
            ValueError: rows that are not contiguous or not whole 64-bit words.
        """
        strides, widths = [], []
        for buffer in buffers:
            row = buffer[0]
            stride, width = buffer.stride(0) * buffer.element_size(), row.numel() * row.element_size()
            if not row.is_contiguous() or stride % WORD_BYTES or width % WORD_BYTES:
                raise ValueError(
                    f"rows of a KV buffer {tuple(buffer.shape)} of {buffer.dtype} are {width} bytes at a "
                    f"stride of {stride}; they must be contiguous and whole words of {WORD_BYTES} bytes"
                )
            strides.append(stride // WORD_BYTES)
            widths.append(width // WORD_BYTES)
        device = buffers[0].device
        return cls(
            addresses=torch.tensor([buffer.data_ptr() for buffer in buffers], device=device),
            strides=torch.tensor(strides, device=device),
            widths=torch.tensor(widths, device=device),
            widest=max(widths),
        )


def commit_rows(buffers: RowBuffers, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Move accepted rows of all buffers, in place, without reading anything on the host.

    Args:
        buffers: the KV buffers of all layers.
        slots: [batch, block] int64, contiguous: the slot of each block offset.
        rows: [batch, path] int64, contiguous, path <= block: the accepted rows in order, ``rows[:, k] >= k``;
            a column that holds itself moves nothing.
    """
    batch, path = rows.shape
    columns = min(triton.next_power_of_2(buffers.widest), MAX_COLUMNS)
    grid = (buffers.addresses.numel(), batch, triton.cdiv(buffers.widest, columns))
    _move_rows[grid](
        buffers.addresses, buffers.strides, buffers.widths, slots, rows, slots.shape[1],
        PATH=path, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
