"""Tree verify attention in plain PyTorch: the meaning of every tree attention kernel, on any device.

For row ``i`` of a request with committed length ``p``, over its keys ``k_0 .. k_{p+rows-1}``:

    out_i = softmax_j(softmax_scale * q_i . k_j + m_ij) v_j

where ``m_ij`` is 0 for every ``j < p`` and for the block rows that row ``i`` may see, and minus infinity
for the others. Row ``i`` stands at position ``p + depth_i``, and so does its key; with a sliding window keys
further back than ``window`` positions are hidden too. A sink is one more logit in the softmax, of no value.
Arithmetic is float32 whatever the inputs.
"""

from __future__ import annotations

import torch

from sglang_ddtree_patch.kernels.tree.build import unpack_masks


def tree_attention_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_table: torch.Tensor,
    request_ids: torch.Tensor,
    prefix_lens: torch.Tensor,
    tree_mask: torch.Tensor | None,
    *,
    softmax_scale: float,
    logit_cap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    slot_map: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend a block of tree rows to a paged prefix and to the block itself.

    Args:
        query: [batch * rows, heads, key_dim].
        key_cache: [slots, kv_heads, key_dim], one layer of the KV pool.
        value_cache: [slots, kv_heads, value_dim]; for MLA the first columns of ``key_cache``.
        slot_table: [requests, positions], the slot of each logical position of each request.
        request_ids: [batch], rows of ``slot_table``.
        prefix_lens: [batch], committed lengths. Block row ``i`` stands at position ``prefix + i``.
        tree_mask: [batch, rows, words] int64 ancestor bitmasks, or None if every row sees the block.
        softmax_scale: factor of the logits.
        logit_cap: ``cap * tanh(logit / cap)`` where positive.
        k_scale, v_scale: what a float8 cache's keys and values are multiplied by.
        window: a row at position ``x`` sees keys at ``x - window`` to ``x``, both inclusive; without a mask,
            where row ``i`` stands at ``prefix + i``, as far forward too. None or negative: the whole prefix.
            Keys before ``prefix - window`` are not read.
        sinks: [heads], a logit a head that joins the denominator of its rows' softmax, unscaled.
        slot_map: [slots of the table] int64: where a slot of the table lies in this cache. None: the same.
        out: [batch * rows, heads, value_dim], written when given.

    Returns:
        [batch * rows, heads, value_dim] in the dtype of ``query``. Reads the lengths on the host.
    """
    batch = request_ids.shape[0]
    rows = query.shape[0] // batch
    heads, kv_heads = query.shape[1], key_cache.shape[1]
    windowed = window is not None and window >= 0
    if out is None:
        out = query.new_empty((*query.shape[:2], value_cache.shape[2]))
    masks = torch.ones((batch, rows, rows), dtype=torch.bool, device=query.device)
    depths = torch.arange(rows, device=query.device).expand(batch, rows)
    if tree_mask is not None:
        masks = unpack_masks(tree_mask)
        depths = (masks.sum(-1) - 1).clamp(min=0)
    for index, (request, prefix) in enumerate(zip(request_ids.tolist(), prefix_lens.tolist(), strict=True)):
        first = max(prefix - window, 0) if windowed else 0
        slots = slot_table[request, first : prefix + rows].long()
        if slot_map is not None:
            slots = slot_map[slots]
        keys, values = key_cache[slots].float() * k_scale, value_cache[slots].float() * v_scale
        block = slice(index * rows, (index + 1) * rows)
        grouped = query[block].float().view(rows, kv_heads, heads // kv_heads, -1)
        logits = torch.einsum("rkgd,mkd->kgrm", grouped, keys) * softmax_scale
        if logit_cap > 0:
            logits = logit_cap * torch.tanh(logits / logit_cap)
        visible = torch.cat([masks.new_ones(rows, prefix - first), masks[index]], dim=1)
        if windowed:
            row_positions = prefix + depths[index]
            key_positions = torch.cat([torch.arange(first, prefix, device=query.device), row_positions])
            visible &= (row_positions[:, None] - key_positions).abs() <= window
        logits.masked_fill_(~visible, -torch.inf)
        if sinks is not None:
            sink = sinks.float().view(kv_heads, -1, 1, 1).expand(*logits.shape[:3], 1)
            logits = torch.cat([logits, sink], dim=-1)
        weights = logits.softmax(-1)[..., : len(keys)]
        attended = torch.einsum("kgrm,mkd->rkgd", weights, values)
        out[block] = attended.reshape(rows, heads, -1).to(out.dtype)
    return out
