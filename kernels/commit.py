"""Commit of accepted rows: KV of all layers moved to the front of each request's block in one launch.

Row ``a_k`` of a block moves to offset ``k``, in place. A row may be read by one move and written by another
(the path 0, 2, 5 reads row 2 and writes it), so a program reads all rows of its request before it writes
any; programs share nothing, as each has its own request, buffer and columns. All its reads are under way
together: what a launch takes is the latency of a few loads, not of one for each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

WORD_BYTES = 8
WORDS_AT_ONCE = 4096  # words a program holds between reading and writing: 32 a thread


@triton.jit(do_not_specialize=["path", "slots_per_request"])
def _move_rows(
    addresses, strides, widths, slots, rows, path, slots_per_request,
    PATH_LANES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program (buffer, request, chunk of columns): all moves of the request."""
    buffer, request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    offset = tl.arange(0, PATH_LANES)
    row = tl.load(rows + request * path + offset, mask=offset < path, other=0)
    moves = (offset < path) & (row != offset)
    source = tl.load(slots + request * slots_per_request + row, mask=moves, other=0)
    target = tl.load(slots + request * slots_per_request + offset, mask=moves, other=0)

    base = tl.load(addresses + buffer).to(tl.pointer_type(tl.int64))
    stride = tl.load(strides + buffer)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    moved = moves[:, None] & (column < tl.load(widths + buffer))[None, :]
    words = tl.load(base + (source * stride)[:, None] + column[None, :], mask=moved)
    tl.debug_barrier()  # other threads write the rows that these have read
    tl.store(base + (target * stride)[:, None] + column[None, :], words, mask=moved)


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
        rows: [batch, path] int64, contiguous, path <= block: the row that moves to each offset; a column
            that holds itself moves nothing.
    """
    batch, path = rows.shape
    path_lanes = triton.next_power_of_2(path)
    columns = min(triton.next_power_of_2(buffers.widest), max(WORDS_AT_ONCE // path_lanes, 1))
    grid = (buffers.addresses.numel(), batch, triton.cdiv(buffers.widest, columns))
    _move_rows[grid](
        buffers.addresses, buffers.strides, buffers.widths, slots, rows, path, slots.shape[1],
        PATH_LANES=path_lanes, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
