"""One split of tree verify attention: a tile of tree rows against a run of key blocks.

The rows of a request and the query heads that share a KV head are packed into one axis, ``row * group +
head in group``, and cut into tiles of ``BLOCK_M``. A program owns one tile, one KV head and one split of
the keys, so every key it loads serves all tree rows and all heads of the tile. It leaves

    partial      acc / l    the split's own softmax average of the values, float32
    partial_lse  m + log2 l the base-2 log of the split's softmax denominator

for merge.py to combine. With logits ``s`` scaled to base 2, ``m`` is the running maximum, ``l``
the running sum of ``2^(s - m)`` and ``acc`` the sum of ``2^(s - m) v`` (the online softmax of FlashAttention,
arXiv 2205.14135; splitting along the keys is Flash-Decoding's).

Keys are walked in blocks of ``BLOCK_N`` positions. Blocks that lie in the prefix need no mask at all. The
last partial prefix block and the tree behind it are one masked tail, read from the cache in place.

MLA is the same kernel: one KV head whose value is the first part of its key, so the latent part is
loaded once and used twice.

With a sliding window a row at position ``x`` sees keys at ``x - window`` and behind. The leftmost row is
the root, at position ``prefix``, so no row sees a key before ``prefix - window``: the walk starts with the
block of that position, and positions before it are not read. Row ``i`` stands at ``prefix + depth_i``, and
its depth is the number of rows it sees less one.
"""

import triton
import triton.language as tl

from sglang_ddtree_patch.kernels.attention.visible import row_depths, visible_keys

# A finite stand-in for minus infinity: subtracting it from itself gives 0, not NaN, so a split in which
# a row sees nothing comes out as zeros with a weight of 0 in the merge.
NOTHING_SEEN = tl.constexpr(-1e30)
NO_WINDOW = tl.constexpr(1 << 30)  # a window that reaches behind every position


@triton.jit
def first_key(prefix, window):
    """The leftmost position that any row of a request sees: what the root, at position ``prefix``, sees."""
    return tl.maximum(prefix - window, 0)


@triton.jit
def split_plan(
    prefix_lens, batch, rows, max_splits, BLOCK_N: tl.constexpr, BATCH_BLOCK: tl.constexpr, window=NO_WINDOW
):
    """How the launch's ``max_splits`` splits are dealt to the requests, from their lengths on the device.

    Returns two int32 tensors of [BATCH_BLOCK]: the splits of each request, in proportion to its key
    blocks (those before the window left out) and at least one, and their running sum. Rounding up adds
    less than one split a request, so the sum stays below ``all blocks / share + batch``, which is at most
    ``max_splits + 1``.
    """
    request = tl.arange(0, BATCH_BLOCK)
    in_batch = request < batch
    prefix = tl.load(prefix_lens + request, mask=in_batch, other=0).to(tl.int32)
    blocks = tl.cdiv(prefix + rows, BLOCK_N) - first_key(prefix, window) // BLOCK_N
    blocks = tl.where(in_batch, blocks, 0)
    share = tl.cdiv(tl.sum(blocks, 0), max_splits - batch + 1)
    splits = tl.cdiv(blocks, share)
    return splits, tl.cumsum(splits, 0)


@triton.jit
def _load_columns(row_pointers, row_ok, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, MASK_ROWS: tl.constexpr):
    """Load ``COLUMNS`` elements behind each pointer, padded to ``WIDTH``, as [rows, WIDTH]."""
    columns = tl.arange(0, WIDTH)[None, :]
    if MASK_ROWS:
        return tl.load(row_pointers + columns, mask=row_ok & (columns < COLUMNS), other=0.0)
    elif COLUMNS < WIDTH:
        return tl.load(row_pointers + columns, mask=columns < COLUMNS, other=0.0)
    else:
        return tl.load(row_pointers + columns)


@triton.jit
def float_of(codes, dtype: tl.constexpr):
    """Stored elements as ``dtype``. uint8 holds float8 e4m3 for GPUs that cannot convert it (before sm_89).

    Its exponent and mantissa, moved to where float16 has them, are the value over 2^8, subnormals too.
    """
    if codes.dtype == tl.uint8:
        magnitude = codes & 0x7F
        bits = ((codes & 0x80).to(tl.uint16) << 8) | (magnitude.to(tl.uint16) << 7)
        value = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where(magnitude == 0x7F, float("nan"), value).to(dtype)
    else:
        return codes.to(dtype)


