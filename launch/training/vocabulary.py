"""The byte-level BPE vocabulary both tiny models share, and its Hugging Face files.

768 entries: 8 special tokens, the 256 bytes, and 504 merges. Small on purpose: the embedding stays a
tenth of the model, and a drafter's token is about two and a half characters, so that a block of eight
covers a few words.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 768
PAD, BOS, END, MASK = "<|pad|>", "<|bos|>", "<|end|>", "<|mask|>"
SYSTEM, USER, ASSISTANT, SPARE = "<|system|>", "<|user|>", "<|assistant|>", "<|spare|>"
SPECIALS = [PAD, BOS, END, MASK, SYSTEM, USER, ASSISTANT, SPARE]  # ids 0 .. 7, in this order
PAD_ID, BOS_ID, END_ID, MASK_ID = range(4)

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


def train_tokenizer(texts: list[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Byte-level BPE over `texts`: any text encodes, and decoding gives it back unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_many(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """The token ids of all texts, one after another: uint16 [tokens]."""
    parts = [
        np.asarray(e.ids, dtype=np.uint16) for e in tokenizer.encode_batch(texts, add_special_tokens=False)
    ]
    return np.concatenate(parts)


def write_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """tokenizer.json and tokenizer_config.json, as the fast tokenizer loader of transformers reads them."""
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "mask_token": MASK,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
