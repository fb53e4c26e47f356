"""SmolLM2's GGUF file as a Hugging Face folder: config, weights, tokenizer, chat template.

Two things in the file are not as Hugging Face's Llama wants them. Rows of the query and key projections of a
head are interleaved (rotary pairs side by side) and go back to halves. And the file only names the
tokenizer's way of splitting text, `smollm`: every digit by itself, then GPT-2's expression.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from sglang_ddtree_patch.launch.smollm2.gguf_file import GGUFError, GGUFFile
from sglang_ddtree_patch.launch.weights import save_weights

SPECIAL = 3  # a token's type in the file: control
WEIGHTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_target(source: GGUFFile, folder: Path, dtype: str) -> None:
    """Everything a server needs of the target, into an existing folder."""
    write_json(folder / "config.json", model_config(source, dtype))
    write_json(folder / "generation_config.json", generation_config(source))
    write_tokenizer(source, folder)
    write_weights(source, folder / "model.safetensors", dtype)


def model_config(source: GGUFFile, dtype: str) -> dict:
    metadata = source.metadata
    expected = {"general.architecture": "llama", "tokenizer.ggml.pre": "smollm"}
    for key, value in expected.items():
        if metadata.get(key) != value:
            raise GGUFError(f"{key} is {metadata.get(key)!r} and not {value!r}")
    heads, hidden = metadata["llama.attention.head_count"], metadata["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "max_position_embeddings": metadata["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": metadata["llama.block_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "rms_norm_eps": round(metadata["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": metadata["llama.rope.freq_base"],
        "tie_word_embeddings": "output.weight" not in source.tensors,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": metadata["llama.vocab_size"],
    }


def generation_config(source: GGUFFile) -> dict:
    names = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
    ids = {ours: source.metadata[f"tokenizer.ggml.{theirs}_token_id"] for theirs, ours in names.items()}
    return {**ids, "do_sample": False}


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`"""
    whole = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if name in whole:
        return whole[name]
    parts = name.split(".")
    if len(parts) != 4 or parts[0::3] != ["blk", "weight"] or parts[2] not in WEIGHTS:
        raise GGUFError(f"tensor {name} has no place in a Llama model")
    return f"model.layers.{parts[1]}.{WEIGHTS[parts[2]]}.weight"


def halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rotary pairs from side by side to half a head apart: [heads * D, H]."""
    pairs = weight.reshape(heads, -1, 2, weight.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def read_weight(source: GGUFFile, name: str) -> np.ndarray:
    """One tensor in float32, its rows in Hugging Face's order."""
    weight = source.read(name)
    if ".attn_q." in name:
        return halves(weight, source.metadata["llama.attention.head_count"])
    if ".attn_k." in name:
        return halves(weight, source.metadata["llama.attention.head_count_kv"])
    return weight


def write_weights(source: GGUFFile, path: Path, dtype: str) -> None:
    import torch

    weights = {
        hugging_face_name(name): torch.from_numpy(read_weight(source, name).copy()).to(getattr(torch, dtype))
        for name in source.tensors
    }
    save_weights(weights, path)


def write_tokenizer(source: GGUFFile, folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    metadata = source.metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == SPECIAL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)

    def named(role: str) -> str:
        return tokens[metadata[f"tokenizer.ggml.{role}_token_id"]]

    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": metadata["tokenizer.ggml.add_bos_token"],
        "add_prefix_space": metadata["tokenizer.ggml.add_space_prefix"],
        "bos_token": named("bos"),
        "eos_token": named("eos"),
        "pad_token": named("padding"),
        "unk_token": named("unknown"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        "chat_template": metadata["tokenizer.chat_template"],
    }
    write_json(folder / "tokenizer_config.json", config)


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
