"""A language model with random weights: each token depends on all before it and on its position."""

from __future__ import annotations

import torch
from sglang.srt.layers.radix_attention import RadixAttention

VOCABULARY, HIDDEN, LAYERS, HEADS, KV_HEADS = 61, 64, 2, 4, 2
HEAD_DIM = HIDDEN // HEADS


class ToyModel:
    def __init__(self):
        generator = torch.Generator().manual_seed(3)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator) * shape[0] ** -0.5

        self.embedding = weight(VOCABULARY, HIDDEN) * VOCABULARY**0.5
        self.query = [weight(HIDDEN, HIDDEN) for _ in range(LAYERS)]
        self.key = [weight(HIDDEN, KV_HEADS * HEAD_DIM) for _ in range(LAYERS)]
        self.value = [weight(HIDDEN, KV_HEADS * HEAD_DIM) for _ in range(LAYERS)]
        self.head = weight(HIDDEN, VOCABULARY)
        self.attention = [
            RadixAttention(HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS, layer) for layer in range(LAYERS)
        ]

    def forward(self, forward_batch):
        steps = torch.arange(HIDDEN) / HIDDEN
        hidden = self.embedding[forward_batch.input_ids]
        hidden = hidden + torch.sin(forward_batch.positions[:, None] * 1.7 ** (-8 * steps) + steps)
        for layer, attention in enumerate(self.attention):
            key = (hidden @ self.key[layer]).view(-1, KV_HEADS, HEAD_DIM)
            value = (hidden @ self.value[layer]).view(-1, KV_HEADS, HEAD_DIM)
            attended = attention.forward(hidden @ self.query[layer] * 2, key, value, forward_batch)
            hidden = torch.tanh(hidden + 2 * attended)
        return hidden @ self.head
