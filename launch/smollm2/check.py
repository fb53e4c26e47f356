"""Hold a converted folder to transformers' own loading of the same GGUF file.

transformers takes the tensors from another reader and another dequantizer, the package `gguf`'s, and maps
them to its own Llama model and tokenizer. Its `load_gguf_checkpoint` is called, which `from_pretrained` calls
too, but only where the package `accelerate` is installed. Three things must agree:

- every weight, to the last bit after rounding to the folder's dtype;
- greedy continuations of a few prompts, token by token;
- token ids of texts with special tokens, and what they decode to.

transformers splits numbers from what stands before them as GPT-2 does and not digit by digit, as this model
was trained. That shows where a number follows two spaces and in numerals such as ½: texts with these are not
among those compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from sglang_ddtree_patch.errors import ConfigurationError

PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Write a Python function that returns the sum of the even numbers in a list.",
    "I have 12 apples and give away 5. How many are left?",
)
NEW_TOKENS = 24
TEXTS = (
    "Don't stop: 3 cats, 12 dogs and 2026 birds.",
    "def f(x):\n    return x ** 2  # squared\n\n\nprint(f(12))\t\n",
    "Äpfel, naïve café, 東京, 🙂",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|><repo_name>a/b<file_sep>",
    "  leading and trailing  ",
)


def check_against_transformers(gguf: Path, folder: Path, say: Callable[[str], None]) -> None:
    """Compare; the first difference ends it.

    Raises:
        ConfigurationError: names what differs.
    """
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    ours = LlamaForCausalLM.from_pretrained(folder, dtype="auto").eval()
    say("check: transformers reads the GGUF file itself, half a minute or more")
    with torch.device("meta"):
        skeleton = LlamaForCausalLM(ours.config)
    loaded = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=skeleton)
    theirs = LlamaForCausalLM(LlamaConfig(**loaded["config"]))
    missing, unexpected = theirs.load_state_dict(loaded["tensors"], strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ConfigurationError(f"transformers found other weights: {[*missing, *unexpected][:4]}.")
    theirs.tie_weights()
    theirs = theirs.to(ours.dtype).eval()

    compare_weights(ours.state_dict(), theirs.state_dict())
    say(f"check: all {len(ours.state_dict())} weights are equal to the last bit")

    tokenizer = AutoTokenizer.from_pretrained(folder)
    compare_tokenizers(tokenizer, AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name))
    say("check: token ids, special tokens and what they decode to are equal")

    for prompt in PROMPTS:
        ids = tokenizer(chat_text(tokenizer, prompt), add_special_tokens=False)["input_ids"]
        texts = [greedy(model.float(), ids) for model in (ours, theirs)]
        if texts[0] != texts[1]:
            raise ConfigurationError(f"the greedy continuations of {prompt!r} differ: {texts}.")
    say(f"check: greedy continuations of {len(PROMPTS)} prompts are equal, for example")
    say("  " + tokenizer.decode(texts[0], skip_special_tokens=True).replace("\n", "\n  "))


def compare_weights(ours, theirs) -> None:
    import torch

    if set(ours) != set(theirs):
        raise ConfigurationError(f"other weights: {sorted(set(ours) ^ set(theirs))[:4]}.")
    for name, weight in ours.items():
        if not torch.equal(weight, theirs[name]):
            raise ConfigurationError(f"the weight {name} differs from what transformers reads.")


def compare_tokenizers(ours, theirs) -> None:
    if ours.special_tokens_map != theirs.special_tokens_map:
        raise ConfigurationError(f"special tokens: {ours.special_tokens_map}, {theirs.special_tokens_map}.")
    if ours.chat_template != theirs.chat_template:
        raise ConfigurationError("the chat templates differ.")
    for text in (*TEXTS, chat_text(ours, PROMPTS[0])):
        ids = ours(text)["input_ids"]
        if ids != theirs(text)["input_ids"]:
            raise ConfigurationError(f"the token ids of {text!r} differ from transformers'.")
        if ours.decode(ids) != text or theirs.decode(ids) != text:
            raise ConfigurationError(f"{text!r} decodes to {ours.decode(ids)!r}.")


def chat_text(tokenizer, prompt: str) -> str:
    turn = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)


def greedy(model, ids: Sequence[int]) -> list[int]:
    """The argmax at each step, in float32 and without sampling parameters of any config."""
    import torch

    step, cache, made = torch.tensor([ids]), None, []
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            out = model(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1)
            step, cache = out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values
            made.append(step.item())
    return made
