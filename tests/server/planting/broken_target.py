"""A test plugin that breaks the target: one token's embedding is NaN, and so is its logit after every token.

From that token on all hidden states of a request that holds it are NaN, its logits and its KV too. To every
other request the token is impossible, where NaN logits are sanitized, and else the likeliest of all.

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

    def break_logits(output, *arguments, **options):
        output.next_token_logits[:, int(token)] = torch.nan

    layers = "sglang.srt.layers"
    HookRegistry.register(
        f"{layers}.vocab_parallel_embedding.VocabParallelEmbedding.forward", embed, HookType.AROUND
    )
    HookRegistry.register(f"{layers}.logits_processor.LogitsProcessor.forward", break_logits, HookType.AFTER)
