"""What the Hopper kernels of tree verify attention share: which split a program owns, and the tree's mask."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

NOTHING_SEEN = gl.constexpr(-1e30)
LOAD_KEYS = gl.constexpr(64)  # keys of one TMA load, all of one page


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def owned_blocks(
    prefix_lens, split, batch, rows, max_splits, BLOCK_N: gl.constexpr, BATCH_BLOCK: gl.constexpr
):
    """The request of a split and its run of key blocks: ``(request, first, count)``.

    `split_plan` in attention/split.py in Gluon's words; the merge finds the same splits through it.
    A split that the lengths leave without work has no blocks, of the last request.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    lane = gl.arange(0, BATCH_BLOCK, layout)
    in_batch = lane < batch
    prefix = gl.load(prefix_lens + lane, mask=in_batch, other=0).to(gl.int32)
    blocks = gl.where(in_batch, (prefix + rows + BLOCK_N - 1) // BLOCK_N, 0)
    most = max_splits - batch + 1
    share = (gl.sum(blocks, 0) + most - 1) // most
    splits = (blocks + share - 1) // share
    ends = gl.associative_scan(splits, 0, _add)
    request = gl.sum((ends <= split).to(gl.int32), 0)
    mine = lane == request
    request_blocks = gl.sum(gl.where(mine, blocks, 0), 0)
    request_splits = gl.maximum(gl.sum(gl.where(mine, splits, 0), 0), 1)
    local = split - gl.sum(gl.where(mine, ends - splits, 0), 0)
    first = request_blocks * local // request_splits
    blocks = request_blocks * (local + 1) // request_splits - first
    return gl.minimum(request, batch - 1), first, blocks


@gluon.jit
def _window(mask_rows, row_ok, offset, MASK_WORDS: gl.constexpr):
    """64 bits of each row's mask from block row ``offset`` on, as uint64.

    Negative rows are positions of the prefix and set; rows behind the mask are not.
    """
    word = offset >> 6
    shift = (offset & 63).to(gl.uint64)
    outside = gl.where(word < 0, -1, 0).to(gl.int64)
    low = gl.load(mask_rows + word, mask=row_ok & (word >= 0) & (word < MASK_WORDS), other=outside)
    outside = gl.where(word + 1 < 0, -1, 0).to(gl.int64)
    inside = row_ok & (word + 1 >= 0) & (word + 1 < MASK_WORDS)
    high = gl.load(mask_rows + (word + 1), mask=inside, other=outside)
    return (low.to(gl.uint64) >> shift) | ((high.to(gl.uint64) << (63 - shift)) << 1)


@gluon.jit
def mask_block(
    logits, mask_rows, row_ok, start, prefix, end, MASK_WORDS: gl.constexpr, BLOCK_N: gl.constexpr
):
    """Hide from each row what it must not see of the positions ``start .. start + BLOCK_N - 1``.

    ``mask_rows`` [rows] points at each row's first mask word.
    """
    column = gl.arange(0, BLOCK_N, gl.SliceLayout(0, logits.type.layout))
    if MASK_WORDS == 0:
        visible = (start + column < end)[None, :] & (row_ok | True)[:, None]
    else:
        window = _window(mask_rows, row_ok, start - prefix, MASK_WORDS)[:, None]
        if BLOCK_N == 128:
            behind = _window(mask_rows, row_ok, start + 64 - prefix, MASK_WORDS)[:, None]
            window = gl.where((column < 64)[None, :], window, behind)
        visible = ((window >> (column & 63)[None, :].to(gl.uint64)) & 1) != 0
    return gl.where(visible, logits, float("-inf"))


@gluon.jit
def cap_logits(logits, logit_cap, cap_scale, CAPPED: gl.constexpr):
    """``cap * tanh(cap_scale * logits)`` where the model caps them; tanh x = 1 - 2 / (1 + e^(2x))."""
    if CAPPED:
        logits = logit_cap * (1.0 - 2.0 / (1.0 + gl.exp2(2.8853900817779268 * cap_scale * logits)))
    return logits


@gluon.jit
def zero_rows_from(buffer, first, LAYOUT: gl.constexpr):
    """Zero the rows of a shared tile from ``first`` on: weight 0 times NaN would still be NaN."""
    tile = buffer.load(LAYOUT)
    row = gl.arange(0, buffer.shape[0], gl.SliceLayout(1, LAYOUT))
    buffer.store(gl.where((row < first)[:, None], tile, gl.zeros_like(tile)))
