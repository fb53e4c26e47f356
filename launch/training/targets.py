"""The two tiny targets: their shapes, their forward with drafter features, greedy text from them.

The modelling code is transformers' own, so that a checkpoint trained here means the same thing to every
engine that reads the format. Sizes are the smallest that keep the real attention layouts:

- `gqa`: Qwen3, 4 query heads sharing 2 KV heads, 64 wide, tied embedding and head;
- `mla`: DeepSeek V3 with the latent sizes of the large models (512 + 64 a token), 2 heads, low-rank
  queries, dense layers only, YaRN rotary scaling whose mscale enters the softmax scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from vocabulary import BOS_ID, END_ID, PAD_ID, VOCAB_SIZE

MAX_POSITIONS = 4096

COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "intermediate_size": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": MAX_POSITIONS,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.05,
    "use_cache": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": BOS_ID,
    "eos_token_id": END_ID,
    "pad_token_id": PAD_ID,
}

CONFIGS: dict[str, dict] = {
    "gqa": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **COMMON,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": None,
    },
    "mla": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **COMMON,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        # qk = 64 + 64 equals v = 128: prefill kernels that want one head width take it.
        "q_lora_rank": 64,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_interleave": True,
        "rope_scaling": {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        # Every layer is dense: the first MoE layer would come after the last one.
        "first_k_dense_replace": 4,
        "moe_layer_freq": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
    },
}

# 0-based layers whose outputs feed the drafter. SGLang records the residual stream before layer k + 1, so
# the last layer cannot be one of them.
FEATURE_LAYERS = (0, 1, 2)


def new_target(name: str) -> nn.Module:
    """A freshly initialised float32 target on the CPU."""
    fields = dict(CONFIGS[name])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")


def load_target(folder, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The exported target, its bf16 weights widened to `dtype`."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()


def features(model: nn.Module, ids: torch.Tensor, layers: Sequence[int] = FEATURE_LAYERS) -> torch.Tensor:
    """ids [S, T] -> the drafter's features [S, T, len(layers) * H]; the head is not run.

    hidden_states[0] is the embedding, hidden_states[k + 1] the residual stream after layer k.
    """
    out = model.get_decoder()(input_ids=ids, output_hidden_states=True, use_cache=False)
    return torch.cat([out.hidden_states[layer + 1] for layer in layers], dim=-1)


@torch.no_grad()
def greedy(model: nn.Module, prompt: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """Continue prompts of one length: [S, P] -> [S, P + new_tokens], the argmax at each step."""
    ids, step, cache = [prompt], prompt, None
    for _ in range(new_tokens):
        out = model(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1)
        step, cache = out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values
        ids.append(step)
    return torch.cat(ids, dim=1)
