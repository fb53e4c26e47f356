"""Tree verify attention over a paged KV cache: dense prefix, masked tree, split along the keys.

For row ``i`` of a request with committed length ``p``, over its keys ``k_0 .. k_{p + rows - 1}``:

    out_i = softmax_j(softmax_scale * q_i . k_j + m_ij) v_j

where ``m_ij`` is 0 for every ``j < p`` and for the block rows that row ``i`` may see, and minus infinity
otherwise (reference.py beside this says the same in plain PyTorch, windows and sinks included). Only the
last ``rows`` positions need a mask: the prefix is dense, so its keys are loaded once for all tree rows and
all heads that share them, and many programs share the work of one long request.

Two launches: `split_attention` leaves one partial result a split, `merge_splits` combines them. Lengths are
read on the device and grid and workspace depend on shapes alone, so a CUDA graph captured once serves
every context length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from sglang_ddtree_patch.kernels.attention.configs import (
    INTERPRETER_CONFIG,
    INTERPRETER_SM_COUNT,
    HeadShape,
    TreeAttentionConfig,
    choose_config,
    converts_e4m3,
    device_properties,
    split_count,
)
from sglang_ddtree_patch.kernels.attention.merge import merge_splits
from sglang_ddtree_patch.kernels.attention.split import NO_WINDOW, split_attention

LOG2_E = 1.4426950408889634
SMALLEST_DOT = 16  # columns a tensor-core product takes at least


@dataclass(frozen=True)
class TreeAttentionPlan:
    """Everything about a launch that shapes decide."""

    config: TreeAttentionConfig
    tiles: int  # row tiles of a request and KV head
    splits: int  # splits of the keys, all requests together

    def workspace_elements(self, rows: int, heads: int, value_dim: int) -> int:
        """float32 elements: a partial output and its log-sum-exp for each split, row and head."""
        return self.splits * rows * heads * (value_dim + 1)


def plan_tree_attention(
    device: torch.device,
    head: HeadShape,
    *,
    batch: int,
    rows: int,
    heads: int,
    kv_heads: int,
    window: int = NO_WINDOW.value,
    config: TreeAttentionConfig | None = None,
) -> TreeAttentionPlan:
    """Choose tile shape and number of splits. ``config`` forces a tile shape, for benchmarks."""
    packed_rows = rows * (heads // kv_heads)
    if device.type == "cuda":
        capability, sm_count = device_properties(device)
        config = config or choose_config(capability, head, packed_rows)
    else:
        sm_count, config = INTERPRETER_SM_COUNT, config or INTERPRETER_CONFIG
    tiles = triton.cdiv(packed_rows, config.block_m)
    most_blocks = triton.cdiv(window + rows, config.block_n) + 1  # a window may start anywhere in a block
    splits = min(split_count(sm_count, config, kv_heads, tiles, batch), batch * most_blocks)
    return TreeAttentionPlan(config, tiles, splits)


def workspace_size(
    device: torch.device,
    head: HeadShape,
    *,
    max_batch: int,
    max_rows: int,
    heads: int,
    kv_heads: int,
) -> int:
    """float32 elements of a workspace for every launch up to this batch and width, at any length.

    Bounded by shapes: about one tile of output for each program that the GPU runs at once.
    """
    return max(
        plan_tree_attention(
            device, head, batch=max_batch, rows=rows, heads=heads, kv_heads=kv_heads
        ).workspace_elements(rows, heads, head.value_dim)
        for rows in range(1, max_rows + 1)
    )


def tree_attention(
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
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    slot_map: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    config: TreeAttentionConfig | None = None,
) -> torch.Tensor:
    """Attend a block of tree rows to a paged prefix and to the block itself.

    The block's own keys and values are in the cache already, row ``i`` at position ``prefix + i``. Nothing
    behind position ``prefix + rows - 1`` is read, whatever the slots there hold.

    Args:
        query: [batch * rows, heads, key_dim], bfloat16, float16 or float32.
        key_cache: [slots, kv_heads, key_dim], one layer of the KV pool, in the dtype of ``query`` or float8;
            uint8 are the bits of float8 e4m3.
        value_cache: [slots, kv_heads, value_dim]. For MLA a view of the first columns of ``key_cache``.
        slot_table: [requests, positions] int32, the slot of each logical position. The slots of a page
            (positions ``i * page_size`` and the next ``page_size - 1``) follow one another.
        request_ids: [batch] integers, rows of ``slot_table``.
        prefix_lens: [batch] integers, committed lengths; at least 0.
        tree_mask: [batch, rows, words] int64; bit ``j % 64`` of word ``j // 64`` says that the row sees block
            row ``j``. None: every row sees the whole block.
        page_size: positions of a page.
        softmax_scale: factor of the logits.
        logit_cap: ``cap * tanh(logit / cap)`` where positive.
        k_scale, v_scale: what a float8 cache's keys and values are multiplied by.
        window: how far back a row sees, inclusive: at position ``x`` it sees keys at positions
            ``x - window`` to ``x``, ``window + 1`` of them, which is what SGLang's ``sliding_window_size``
            means. A tree row stands at ``prefix + depth``. Without a mask row ``i`` stands at ``prefix + i``
            and sees as far forward as back. None or negative: the whole prefix. Positions before
            ``prefix - window`` are not read.
        sinks: [heads], a logit a head that joins the denominator of its rows' softmax, unscaled.
        slot_map: [slots of the table] int64: where a slot of the table lies in this cache, for layers whose
            pool is not the table's own. None: they are the same.
        out: [batch * rows, heads, value_dim], written when given.
        workspace: float32, at least `workspace_size` elements; allocated here when not given.
        config: forces a tile shape, for benchmarks.

    Returns:
        [batch * rows, heads, value_dim] in the dtype of ``query``.
    """
    batch, (tokens, heads, key_dim) = request_ids.shape[0], query.shape
    kv_heads, value_dim = key_cache.shape[1], value_cache.shape[2]
    rows, group = tokens // batch, heads // kv_heads
    check_inputs(query, key_cache, value_cache, slot_table, tree_mask, batch, rows)
    windowed = window is not None and window >= 0
    window = min(window, NO_WINDOW.value) if windowed else NO_WINDOW.value

    key_main, key_rest = _two_parts(key_dim)
    value_is_key = _is_front_of(value_cache, key_cache) and value_dim == key_main
    head = HeadShape(key_dim, value_dim, value_is_key, query.element_size())
    plan = plan_tree_attention(
        query.device, head,
        batch=batch, rows=rows, heads=heads, kv_heads=kv_heads, window=window, config=config,
    )  # fmt: skip
    config = plan.config
    if key_cache.dtype == torch.float8_e4m3fn and query.is_cuda and not converts_e4m3(query.device):
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    if out is None:
        out = query.new_empty(tokens, heads, value_dim)
    partial, partial_lse = cut_workspace(workspace, plan.splits, query.device, rows, heads, value_dim)

    scale = softmax_scale * k_scale
    capped = logit_cap > 0
    batch_block = triton.next_power_of_2(batch)
    split_attention[(plan.tiles * kv_heads * plan.splits,)](
        query, key_cache, value_cache, slot_table, slot_map, request_ids, prefix_lens,
        request_ids if tree_mask is None else tree_mask, partial, partial_lse,
        batch, rows, plan.tiles, plan.splits, window,
        query.stride(0), query.stride(1), slot_table.stride(0),
        LOG2_E if capped else LOG2_E * scale, float(logit_cap), scale / logit_cap if capped else 0.0,
        KEY_STRIDE=key_cache.stride(0), KEY_HEAD_STRIDE=key_cache.stride(1),
        VALUE_STRIDE=value_cache.stride(0), VALUE_HEAD_STRIDE=value_cache.stride(1),
        KV_HEADS=kv_heads, GROUP=group,
        KEY_MAIN=key_main, KEY_REST=key_rest, REST_WIDTH=_dot_width(key_rest),
        VALUE_DIM=value_dim, VALUE_WIDTH=_dot_width(value_dim), VALUE_IS_KEY=value_is_key,
        MASK_WORDS=0 if tree_mask is None else tree_mask.shape[2], CAPPED=capped,
        ONE_PAGE=page_size % config.block_n == 0,
        WINDOWED=windowed, DEEP=window < rows - 1,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, TAIL_BLOCK=config.tail_block,
        BATCH_BLOCK=batch_block, STAGES=config.stages,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    rows_at_once, columns = (1, 128) if query.is_cuda else (64, 512)
    columns = min(columns, triton.next_power_of_2(value_dim))
    row_blocks = triton.cdiv(rows * heads, rows_at_once)
    merge_splits[(batch * row_blocks, triton.cdiv(value_dim, columns))](
        partial, partial_lse, out, prefix_lens, batch, rows, plan.splits,
        out.stride(0), out.stride(1), v_scale,
        KV_HEADS=kv_heads, GROUP=group, VALUE_DIM=value_dim,
        ROWS_AT_ONCE=rows_at_once, SPLITS_AT_ONCE=32 if plan.splits > 20 * batch else 4, COLUMNS=columns,
        BLOCK_N=config.block_n, BATCH_BLOCK=batch_block, window=window, sinks=sinks, num_warps=1,
    )  # fmt: skip
    return out


def _two_parts(key_dim: int) -> tuple[int, int]:
    """Cut a head into its largest power of two and the rest: 576 = 512 + 64, 96 = 64 + 32, 128 = 128 + 0."""
    main = 1 << (key_dim.bit_length() - 1)
    return main, key_dim - main


def _dot_width(columns: int) -> int:
    return max(triton.next_power_of_2(columns), SMALLEST_DOT)


def _is_front_of(value_cache: torch.Tensor, key_cache: torch.Tensor) -> bool:
    """Whether the values are the first columns of the keys, as in MLA's latent cache."""
    return (
        value_cache.data_ptr() == key_cache.data_ptr()
        and value_cache.dtype == key_cache.dtype
        and value_cache.stride() == key_cache.stride()
    )


