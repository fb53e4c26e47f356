"""A test plugin that breaks the target for some requests: the embedding of one token is NaN.

From that token on all hidden states of the request are NaN, its logits and its KV too.

    DDTREE_TEST_NAN_TOKEN   the token
"""

import os

import torch


def load() -> None:
    token = os.environ.get("DDTREE_TEST_NAN_TOKEN")
    if not token:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def embed(original, layer, tokens, *arguments, **options):
        embedded = original(layer, tokens, *arguments, **options)
        return embedded.masked_fill((tokens == int(token)).unsqueeze(-1), torch.nan)

    HookRegistry.register(
        "sglang.srt.layers.vocab_parallel_embedding.VocabParallelEmbedding.forward", embed, HookType.AROUND
    )
