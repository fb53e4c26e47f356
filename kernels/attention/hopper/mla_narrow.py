"""Tree verify attention on Hopper for MLA, for few packed rows: `mla_narrow.cu` says how and why.

Same arguments, same results, same merge as `tree_attention`. What it takes is narrower: bf16 or fp16, latents
of 576 whose front 512 are the value, pages of whole 16 positions, no cap of the logits. A kernel is
compiled for a width of the tree when its memory is reserved, before any graph, or else by the first call.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
import triton

from sglang_ddtree_patch.kernels.attention.configs import device_properties
from sglang_ddtree_patch.kernels.attention.hopper.cuda_driver import Kernel, TensorMap
from sglang_ddtree_patch.kernels.attention.hopper.cuda_source import cached_code, narrow_source
from sglang_ddtree_patch.kernels.attention.merge import merge_splits
from sglang_ddtree_patch.kernels.attention.tree_attention import LOG2_E, check_inputs, cut_workspace
from sglang_ddtree_patch.kernels.attention.verify_attention import AttentionShape, OneCall

KEY_DIM, VALUE_DIM = 576, 512
BLOCK = 64  # keys
CHUNK = 64  # columns of a tensor load
SMALLEST_PAGE = 16  # positions a tensor load brings at least
THREADS, SHARED_BYTES = 512, 232_448
MERGED_COLUMNS = 128  # of the value, a program of the merge
HALF_TYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}


@dataclass(frozen=True)
class NarrowConfig:
    most_columns: int = 72  # packed rows of a tile: with more the ring could not hold two blocks
    # Chunks of the next block's logits that are issued before a block's weights are given out.
    keys_ahead: int = 0


SERVED = NarrowConfig()


def narrow_refusal(shape: AttentionShape, page_size: int, capability: tuple[int, int]) -> str | None:
    """Why the kernel cannot serve a shape on a GPU; None where it can."""
    if capability != (9, 0):
        return f"it is made for compute capability 9.0, and this is {capability[0]}.{capability[1]}"
    if not shape.value_is_key or (shape.key_dim, shape.value_dim) != (KEY_DIM, VALUE_DIM):
        return f"it takes MLA heads of {KEY_DIM}/{VALUE_DIM}, and these are {shape}"
    if page_size % SMALLEST_PAGE:
        return f"it takes pages of whole {SMALLEST_PAGE} positions, and --page-size is {page_size}"
    if shape.dtype not in HALF_TYPES:
        return f"it takes bfloat16 and float16, not {shape.dtype}"
    if shape.capped:
        return "it cannot cap logits"
    return None


def tile_columns(packed_rows: int, most: int) -> int:
    """Columns of a tile: as few tiles as fit, all of one width, a multiple of 8."""
    tiles = triton.cdiv(packed_rows, most)
    return triton.cdiv(triton.cdiv(packed_rows, tiles), 8) * 8


def keys_of_a_load(page_size: int) -> int:
    """Positions of a block that surely lie in one page."""
    return next(keys for keys in (64, 32, 16) if page_size % keys == 0)


@functools.cache
def narrow_kernel(
    columns: int, keys_ahead: int, page_keys: int, dtype: torch.dtype, device: torch.device
) -> Kernel:
    """The kernel of one tile shape, compiled if need be, loaded on a device."""
    code = cached_code(narrow_source(columns, BLOCK // page_keys, HALF_TYPES[dtype], keys_ahead))
    with torch.cuda.device(device):
        return Kernel(code, "split_attention_narrow", SHARED_BYTES)


def tree_attention_narrow(
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
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    config: NarrowConfig = SERVED,
) -> torch.Tensor:
    """As `tree_attention`; logits must stay below 2^24, where float32 still tells neighbours apart.

    ``config`` makes other tiles, for benchmarks.

    Raises:
        ValueError: shapes that do not fit one another, or that `narrow_refusal` names.
    """
    batch, (tokens, heads, key_dim) = request_ids.shape[0], query.shape
    rows, kv_heads, value_dim = tokens // batch, key_cache.shape[1], value_cache.shape[2]
    check_inputs(query, key_cache, value_cache, slot_table, tree_mask, batch, rows)
    if (
        (kv_heads, key_dim, value_dim) != (1, KEY_DIM, VALUE_DIM)
        or logit_cap > 0
        or page_size % SMALLEST_PAGE
    ):
        raise ValueError(
            f"this kernel takes one latent head of {KEY_DIM}/{VALUE_DIM} in pages of whole {SMALLEST_PAGE} "
            f"and no logit cap; it was given {kv_heads} of {key_dim}/{value_dim}, pages of {page_size}, "
            f"cap {logit_cap}"
        )
    columns = tile_columns(rows * heads, config.most_columns)
    tiles = triton.cdiv(rows * heads, columns)
    _, sm_count = device_properties(query.device)
    splits = max(sm_count // tiles, 2 * batch)
    if out is None:
        out = query.new_empty(tokens, heads, VALUE_DIM)
    partial, partial_lse = cut_workspace(workspace, splits, query.device, rows, heads, VALUE_DIM)

    wide = (request_ids.dtype == torch.int64) + 2 * (prefix_lens.dtype == torch.int64)
    mask_words = 0 if tree_mask is None else tree_mask.shape[2]
    page_keys = keys_of_a_load(page_size)
    packed = query.contiguous().view(tokens * heads, KEY_DIM)
    narrow_kernel(columns, config.keys_ahead, page_keys, query.dtype, query.device).launch(
        tiles * splits,
        THREADS,
        (
            TensorMap(packed, KEY_DIM, columns, CHUNK),
            TensorMap(key_cache[:, 0], key_cache.stride(0), page_keys, CHUNK),
            slot_table, request_ids, prefix_lens, request_ids if tree_mask is None else tree_mask,
            partial, partial_lse, ctypes.c_longlong(slot_table.stride(0)),
            *map(ctypes.c_int, (wide, batch, rows, heads, mask_words, tiles, splits)),
            ctypes.c_float(LOG2_E * softmax_scale * k_scale),
        ),
    )  # fmt: skip
    merge_splits[(tokens * heads, VALUE_DIM // MERGED_COLUMNS)](
        partial, partial_lse, out, prefix_lens, batch, rows, splits, out.stride(0), out.stride(1), v_scale,
        KV_HEADS=1, GROUP=heads, VALUE_DIM=VALUE_DIM,
        ROWS_AT_ONCE=1, SPLITS_AT_ONCE=32 if splits > 20 * batch else 4, COLUMNS=MERGED_COLUMNS,
        BLOCK_N=BLOCK, BATCH_BLOCK=triton.next_power_of_2(batch), sinks=sinks, num_warps=1,
    )  # fmt: skip
    return out


class NarrowMLA(OneCall):
    """The kernel behind the backend's interface; what it needs compiled is compiled when it is reserved."""

    def __init__(self, slot_table: torch.Tensor, shape: AttentionShape, page_size: int):
        super().__init__(slot_table, functools.partial(tree_attention_narrow, page_size=page_size))
        self._shape, self._page_size = shape, page_size

    def reserve(self, max_batch: int, rows: int) -> None:
        columns = tile_columns(rows * self._shape.heads, SERVED.most_columns)
        page_keys = keys_of_a_load(self._page_size)
        narrow_kernel(columns, SERVED.keys_ahead, page_keys, self._shape.dtype, self.slot_table.device)