def cut_workspace(
    workspace: torch.Tensor | None,
    splits: int,
    device: torch.device,
    rows: int,
    heads: int,
    value_dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut the workspace into partial outputs and their log-sum-exps; allocated here when not given."""
    outputs = splits * rows * heads * value_dim
    needed = outputs + splits * rows * heads
    if workspace is None:
        workspace = torch.empty(needed, dtype=torch.float32, device=device)
    elif workspace.dtype != torch.float32 or workspace.numel() < needed:
        raise ValueError(
            f"tree attention needs a float32 workspace of {needed} elements and was given "
            f"{workspace.numel()} of {workspace.dtype}; size it with workspace_size()"
        )
    return workspace[:outputs], workspace[outputs:needed]


def check_inputs(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_table: torch.Tensor,
    tree_mask: torch.Tensor | None,
    batch: int,
    rows: int,
) -> None:
    """Refuse what the kernels would read wrongly. Shapes and strides only: nothing waits for the GPU."""
    tokens, heads, key_dim = query.shape
    kv_heads = key_cache.shape[1]
    if tokens != batch * rows or heads % kv_heads or key_cache.shape[2] != key_dim:
        raise ValueError(
            f"query {tuple(query.shape)} does not fit {batch} requests and a key cache of "
            f"{tuple(key_cache.shape)}: it must be "
            f"[{batch} * rows, a multiple of {kv_heads}, {key_cache.shape[2]}]"
        )
    if any(tensor.stride(-1) != 1 for tensor in (query, key_cache, value_cache, slot_table)):
        raise ValueError("the last axis of query, key_cache, value_cache and slot_table must be contiguous")
    if key_dim < SMALLEST_DOT:
        raise ValueError(f"heads must be at least {SMALLEST_DOT} wide; these are {key_dim}")
    if tree_mask is not None and (
        tree_mask.shape[:2] != (batch, rows)
        or tree_mask.dtype != torch.int64
        or not tree_mask.is_contiguous()
    ):
        raise ValueError(
            f"tree_mask must be a contiguous int64 [{batch}, {rows}, words]; it is {tree_mask.dtype} "
            f"{tuple(tree_mask.shape)}"
        )
    if not query.is_cuda and isinstance(split_attention, triton.runtime.JITFunction):
        raise RuntimeError("without a GPU tree attention needs TRITON_INTERPRET=1 in Python's environment")
