"""Any Hugging Face target, as the drafter's trainer needs it: config, tokenizer, prompts as tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@dataclass
class HFTarget:
    """A target's folder, and what can be asked of it without its weights."""

    folder: Path
    device: str
    config: dict = field(init=False)  # config.json, with what drafters need of it filled in

    def __post_init__(self) -> None:
        config = json.loads((self.folder / "config.json").read_text())
        config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
        config.setdefault("num_key_value_heads", config["num_attention_heads"])
        config.setdefault("rope_theta", config.get("rope_parameters", {}).get("rope_theta", 10000.0))
        self.config = config

    @cached_property
    def tokenizer(self):
        return AutoTokenizer.from_pretrained(self.folder)

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        named = self.config.get("eos_token_id")
        ids = named if isinstance(named, list) else [named]
        return frozenset(i for i in (*ids, self.tokenizer.eos_token_id) if i is not None)

    @property
    def positions(self) -> int:
        return self.config["max_position_embeddings"]

    def mask_token(self, chosen: str | None) -> tuple[str, int]:
        """The token that stands for what is not known yet: one that no text holds.

        Without a choice: the tokenizer's own mask token, or the last of its special tokens that has no role.
        """
        tokenizer = self.tokenizer
        used = {*tokenizer.special_tokens_map.values(), *(tokenizer.get_chat_template() or "").split("'")}
        spare = [
            token.content
            for _, token in sorted(tokenizer.added_tokens_decoder.items())
            if token.special and token.content not in used
        ]
        token = chosen or tokenizer.mask_token or (spare[-1] if spare else None)
        found = None if token is None else tokenizer.get_vocab().get(token)
        if token is None or found is None:
            raise SystemExit(f"no mask token: {token!r} is not in the vocabulary; name one with --mask-token")
        return token, found

    def feature_layers(self, count: int) -> tuple[int, ...]:
        """`count` layers spread from the second to the third last, as 0-based indices."""
        first, last = 1, self.config["num_hidden_layers"] - 3
        if last - first + 1 < count:
            first, last = 0, self.config["num_hidden_layers"] - 2
        count = min(count, last - first + 1)
        steps = max(count - 1, 1)
        return tuple(first + (last - first) * i // steps for i in range(count))

    def model(self):
        """bf16 on a GPU, as it is served; float32 on a CPU."""
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype, attn_implementation="sdpa")
        return model.to(self.device).eval().requires_grad_(False)

    def prompts_ids(self, prompts: Sequence[dict]) -> list[list[int]]:
        """A `text` prompt is continued as it stands, any other is asked through the chat template."""
        found: list[list[int]] = [[]] * len(prompts)
        is_plain = [p["kind"] == "text" or self.tokenizer.chat_template is None for p in prompts]
        for kind in (True, False):
            indices = [index for index, plain in enumerate(is_plain) if plain == kind]
            texts = [prompts[index]["text"] for index in indices]
            if not kind:
                turns = ([{"role": "user", "content": text}] for text in texts)
                texts = [
                    self.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
                    for turn in turns
                ]
            # All at once: the tokenizer takes every core.
            for index, ids in zip(indices, self._encode(texts, special=kind), strict=True):
                found[index] = ids
        return found

    def _encode(self, texts: list[str], special: bool) -> list[list[int]]:
        return self.tokenizer(texts, add_special_tokens=special)["input_ids"] if texts else []

    def prompt_ids(self, prompt: dict) -> list[int]:
        return self.prompts_ids([prompt])[0]

    def opening_ids(self) -> list[int]:
        """The chat template up to where a user's words begin; empty without a template."""
        if self.tokenizer.chat_template is None:
            return []
        words = "what a user says"
        rendered = self.tokenizer.apply_chat_template([{"role": "user", "content": words}], tokenize=False)
        before, found, _ = rendered.partition(words)
        return self.tokenizer(before, add_special_tokens=False)["input_ids"] if found else []
