"""Bytes of KV that one step of a request reads, from the models' configs.

A step that verifies a tree or a chain reads the prefix's keys and values once in every layer, however many
rows it has; a drafter's forward reads its own once as well. Nothing else is counted, least of all weights:
at short context they are most of what a step reads.
"""

from __future__ import annotations

from collections.abc import Mapping

from sglang_ddtree_patch.errors import ConfigurationError
from sglang_ddtree_patch.launch.doctor.models import ModelConfig

DTYPE_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "bf16": 2, "float16": 2, "half": 2, "auto": 2}
TP_FLAGS = ("--tp-size", "--tp", "--tensor-parallel-size")


def kv_bytes_a_step(config: ModelConfig, context: int, element_bytes: int, tp_size: int = 1) -> int:
    """Bytes that one GPU of a tensor-parallel group reads of the model's KV at this context length."""
    text = config.text
    if text.get("kv_lora_rank"):
        # Multi-head latent attention: one latent a position, the same on every GPU.
        layer = text["kv_lora_rank"] + text["qk_rope_head_dim"]
    else:
        heads = config.count("num_attention_heads")
        head_dim = text.get("head_dim") or config.count("hidden_size") // heads
        kv_heads = text.get("num_key_value_heads") or heads
        layer = 2 * head_dim * max(1, kv_heads // tp_size)
    return element_bytes * layer * sum(_positions_read(config, context))


def _positions_read(config: ModelConfig, context: int) -> list[int]:
    """Of each layer: all, or those in its window."""
    layers = config.count("num_hidden_layers")
    kinds = config.text.get("layer_types") or ["full_attention"] * layers
    window = config.text.get("sliding_window") or context
    return [min(context, window) if kind == "sliding_attention" else context for kind in kinds[:layers]]


def element_bytes(config: ModelConfig, flags: Mapping[str, str]) -> int:
    """Bytes of one cached number under these SGLang flags.

    Raises:
        ConfigurationError: a type whose size is not known here.
    """
    asked = flags.get("--kv-cache-dtype", "auto")
    if asked.startswith("fp8"):
        return 1
    if asked == "auto":
        asked = flags.get("--dtype", "auto")
    if asked == "auto":
        asked = config.text.get("torch_dtype") or config.text.get("dtype") or "auto"
    if asked not in DTYPE_BYTES:
        raise ConfigurationError(f"bytes of KV are not known for the type {asked}.")
    return DTYPE_BYTES[asked]


def tensor_parallel_size(flags: Mapping[str, str]) -> int:
    return next((int(flags[name]) for name in TP_FLAGS if name in flags), 1)
