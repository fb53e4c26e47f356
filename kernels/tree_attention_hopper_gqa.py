"""One split of tree verify attention on Hopper, for separate keys and values: GQA, MHA, MQA.

The same tile, partial results and merge as tree_attention_split.py, with the data movement written out:
TMA brings key and value blocks into a ring of shared buffers, ``q k`` of the next block and ``p v`` of this
one run on the tensor cores while the softmax of the next is computed. Nothing asynchronous crosses the
loop's back edge, where the compiler would serialize it. The tree's keys are ordinary blocks of the same
loop, read from the cache in place, with a mask behind a branch.
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

from sglang_ddtree_patch.kernels.tree_attention_hopper_parts import (
    BLOCK_N,
    NOTHING_SEEN,
    cap_logits,
    mask_block,
    owned_blocks,
    zero_rows_from,
)


@gluon.jit
def _fetch(descriptor, ring, barriers, index, slot, column, wanted, STAGES: gl.constexpr):
    """Start loading block ``index`` of this program, if it is wanted, into its place in the ring."""
    place = index % STAGES
    bytes_: gl.constexpr = BLOCK_N * ring.shape[2] * 2
    mbarrier.expect(barriers.index(place), bytes_, pred=wanted)
    tma.async_load(descriptor, [slot, column], barriers.index(place), ring.index(place), pred=wanted)


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
    BLOCK_M: gl.constexpr, BATCH_BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Arguments as `split_attention`; ``keys`` and ``values`` are TMA descriptors [slots, columns]."""
    tile = gl.program_id(0) % tiles
    kv_head = (gl.program_id(0) // tiles) % KV_HEADS
    split = gl.program_id(0) // (tiles * KV_HEADS)
    request, first_block, blocks = owned_blocks(prefix_lens, split, batch, rows, max_splits, BATCH_BLOCK)
    if request >= batch:
        return
    prefix = gl.load(prefix_lens + request).to(gl.int32)
    end = prefix + rows
    table_row = slot_table + gl.load(request_ids + request).to(gl.int64) * table_stride
    last_start = (end - 1) // BLOCK_N * BLOCK_N

    warps: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = query.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [warps, 1], [1, 0])
    logits_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, BLOCK_N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, HEAD_DIM, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, logits_layout)

    key_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], shared)
    value_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], shared)
    key_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(key_ready.index(i), count=1)
        mbarrier.init(value_ready.index(i), count=1)
    fence_async_shared()
    gl.barrier()

    key_column, value_column = kv_head * KEY_HEAD_STRIDE, kv_head * VALUE_HEAD_STRIDE
    start = first_block * BLOCK_N
    for i in gl.static_range(STAGES):
        slot = gl.load(table_row + gl.minimum(start + i * BLOCK_N, last_start))
        _fetch(keys, key_ring, key_ready, i, slot, key_column, i < blocks, STAGES)
        _fetch(values, value_ring, value_ready, i, slot, value_column, i < blocks, STAGES)

    # The tile's query rows, packed as row * GROUP + head in group.
    packed = tile * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, load_layout))
    column = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, load_layout))
    token = (request * rows + packed // GROUP).to(gl.int64)
    query_rows = query + token * query_row_stride + (kv_head * GROUP + packed % GROUP) * query_head_stride
    q = gl.load(
        query_rows[:, None] + column[None, :], mask=(packed < rows * GROUP)[:, None], other=0.0
    )
    q_shared = gl.allocate_shared_memory(dtype, [BLOCK_M, HEAD_DIM], shared, q)
    fence_async_shared()
    gl.barrier()

    packed = tile * BLOCK_M + gl.arange(0, BLOCK_M, row_layout)
    row_ok = packed < rows * GROUP
    mask_rows = tree_mask + (request * rows + packed // GROUP).to(gl.int64) * MASK_WORDS
    no_logits = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, logits_layout)
    acc = gl.zeros([BLOCK_M, HEAD_DIM], gl.float32, out_layout)

    mbarrier.wait(key_ready.index(0), 0)
    logits = warpgroup_mma(q_shared, key_ring.index(0).permute([1, 0]), no_logits, use_acc=False)
    logits = cap_logits(logits, logit_cap, cap_scale, CAPPED)
    if start + BLOCK_N > prefix:
        logits = mask_block(logits, mask_rows, row_ok, start, prefix, end, MASK_WORDS)
    m = gl.maximum(gl.max(logits, 1) * log2_scale, NOTHING_SEEN)
    weights = gl.exp2(logits * log2_scale - m[:, None])
    l = gl.sum(weights, 1)  # noqa: E741
    p = gl.convert_layout(weights.to(dtype), weights_layout)
    gl.barrier()
    value_slot = gl.load(table_row + gl.minimum(start + STAGES * BLOCK_N, last_start))
    _fetch(keys, key_ring, key_ready, STAGES, value_slot, key_column, STAGES < blocks, STAGES)
    key_slot = gl.load(table_row + gl.minimum(start + (STAGES + 1) * BLOCK_N, last_start))

    for i in range(0, blocks):
        following = i + 1
        # Behind the last block the ring holds an old one: its logits are hidden below.
        mbarrier.wait(key_ready.index(following % STAGES), (following // STAGES) & 1, pred=following < blocks)
        next_logits = warpgroup_mma(
            q_shared, key_ring.index(following % STAGES).permute([1, 0]), no_logits, use_acc=False,
            is_async=True,
        )  # fmt: skip
        mbarrier.wait(value_ready.index(i % STAGES), (i // STAGES) & 1)
        if start + BLOCK_N > end:
            zero_rows_from(value_ring.index(i % STAGES), end - start, load_layout)
            fence_async_shared()
            gl.barrier()
        next_acc = warpgroup_mma(p, value_ring.index(i % STAGES), acc, is_async=True)
        logits = warpgroup_mma_wait(1, deps=[next_logits])
        start += BLOCK_N
        logits = cap_logits(logits, logit_cap, cap_scale, CAPPED)
        if following == blocks:
            logits = gl.full([BLOCK_M, BLOCK_N], float("-inf"), gl.float32, logits_layout)
        elif start + BLOCK_N > prefix:
            logits = mask_block(logits, mask_rows, row_ok, start, prefix, end, MASK_WORDS)
        new_m = gl.maximum(m, gl.max(logits, 1) * log2_scale)
        weights = gl.exp2(logits * log2_scale - new_m[:, None])
        rescale = gl.exp2(m - new_m)
        l = l * rescale + gl.sum(weights, 1)  # noqa: E741
        m = new_m
        acc = warpgroup_mma_wait(0, deps=[next_acc])
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, out_layout))[:, None]
        p = gl.convert_layout(weights.to(dtype), weights_layout)
        gl.barrier()
        _fetch(keys, key_ring, key_ready, following + STAGES, key_slot, key_column,
               following + STAGES < blocks, STAGES)  # fmt: skip
        _fetch(values, value_ring, value_ready, i + STAGES, value_slot, value_column,
               i + STAGES < blocks, STAGES)  # fmt: skip
        value_slot = key_slot
        key_slot = gl.load(table_row + gl.minimum(start + (STAGES + 1) * BLOCK_N, last_start))

    l = gl.maximum(l, 1e-30)  # noqa: E741
    place = (split * KV_HEADS + kv_head).to(gl.int64) * (rows * GROUP)
    gl.store(partial_lse + place + packed, m + gl.log2(l), mask=row_ok)
    packed = tile * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, out_layout))
    column = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, out_layout))
    average = acc * gl.convert_layout(1.0 / l, gl.SliceLayout(1, out_layout))[:, None]
    gl.store(
        partial + (place + packed)[:, None] * HEAD_DIM + column[None, :], average,
        mask=(packed < rows * GROUP)[:, None],
    )  # fmt: skip
