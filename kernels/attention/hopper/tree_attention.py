"""Tree verify attention on Hopper: `tree_attention` with TMA loads and asynchronous wgmma, in Gluon.

Same arguments, same results, same merge. What it takes is narrower: bf16 or fp16, pages of whole 64-key
blocks, heads as in `supports`. Everything else runs `tree_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sglang_ddtree_patch.kernels.attention.configs import HeadShape, device_properties
from sglang_ddtree_patch.kernels.attention.hopper.gqa import split_attention_hopper
from sglang_ddtree_patch.kernels.attention.hopper.mla import split_attention_hopper_mla
from sglang_ddtree_patch.kernels.attention.merge import merge_splits
from sglang_ddtree_patch.kernels.attention.tree_attention import LOG2_E, check_inputs, cut_workspace

CONSUMER_ROWS = 64  # packed rows of a warpgroup, the smallest wgmma tile
LOAD_KEYS = 64  # keys of a TMA load, all of one page
_SHARED = gl.NVMMASharedLayout(128, 16, 2)


@dataclass(frozen=True)
class HopperConfig:
    consumers: int  # warpgroups that attend, 64 packed rows each
    block_n: int  # keys of a block
    stages: int  # blocks of the ring
    programs_per_sm: int
    registers: int = 0  # of a consuming thread, where there is more than one consumer

    @property
    def tile_rows(self) -> int:
        return self.consumers * CONSUMER_ROWS


# [(up to this many packed rows, config)]. Measured on an H200 (launch/results/kernel-h200.json): one block in
# three consumers beats two tiles of two, whose second would read the same keys again.
ANY = 1 << 30
GQA = [
    (64, HopperConfig(consumers=1, block_n=64, stages=2, programs_per_sm=2)),
    (128, HopperConfig(consumers=2, block_n=64, stages=4, programs_per_sm=1, registers=232)),
    (192, HopperConfig(consumers=3, block_n=64, stages=4, programs_per_sm=1, registers=160)),
    (ANY, HopperConfig(consumers=2, block_n=128, stages=3, programs_per_sm=1, registers=232)),
]
# Two warpgroups share 64 rows; Q and two blocks of latents fill the shared memory.
MLA = HopperConfig(consumers=1, block_n=64, stages=2, programs_per_sm=1)
# A single consumer beside its loading warp, two such programs a multiprocessor: registers for both.
REGISTERS_OF_TWO_PROGRAMS = 128


def supports(head: HeadShape, page_size: int, capability: tuple[int, int]) -> bool:
    """Whether these kernels serve a head shape and page size on a GPU."""
    if capability[0] != 9 or page_size % LOAD_KEYS or head.element_size != 2:
        return False
    if head.value_is_key:
        return (head.key_dim, head.value_dim) == (576, 512)
    return head.key_dim == head.value_dim and head.key_dim in (64, 128)


def choose_hopper_config(head: HeadShape, packed_rows: int) -> HopperConfig:
    """The configuration for a head shape and a number of packed rows."""
    if head.value_is_key:
        return MLA
    return next(config for limit, config in GQA if packed_rows <= limit)


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
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    config: HopperConfig | None = None,
) -> torch.Tensor:
    """As `tree_attention`; logits must stay below 2^24, where float32 still tells neighbours apart.

    Raises:
        ValueError: shapes that do not fit one another, or pages that are not whole blocks.
    """
    batch, (tokens, heads, key_dim) = request_ids.shape[0], query.shape
    kv_heads, value_dim = key_cache.shape[1], value_cache.shape[2]
    rows, group = tokens // batch, heads // kv_heads
    check_inputs(query, key_cache, value_cache, slot_table, tree_mask, batch, rows)
    if page_size % LOAD_KEYS:
        raise ValueError(f"pages of {page_size} are not whole blocks of {LOAD_KEYS} keys")
    head = HeadShape(key_dim, value_dim, key_dim != value_dim, query.element_size())
    config = config or choose_hopper_config(head, rows * group)
    tiles = triton.cdiv(rows * group, config.tile_rows)
    _, sm_count = device_properties(query.device)
    splits = max(sm_count * config.programs_per_sm // (kv_heads * tiles), 2 * batch)
    if out is None:
        out = query.new_empty(tokens, heads, value_dim)
    partial, partial_lse = cut_workspace(workspace, splits, query.device, rows, heads, value_dim)

    scale = softmax_scale * k_scale
    capped = logit_cap > 0
    scales = (LOG2_E if capped else LOG2_E * scale, float(logit_cap), scale / logit_cap if capped else 0.0)
    work = (batch, rows, tiles, splits)
    tensors = (
        slot_table, request_ids, prefix_lens, request_ids if tree_mask is None else tree_mask,
        partial, partial_lse,
    )  # fmt: skip
    constants = {
        "GROUP": group,
        "MASK_WORDS": 0 if tree_mask is None else tree_mask.shape[2],
        "CAPPED": capped,
        "BATCH_BLOCK": triton.next_power_of_2(batch),
        "STAGES": config.stages,
    }
    if head.value_is_key:
        packed, rest = query.contiguous().view(tokens * heads, 1, key_dim), key_dim - value_dim
        split_attention_hopper_mla[(tiles * splits,)](
            _rows_of(packed, CONSUMER_ROWS, value_dim), _rows_of(packed, CONSUMER_ROWS, rest),
            _rows_of(key_cache, LOAD_KEYS, value_dim), _rows_of(key_cache, LOAD_KEYS, rest),
            *tensors, *work, slot_table.stride(0), *scales, **constants,
            VALUE_DIM=value_dim, REST_DIM=rest, BLOCK_M=config.tile_rows, num_warps=8,
        )  # fmt: skip
    else:
        if config.programs_per_sm == 2:
            constants["maxnreg"] = REGISTERS_OF_TWO_PROGRAMS
        split_attention_hopper[(tiles * kv_heads * splits,)](
            query, _rows_of(key_cache, LOAD_KEYS, key_dim), _rows_of(value_cache, LOAD_KEYS, value_dim),
            *tensors, *work, query.stride(0), query.stride(1), slot_table.stride(0), *scales, **constants,
            KEY_HEAD_STRIDE=key_cache.stride(1), VALUE_HEAD_STRIDE=value_cache.stride(1),
            KV_HEADS=kv_heads, HEAD_DIM=key_dim, CONSUMERS=config.consumers, BLOCK_N=config.block_n,
            REGISTERS=config.registers, num_warps=4,
        )  # fmt: skip
    columns = min(128, value_dim)
    merge_splits[(batch * rows * heads, value_dim // columns)](
        partial, partial_lse, out, prefix_lens, batch, rows, splits, out.stride(0), out.stride(1), v_scale,
        KV_HEADS=kv_heads, GROUP=group, VALUE_DIM=value_dim,
        ROWS_AT_ONCE=1, SPLITS_AT_ONCE=32 if splits > 20 * batch else 4, COLUMNS=columns,
        BLOCK_N=config.block_n, BATCH_BLOCK=constants["BATCH_BLOCK"], sinks=sinks, num_warps=1,
    )  # fmt: skip
    return out


def _rows_of(tensor: torch.Tensor, block: int, columns: int) -> TensorDescriptor:
    """A TMA descriptor of [rows, heads, columns] as a matrix, that brings a block of rows and columns."""
    width = tensor.stride(1) * (tensor.shape[1] - 1) + tensor.shape[2]
    shape, strides = [tensor.shape[0], width], [tensor.stride(0), 1]
    return TensorDescriptor(tensor, shape, strides, [block, columns], _SHARED)
