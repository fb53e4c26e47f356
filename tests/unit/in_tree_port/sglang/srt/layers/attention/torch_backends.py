"""Two backends in plain PyTorch: one reads the verify mask, as Triton's does, the other is causal always."""

from __future__ import annotations

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend


class CausalAttnBackend(AttentionBackend):
    takes_masks = False

    def __init__(self, runner):
        self.pool = runner.token_to_kv_pool
        self.req_to_token = runner.req_to_token_pool.req_to_token
        self.page_size = runner.server_args.page_size
        self.masks = None

    def init_forward_metadata(self, forward_batch):
        """A mask [rows, keys] for each request."""
        self.masks = []
        custom_mask = forward_batch.spec_info.custom_mask if forward_batch.spec_info else None
        taken = 0
        for prefix, rows in zip(forward_batch.prefix_lens(), forward_batch.rows(), strict=True):
            if self.takes_masks and custom_mask is not None:
                self.masks.append(custom_mask[taken : taken + rows * (prefix + rows)].view(rows, -1))
                taken += rows * (prefix + rows)
            else:
                self.masks.append(torch.ones(rows, prefix + rows, dtype=torch.bool).tril(prefix))

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        if save_kv_cache:
            self.pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        out, taken = torch.empty_like(q), 0
        repeats = layer.tp_q_head_num // layer.tp_k_head_num
        for request, mask in zip(forward_batch.req_pool_indices.tolist(), self.masks, strict=True):
            rows, keys = mask.shape
            slots = self.slots(request, keys)
            key = self.pool.get_key_buffer(layer.layer_id)[slots].repeat_interleave(repeats, dim=1)
            value = self.pool.get_value_buffer(layer.layer_id)[slots].repeat_interleave(repeats, dim=1)
            query = q[taken : taken + rows].view(rows, layer.tp_q_head_num, layer.qk_head_dim)
            logits = torch.einsum("rhd,khd->hrk", query, key) * layer.scaling
            weights = logits.masked_fill(~mask, -torch.inf).softmax(-1)
            out[taken : taken + rows] = torch.einsum("hrk,khd->rhd", weights, value).flatten(1)
            taken += rows
        return out

    def slots(self, request: int, keys: int) -> torch.Tensor:
        """As paged kernels do: the first slot of each page says where the page is."""
        pages = self.req_to_token[request, : keys : self.page_size].long() // self.page_size
        return (pages[:, None] * self.page_size + torch.arange(self.page_size)).flatten()[:keys]


class TritonAttnBackend(CausalAttnBackend):
    takes_masks = True

    def slots(self, request: int, keys: int) -> torch.Tensor:
        """Key by key."""
        return self.req_to_token[request, :keys].long()