@triton.jit
def _load_block(
    table_row, slot_map, key_base, value_base, start, low, end, dtype: tl.constexpr,
    KEY_STRIDE: tl.constexpr, VALUE_STRIDE: tl.constexpr,
    KEY_MAIN: tl.constexpr, KEY_REST: tl.constexpr, REST_WIDTH: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, VALUE_IS_KEY: tl.constexpr,
    BLOCK: tl.constexpr, ONE_PAGE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Load the keys and values of positions ``start .. start + BLOCK - 1``: key, rest of the key, value.

    ``ONE_PAGE``: the block lies in one page, so one look-up gives the slots of all its positions.
    ``slot_map``: where the table's slots lie in this layer's pool, if that is not the table's own.
    ``MASKED``: positions before ``low`` and from ``end`` on are not read and come back as zeros.
    """
    keys = tl.arange(0, BLOCK)[:, None]
    in_range = (start + keys >= low) & (start + keys < end)
    if ONE_PAGE:
        first_slot = tl.load(table_row + start).to(tl.int64)
        if slot_map is not None:
            first_slot = tl.load(slot_map + first_slot)
        key_rows = key_base + first_slot * KEY_STRIDE + keys * KEY_STRIDE
        value_rows = value_base + first_slot * VALUE_STRIDE + keys * VALUE_STRIDE
    else:
        if MASKED:
            slots = tl.load(table_row + start + keys, mask=in_range, other=0).to(tl.int64)
        else:
            slots = tl.load(table_row + start + keys).to(tl.int64)
        if slot_map is not None:
            slots = tl.load(slot_map + slots, mask=in_range, other=0)
        key_rows = key_base + slots * KEY_STRIDE
        value_rows = value_base + slots * VALUE_STRIDE
    key = float_of(_load_columns(key_rows, in_range, KEY_MAIN, KEY_MAIN, MASKED), dtype)
    rest = key
    if KEY_REST > 0:
        rest = float_of(_load_columns(key_rows + KEY_MAIN, in_range, KEY_REST, REST_WIDTH, MASKED), dtype)
    value = key
    if not VALUE_IS_KEY:
        value = float_of(_load_columns(value_rows, in_range, VALUE_DIM, VALUE_WIDTH, MASKED), dtype)
    return key, rest, value


@triton.jit
def _logits(query, query_rest, key, rest, logit_cap, cap_scale, KEY_REST: tl.constexpr, CAPPED: tl.constexpr):
    """``q . k`` as float32, capped to ``cap * tanh(scale / cap * q . k)`` when the model asks for it."""
    if KEY_REST > 0:
        logits = tl.dot(query_rest, tl.trans(rest), input_precision="ieee")
        logits = tl.dot(query, tl.trans(key), logits, input_precision="ieee")
    else:
        logits = tl.dot(query, tl.trans(key), input_precision="ieee")
    if CAPPED:
        # tanh x = 2 sigmoid(2 x) - 1
        logits = logit_cap * (2.0 * tl.sigmoid(2.0 * cap_scale * logits) - 1.0)
    return logits


@triton.jit
def _accumulate(m, l, acc, logits, value, log2_scale):  # noqa: E741
    """Fold one block into the running maximum, sum and weighted values."""
    new_m = tl.maximum(m, tl.max(logits, 1) * log2_scale)
    weights = tl.exp2(logits * log2_scale - new_m[:, None])
    rescale = tl.exp2(m - new_m)
    l = l * rescale + tl.sum(weights, 1)  # noqa: E741
    acc = tl.dot(weights.to(value.dtype), value, acc * rescale[:, None], input_precision="ieee")
    return new_m, l, acc


# The batch's own tensors are slices of larger ones as often as not: their alignment makes no new kernel.
@triton.jit(
    do_not_specialize=["batch", "rows", "tiles", "max_splits", "window"],
    do_not_specialize_on_alignment=["request_ids", "prefix_lens", "tree_mask"],
)
def split_attention(
    query, key_cache, value_cache, slot_table, slot_map, request_ids, prefix_lens, tree_mask,
    partial, partial_lse, batch, rows, tiles, max_splits, window,
    query_row_stride, query_head_stride, table_stride, log2_scale, logit_cap, cap_scale,
    KEY_STRIDE: tl.constexpr, KEY_HEAD_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr, VALUE_HEAD_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    KEY_MAIN: tl.constexpr, KEY_REST: tl.constexpr, REST_WIDTH: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, VALUE_IS_KEY: tl.constexpr,
    MASK_WORDS: tl.constexpr, CAPPED: tl.constexpr, ONE_PAGE: tl.constexpr,
    WINDOWED: tl.constexpr, DEEP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL_BLOCK: tl.constexpr,
    BATCH_BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # Tiles and heads of one split are neighbours in launch order: they read the same lines of KV, or
    # lines beside them, at about the same time.
    tile = tl.program_id(0) % tiles
    kv_head = (tl.program_id(0) // tiles) % KV_HEADS
    split = tl.program_id(0) // (tiles * KV_HEADS)

    splits, splits_end = split_plan(prefix_lens, batch, rows, max_splits, BLOCK_N, BATCH_BLOCK, window)
    request = tl.sum((splits_end <= split).to(tl.int32), 0)
    if request >= batch:
        return
    is_request = tl.arange(0, BATCH_BLOCK) == request
    request_splits = tl.sum(tl.where(is_request, splits, 0), 0)
    local_split = split - tl.sum(tl.where(is_request, splits_end - splits, 0), 0)

    prefix = tl.load(prefix_lens + request).to(tl.int32)
    end = prefix + rows
    low = first_key(prefix, window)
    skipped = low // BLOCK_N
    blocks = tl.cdiv(end, BLOCK_N) - skipped
    first_block = skipped + blocks * local_split // request_splits
    last_block = skipped + blocks * (local_split + 1) // request_splits
    whole_blocks = prefix // BLOCK_N

    packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = packed // GROUP
    row_ok = row < rows
    token = (request * rows + row).to(tl.int64)
    query_rows = query + token * query_row_stride + (kv_head * GROUP + packed % GROUP) * query_head_stride
    q = _load_columns(query_rows[:, None], row_ok[:, None], KEY_MAIN, KEY_MAIN, True)
    q_rest = q
    if KEY_REST > 0:
        q_rest = _load_columns(query_rows[:, None] + KEY_MAIN, row_ok[:, None], KEY_REST, REST_WIDTH, True)
    mask_rows = tree_mask + token * MASK_WORDS
    request_masks = tree_mask + request.to(tl.int64) * rows * MASK_WORDS
    row_position = prefix + row
    if WINDOWED:
        row_position = prefix + row_depths(mask_rows, row, row_ok, MASK_WORDS)

    table_row = slot_table + tl.load(request_ids + request).to(tl.int64) * table_stride
    key_base = key_cache + kv_head * KEY_HEAD_STRIDE
    value_base = value_cache + kv_head * VALUE_HEAD_STRIDE
    m = tl.full([BLOCK_M], NOTHING_SEEN, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
    acc = tl.zeros([BLOCK_M, VALUE_WIDTH], tl.float32)

    for block in tl.range(first_block, tl.minimum(last_block, whole_blocks), num_stages=STAGES):
        key, rest, value = _load_block(
            table_row, slot_map, key_base, value_base, block * BLOCK_N, low, end, q.dtype,
            KEY_STRIDE, VALUE_STRIDE, KEY_MAIN, KEY_REST, REST_WIDTH, VALUE_DIM, VALUE_WIDTH, VALUE_IS_KEY,
            BLOCK_N, ONE_PAGE, WINDOWED,
        )  # fmt: skip
        logits = _logits(q, q_rest, key, rest, logit_cap, cap_scale, KEY_REST, CAPPED)
        if WINDOWED:
            position = block * BLOCK_N + tl.arange(0, BLOCK_N)
            in_window = position[None, :] >= row_position[:, None] - window
            logits = tl.where(in_window, logits, float("-inf"))
        m, l, acc = _accumulate(m, l, acc, logits, value, log2_scale)  # noqa: E741

    tail_start = tl.maximum(first_block, whole_blocks) * BLOCK_N
    tail_end = tl.minimum(last_block * BLOCK_N, end)
    # Two stages: without them the tail's keys would pass through registers, which the accumulator needs.
    for start in tl.range(tail_start, tail_end, TAIL_BLOCK, num_stages=2):
        key, rest, value = _load_block(
            table_row, slot_map, key_base, value_base, start, low, end, q.dtype,
            KEY_STRIDE, VALUE_STRIDE, KEY_MAIN, KEY_REST, REST_WIDTH, VALUE_DIM, VALUE_WIDTH, VALUE_IS_KEY,
            TAIL_BLOCK, ONE_PAGE, True,
        )  # fmt: skip
        logits = _logits(q, q_rest, key, rest, logit_cap, cap_scale, KEY_REST, CAPPED)
        visible = visible_keys(
            request_masks, mask_rows, row_ok, row_position, start, prefix, rows, window,
            MASK_WORDS, TAIL_BLOCK, WINDOWED, DEEP,
        )  # fmt: skip
        logits = tl.where(visible, logits, float("-inf"))
        m, l, acc = _accumulate(m, l, acc, logits, value, log2_scale)  # noqa: E741

    l = tl.maximum(l, 1e-30)  # noqa: E741
    place = (split * KV_HEADS + kv_head).to(tl.int64) * (rows * GROUP) + packed
    tl.store(partial_lse + place, m + tl.log2(l), mask=row_ok)
    columns = tl.arange(0, VALUE_WIDTH)[None, :]
    ok = row_ok[:, None] & (columns < VALUE_DIM)
    tl.store(partial + place[:, None] * VALUE_DIM + columns, acc * (1.0 / l)[:, None], mask=ok)
