"""One split of tree verify attention on Hopper for MLA: one latent head whose value is its key's front.

The same tile, partial results and merge as attention/split.py. Two warpgroups share a tile of 64 packed
rows: each takes half of a block's keys for ``q k`` and half of the value columns for ``p v``, so the latent
tile is in shared memory once. The next block's TMA is issued before this block's softmax.

The running reference ``m`` of a row moves only when some logit of the tile exceeds its own by more than 8 in
base 2, so that rescaling 512 columns is rare. That is looked at while ``p v`` runs, with the weights of a
rise too steep for float32 cut off: such a row's past then weighs nothing, and the block is redone for it.
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

SLACK = gl.constexpr(8.0)  # how far, in base 2, a logit may exceed its row's reference
LARGEST = gl.constexpr(100.0)  # log2 of the largest weight that is ever computed


@gluon.jit
def _fetch(keys, rests, key_ring, rest_ring, barriers, index, slot, wanted, STAGES: gl.constexpr):
    """Start loading block ``index`` of this program, if it is wanted, into its place in the ring."""
    place = index % STAGES
    block_bytes: gl.constexpr = LOAD_KEYS * (key_ring.shape[2] + rest_ring.shape[2]) * 2
    ready = barriers.index(place)
    mbarrier.expect(ready, block_bytes, pred=wanted)
    tma.async_load(rests, [slot, key_ring.shape[2]], ready, rest_ring.index(place), pred=wanted)
    tma.async_load(keys, [slot, 0], ready, key_ring.index(place), pred=wanted)


@gluon.jit(
    do_not_specialize=["batch", "rows", "tiles", "max_splits"],
    do_not_specialize_on_alignment=["request_ids", "prefix_lens", "tree_mask"],
)
def split_attention_hopper_mla(
    query_main, query_rest, keys, rests,
    slot_table, request_ids, prefix_lens, tree_mask, partial, partial_lse,
    batch, rows, tiles, max_splits, table_stride, log2_scale, logit_cap, cap_scale,
    GROUP: gl.constexpr, VALUE_DIM: gl.constexpr, REST_DIM: gl.constexpr,
    MASK_WORDS: gl.constexpr, CAPPED: gl.constexpr,
    BLOCK_M: gl.constexpr, BATCH_BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Arguments as `split_attention`; queries [rows * heads, columns] and keys [slots, columns] are TMA
    descriptors of the latent part and of the rotary rest."""
    tile = gl.program_id(0) % tiles
    split = gl.program_id(0) // tiles
    request, first_block, blocks = owned_blocks(
        prefix_lens, split, batch, rows, max_splits, LOAD_KEYS, BATCH_BLOCK
    )
    if blocks == 0:
        return
    prefix = gl.load(prefix_lens + request).to(gl.int32)
    end = prefix + rows
    table_row = slot_table + gl.load(request_ids + request).to(gl.int64) * table_stride
    last_start = (end - 1) // LOAD_KEYS * LOAD_KEYS

    warps: gl.constexpr = gl.num_warps()
    groups: gl.constexpr = warps // 4  # warpgroups
    dtype: gl.constexpr = keys.dtype
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    tile_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [warps, 1], [1, 0])
    group_keys: gl.constexpr = LOAD_KEYS // groups
    group_columns: gl.constexpr = VALUE_DIM // groups
    logits_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, groups], [16, group_keys, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, groups], [16, group_columns, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, logits_layout)

    key_ring = gl.allocate_shared_memory(dtype, [STAGES, LOAD_KEYS, VALUE_DIM], shared)
    rest_ring = gl.allocate_shared_memory(dtype, [STAGES, LOAD_KEYS, REST_DIM], shared)
    q_main = gl.allocate_shared_memory(dtype, [BLOCK_M, VALUE_DIM], shared)
    q_rest = gl.allocate_shared_memory(dtype, [BLOCK_M, REST_DIM], shared)
    p_shared = gl.allocate_shared_memory(dtype, [BLOCK_M, LOAD_KEYS], shared)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    query_ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    mbarrier.init(query_ready.index(0), count=1)
    fence_async_shared()
    gl.barrier()

    # Packed rows follow one another in the query; a tile's surplus rows are the next request's, or zeros.
    first_row = request * rows * GROUP + tile * BLOCK_M
    mbarrier.expect(query_ready.index(0), BLOCK_M * (VALUE_DIM + REST_DIM) * 2)
    tma.async_load(query_main, [first_row, 0], query_ready.index(0), q_main)
    tma.async_load(query_rest, [first_row, VALUE_DIM], query_ready.index(0), q_rest)
    start = first_block * LOAD_KEYS
    for i in gl.static_range(STAGES):
        slot = gl.load(table_row + gl.minimum(start + i * LOAD_KEYS, last_start))
        _fetch(keys, rests, key_ring, rest_ring, ready, i, slot, i < blocks, STAGES)
    slot = gl.load(table_row + gl.minimum(start + STAGES * LOAD_KEYS, last_start))

    packed = tile * BLOCK_M + gl.arange(0, BLOCK_M, row_layout)
    row_ok = packed < rows * GROUP
    mask_rows = tree_mask + (request * rows + packed // GROUP).to(gl.int64) * MASK_WORDS
    no_logits = gl.zeros([BLOCK_M, LOAD_KEYS], gl.float32, logits_layout)
    acc = gl.zeros([BLOCK_M, VALUE_DIM], gl.float32, out_layout)
    m = gl.full([BLOCK_M], NOTHING_SEEN, gl.float32, row_layout)
    # Each thread sums its own columns; the sums meet once, behind the loop.
    sums = gl.sum(no_logits.reshape([BLOCK_M, groups, group_keys // 8, 8]), 2)
    mbarrier.wait(query_ready.index(0), 0)

    for i in range(blocks):
        place = i % STAGES
        mbarrier.wait(ready.index(place), (i // STAGES) & 1)
        token = warpgroup_mma(
            q_rest, rest_ring.index(place).permute([1, 0]), no_logits, use_acc=False, is_async=True
        )
        token = warpgroup_mma(q_main, key_ring.index(place).permute([1, 0]), token, is_async=True)
        # The block before this one is done with: its place is free.
        refill = i - 1 + STAGES
        _fetch(keys, rests, key_ring, rest_ring, ready, refill, slot, (i > 0) & (refill < blocks), STAGES)
        if i > 0:
            slot = gl.load(table_row + gl.minimum(start + STAGES * LOAD_KEYS, last_start))
        logits = warpgroup_mma_wait(0, deps=[token])
        logits = cap_logits(logits, logit_cap, cap_scale, CAPPED)
        if start + LOAD_KEYS > prefix:
            logits = mask_block(logits, mask_rows, row_ok, start, prefix, end, MASK_WORDS, LOAD_KEYS)
            if start + LOAD_KEYS > end:
                for part in gl.static_range(VALUE_DIM // 128):
                    zero_rows_from(
                        key_ring.index(place).slice(part * 128, 128, dim=1), end - start, tile_layout
                    )
        if i == 0:
            m = gl.maximum(gl.max(logits, 1) * log2_scale, NOTHING_SEEN)
        excess = logits * log2_scale - m[:, None]
        weights = gl.exp2(gl.minimum(excess, LARGEST))
        p_shared.store(weights.to(dtype))
        fence_async_shared()
        gl.barrier()
        next_acc = warpgroup_mma(p_shared, key_ring.index(place), acc, is_async=True)
        # While the tensor cores work: sums, and whether some row's reference must move.
        sums = sums + gl.sum(weights.reshape([BLOCK_M, groups, group_keys // 8, 8]), 2)
        highest = gl.max(excess.reshape([BLOCK_M * LOAD_KEYS]), 0)
        start += LOAD_KEYS
        acc = warpgroup_mma_wait(0, deps=[next_acc])
        gl.barrier()
        if highest > SLACK:
            rise = gl.maximum(gl.max(excess, 1), 0.0)
            # Beyond LARGEST the weights were cut off, and all that came before weighs nothing: start anew.
            anew = rise > LARGEST
            m += rise
            keep = gl.where(anew, 0.0, gl.exp2(-rise))
            acc = acc * gl.convert_layout(keep, gl.SliceLayout(1, out_layout))[:, None]
            keep = gl.convert_layout(keep, gl.SliceLayout(1, gl.SliceLayout(2, sums.type.layout)))
            sums = sums * keep[:, None][:, :, None]
            weights = gl.exp2(gl.minimum(logits * log2_scale - m[:, None], SLACK))
            weights = gl.where(anew[:, None], weights, 0.0)
            p_shared.store(weights.to(dtype))
            fence_async_shared()
            gl.barrier()
            acc = warpgroup_mma(p_shared, key_ring.index(place), acc)
            sums = sums + gl.sum(weights.reshape([BLOCK_M, groups, group_keys // 8, 8]), 2)
            gl.barrier()

    l = gl.convert_layout(gl.sum(gl.sum(sums, 2), 1), row_layout)  # noqa: E741
    l = gl.maximum(l, 1e-30)  # noqa: E741
    first_row = split.to(gl.int64) * (rows * GROUP)
    gl.store(partial_lse + first_row + packed, m + gl.log2(l), mask=row_ok)
    packed = tile * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, out_layout))
    column = gl.arange(0, VALUE_DIM, gl.SliceLayout(0, out_layout))
    average = acc * gl.convert_layout(1.0 / l, gl.SliceLayout(1, out_layout))[:, None]
    gl.store(
        partial + (first_row + packed)[:, None] * VALUE_DIM + column[None, :], average,
        mask=(packed < rows * GROUP)[:, None],
    )  # fmt: skip
