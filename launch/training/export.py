"""Write a trained model as a Hugging Face folder: config.json, model.safetensors in bf16, tokenizer files."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from targets import CONFIGS, MAX_POSITIONS
from tokenizers import Tokenizer
from vocabulary import BOS_ID, END_ID, PAD_ID, write_tokenizer

from sglang_ddtree_patch.launch.weights import save_weights


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_weights(module: torch.nn.Module, folder: Path, dropped: frozenset[str] = frozenset()) -> int:
    """model.safetensors with every parameter but `dropped`, rounded to bf16; returns its bytes."""
    weights = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in module.state_dict().items()
        if name not in dropped
    }
    save_weights(weights, folder / "model.safetensors")
    return (folder / "model.safetensors").stat().st_size


def write_target(model: torch.nn.Module, name: str, tokenizer: Tokenizer, folder: Path) -> int:
    """The target's folder; a tied head is left out, as the config says where to find it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIGS[name]
    write_json(folder / "config.json", config)
    write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": BOS_ID,
            "eos_token_id": END_ID,
            "pad_token_id": PAD_ID,
            "do_sample": False,
        },
    )
    write_tokenizer(tokenizer, folder, MAX_POSITIONS)
    tied = frozenset({"lm_head.weight"}) if config["tie_word_embeddings"] else frozenset()
    return write_weights(model, folder, tied)


def write_drafter(drafter: torch.nn.Module, config: dict, folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    return write_weights(drafter, folder)
