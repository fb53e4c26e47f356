"""A test plugin that lets gpt-oss's experts run on a CPU without AMX.

SGLang loads their weights as [inputs, outputs], and its plain CPU path multiplies by [outputs, inputs].

    DDTREE_TEST_GPT_OSS    set: hook that path
"""

import os
from types import SimpleNamespace


def load() -> None:
    if not os.environ.get("DDTREE_TEST_GPT_OSS"):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.layers.moe.fused_moe_native.moe_forward_native", with_weights_turned, HookType.AROUND
    )


def with_weights_turned(original, layer, *arguments, **options):
    turned = SimpleNamespace(
        num_experts=layer.num_experts,
        w13_weight=layer.w13_weight.transpose(1, 2),
        w2_weight=layer.w2_weight.transpose(1, 2),
        w13_weight_bias=layer.w13_weight_bias,
        w2_weight_bias=layer.w2_weight_bias,
    )
    return original(turned, *arguments, **options)
