"""Candidates in two Triton launches, as `kernels/tree/candidates.py` defines them.

The first reads all logits once: of each tile of a row its maximum and its sum of exponentials. The
``count`` best logits of a row stand in the ``count`` tiles of the best maxima (first tiles first), because
any other tile has that many tiles before it, each with a logit at least as good; so the second launch
reads those tiles alone, picks the best one by one, and adds the sums up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Logits a program holds at once: whole tiles while reading, the tiles of the best maxima while picking.
AT_ONCE = 8192
SMALLEST_TILE, LARGEST_TILE = 128, 1024

TAKEN = tl.constexpr(-(1 << 31))  # sorts before every float
NO_COLUMN = tl.constexpr((1 << 31) - 1)


@triton.jit
def _as_order(value):
    """A float's order as a 32-bit integer; one reduction instruction takes those and not floats."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # the two zeros are equal
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _as_value(order):
    """The float of an order; the mapping is its own inverse."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _or_zero(maximum):
    """What to subtract in an exponent: the maximum, but not if there is no finite logit below it."""
    return tl.where(maximum > float("-inf"), maximum, 0.0)


@triton.jit(do_not_specialize=["tiles"])
def _scan_tiles(
    logits, tile_max, tile_sum, row_stride, vocabulary, tiles, TILE: tl.constexpr, TILES: tl.constexpr
):
    """Program (row, group of TILES tiles)."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
    column = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    logit = tl.load(logits + row * row_stride + column, mask=column < vocabulary, other=float("-inf"))
    logit = logit.to(tl.float32)
    maximum = tl.max(logit, 1)
    total = tl.sum(tl.exp(logit - _or_zero(maximum)[:, None]), 1)
    tl.store(tile_max + row * tiles + tile, maximum, mask=tile < tiles)
    tl.store(tile_sum + row * tiles + tile, total, mask=tile < tiles)


@triton.jit(do_not_specialize=["tiles", "count"])
def _pick_best(
    logits, tile_max, tile_sum, tokens, log_probs, row_stride, vocabulary, tiles, count,
    TILE: tl.constexpr, TILE_LANES: tl.constexpr, PICKED: tl.constexpr,
):  # fmt: skip
    """Program (row): the ``count`` best of one row."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, TILE_LANES)
    maximum = tl.load(tile_max + row * tiles + lane, mask=lane < tiles, other=float("-inf"))
    total = tl.load(tile_sum + row * tiles + lane, mask=lane < tiles, other=0.0)
    base = _or_zero(tl.max(maximum, 0))
    log_partition = base + tl.log(tl.sum(total * tl.exp(maximum - base), 0))

    slot = tl.arange(0, PICKED)
    picked = tl.full([PICKED], -1, tl.int32)
    order = tl.where(lane < tiles, _as_order(maximum), TAKEN)
    for i in range(tl.minimum(count, tiles)):
        best = tl.max(order, 0)
        tile = tl.min(tl.where(order == best, lane, TILE_LANES), 0)
        picked = tl.where(slot == i, tile, picked)
        order = tl.where(lane == tile, TAKEN, order)

    column = picked[:, None] * TILE + tl.arange(0, TILE)[None, :]
    exists = (picked >= 0)[:, None] & (column < vocabulary)
    logit = tl.load(logits + row * row_stride + column, mask=exists, other=float("-inf")).to(tl.float32)
    logit = tl.where(logit == logit, logit, float("-inf"))
    order = tl.reshape(tl.where(exists, _as_order(logit), TAKEN), [PICKED * TILE])
    column = tl.reshape(column, [PICKED * TILE])
    for i in range(count):
        best = tl.max(order, 0)
        token = tl.min(tl.where(order == best, column, NO_COLUMN), 0)
        tl.store(tokens + row * count + i, token.to(tl.int64))
        tl.store(log_probs + row * count + i, _as_value(best) - log_partition)
        order = tl.where(column == token, TAKEN, order)


def top_log_probs_triton(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`top_log_probs` by the kernels: arguments and result are described there."""
    rows, vocabulary = logits.shape
    picked = triton.next_power_of_2(count)
    tile = max(SMALLEST_TILE, min(LARGEST_TILE, AT_ONCE // picked))
    tiles, group = triton.cdiv(vocabulary, tile), AT_ONCE // tile
    maxima, sums = torch.empty((2, rows, tiles), dtype=torch.float32, device=logits.device)
    tokens = torch.empty((rows, count), dtype=torch.int64, device=logits.device)
    log_probs = torch.empty((rows, count), dtype=torch.float32, device=logits.device)
    _scan_tiles[(rows, triton.cdiv(tiles, group))](
        logits, maxima, sums, logits.stride(0), vocabulary, tiles, TILE=tile, TILES=group, num_warps=4
    )
    _pick_best[(rows,)](
        logits, maxima, sums, tokens, log_probs, logits.stride(0), vocabulary, tiles, count,
        TILE=tile, TILE_LANES=triton.next_power_of_2(tiles), PICKED=picked, num_warps=8,
    )  # fmt: skip
    return tokens, log_probs
