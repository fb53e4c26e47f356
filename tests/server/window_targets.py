"""Small targets with sliding-window layers, made by the tests: their oracle is stock SGLang, not quality."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sglang_ddtree_patch import model_catalog

WINDOW = 24  # positions a window layer sees, its own included; SGLang counts one less
LAYERS = 4
LAYER_TYPES = ["sliding_attention", "full_attention"] * (LAYERS // 2)
SOURCE = "tiny-gqa"  # tokenizer, vocabulary and hidden size, so that its drafter fits


def write_model(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    """A model folder with the tokenizer of `SOURCE`."""
    folder.mkdir(parents=True)
    for file in (model_catalog.path(SOURCE) / "target").iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, folder / file.name)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def source_config() -> dict[str, Any]:
    return json.loads((model_catalog.path(SOURCE) / "target" / "config.json").read_text())


def laguna(folder: Path) -> Path:
    """Laguna without gates and experts is Qwen3 with windows: `SOURCE` with them. Its drafter fits."""
    weights = load_file(model_catalog.path(SOURCE) / "target" / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    config = source_config() | {
        "architectures": ["LagunaForCausalLM"],
        "model_type": "laguna",
        "gating": False,
        "num_experts": 0,
        "mlp_layer_types": ["dense"] * LAYERS,
        "layer_types": LAYER_TYPES,
        "sliding_window": WINDOW,
        "tie_word_embeddings": False,
    }
    del config["use_sliding_window"]
    return write_model(folder, config, weights)


def gpt_oss(folder: Path, dtype: str = "float32") -> Path:
    """gpt-oss with random weights: windows, sinks, biases and experts."""
    config = source_config() | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_local_experts": 2,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "layer_types": LAYER_TYPES,
        "sliding_window": WINDOW,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,  # SGLang makes these layers by the config, whatever --dtype says
    }
    del config["use_sliding_window"]
    hidden, inner, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    heads, kv_heads, head_dim = (
        config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, scale: float = 0.1) -> torch.Tensor:
        return (scale * torch.randn(shape, generator=generator)).bfloat16()

    weights = {
        "model.embed_tokens.weight": random(config["vocab_size"], hidden, scale=1.0),
        "model.norm.weight": torch.ones(hidden).bfloat16(),
        "lm_head.weight": random(config["vocab_size"], hidden),
    }
    for number in range(LAYERS):
        layer = {
            "input_layernorm.weight": torch.ones(hidden).bfloat16(),
            "post_attention_layernorm.weight": torch.ones(hidden).bfloat16(),
            "self_attn.sinks": random(heads, scale=2.0),
            "mlp.router.weight": random(experts, hidden),
            "mlp.router.bias": random(experts),
            "mlp.experts.gate_up_proj": random(experts, hidden, 2 * inner),
            "mlp.experts.gate_up_proj_bias": random(experts, 2 * inner),
            "mlp.experts.down_proj": random(experts, inner, hidden),
            "mlp.experts.down_proj_bias": random(experts, hidden),
            "self_attn.o_proj.weight": random(hidden, heads * head_dim),
            "self_attn.o_proj.bias": random(hidden),
        }
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            layer[f"self_attn.{name}_proj.weight"] = random(count * head_dim, hidden, scale=0.2)
            layer[f"self_attn.{name}_proj.bias"] = random(count * head_dim)
        weights |= {f"model.layers.{number}.{name}": weight for name, weight in layer.items()}
    return write_model(folder, config, weights)


def windowed_drafter(folder: Path, window: int, **settings: Any) -> Path:
    """The drafter of `SOURCE` with a window in every other layer."""
    shutil.copytree(model_catalog.path(SOURCE) / "draft", folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"layer_types": LAYER_TYPES, "sliding_window": window, "use_sliding_window": True, **settings}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
