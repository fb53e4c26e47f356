"""`ddtree doctor`: do a target and a drafter fit each other? Read from their two config.json files alone.

A drafter lends the target's embedding and head and reads hidden states of some of its layers, so their
shapes must agree. What SGLang or DDTREE would refuse is a problem; what serves the right text with fewer
accepted tokens is a warning.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from sglang_ddtree_patch.errors import ConfigurationError
from sglang_ddtree_patch.launch.doctor.check import Check, ok, problem, warning
from sglang_ddtree_patch.settings import DEFAULT_DRAFT_BLOCK, DRAFT_ARCHITECTURES, MAX_DRAFT_BLOCK

CORRECT_DRAFTER = "Correct the drafter's config.json."
OTHER_DRAFTER = "Give the drafter that was trained for this target."
CHAIN = "Serve this target with --speculative-algorithm DFLASH."
LAYER_TYPES = ("full_attention", "sliding_attention")  # that SGLang's DFlash model knows
DEFAULT_CONTEXT = 2048  # what SGLang assumes where a config names none


@dataclass(frozen=True)
class ModelConfig:
    """A config.json. What describes the language model may lie below `text_config`."""

    path: str
    values: dict[str, Any]

    @property
    def text(self) -> dict[str, Any]:
        return {**self.values, **(self.values.get("text_config") or {})}

    @property
    def drafting(self) -> dict[str, Any]:
        """What describes drafting: below `dflash_config`, and at the top in some checkpoints."""
        return {**self.values, **(self.values.get("dflash_config") or {})}

    def count(self, name: str) -> int:
        value = self.text.get(name)
        if not is_count(value):
            raise ConfigurationError(f"config.json in {self.path} has {name}={value!r}, not a count.")
        return value

    @property
    def rope_scaling(self) -> dict[str, Any]:
        """How rotary positions are stretched; empty where they are not."""
        rope = self.text.get("rope_scaling") or self.text.get("rope_parameters") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        return {} if kind == "default" else {"type": kind, "factor": rope.get("factor"), **rope}

    @property
    def context_length(self) -> int:
        """Positions that SGLang serves: stretched unless the config's figure is so already."""
        rope = self.rope_scaling
        is_stretched = "original_max_position_embeddings" in rope or rope.get("type") == "llama3"
        factor = 1 if is_stretched else rope.get("factor") or 1
        return int(factor * self.text.get("max_position_embeddings", DEFAULT_CONTEXT))


def is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def check_pair(target_path: str, draft_path: str) -> list[Check]:
    """All checks of two models, given as folders or Hugging Face names."""
    try:
        target, draft = read_config(target_path), read_config(draft_path)
        return [
            check_drafter(draft),
            check_target_attention(target),
            check_hidden_size(target, draft),
            check_vocabulary(target, draft),
            check_block_size(draft),
            check_target_layers(target, draft),
            check_mask_token(target, draft),
            check_context(target, draft),
            check_draft_layers(draft),
            check_rope_scaling(target, draft),
        ]
    except ConfigurationError as error:
        return [problem("models", str(error), "Correct the path or the file.")]


def read_config(path: str) -> ModelConfig:
    """Raises ConfigurationError where there is no config.json that can be read."""
    file = Path(path, "config.json") if Path(path).is_dir() else downloaded_config(path)
    if file is None and looks_local(path):
        raise ConfigurationError(f"{path} is no folder.")
    if file is None:
        raise ConfigurationError(f"{path} is no folder and not downloaded: hf download {path} config.json")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{file} cannot be read: {error}.") from error
    if not isinstance(values, dict):
        raise ConfigurationError(f"{file} holds no settings by name.")
    return ModelConfig(path, values)


def looks_local(path: str) -> bool:
    """Whether it can only be a path on this machine, and no Hugging Face name or file, no URL."""
    return path.startswith(("/", ".", "~"))


def downloaded_config(name: str) -> Path | None:
    """The config.json of a Hugging Face model that was downloaded before; the network is not asked."""
    if importlib.util.find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def check_drafter(draft: ModelConfig) -> Check:
    architectures = draft.values.get("architectures") or []
    named = ", ".join(architectures) or "no architecture"
    if not DRAFT_ARCHITECTURES.intersection(architectures):
        advice = f"DDTREE drafts with one of {', '.join(sorted(DRAFT_ARCHITECTURES))}."
        return problem("drafter", f"{named} is no plain DFlash drafter", advice)
    drafting = draft.drafting
    if drafting.get("projector_type") == "domino" or drafting.get("selector_rank"):
        advice = "Give a plain DFlash drafter, or serve this one with --speculative-algorithm DFLASH."
        return problem("drafter", f"{named} with a Domino or selector head, which proposes one chain", advice)
    return ok("drafter", named)


def check_target_attention(target: ModelConfig) -> Check:
    layer_types = target.text.get("layer_types") or []
    others = sorted(set(layer_types) - {"full_attention"})
    if others:
        return problem("target attention", f"{', '.join(others)}: not served by DDTREE yet", CHAIN)
    window = target.text.get("sliding_window")
    if window and not layer_types and target.text.get("use_sliding_window", True):
        advice = "Compare with a server without speculation: DDTREE reads the whole prefix."
        return warning("target attention", f"sliding_window={window}", advice)
    return ok("target attention", "full in every layer")


