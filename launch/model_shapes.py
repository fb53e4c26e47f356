"""Config folders of well-known model shapes, for servers whose weights are random.

`--load-format dummy` needs no weights and `--skip-tokenizer-init` no tokenizer, so such a folder holds a
config.json alone. A step costs what the real model's would: the same matrices, the same KV. A drafter with
random weights is always wrong, so nothing is ever accepted.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DUMMY_FLAGS = ("--load-format", "dummy", "--skip-tokenizer-init")
# Room for 185k tokens and more: with random weights no position has been trained anyway.
POSITIONS = 262144
DRAFT_LAYERS, DRAFT_BLOCK = 5, 16


@dataclass(frozen=True)
class ModelShape:
    """The configs of a target and its drafter."""

    target: dict[str, Any]
    draft: dict[str, Any]


QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16",
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936, "rms_norm_eps": 1e-6,
    "max_position_embeddings": POSITIONS, "rope_theta": 1000000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "attention_bias": False, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip

# Multi-head latent attention, 64 routed experts. Its positions end at 160k.
DEEPSEEK_V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "torch_dtype": "bfloat16",
    "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27, "vocab_size": 102400,
    "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64,
    "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "n_group": 1,
    "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False,
    "routed_scaling_factor": 1.0, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "max_position_embeddings": 163840, "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "rope_scaling": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
        "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
    },
    "tie_word_embeddings": False, "attention_bias": False, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def dflash_drafter(target: dict[str, Any], mask_token_id: int, **attention: Any) -> dict[str, Any]:
    """A DFlash drafter for the target: Qwen3 layers of its width, reading layers spread over its depth."""
    layers = target["num_hidden_layers"]
    spread = [1 + round(index * (layers - 4) / (DRAFT_LAYERS - 1)) for index in range(DRAFT_LAYERS)]
    shared = (
        "torch_dtype", "hidden_size", "intermediate_size", "vocab_size", "rms_norm_eps", "rope_theta",
        "max_position_embeddings", "hidden_act", "attention_bias", "bos_token_id", "eos_token_id",
    )  # fmt: skip
    return {
        **{name: target[name] for name in shared},
        **attention,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": DRAFT_LAYERS,
        "block_size": DRAFT_BLOCK,
        "num_target_layers": layers,
        "tie_word_embeddings": False,
        "dflash_config": {
            "mask_token": "<|mask|>",
            "mask_token_id": mask_token_id,
            "target_layer_ids": spread,
        },
    }


SHAPES = {
    "qwen3-8b-shapes": ModelShape(
        QWEN3_8B,
        dflash_drafter(QWEN3_8B, 151669, head_dim=128, num_attention_heads=32, num_key_value_heads=8),
    ),
    "deepseek-v2-lite-shapes": ModelShape(
        DEEPSEEK_V2_LITE,
        dflash_drafter(DEEPSEEK_V2_LITE, 102399, head_dim=128, num_attention_heads=16, num_key_value_heads=4),
    ),
}


def write_shape(name: str, folder: Path) -> None:
    """Write `target/config.json` and `draft/config.json` of the shape below the folder."""
    shape = SHAPES[name]
    for part, config in (("target", shape.target), ("draft", shape.draft)):
        (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / part / "config.json").write_text(json.dumps(config, indent=1) + "\n")
