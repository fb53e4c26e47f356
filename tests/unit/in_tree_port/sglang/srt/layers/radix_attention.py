"""One attention layer, as backends see it."""

from __future__ import annotations


class RadixAttention:
    def __init__(self, num_heads: int, head_dim: int, scaling: float, num_kv_heads: int, layer_id: int):
        self.tp_q_head_num = num_heads
        self.tp_k_head_num = num_kv_heads
        self.qk_head_dim = head_dim
        self.v_head_dim = head_dim
        self.scaling = scaling
        self.layer_id = layer_id
        self.logit_cap = 0.0
        self.sliding_window_size = -1

    def forward(self, q, k, v, forward_batch):
        return forward_batch.attn_backend.forward(q, k, v, self, forward_batch, save_kv_cache=True)
