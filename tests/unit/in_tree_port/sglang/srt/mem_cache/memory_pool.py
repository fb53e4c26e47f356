"""The page table and the KV pools."""

from __future__ import annotations

import torch


class ReqToTokenPool:
    def __init__(self, size: int, max_context_len: int):
        self.req_to_token = torch.zeros((size, max_context_len), dtype=torch.int32)


class MHATokenToKVPool:
    """A slot 0 that padding may write to, then `size` slots."""

    def __init__(self, size: int, layer_num: int, head_num: int, head_dim: int):
        shape = (size + 1, head_num, head_dim)
        # Whatever is read before it was written shows at once.
        self.k_buffer = [torch.full(shape, float("nan")) for _ in range(layer_num)]
        self.v_buffer = [torch.full(shape, float("nan")) for _ in range(layer_num)]

    def get_key_buffer(self, layer_id: int):
        return self.k_buffer[layer_id]

    def get_value_buffer(self, layer_id: int):
        return self.v_buffer[layer_id]

    def set_kv_buffer(self, layer, loc, cache_k, cache_v, k_scale=None, v_scale=None, layer_id_override=None):
        layer_id = layer.layer_id if layer_id_override is None else layer_id_override
        self.k_buffer[layer_id][loc] = cache_k
        self.v_buffer[layer_id][loc] = cache_v


class MLATokenToKVPool:
    """One latent a slot, whose front is the value."""

    def __init__(self, size: int, layer_num: int, kv_lora_rank: int, qk_rope_head_dim: int):
        self.kv_lora_rank = kv_lora_rank
        shape = (size + 1, 1, kv_lora_rank + qk_rope_head_dim)
        self.kv_buffer = [torch.full(shape, float("nan")) for _ in range(layer_num)]

    def get_key_buffer(self, layer_id: int):
        return self.kv_buffer[layer_id]

    def get_value_buffer(self, layer_id: int):
        return self.kv_buffer[layer_id][..., : self.kv_lora_rank]

    def set_kv_buffer(self, layer, loc, cache_k, cache_v):
        self.kv_buffer[layer.layer_id][loc] = cache_k

    def set_mla_kv_buffer(self, layer, loc, cache_k_nope, cache_k_rope):
        self.kv_buffer[layer.layer_id][loc] = torch.cat([cache_k_nope, cache_k_rope], dim=-1)
