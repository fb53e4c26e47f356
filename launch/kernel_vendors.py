"""Vendor kernels on the prefix alone, where their packages are installed: what tree verify is held against.

They answer another question (no tree, no mask), so their time is a yardstick and not an alternative.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_ddtree_patch.launch.kernel_workload import PAGE_SIZE, Workload


def vendor_calls(workload: Workload, rows: int) -> tuple[str, list[Callable[[], object]]] | None:
    """The vendor kernel's name and one call for each copy of the cache, or None where it is missing."""
    try:
        return _flash_mla(workload, rows) if workload.shape.mla else _fa3(workload, rows)
    except ImportError:
        return None


def _query(workload: Workload, rows: int) -> torch.Tensor:
    query = workload.arguments(rows)["query"]
    return query.view(workload.batch, rows, *query.shape[1:])


def _fa3(workload: Workload, rows: int) -> tuple[str, list[Callable[[], object]]]:
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    query = _query(workload, rows)
    keys, values = (cache.view(-1, PAGE_SIZE, *cache.shape[1:]) for cache in (workload.keys, workload.values))

    def call(pages: torch.Tensor) -> Callable[[], object]:
        return lambda: flash_attn_with_kvcache(
            query, keys, values, cache_seqlens=workload.prefix_lens, page_table=pages, causal=False
        )

    return "fa3-prefix", [call(workload.page_table[ids]) for ids in workload.request_ids]


def _flash_mla(workload: Workload, rows: int) -> tuple[str, list[Callable[[], object]]]:
    from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata

    query, shape = _query(workload, rows), workload.shape
    keys = workload.keys.view(-1, PAGE_SIZE, 1, shape.key_dim)
    metadata, splits = get_mla_metadata(workload.prefix_lens, rows * shape.heads, 1)

    def call(pages: torch.Tensor) -> Callable[[], object]:
        return lambda: flash_mla_with_kvcache(
            query, keys, pages, workload.prefix_lens, shape.value_dim, metadata, splits, causal=False
        )

    return "flashmla-prefix", [call(workload.page_table[ids]) for ids in workload.request_ids]
