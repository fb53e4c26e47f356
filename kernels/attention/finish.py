"""Finish tree verify behind a dense prefix kernel: attend to the tree, merge with the prefix, one launch.

A vendor's kernel leaves, for every row and head, the prefix's softmax average ``P`` and the natural log of
its denominator ``lse``. The tree's rows of the block give the same pair ``T, lse_t`` under the ancestor
mask, and

    out = (e^lse P + e^lse_t T) / (e^lse + e^lse_t + e^sink)

with a sink where the model has one for each head.

A launch is bound by latency, not by work: the tree is at most 256 keys. So the work is cut small, into row
tiles times KV heads times chunks of the value's columns, until it fills the GPU; the chunks repeat
the logits, which costs less than leaving multiprocessors idle.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang_ddtree_patch.kernels.attention.configs import INTERPRETER_SM_COUNT, device_properties
from sglang_ddtree_patch.kernels.attention.split import (
    NOTHING_SEEN,
    _accumulate,
    _load_columns,
    _logits,
)
from sglang_ddtree_patch.kernels.attention.visible import WORD_BITS

LOG2_E = 1.4426950408889634
SMALLEST_DOT = 16  # columns a tensor-core product takes at least


@dataclass(frozen=True)
class FinishConfig:
    block_m: int  # packed rows of a tile
    columns: int  # of the value, a program
    tail_block: int  # keys at a time
    warps: int


def choose_finish_config(
    sm_count: int, *, batch: int, rows: int, heads: int, kv_heads: int, key_dim: int, value_dim: int
) -> FinishConfig:
    """The largest tile that still gives most multiprocessors a program, else the smallest.

    A tree of up to 64 rows is one block of keys, so that no look-up or load waits for a block before it.
    Wide heads take fewer rows at a time.
    """
    wide = key_dim > 128
    width = max(triton.next_power_of_2(value_dim), SMALLEST_DOT)
    tiles = [(32, 256), (16, 256)] if wide else [(64, 128), (32, 128)]
    tiles += [(16, 128), (16, 64)]
    tail_block = min(max(triton.next_power_of_2(rows), SMALLEST_DOT), 64)
    for block_m, columns in tiles:
        columns = min(columns, width)
        programs = batch * kv_heads * triton.cdiv(rows * heads // kv_heads, block_m)
        if programs * triton.cdiv(value_dim, columns) >= sm_count * 3 // 4:
            break
    return FinishConfig(block_m, columns, tail_block, warps=8 if wide and tail_block == 64 else 4)


def finish_tree_attention(
    prefix_out: torch.Tensor,
    prefix_lse: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_slots: torch.Tensor,
    prefix_lens: torch.Tensor,
    tree_mask: torch.Tensor | None,
    *,
    softmax_scale: float,
    logit_cap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: FinishConfig | None = None,
) -> torch.Tensor:
    """Attend every row to its block's own keys and merge the result with the prefix's.

    Args:
        prefix_out: [batch * rows, heads, value_dim], attention to the prefix alone. May hold anything
            where the prefix is empty, as may ``prefix_lse``.
        prefix_lse: [batch, heads, rows] float32 of any strides, natural log of the softmax denominators.
        query: [batch * rows, heads, key_dim].
        key_cache: [slots, kv_heads, key_dim]; value_cache: [slots, kv_heads, value_dim]. As in
            `tree_attention`; only the block's own slots are read.
        block_slots: [batch, rows] int32, the slots of positions ``prefix .. prefix + rows - 1``.
        prefix_lens: [batch] integers, committed lengths.
        tree_mask: [batch, rows, words] int64 ancestor bitmasks; None: every row sees the whole block.
        softmax_scale, logit_cap, k_scale, v_scale, sinks: as in `tree_attention`.
        out: [batch * rows, heads, value_dim], may be ``prefix_out``; allocated when not given.
        config: forces a tile shape.

    Returns:
        [batch * rows, heads, value_dim].
    """
    (batch, rows), (_, heads, key_dim) = block_slots.shape, query.shape
    kv_heads, value_dim = key_cache.shape[1], value_cache.shape[2]
    _check(prefix_out, prefix_lse, query, key_cache, value_cache, block_slots, tree_mask)
    if config is None:
        sm_count = device_properties(query.device)[1] if query.is_cuda else INTERPRETER_SM_COUNT
        config = choose_finish_config(
            sm_count, batch=batch, rows=rows, heads=heads, kv_heads=kv_heads, key_dim=key_dim,
            value_dim=value_dim,
        )  # fmt: skip
    if out is None:
        out = torch.empty_like(prefix_out)
    key_main = 1 << (key_dim.bit_length() - 1)
    key_rest = key_dim - key_main
    tiles = triton.cdiv(rows * (heads // kv_heads), config.block_m)
    chunks = triton.cdiv(value_dim, config.columns)
    scale = softmax_scale * k_scale
    capped = logit_cap > 0
    finish_attention[(batch * kv_heads * tiles * chunks,)](
        prefix_out, prefix_lse, query, key_cache, value_cache, block_slots, prefix_lens,
        prefix_lens if tree_mask is None else tree_mask, sinks, out,
        rows, tiles,
        prefix_out.stride(0), prefix_out.stride(1),
        prefix_lse.stride(0), prefix_lse.stride(1), prefix_lse.stride(2),
        query.stride(0), query.stride(1), out.stride(0), out.stride(1),
        LOG2_E if capped else LOG2_E * scale, float(logit_cap), scale / logit_cap if capped else 0.0,
        float(v_scale),
        KEY_STRIDE=key_cache.stride(0), KEY_HEAD_STRIDE=key_cache.stride(1),
        VALUE_STRIDE=value_cache.stride(0), VALUE_HEAD_STRIDE=value_cache.stride(1),
        KV_HEADS=kv_heads, GROUP=heads // kv_heads,
        KEY_MAIN=key_main, KEY_REST=key_rest,
        REST_WIDTH=max(triton.next_power_of_2(key_rest), SMALLEST_DOT),
        VALUE_DIM=value_dim, CHUNKS=chunks, COLUMNS=config.columns,
        MASK_WORDS=0 if tree_mask is None else tree_mask.shape[2], CAPPED=capped,
        BLOCK_M=config.block_m, TAIL_BLOCK=config.tail_block,
        num_warps=config.warps, num_stages=2,
    )  # fmt: skip
    return out


@triton.jit(
    do_not_specialize=["rows", "tiles"],
    do_not_specialize_on_alignment=["prefix_lse", "block_slots", "prefix_lens", "tree_mask", "sinks"],
)
def finish_attention(
    prefix_out, prefix_lse, query, key_cache, value_cache, block_slots, prefix_lens, tree_mask, sinks, out,
    rows, tiles,
    prefix_row_stride, prefix_head_stride, lse_batch_stride, lse_head_stride, lse_row_stride,
    query_row_stride, query_head_stride, out_row_stride, out_head_stride,
    log2_scale, logit_cap, cap_scale, v_scale,
    KEY_STRIDE: tl.constexpr, KEY_HEAD_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr, VALUE_HEAD_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    KEY_MAIN: tl.constexpr, KEY_REST: tl.constexpr, REST_WIDTH: tl.constexpr,
    VALUE_DIM: tl.constexpr, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr,
    MASK_WORDS: tl.constexpr, CAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr, TAIL_BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: ``COLUMNS`` value columns of a tile of rows and heads that share a KV head."""
    chunk = tl.program_id(0) % CHUNKS
    tile = tl.program_id(0) // CHUNKS % tiles
    kv_head = tl.program_id(0) // (CHUNKS * tiles) % KV_HEADS
    request = tl.program_id(0) // (CHUNKS * tiles * KV_HEADS)

    packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = packed // GROUP
    row_ok = row < rows
    token = (request * rows + row).to(tl.int64)
    head = kv_head * GROUP + packed % GROUP
    column = chunk * COLUMNS + tl.arange(0, COLUMNS)
    ok = row_ok[:, None] & (column < VALUE_DIM)[None, :]

    # Everything that waits for nothing is asked for first, and nothing waits for the length.
    has_prefix = tl.load(prefix_lens + request) > 0
    prefix_rows = prefix_out + token * prefix_row_stride + head * prefix_head_stride
    prefix = tl.load(prefix_rows[:, None] + column[None, :], mask=ok, other=0.0)
    lse = tl.load(
        prefix_lse + request.to(tl.int64) * lse_batch_stride + head * lse_head_stride + row * lse_row_stride,
        mask=row_ok, other=0.0,
    )  # fmt: skip
    query_rows = query + token * query_row_stride + head * query_head_stride
    q = _load_columns(query_rows[:, None], row_ok[:, None], KEY_MAIN, KEY_MAIN, True)
    q_rest = q
    if KEY_REST > 0:
        q_rest = _load_columns(query_rows[:, None] + KEY_MAIN, row_ok[:, None], KEY_REST, REST_WIDTH, True)

    key_base = key_cache + kv_head * KEY_HEAD_STRIDE
    value_base = value_cache + kv_head * VALUE_HEAD_STRIDE
    m = tl.full([BLOCK_M], NOTHING_SEEN, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
    acc = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
    for start in tl.range(0, rows, TAIL_BLOCK):
        node = start + tl.arange(0, TAIL_BLOCK)
        in_block = node < rows
        slots = tl.load(block_slots + request * rows + node, mask=in_block, other=0).to(tl.int64)[:, None]
        key_rows = key_base + slots * KEY_STRIDE
        key = _load_columns(key_rows, in_block[:, None], KEY_MAIN, KEY_MAIN, True).to(q.dtype)
        rest = key
        if KEY_REST > 0:
            rest = _load_columns(key_rows + KEY_MAIN, in_block[:, None], KEY_REST, REST_WIDTH, True)
            rest = rest.to(q.dtype)
        value_ok = in_block[:, None] & (column < VALUE_DIM)[None, :]
        value = tl.load(value_base + slots * VALUE_STRIDE + column[None, :], mask=value_ok, other=0.0)
        value = value.to(q.dtype)
        logits = _logits(q, q_rest, key, rest, logit_cap, cap_scale, KEY_REST, CAPPED)
        visible = in_block[None, :]
        if MASK_WORDS > 0:
            # A block of keys lies in one word of the mask, because its size divides a word's bits.
            word = tl.load(tree_mask + token * MASK_WORDS + start // WORD_BITS, mask=row_ok, other=0)
            ancestor = ((word[:, None] >> (node % WORD_BITS).to(tl.int64)[None, :]) & 1) != 0
            visible = visible & ancestor
        logits = tl.where(visible, logits, float("-inf"))
        m, l, acc = _accumulate(m, l, acc, logits, value, log2_scale)  # noqa: E741

    # An empty prefix's output and log-sum-exp may be anything, NaN included.
    prefix = tl.where(has_prefix, prefix.to(tl.float32), 0.0)
    prefix_m = tl.where(has_prefix, lse * 1.4426950408889634, NOTHING_SEEN)
    top = tl.maximum(m, prefix_m)
    if sinks is not None:
        sink = tl.load(sinks + head, mask=row_ok, other=0.0).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(top, sink)
    prefix_weight = tl.exp2(prefix_m - top)  # of zeros, where there is no prefix
    tree_weight = tl.exp2(m - top)
    total = prefix_weight + tree_weight * l
    if sinks is not None:
        total += tl.exp2(sink - top)
    total = tl.maximum(total, 1e-30)
    merged = prefix_weight[:, None] * prefix + (tree_weight * v_scale)[:, None] * acc
    place = out + (token * out_row_stride + head * out_head_stride)[:, None] + column[None, :]
    tl.store(place, (merged / total[:, None]).to(out.dtype.element_ty), mask=ok)


def _check(
    prefix_out: torch.Tensor,
    prefix_lse: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_slots: torch.Tensor,
    tree_mask: torch.Tensor | None,
) -> None:
    """Refuse what the kernel would read wrongly. Shapes and strides only: nothing waits for the GPU."""
    (batch, rows), (tokens, heads, key_dim) = block_slots.shape, query.shape
    if tokens != batch * rows or key_cache.shape[2] != key_dim or heads % key_cache.shape[1]:
        raise ValueError(
            f"query {tuple(query.shape)} does not fit block slots {tuple(block_slots.shape)} and a key cache "
            f"of {tuple(key_cache.shape)}"
        )
    if prefix_out.shape != (tokens, heads, value_cache.shape[2]) or prefix_lse.shape != (batch, heads, rows):
        raise ValueError(
            f"the prefix's output must be {(tokens, heads, value_cache.shape[2])} and its log-sum-exp "
            f"{(batch, heads, rows)}; they are {tuple(prefix_out.shape)} and {tuple(prefix_lse.shape)}"
        )
    if any(tensor.stride(-1) != 1 for tensor in (prefix_out, query, key_cache, value_cache)):
        raise ValueError("the last axis of prefix_out, query, key_cache and value_cache must be contiguous")
    if not block_slots.is_contiguous():
        raise ValueError("block_slots must be contiguous")
    if tree_mask is not None and (
        tree_mask.shape[:2] != (batch, rows)
        or tree_mask.dtype != torch.int64
        or not tree_mask.is_contiguous()
    ):
        raise ValueError(
            f"tree_mask must be a contiguous int64 [{batch}, {rows}, words]; it is {tree_mask.dtype} "
            f"{tuple(tree_mask.shape)}"
        )
