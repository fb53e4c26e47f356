"""`ddtree serve`: the flags that make a good DDTREE server of this machine and these models, with reasons.

What the user gave is never among them. Everything here is decided from the flags and two config.json, so it
can be read and tested alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sglang_ddtree_patch.errors import ConfigurationError
from sglang_ddtree_patch.launch.doctor.models import ModelConfig, is_count, read_config
from sglang_ddtree_patch.settings import ALGORITHM, BACKEND, DEFAULT_WIDTH

# What `ddtree serve` and `ddtree demo` take where nothing is said. Trees of 32 rows accept 0.2 tokens more
# than those of 16, and of 64 as much again (launch/results/tiny-models-h200.json). A verify costs about the
# same up to one tile of queries, and a third more behind it: 9, 17 and 33 rows of GQA in groups of 4 take 74,
# 75 and 99 us at 64k (kernel-h200.json). No kernel there minds pages of 64, and FlashMLA takes no others.
PAGE_SIZE = 64
CPU_POOL = 65536  # tokens of KV: enough to try things out
TILE_ROWS = 128  # rows of queries that attention kernels take through the keys at once
WIDEST_DEFAULT = 32  # more rows accept little more, and cost more when requests are many

TARGET_FLAGS = ("--model-path", "--model")
DRAFT_FLAGS = ("--speculative-draft-model-path", "--speculative-draft-model")
TP_FLAGS = ("--tp-size", "--tp", "--tensor-parallel-size")


@dataclass(frozen=True)
class Default:
    """One flag that was left open, what it is set to, and why."""

    flag: str
    value: str
    reason: str


def choose_defaults(given: Mapping[str, str], *, on_cpu: bool) -> tuple[Default, ...]:
    """What to add to the flags that were given (by name, with their values)."""
    chosen = []
    if on_cpu:
        chosen += [
            Default("--device", "cpu", "torch sees no accelerator: exact and slow, for trying things out"),
            # bf16 sends SGLang's drafter through kernels that a CPU can only interpret.
            Default("--dtype", "float32", "ten times as fast here as bfloat16"),
            Default("--max-total-tokens", str(CPU_POOL), "SGLang would give its KV cache most of the memory"),
        ]
    if is_ddtree(given):
        chosen += _ddtree_defaults(given)
    return tuple(default for default in chosen if default.flag not in given)


def is_ddtree(given: Mapping[str, str]) -> bool:
    return given.get("--speculative-algorithm", ALGORITHM).upper() == ALGORITHM


def _ddtree_defaults(given: Mapping[str, str]) -> list[Default]:
    wraps = "verifies trees, in front of the backend SGLang chooses for this model and device"
    chosen = [
        Default("--speculative-algorithm", ALGORITHM, "what this command is for"),
        Default("--attention-backend", BACKEND, wraps),
        Default("--page-size", str(PAGE_SIZE), "every backend takes it, and trees need no other"),
    ]
    target, draft = (config_of(given, names) for names in (TARGET_FLAGS, DRAFT_FLAGS))
    if target is not None:
        chosen.append(choose_width(target, tensor_parallel(given)))
    window = trained_window(draft) if draft is not None else None
    if window is not None:
        reason = f"every layer of this drafter was trained on the last {window} positions"
        chosen.append(Default("--speculative-draft-window-size", str(window), reason))
    return chosen


def first_given(given: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((given[name] for name in names if name in given), None)


def config_of(given: Mapping[str, str], names: tuple[str, ...]) -> ModelConfig | None:
    """The config.json of a model on this disk; None where SGLang has to download it first."""
    path = first_given(given, names)
    try:
        return None if path is None else read_config(path)
    except ConfigurationError:
        return None


def tensor_parallel(given: Mapping[str, str]) -> int:
    value = first_given(given, TP_FLAGS) or "1"
    return int(value) if value.isdecimal() and int(value) else 1


def choose_width(target: ModelConfig, tp_size: int) -> Default:
    """As many rows as go through the keys at once with all query heads that share a KV head."""
    group = heads_a_kv_head(target, tp_size)
    fitting = TILE_ROWS // group if group else 0
    width = min(max(fitting, DEFAULT_WIDTH), WIDEST_DEFAULT)
    if width * (group or 0) in range(1, TILE_ROWS + 1):
        reason = f"with {group} query heads a KV head they fit a tile of {TILE_ROWS}: the prefix is read once"
        if fitting > width:
            reason += "; wider trees accept little more"
    else:
        reason = "the plugin's own default"
    return Default("--speculative-num-draft-tokens", str(width), f"tree rows; {reason}")


def heads_a_kv_head(target: ModelConfig, tp_size: int) -> int | None:
    """Query heads of one rank that read the same keys; None where the config does not say."""
    heads, kv_heads = target.text.get("num_attention_heads"), target.text.get("num_key_value_heads")
    if not is_count(heads) or not heads:
        return None
    if target.text.get("kv_lora_rank") is not None:  # MLA: one latent for all heads
        return max(heads // tp_size, 1)
    return heads // kv_heads if is_count(kv_heads) and kv_heads else 1


def trained_window(draft: ModelConfig) -> int | None:
    """The window of a drafter none of whose layers reads further back; None for any other."""
    layer_types, window = draft.text.get("layer_types"), draft.text.get("sliding_window")
    return window if layer_types and set(layer_types) == {"sliding_attention"} and is_count(window) else None
