"""Measure GPU kernels by CUDA graph, and what the device allows at best."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

REPLAYS = 11
# A call that takes this long is no question of microseconds: fewer of it will do.
SLOW_MILLISECONDS = 2.0
SLOW_CALLS, SLOW_REPLAYS = 2, 3


def graph_microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Median time of one call, from replays of one CUDA graph that holds all of them in a row.

    Give it enough calls on different memory that none finds its input in the L2 cache.
    """
    calls[0]()
    replays = REPLAYS
    if _milliseconds(calls[0]) > SLOW_MILLISECONDS:
        calls, replays = calls[:SLOW_CALLS], SLOW_REPLAYS
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = sorted(_milliseconds(graph.replay) for _ in range(replays))
    return times[replays // 2] / len(calls) * 1e3


def _milliseconds(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


@triton.jit
def _copy(source, target, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + place, tl.load(source + place))


# Elements of a copy: the whole one is what results are held to, the small one finds room beside a server and
# is still several times the L2 cache.
WHOLE_COPY, SMALL_COPY = 1 << 30, 1 << 28


def measure_ceilings() -> dict[str, float]:
    """Copy rate (bytes read and written) and dense bf16 rate."""
    copied = copy_rate(WHOLE_COPY)
    size = 8192
    left, right, product = (_random(size * size).view(size, size) for _ in range(3))
    multiply = graph_microseconds([lambda: torch.mm(left, right, out=product)] * 4)
    return {"copy_gb_s": copied, "bf16_tflop_s": 2 * size**3 / multiply / 1e6}


def copy_rate(elements: int) -> float:
    """GB/s, bytes read and written, of this many bf16 numbers.

    The copy is a kernel: `Tensor.copy_` in a graph becomes a copy engine's transfer, which is slower than
    what a kernel can read and write.
    """
    block = 8192
    source, target = _random(elements), _random(elements)
    grid = (elements // block,)
    copy = graph_microseconds([lambda: _copy[grid](source, target, BLOCK=block, num_warps=8)])
    return 2 * elements * source.element_size() / copy / 1e3


def _random(elements: int) -> torch.Tensor:
    return torch.empty(elements, device="cuda", dtype=torch.bfloat16).normal_()
