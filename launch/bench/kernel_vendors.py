"""What a user would run instead of our kernels, each where its package is installed.

`fa3-prefix` and `flashmla-prefix` answer another question (no tree, no mask): a yardstick for the prefix.
The others verify trees: SGLang's Triton kernel at page 1 with the tree as its custom mask, FlashInfer
with the tree as its custom mask, and eagle-harness's variant of FlashInfer that masks the tail alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from sglang_ddtree_patch.kernels.tree.build import unpack_masks
from sglang_ddtree_patch.launch.bench.kernel_contenders import Calls, Contender
from sglang_ddtree_patch.launch.bench.kernel_workload import PAGE_SIZE, Workload

LARGEST_MASK = 1 << 30  # bytes of a mask over the whole prefix, a byte a key
MOST_WRAPPERS = 16  # each pins 8 MiB on the host
FLASHINFER_WORKSPACE = 512 << 20


def fa3_prefix(workload: Workload, rows: int) -> Calls:
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    query, keys, values = _query(workload, rows), _pages(workload, "keys"), _pages(workload, "values")

    def call(pages: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: flash_attn_with_kvcache(
            query, keys, values, cache_seqlens=workload.prefix_lens, page_table=pages, causal=False
        )

    return [call(workload.page_table[ids]) for ids in workload.request_ids]


def flashmla_prefix(workload: Workload, rows: int) -> Calls:
    from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata

    query, keys, shape = _query(workload, rows), _pages(workload, "keys"), workload.shape
    metadata, splits = get_mla_metadata(workload.prefix_lens, rows * shape.heads, 1)

    def call(pages: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: flash_mla_with_kvcache(
            query, keys, pages, workload.prefix_lens, shape.value_dim, metadata, splits, causal=False
        )

    return [call(workload.page_table[ids]) for ids in workload.request_ids]


def sglang_triton_tree(workload: Workload, rows: int) -> Calls:
    """Target verify of SGLang's Triton backend: prefix by slot, block from its own tensors, mask by byte."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    arguments, shape, batch = workload.arguments(rows), workload.shape, workload.batch
    query = arguments["query"]
    out = query.new_empty(len(query), shape.heads, shape.value_dim)
    mask = _whole_mask(workload, rows)
    row_starts, key_starts = _starts(batch, rows), _starts(batch, workload.context)
    mask_starts = _starts(batch, mask.numel() // batch).long()

    def call(ids: torch.Tensor) -> Callable[[], torch.Tensor]:
        table = workload.slot_table[ids].long()
        prefix = table[:, : workload.context].flatten()
        block = table[:, workload.context : workload.context + rows].flatten()
        keys, values = workload.keys[block].contiguous(), workload.values[block].contiguous()

        def run() -> torch.Tensor:
            extend_attention_fwd(
                query, keys, values, out, workload.keys, workload.values, row_starts, key_starts, prefix,
                mask, True, mask_starts, rows, 1.0, 1.0, sm_scale=arguments["softmax_scale"], page_size=1,
            )  # fmt: skip
            return out

        return run

    return [call(ids) for ids in workload.request_ids]


def flashinfer_tree(workload: Workload, rows: int) -> Calls:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    mask = _whole_mask(workload, rows)

    def wrapper(workspace: torch.Tensor, buffers: dict[str, torch.Tensor]) -> Any:
        mask_buffers = {
            "custom_mask_buf": torch.empty(
                mask.numel() // 8 + workload.batch, dtype=torch.uint8, device="cuda"
            ),
            "mask_indptr_buf": torch.empty_like(buffers["qo_indptr_buf"]),
        }
        return BatchPrefillWithPagedKVCacheWrapper(
            workspace, "NHD", backend="fa2", use_cuda_graph=True, **buffers, **mask_buffers
        )

    return _flashinfer_calls(workload, rows, wrapper, custom_mask=mask)


def eagle_tail(workload: Workload, rows: int) -> Calls:
    from eagle_harness.sglang import tail_mask
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    variant = tail_mask.jit_args(torch.bfloat16, workload.shape.key_dim)
    tail_bits = workload.arguments(rows)["tree_mask"].flatten().view(torch.uint8)

    def wrapper(workspace: torch.Tensor, buffers: dict[str, torch.Tensor]) -> Any:
        return BatchPrefillWithPagedKVCacheWrapper(
            workspace, "NHD", backend="fa2", use_cuda_graph=True, **buffers,
            custom_mask_buf=tail_bits, jit_args=list(variant), variant_owns_mask=True,
        )  # fmt: skip

    return _flashinfer_calls(workload, rows, wrapper)


def _flashinfer_calls(workload: Workload, rows: int, make_wrapper: Callable, **mask: torch.Tensor) -> Calls:
    """A planned FlashInfer wrapper a copy, over one workspace: plans are made on the host, untimed."""
    arguments, shape, batch = workload.arguments(rows), workload.shape, workload.batch
    pages = -(-(workload.context + rows) // PAGE_SIZE)
    last_page = workload.context + rows - (pages - 1) * PAGE_SIZE
    row_starts, page_starts = _starts(batch, rows), _starts(batch, pages)
    last_pages = torch.full((batch,), last_page, dtype=torch.int32, device="cuda")
    cache = _pages(workload, "keys"), _pages(workload, "values")
    workspace = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device="cuda")

    def call(ids: torch.Tensor) -> Callable[[], torch.Tensor]:
        indices = workload.page_table[ids, :pages].flatten()
        buffers = {
            "qo_indptr_buf": row_starts.clone(),
            "paged_kv_indptr_buf": page_starts.clone(),
            "paged_kv_indices_buf": indices.clone(),
            "paged_kv_last_page_len_buf": last_pages.clone(),
        }
        wrapper = make_wrapper(workspace, buffers)
        wrapper.plan(
            row_starts, page_starts, indices, last_pages, shape.heads, shape.kv_heads, shape.key_dim,
            PAGE_SIZE, sm_scale=arguments["softmax_scale"], q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16, **mask,
        )  # fmt: skip
        return lambda: wrapper.run(arguments["query"], cache)

    return [call(ids) for ids in workload.request_ids[:MOST_WRAPPERS]]


def _query(workload: Workload, rows: int) -> torch.Tensor:
    query = workload.arguments(rows)["query"]
    return query.view(workload.batch, rows, *query.shape[1:])


def _pages(workload: Workload, name: str) -> torch.Tensor:
    cache = getattr(workload, name)
    return cache.view(-1, PAGE_SIZE, *cache.shape[1:])


def _starts(count: int, each: int) -> torch.Tensor:
    return torch.arange(0, (count + 1) * each, each, dtype=torch.int32, device="cuda")


def _whole_mask(workload: Workload, rows: int) -> torch.Tensor:
    """What every row sees of prefix and block, flat: [batch * rows * (context + rows)] bool."""
    mask = torch.ones(workload.batch, rows, workload.context + rows, dtype=torch.bool, device="cuda")
    mask[..., workload.context :] = unpack_masks(workload.arguments(rows)["tree_mask"])
    return mask.flatten()


def _is_mla(workload: Workload, rows: int) -> bool:
    return workload.shape.mla


def _is_gqa(workload: Workload, rows: int) -> bool:
    return not workload.shape.mla


def _mask_fits(workload: Workload, rows: int) -> bool:
    return math.prod((workload.batch, rows, workload.context + rows)) <= LARGEST_MASK


def _is_masked_gqa(workload: Workload, rows: int) -> bool:
    return not workload.shape.mla and _mask_fits(workload, rows)


def _fits_eagle(workload: Workload, rows: int) -> bool:
    """The package itself takes this kernel for one request and 2 to 64 rows."""
    return not workload.shape.mla and workload.batch == 1 and 2 <= rows <= 64


BASELINES = (
    Contender("fa3-prefix", fa3_prefix, is_tree=False, serves=_is_gqa),
    Contender("flashmla-prefix", flashmla_prefix, is_tree=False, serves=_is_mla),
    Contender("sglang-triton-tree", sglang_triton_tree, page_size=1, serves=_mask_fits),
    Contender("flashinfer-tree", flashinfer_tree, serves=_is_masked_gqa),
    Contender("eagle-tail", eagle_tail, serves=_fits_eagle),
)
