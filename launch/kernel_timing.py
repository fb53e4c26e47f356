"""Measure GPU kernels by CUDA graph, and what the device allows at best."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

REPLAYS = 11


def graph_microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Median time of one call, from replays of one CUDA graph that holds all of them in a row.

    Give it enough calls on different memory that none finds its input in the L2 cache.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    spans = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPLAYS)
    ]
    for start, end in spans:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) for start, end in spans)
    return times[REPLAYS // 2] / len(calls) * 1e3


def measure_ceilings() -> dict[str, float]:
    """Copy rate (bytes read and written) and dense bf16 rate, by PyTorch's own kernels."""
    source = torch.randn(1 << 29, device="cuda").bfloat16()
    target = torch.empty_like(source)
    copy = graph_microseconds([lambda: target.copy_(source)])
    size = 8192
    left, right = source[: size * size].view(size, size), source[-size * size :].view(size, size)
    product = target[: size * size].view(size, size)
    multiply = graph_microseconds([lambda: torch.mm(left, right, out=product)] * 4)
    return {
        "copy_gb_s": 2 * source.numel() * source.element_size() / copy / 1e3,
        "bf16_tflop_s": 2 * size**3 / multiply / 1e6,
    }
