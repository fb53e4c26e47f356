"""One split of tree verify attention on Hopper, for separate keys and values: GQA, MHA, MQA.

The same tile, partial results and merge as attention/split.py, with roles for the warps. One warp loads:
TMA brings key and value blocks into rings of shared buffers. ``CONSUMERS`` warpgroups attend, 64 packed rows
each, and all read the same ring, so a block passes from the L2 cache once for up to 192 rows; without that
wide trees are held up by L2, which levels off at 7 to 8 TB/s.

A consumer keeps ``q k`` of the next block and ``p v`` of this one on the tensor cores while it computes the
softmax of the next. Nothing asynchronous crosses the loop's back edge, where the compiler would serialize
it. The tree's keys are ordinary blocks of the same loop, read from the cache in place, masked behind a
branch.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sglang_ddtree_patch.kernels.attention.hopper.parts import (
    LOAD_KEYS,
    NOTHING_SEEN,
    cap_logits,
    mask_block,
    owned_blocks,
    zero_rows_from,
)

CONSUMER_ROWS = gl.constexpr(64)


@gluon.jit
def _advance(place, turn, STAGES: gl.constexpr):
    """The next place of a ring and the parity of its turn; a remainder would cost a division a block."""
    wraps = place + 1 == STAGES
    return gl.where(wraps, 0, place + 1), gl.where(wraps, turn ^ 1, turn)


@gluon.jit
def _load_blocks(
    rings, keys, values, table_row, start, last_start, blocks, key_column, value_column,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The loading warp: every block of the split, as its place in the rings becomes free."""
    key_ring, value_ring, key_ready, value_ready, key_free, value_free = rings
    block_keys: gl.constexpr = key_ring.shape[1]
    block_bytes: gl.constexpr = block_keys * key_ring.shape[2] * 2
    place, turn = 0, 1  # a fresh barrier counts as free: its turn 1 has passed
    for _ in range(blocks):
        mbarrier.wait(key_free.index(place), turn)
        mbarrier.expect(key_ready.index(place), block_bytes)
        for part in gl.static_range(block_keys // LOAD_KEYS):
            slot = gl.load(table_row + gl.minimum(start + part * LOAD_KEYS, last_start))
            into = key_ring.index(place).slice(part * LOAD_KEYS, LOAD_KEYS)
            tma.async_load(keys, [slot, key_column], key_ready.index(place), into)
        mbarrier.wait(value_free.index(place), turn)
        mbarrier.expect(value_ready.index(place), block_bytes)
        for part in gl.static_range(block_keys // LOAD_KEYS):
            slot = gl.load(table_row + gl.minimum(start + part * LOAD_KEYS, last_start))
            into = value_ring.index(place).slice(part * LOAD_KEYS, LOAD_KEYS)
            tma.async_load(values, [slot, value_column], value_ready.index(place), into)
        start += block_keys
        place, turn = _advance(place, turn, STAGES)


@gluon.jit
def _step(
    query, key, value, no_logits, p, acc, m, total, log2_scale, logit_cap, cap_scale,
    mask_rows, row_ok, start, prefix, end,
    CAPPED: gl.constexpr, MASK_WORDS: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """``p v`` of one block beside ``q k`` and the softmax of the next, which begins at ``start``.

    Straight-line code: at a branch the compiler would wait for all that runs on the tensor cores.
    """
    next_logits = warpgroup_mma(query, key.permute([1, 0]), no_logits, use_acc=False, is_async=True)
    next_acc = warpgroup_mma(p, value, acc, is_async=True)
    logits = warpgroup_mma_wait(1, deps=[next_logits])
    logits = cap_logits(logits, logit_cap, cap_scale, CAPPED)
    if MASKED:
        logits = mask_block(logits, mask_rows, row_ok, start, prefix, end, MASK_WORDS, key.shape[0])
    new_m = gl.maximum(m, gl.max(logits, 1) * log2_scale)
    weights = gl.exp2(logits * log2_scale - new_m[:, None])
    rescale = gl.exp2(m - new_m)
    total = total * rescale + gl.sum(weights, 1)
    p = gl.convert_layout(weights.to(p.dtype), p.type.layout)
    # The weights wait with it, or they might be computed only afterwards.
    acc, p = warpgroup_mma_wait(0, deps=[next_acc, p])
    gl.barrier()
    acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, p, new_m, total


@gluon.jit
def _attend(
    rings, tensors, work, scales, query_ring, consumer: gl.constexpr,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    MASK_WORDS: gl.constexpr, CAPPED: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A consuming warpgroup: 64 packed rows against every block of the split."""
    key_ring, value_ring, key_ready, value_ready, key_free, value_free = rings
    query, query_row_stride, query_head_stride, tree_mask, partial, partial_lse = tensors
    request, rows, prefix, start, blocks, tile, kv_head, split = work
    log2_scale, logit_cap, cap_scale = scales
    dtype: gl.constexpr = key_ring.dtype
    BLOCK_N: gl.constexpr = key_ring.shape[1]
    load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    logits_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, logits_layout)
    end = prefix + rows
    first_row = (tile * CONSUMERS + consumer) * CONSUMER_ROWS

    # Rows of the tile are packed as row * GROUP + head in group.
    packed = first_row + gl.arange(0, CONSUMER_ROWS, gl.SliceLayout(1, load_layout))
    column = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, load_layout))
    token = (request * rows + packed // GROUP).to(gl.int64)
    query_rows = query + token * query_row_stride + (kv_head * GROUP + packed % GROUP) * query_head_stride
    wanted = (packed < rows * GROUP) & (blocks > 0)
    q_shared = query_ring.index(consumer)
    q_shared.store(gl.load(query_rows[:, None] + column[None, :], mask=wanted[:, None], other=0.0))
    fence_async_shared()
    gl.barrier()

    packed = first_row + gl.arange(0, CONSUMER_ROWS, row_layout)
    row_ok = (packed < rows * GROUP) & (blocks > 0)
    mask_rows = tree_mask + (request * rows + packed // GROUP).to(gl.int64) * MASK_WORDS
    no_logits = gl.zeros([CONSUMER_ROWS, BLOCK_N], gl.float32, logits_layout)
    acc = gl.zeros([CONSUMER_ROWS, HEAD_DIM], gl.float32, out_layout)

    mbarrier.wait(key_ready.index(0), 0, pred=blocks > 0)
    logits = warpgroup_mma(q_shared, key_ring.index(0).permute([1, 0]), no_logits, use_acc=False)
    gl.barrier()
    mbarrier.arrive(key_free.index(0), count=1, pred=blocks > 0)
    logits = cap_logits(logits, logit_cap, cap_scale, CAPPED)
    if start + BLOCK_N > prefix:
        logits = mask_block(logits, mask_rows, row_ok, start, prefix, end, MASK_WORDS, BLOCK_N)
    m = gl.maximum(gl.max(logits, 1) * log2_scale, NOTHING_SEEN)
    weights = gl.exp2(logits * log2_scale - m[:, None])
    total = gl.sum(weights, 1)
    p = gl.convert_layout(weights.to(dtype), weights_layout)

    place, turn = 0, 0
    whole = gl.minimum(gl.maximum(prefix - start, 0) // BLOCK_N, blocks)  # blocks that need no mask
    for _ in range(1, whole):
        next_place, next_turn = _advance(place, turn, STAGES)
        mbarrier.wait(value_ready.index(place), turn)
        mbarrier.wait(key_ready.index(next_place), next_turn)
        acc, p, m, total = _step(
            q_shared, key_ring.index(next_place), value_ring.index(place), no_logits, p, acc, m, total,
            log2_scale, logit_cap, cap_scale, mask_rows, row_ok, start, prefix, end,
            CAPPED, MASK_WORDS, False,
        )  # fmt: skip
        mbarrier.arrive(key_free.index(next_place), count=1)
        mbarrier.arrive(value_free.index(place), count=1)
        place, turn = next_place, next_turn
    start += gl.maximum(whole, 1) * BLOCK_N
    for _ in range(gl.maximum(whole, 1), blocks):
        next_place, next_turn = _advance(place, turn, STAGES)
        mbarrier.wait(value_ready.index(place), turn)
        mbarrier.wait(key_ready.index(next_place), next_turn)
        acc, p, m, total = _step(
            q_shared, key_ring.index(next_place), value_ring.index(place), no_logits, p, acc, m, total,
            log2_scale, logit_cap, cap_scale, mask_rows, row_ok, start, prefix, end,
            CAPPED, MASK_WORDS, True,
        )  # fmt: skip
        mbarrier.arrive(key_free.index(next_place), count=1)
        mbarrier.arrive(value_free.index(place), count=1)
        place, turn = next_place, next_turn
        start += BLOCK_N
    mbarrier.wait(value_ready.index(place), turn, pred=blocks > 0)
    if start > end:
        zero_rows_from(value_ring.index(place), end - (start - BLOCK_N), load_layout)
        fence_async_shared()
        gl.barrier()
    acc = warpgroup_mma(p, value_ring.index(place), acc)

    total = gl.maximum(total, 1e-30)
    place = (split * KV_HEADS + kv_head).to(gl.int64) * (rows * GROUP)
    gl.store(partial_lse + place + packed, m + gl.log2(total), mask=row_ok)
    packed = first_row + gl.arange(0, CONSUMER_ROWS, gl.SliceLayout(1, out_layout))
    column = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, out_layout))
    average = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, out_layout))[:, None]
    wanted = (packed < rows * GROUP) & (blocks > 0)
    gl.store(
        partial + (place + packed)[:, None] * HEAD_DIM + column[None, :], average, mask=wanted[:, None]
    )


@gluon.jit(
    do_not_specialize=["batch", "rows", "tiles", "max_splits"],
    do_not_specialize_on_alignment=["request_ids", "prefix_lens", "tree_mask"],
)
def split_attention_hopper(
    query, keys, values, slot_table, request_ids, prefix_lens, tree_mask, partial, partial_lse,
    batch, rows, tiles, max_splits,
    query_row_stride, query_head_stride, table_stride, log2_scale, logit_cap, cap_scale,
    KEY_HEAD_STRIDE: gl.constexpr, VALUE_HEAD_STRIDE: gl.constexpr,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    MASK_WORDS: gl.constexpr, CAPPED: gl.constexpr,
    CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, BATCH_BLOCK: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Arguments as `split_attention`; ``keys`` and ``values`` are TMA descriptors [slots, columns].

    ``REGISTERS``: of a consuming thread, where there are several consumers.
    """
    tile = gl.program_id(0) % tiles
    kv_head = (gl.program_id(0) // tiles) % KV_HEADS
    split = gl.program_id(0) // (tiles * KV_HEADS)
    request, first_block, blocks = owned_blocks(
        prefix_lens, split, batch, rows, max_splits, BLOCK_N, BATCH_BLOCK
    )
    prefix = gl.load(prefix_lens + request).to(gl.int32)
    table_row = slot_table + gl.load(request_ids + request).to(gl.int64) * table_stride
    last_start = (prefix + rows - 1) // LOAD_KEYS * LOAD_KEYS
    start = first_block * BLOCK_N

    dtype: gl.constexpr = query.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    query_ring = gl.allocate_shared_memory(dtype, [CONSUMERS, CONSUMER_ROWS, HEAD_DIM], shared)
    key_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], shared)
    value_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], shared)
    key_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    key_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(key_ready.index(i), count=1)
        mbarrier.init(value_ready.index(i), count=1)
        mbarrier.init(key_free.index(i), count=CONSUMERS)
        mbarrier.init(value_free.index(i), count=CONSUMERS)
    fence_async_shared()
    gl.barrier()

    rings = (key_ring, value_ring, key_ready, value_ready, key_free, value_free)
    tensors = (query, query_row_stride, query_head_stride, tree_mask, partial, partial_lse)
    work = (request, rows, prefix, start, blocks, tile, kv_head, split)
    scales = (log2_scale, logit_cap, cap_scale)
    key_column, value_column = kv_head * KEY_HEAD_STRIDE, kv_head * VALUE_HEAD_STRIDE
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_attend, (rings, tensors, work, scales, query_ring, 0,
                           KV_HEADS, GROUP, HEAD_DIM, MASK_WORDS, CAPPED, CONSUMERS, STAGES)),
                (_load_blocks, (rings, keys, values, table_row, start, last_start, blocks,
                                key_column, value_column, STAGES)),
            ],
            [1], [24],
        )  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_attend, (rings, tensors, work, scales, query_ring, 0,
                           KV_HEADS, GROUP, HEAD_DIM, MASK_WORDS, CAPPED, CONSUMERS, STAGES)),
                (_attend, (rings, tensors, work, scales, query_ring, 1,
                           KV_HEADS, GROUP, HEAD_DIM, MASK_WORDS, CAPPED, CONSUMERS, STAGES)),
                (_load_blocks, (rings, keys, values, table_row, start, last_start, blocks,
                                key_column, value_column, STAGES)),
            ],
            [4, 1], [REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_attend, (rings, tensors, work, scales, query_ring, 0,
                           KV_HEADS, GROUP, HEAD_DIM, MASK_WORDS, CAPPED, CONSUMERS, STAGES)),
                (_attend, (rings, tensors, work, scales, query_ring, 1,
                           KV_HEADS, GROUP, HEAD_DIM, MASK_WORDS, CAPPED, CONSUMERS, STAGES)),
                (_attend, (rings, tensors, work, scales, query_ring, 2,
                           KV_HEADS, GROUP, HEAD_DIM, MASK_WORDS, CAPPED, CONSUMERS, STAGES)),
                (_load_blocks, (rings, keys, values, table_row, start, last_start, blocks,
                                key_column, value_column, STAGES)),
            ],
            [4, 4, 1], [REGISTERS, REGISTERS, 24],
        )  # fmt: skip
