"""Merge the splits of tree verify attention: a log-sum-exp weighted average of their partial outputs.

    out = sum_s 2^(lse_s - max) partial_s / (sum_s 2^(lse_s - max) + 2^(sink - max))

The sink is a logit that a head may add to the denominator of its rows (gpt-oss), here once for all splits.
Each request has its own number of splits (`split_plan`), found again here from its length on the device.
The order of the sum is fixed, so two runs give the same bits.
"""

import triton
import triton.language as tl

from sglang_ddtree_patch.kernels.attention.split import NO_WINDOW, NOTHING_SEEN, split_plan

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(
    do_not_specialize=["batch", "rows", "max_splits", "window"],
    do_not_specialize_on_alignment=["prefix_lens", "sinks"],
)
def merge_splits(
    partial, partial_lse, out, prefix_lens, batch, rows, max_splits, out_row_stride, out_head_stride, v_scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, VALUE_DIM: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr, SPLITS_AT_ONCE: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr, BATCH_BLOCK: tl.constexpr, window=NO_WINDOW.value, sinks=None,
):  # fmt: skip
    """One program writes ``COLUMNS`` columns of ``ROWS_AT_ONCE`` rows-and-heads of one request."""
    head_rows = KV_HEADS * GROUP * rows
    row_blocks = tl.cdiv(head_rows, ROWS_AT_ONCE)
    request = tl.program_id(0) // row_blocks
    head_row = tl.program_id(0) % row_blocks * ROWS_AT_ONCE + tl.arange(0, ROWS_AT_ONCE)
    row_ok = head_row < head_rows
    # head_row = (KV head * rows + row) * GROUP + head in group
    packed = head_row % (rows * GROUP)
    token = (request * rows + packed // GROUP).to(tl.int64)
    head = head_row // (rows * GROUP) * GROUP + packed % GROUP

    splits, splits_end = split_plan(prefix_lens, batch, rows, max_splits, BLOCK_N, BATCH_BLOCK, window)
    is_request = tl.arange(0, BATCH_BLOCK) == request
    last = tl.sum(tl.where(is_request, splits_end, 0), 0)
    first = last - tl.sum(tl.where(is_request, splits, 0), 0)

    lanes = tl.arange(0, SPLITS_AT_ONCE)[None, :]
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)

    top = tl.full([ROWS_AT_ONCE, SPLITS_AT_ONCE], NOTHING_SEEN, tl.float32)
    for start in range(first, last, SPLITS_AT_ONCE):
        ok = row_ok[:, None] & (start + lanes < last)
        place = (start + lanes).to(tl.int64) * head_rows + head_row[:, None]
        top = tl.maximum(top, tl.load(partial_lse + place, mask=ok, other=NOTHING_SEEN))
    top = tl.max(top, 1)
    if sinks is not None:
        sink = tl.load(sinks + head, mask=row_ok, other=0.0).to(tl.float32) * LOG2_E
        top = tl.maximum(top, sink)

    total = tl.zeros([ROWS_AT_ONCE, SPLITS_AT_ONCE], tl.float32)
    acc = tl.zeros([ROWS_AT_ONCE, SPLITS_AT_ONCE, COLUMNS], tl.float32)
    for start in range(first, last, SPLITS_AT_ONCE):
        ok = row_ok[:, None] & (start + lanes < last)
        place = (start + lanes).to(tl.int64) * head_rows + head_row[:, None]
        lse = tl.load(partial_lse + place, mask=ok, other=NOTHING_SEEN)
        weight = tl.where(ok, tl.exp2(lse - top[:, None]), 0.0)
        values = tl.load(
            partial + place[:, :, None] * VALUE_DIM + columns[None, None, :],
            mask=ok[:, :, None] & (columns < VALUE_DIM)[None, None, :],
            other=0.0,
        )
        acc += weight[:, :, None] * values
        total += weight

    denominator = tl.sum(total, 1)
    if sinks is not None:
        denominator += tl.exp2(sink - top)
    result = tl.sum(acc, 1) / tl.maximum(denominator, 1e-30)[:, None] * v_scale
    place = out + (token * out_row_stride + head * out_head_stride)[:, None] + columns[None, :]
    tl.store(place, result.to(out.dtype.element_ty), mask=row_ok[:, None] & (columns < VALUE_DIM)[None, :])
