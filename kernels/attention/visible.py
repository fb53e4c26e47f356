"""What each row of a verify block sees: its ancestors, and of the prefix what its window reaches.

A row's ancestor mask says both: bit ``j`` that it sees block row ``j``, and the number of bits its depth,
since a row sees its ancestors and itself. Its position is ``prefix + depth``, wherever it lies in the block.
"""

import triton
import triton.language as tl

WORD_BITS = tl.constexpr(64)


@triton.jit
def _bits_set(words):
    """How many bits of each int64 are set: pairs are added, then fours, then bytes."""
    words = words - ((words >> 1) & 0x5555555555555555)
    words = (words & 0x3333333333333333) + ((words >> 2) & 0x3333333333333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((words * 0x0101010101010101) >> 56).to(tl.int32)


@triton.jit
def row_depths(mask_rows, row, ok, WORDS: tl.constexpr):
    """Depth of each row: its ancestors, as many as it sees besides itself. Without masks its own number."""
    depth = row
    if WORDS > 0:
        seen = _bits_set(tl.load(mask_rows, mask=ok, other=0))
        for word in tl.static_range(1, WORDS):
            seen += _bits_set(tl.load(mask_rows + word, mask=ok, other=0))
        depth = tl.maximum(seen - 1, 0)  # a row that sees nothing stands beside the root
    return depth


@triton.jit
def _ancestors(mask_rows, row_ok, start, node, WORDS: tl.constexpr):
    """Which block rows ``node`` [BLOCK], the first of them at or before ``start``, each row sees."""
    # BLOCK positions touch at most two mask words, because BLOCK is at most the bits of one.
    word = tl.maximum(start, 0) // WORD_BITS
    bits = tl.load(mask_rows + word, mask=row_ok, other=0)[:, None]
    if WORDS > 1:
        next_bits = tl.load(mask_rows + word + 1, mask=row_ok & (word + 1 < WORDS), other=0)[:, None]
        bits = tl.where((node // WORD_BITS == word)[None, :], bits, next_bits)
    return ((bits >> (node % WORD_BITS).to(tl.int64)[None, :]) & 1) != 0


@triton.jit
def visible_keys(
    request_masks, mask_rows, row_ok, row_position, start, prefix, rows, window,
    WORDS: tl.constexpr, BLOCK: tl.constexpr, WINDOWED: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """What each row sees of ``BLOCK`` positions, [rows or 1, BLOCK].

    Without mask ``WORDS`` all of the block, as far as the window reaches to both sides. ``DEEP``: the tree
    may be deeper than the window, so that a row may have ancestors outside it.
    """
    position = start + tl.arange(0, BLOCK)
    node = tl.maximum(position - prefix, 0)
    key_position = position
    if WORDS == 0:
        seen = (position < prefix + rows)[None, :]
        if WINDOWED:
            seen = seen & (position[None, :] <= row_position[:, None] + window)
    else:
        ancestor = _ancestors(mask_rows, row_ok, start - prefix, node, WORDS)
        in_block = (position >= prefix) & (node < rows)
        seen = (position < prefix)[None, :] | (ancestor & in_block[None, :])
        if DEEP:
            depth = row_depths(request_masks + node * WORDS, node, in_block, WORDS)
            key_position = tl.where(in_block, prefix + depth, position)
    if WINDOWED:
        seen = seen & (key_position[None, :] >= row_position[:, None] - window)
    return seen
