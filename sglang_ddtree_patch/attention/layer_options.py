"""What a layer's attention needs besides queries, keys, values and the tree: its window, pool and scales."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_ddtree_patch.errors import ConfigurationError

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
USE_CHAIN = "Use --speculative-algorithm DFLASH for this model."

# What a model may hand to attention that changes its result: sparse selections, score functions, biases.
UNSERVED_EXTRAS = ("topk_indices", "idx_q", "score_mod", "aux_tensors", "rel_bias", "k_descale", "v_descale")


def check_layers(model: torch.nn.Module) -> None:
    """Refuse a model whose layers attend otherwise than to the whole prefix or a sliding window.

    `arguments.check_model` refuses some by their config before anything loads; this catches a layer
    whatever flag or config made it so.

    Raises:
        ConfigurationError: a layer with chunks, or a logit temperature by position.
    """
    for layer in model.modules():
        if isinstance(layer, RadixAttention) and (layer.use_irope or layer.xai_temperature_len > 0):
            raise ConfigurationError(
                f"layer {layer.layer_id} of {type(model).__name__} attends to a chunk of the prefix or with "
                f"a temperature by position, which ddtree-verify does not serve yet. {USE_CHAIN}"
            )


def check_pool(kv_pool: Any) -> None:
    """Refuse a pool that keeps window layers in a way of its own.

    Raises:
        ConfigurationError: neither one pool for all layers nor SGLang's pair of a full and a window pool.
    """
    if isinstance(kv_pool, BaseSWAKVPool) and not isinstance(kv_pool, SWAKVPool):
        raise ConfigurationError(
            f"this model keeps its keys and values in a {type(kv_pool).__name__}, which ddtree-verify does "
            f"not read yet. {USE_CHAIN}"
        )


def refuse_extras(layer: Any, extras: dict[str, Any]) -> None:
    """Refuse a forward whose result would need more than queries, keys, values, sinks and the tree.

    Raises:
        ConfigurationError: at the first verify, which is while the server starts.
    """
    asked = [name for name in UNSERVED_EXTRAS if extras.get(name) is not None]
    if asked:
        raise ConfigurationError(
            f"layer {layer.layer_id} attends with {', '.join(asked)}, which ddtree-verify does not serve "
            f"yet. {USE_CHAIN}"
        )


def has_window(layer: Any) -> bool:
    """Whether a layer sees a sliding window of the prefix alone."""
    return layer.sliding_window_size > -1


def window_slot_map(layer: Any, kv_pool: Any) -> torch.Tensor | None:
    """Where the slot table's slots lie in the layer's own pool: int64, or None for a layer without one.

    SGLang keeps the window layers of a hybrid in a smaller pool and frees what leaves the window; the
    map then leads to that pool's slot 0, which is nobody's.
    """
    if isinstance(kv_pool, SWAKVPool):
        _, is_window_layer = kv_pool.layers_mapping[layer.layer_id]
        if is_window_layer:
            return kv_pool.full_to_swa_index_mapping
    return None


def layer_options(layer: Any, kv_pool: Any, sinks: torch.Tensor | None) -> dict[str, Any]:
    """Arguments of `tree_attention` that a layer needs and others do not: not every kernel takes them all.

    Raises:
        ConfigurationError: MLA latents with a scale, which stock backends do not write alike.
    """
    options = {"slot_map": window_slot_map(layer, kv_pool), "sinks": sinks}
    if has_window(layer):
        options["window"] = layer.sliding_window_size
    # A wider pool holds keys and values as they are, scales in the checkpoint or not.
    if kv_pool.dtype in FLOAT8:
        options |= {"k_scale": layer.k_scale_float, "v_scale": layer.v_scale_float}
        if isinstance(kv_pool, MLATokenToKVPool) and layer.k_scale_float not in (None, 1.0):
            raise ConfigurationError(
                f"layer {layer.layer_id} scales its float8 latents by {layer.k_scale_float}, which "
                f"ddtree-verify does not serve yet. {USE_CHAIN}"
            )
    return {name: value for name, value in options.items() if value is not None}
