"""Tree verify attention in plain PyTorch: the meaning of every tree attention kernel, on any device.

For row ``i`` of a request with committed length ``p``, over its keys ``k_0 .. k_{p+rows-1}``:

    out_i = softmax_j(softmax_scale * q_i . k_j + m_ij) v_j

where ``m_ij`` is 0 for every ``j < p`` and for the block rows that row ``i`` may see, and minus infinity
for the others. Arithmetic is float32 whatever the inputs.
"""

from __future__ import annotations

import torch

from sglang_ddtree_patch.kernels.tree import unpack_masks


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
        out: [batch * rows, heads, value_dim], written when given.

    Returns:
        [batch * rows, heads, value_dim] in the dtype of ``query``. Reads the lengths on the host.
    """
    batch = request_ids.shape[0]
    rows = query.shape[0] // batch
    heads, kv_heads = query.shape[1], key_cache.shape[1]
    if out is None:
        out = query.new_empty((*query.shape[:2], value_cache.shape[2]))
    visible = None if tree_mask is None else unpack_masks(tree_mask)
    for index, (request, prefix) in enumerate(zip(request_ids.tolist(), prefix_lens.tolist(), strict=True)):
        block = slice(index * rows, (index + 1) * rows)
        slots = slot_table[request, : prefix + rows].long()
        keys, values = key_cache[slots].float(), value_cache[slots].float()
        grouped = query[block].float().view(rows, kv_heads, heads // kv_heads, -1)
        logits = torch.einsum("rkgd,mkd->kgrm", grouped, keys) * softmax_scale
        if logit_cap > 0:
            logits = logit_cap * torch.tanh(logits / logit_cap)
        if visible is not None:
            logits[..., prefix:].masked_fill_(~visible[index], -torch.inf)
        attended = torch.einsum("kgrm,mkd->rkgd", logits.softmax(-1), values)
        out[block] = attended.reshape(rows, heads, -1).to(out.dtype)
    return out