def check_hidden_size(target: ModelConfig, draft: ModelConfig) -> Check:
    ours, theirs = draft.count("hidden_size"), target.count("hidden_size")
    if ours != theirs:
        return problem("hidden size", f"drafter {ours}, target {theirs}", OTHER_DRAFTER)
    return ok("hidden size", str(theirs))


def check_vocabulary(target: ModelConfig, draft: ModelConfig) -> Check:
    ours, theirs = draft.text.get("vocab_size"), target.count("vocab_size")
    if ours is not None and ours != theirs:
        return problem("vocabulary", f"drafter {ours}, target {theirs}", OTHER_DRAFTER)
    return ok("vocabulary", str(theirs))


def check_block_size(draft: ModelConfig) -> Check:
    block = draft.drafting.get("block_size")
    if block is None:
        advice = "If it was trained with another, say so with --speculative-dflash-block-size."
        return warning("block size", f"none named: SGLang takes {DEFAULT_DRAFT_BLOCK}", advice)
    if not is_count(block) or not 2 <= block <= MAX_DRAFT_BLOCK:
        advice = f"Set --speculative-dflash-block-size to 2 to {MAX_DRAFT_BLOCK}."
        return problem("block size", f"{block!r} cannot be drafted", advice)
    return ok("block size", str(block))


def check_target_layers(target: ModelConfig, draft: ModelConfig) -> Check:
    """The target layers whose hidden states the drafter reads, numbered from 0."""
    name, layers = "target layers", target.count("num_hidden_layers")
    read = draft.drafting.get("target_layer_ids")
    if read is None:
        # SGLang spreads them over layers 1 to layers - 3.
        if layers < 4 and draft.count("num_hidden_layers") > 1:
            return problem(name, f"none named, and {layers} are too few to choose from", OTHER_DRAFTER)
        return ok(name, f"chosen by SGLang, of {layers}")
    if not isinstance(read, list) or not read or not all(map(is_count, read)):
        return problem(name, f"target_layer_ids={read!r} names no layers", CORRECT_DRAFTER)
    if max(read) >= layers:
        return problem(name, f"reads {read}, and the target has 0 to {layers - 1}", OTHER_DRAFTER)
    trained = draft.drafting.get("num_target_layers")
    if trained is not None and trained != layers:
        return warning(name, f"trained for a target of {trained} layers, this has {layers}", OTHER_DRAFTER)
    return ok(name, f"reads {read} of {layers}")


def check_mask_token(target: ModelConfig, draft: ModelConfig) -> Check:
    mask, vocabulary = draft.drafting.get("mask_token_id"), target.count("vocab_size")
    if mask is None:
        advice = "SGLang looks up or adds the token by name: name dflash_config.mask_token_id to be sure."
        return warning("mask token", "no id in the drafter's config", advice)
    if not is_count(mask) or mask >= vocabulary:
        found = f"id {mask!r} is not one of the target's {vocabulary} tokens"
        return problem("mask token", found, OTHER_DRAFTER)
    return ok("mask token", f"id {mask}")


def check_context(target: ModelConfig, draft: ModelConfig) -> Check:
    """The drafter runs at the target's positions, and SGLang refuses one that ends earlier."""
    ours, theirs = draft.context_length, target.context_length
    if ours < theirs:
        advice = (
            f"Serve with --context-length {ours}, or set SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1: drafts "
            "past the drafter's positions are then accepted less often, the text stays the same."
        )
        return problem("context length", f"drafter {ours}, target {theirs}", advice)
    return ok("context length", f"{theirs}" if ours == theirs else f"drafter {ours}, target {theirs}")


def check_draft_layers(draft: ModelConfig) -> Check:
    """Full or sliding attention in each of the drafter's layers."""
    name, layers = "drafter window", draft.count("num_hidden_layers")
    layer_types = draft.text.get("layer_types")
    if layer_types is None:
        return ok(name, "none: full attention")
    unknown = sorted(set(layer_types) - set(LAYER_TYPES))
    if unknown or len(layer_types) < layers:
        found = f"layer_types {unknown}" if unknown else f"{len(layer_types)} layer_types for {layers} layers"
        return problem(name, f"{found}: SGLang cannot build it", CORRECT_DRAFTER)
    if "sliding_attention" not in layer_types:
        return ok(name, "none: full attention")
    window = draft.text.get("sliding_window")
    if not is_count(window):
        advice = "Name sliding_window in the drafter's config.json."
        return problem(name, f"sliding layers and sliding_window={window!r}", advice)
    return ok(name, f"{window} in {layer_types.count('sliding_attention')} of {len(layer_types)} layers")


def check_rope_scaling(target: ModelConfig, draft: ModelConfig) -> Check:
    """Rotary positions are each model's own, but one stretch for both is how drafters are trained."""
    ours, theirs = (describe_stretch(config.rope_scaling) for config in (draft, target))
    if ours == theirs:
        return ok("RoPE scaling", theirs)
    found = f"drafter {ours}, target {theirs}"
    if not draft.rope_scaling:
        return ok("RoPE scaling", found)
    return warning("RoPE scaling", found, f"Fewer tokens may be accepted at long context. {OTHER_DRAFTER}")


def describe_stretch(rope: dict[str, Any]) -> str:
    return f"{rope['type']} x{rope['factor']}" if rope else "none"
