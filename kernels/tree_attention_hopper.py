"""Tree verify attention on Hopper: `tree_attention` with TMA loads and asynchronous wgmma, in Gluon.

Same arguments, same results, same merge. What it takes is narrower: bf16 or fp16, pages of whole 64-key
blocks, heads as in `supports`. Everything else runs `tree_attention`.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sglang_ddtree_patch.kernels.tree_attention_configs import HeadShape, device_properties
from sglang_ddtree_patch.kernels.tree_attention_hopper_gqa import split_attention_hopper
from sglang_ddtree_patch.kernels.tree_attention_hopper_mla import split_attention_hopper_mla
from sglang_ddtree_patch.kernels.tree_attention_merge import merge_splits

LOG2_E = 1.4426950408889634
BLOCK_M, BLOCK_N = 64, 64
GQA_STAGES, GQA_WARPS, GQA_PROGRAMS = 3, 4, 2  # two programs share a multiprocessor
MLA_STAGES, MLA_WARPS, MLA_PROGRAMS = 2, 8, 1
_SHARED = gl.NVMMASharedLayout(128, 16, 2)


def supports(head: HeadShape, page_size: int, capability: tuple[int, int]) -> bool:
    """Whether these kernels serve a head shape and page size on a GPU."""
    if capability[0] != 9 or page_size % BLOCK_N or head.element_size != 2:
        return False
    if head.value_is_key:
        return (head.key_dim, head.value_dim) == (576, 512)
    return head.key_dim == head.value_dim and head.key_dim in (64, 128, 256)


def split_total(device: torch.device, head: HeadShape, *, batch: int, tiles: int, kv_heads: int) -> int:
    """Splits of a launch, all requests together: the GPU filled once, at least two a request."""
    if head.value_is_key or head.key_dim > 128:
        programs = MLA_PROGRAMS
    else:
        programs = GQA_PROGRAMS
    _, sm_count = device_properties(device)
    return max(sm_count * programs // (kv_heads * tiles), 2 * batch)


def _rows_of(tensor: torch.Tensor, block: int, columns: int) -> TensorDescriptor:
    """A TMA descriptor of [rows, all columns of a row] that brings ``block`` rows and ``columns`` columns."""
    width = tensor.stride(1) * (tensor.shape[1] - 1) + tensor.shape[2]
    return TensorDescriptor(
        tensor, [tensor.shape[0], width], [tensor.stride(0), 1], [block, columns], _SHARED
    )


def tree_attention_hopper(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_table: torch.Tensor,
    request_ids: torch.Tensor,
    prefix_lens: torch.Tensor,
    tree_mask: torch.Tensor | None,
    *,
    page_size: int,
    softmax_scale: float,
    logit_cap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    max_splits: int | None = None,
) -> torch.Tensor:
    """As `tree_attention`."""
    batch, (tokens, heads, key_dim) = request_ids.shape[0], query.shape
    kv_heads, value_dim = key_cache.shape[1], value_cache.shape[2]
    rows, group = tokens // batch, heads // kv_heads
    is_mla = key_dim != value_dim
    head = HeadShape(key_dim, value_dim, is_mla, query.element_size())
    tiles = triton.cdiv(rows * group, BLOCK_M)
    splits = max_splits or split_total(query.device, head, batch=batch, tiles=tiles, kv_heads=kv_heads)
    if out is None:
        out = query.new_empty(tokens, heads, value_dim)
    outputs = splits * rows * heads * value_dim
    needed = outputs + splits * rows * heads
    if workspace is None:
        workspace = torch.empty(needed, dtype=torch.float32, device=query.device)
    partial, partial_lse = workspace[:outputs], workspace[outputs:needed]

    scale = softmax_scale * k_scale
    capped = logit_cap > 0
    batch_block = triton.next_power_of_2(batch)
    log2_scale = LOG2_E if capped else LOG2_E * scale
    cap_scale = scale / logit_cap if capped else 0.0
    words = 0 if tree_mask is None else tree_mask.shape[2]
    mask = request_ids if tree_mask is None else tree_mask
    if is_mla:
        packed = query.contiguous().view(tokens * heads, 1, key_dim)
        rest = key_dim - value_dim
        split_attention_hopper_mla[(tiles * splits,)](
            _rows_of(packed, BLOCK_M, value_dim), _rows_of(packed, BLOCK_M, rest),
            _rows_of(key_cache, BLOCK_N, value_dim), _rows_of(key_cache, BLOCK_N, rest),
            slot_table, request_ids, prefix_lens, mask, partial, partial_lse,
            batch, rows, tiles, splits, slot_table.stride(0), log2_scale, float(logit_cap), cap_scale,
            GROUP=group, VALUE_DIM=value_dim, REST_DIM=rest, MASK_WORDS=words, CAPPED=capped,
            BLOCK_M=BLOCK_M, BATCH_BLOCK=batch_block, STAGES=MLA_STAGES, num_warps=MLA_WARPS,
        )  # fmt: skip
    else:
        split_attention_hopper[(tiles * kv_heads * splits,)](
            query, _rows_of(key_cache, BLOCK_N, key_dim), _rows_of(value_cache, BLOCK_N, value_dim),
            slot_table, request_ids, prefix_lens, mask, partial, partial_lse,
            batch, rows, tiles, splits, query.stride(0), query.stride(1), slot_table.stride(0),
            log2_scale, float(logit_cap), cap_scale,
            KEY_HEAD_STRIDE=key_cache.stride(1), VALUE_HEAD_STRIDE=value_cache.stride(1),
            KV_HEADS=kv_heads, GROUP=group, HEAD_DIM=key_dim, MASK_WORDS=words, CAPPED=capped,
            BLOCK_M=BLOCK_M, BATCH_BLOCK=batch_block, STAGES=GQA_STAGES, num_warps=GQA_WARPS,
        )  # fmt: skip
    columns = min(128, triton.next_power_of_2(value_dim))
    merge_splits[(batch * rows * heads, triton.cdiv(value_dim, columns))](
        partial, partial_lse, out, prefix_lens, batch, rows, splits, out.stride(0), out.stride(1), v_scale,
        KV_HEADS=kv_heads, GROUP=group, VALUE_DIM=value_dim,
        ROWS_AT_ONCE=1, SPLITS_AT_ONCE=32 if splits > 20 * batch else 4, COLUMNS=columns,
        BLOCK_N=BLOCK_N, BATCH_BLOCK=batch_block, num_warps=1,
    )  # fmt: skip
    return out
