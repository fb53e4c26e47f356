"""Probe of `ddtree doctor`: the device, and each implementation of tree attention tried on it.

Every result is compared with the definition of tree attention, computed here in float64 position by
position along the parents of the tree: neither masks nor tiles nor the reference kernel are trusted.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from sglang_ddtree_patch.attention.kernel_choice import REFERENCE, TRITON, own_kernel
from sglang_ddtree_patch.kernels.attention.reference import tree_attention_reference
from sglang_ddtree_patch.kernels.tree.build import ancestor_masks
from sglang_ddtree_patch.launch.doctor.probe import report

PARENTS = (-1, 0, 0, 1, 1, 2, 5, 3)  # two branches that fork again
PREFIX_LENS = (70, 33)  # on either side of a block of keys
PAGE_SIZE = 16
# Relative errors that rounding explains, as in the kernels' own tests.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Heads:
    """The attention heads of a model."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    value_is_key: bool = False  # MLA: the value is the front of the key


HEAD_KINDS = {"GQA": Heads(4, 2, 128, 128), "MLA": Heads(4, 1, 576, 512, value_is_key=True)}


def main() -> None:
    device = _device()
    report("device", _describe(device))
    report("chosen", own_kernel(device))
    if device == "cpu":
        # In time: torch does not import Triton, and nothing above does.
        os.environ["TRITON_INTERPRET"] = "1"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    inputs = {kind: make_inputs(heads, device, dtype) for kind, heads in HEAD_KINDS.items()}
    report("precision", {"dtype": str(dtype).removeprefix("torch."), "tolerance": TOLERANCE[dtype]})
    report(REFERENCE, {kind: relative_error(tree_attention_reference(**i), i) for kind, i in inputs.items()})

    from sglang_ddtree_patch.kernels.attention.tree_attention import tree_attention

    report(
        TRITON,
        {kind: relative_error(tree_attention(**i, page_size=PAGE_SIZE), i) for kind, i in inputs.items()},
    )


def _device() -> str:
    return torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"


def _describe(device: str) -> dict:
    facts = {"type": device, "name": device, "torch": torch.__version__}
    facts |= {"cuda": torch.version.cuda, "rocm": torch.version.hip}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "name": properties.name,
            "capability": [properties.major, properties.minor],
            "memory_gib": round(properties.total_memory / 2**30),
            "count": torch.cuda.device_count(),
        }
    return facts


def make_inputs(heads: Heads, device: str, dtype: torch.dtype) -> dict:
    """The arguments both implementations take, over pages in shuffled order."""
    generator = torch.Generator().manual_seed(0)
    batch, rows = len(PREFIX_LENS), len(PARENTS)
    pages = -(-(max(PREFIX_LENS) + rows) // PAGE_SIZE)
    order = torch.randperm(batch * pages, generator=generator).view(batch, pages, 1)
    table = (order * PAGE_SIZE + torch.arange(PAGE_SIZE)).view(batch, -1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    slots = batch * pages * PAGE_SIZE
    keys = random(slots, heads.kv_heads, heads.key_dim)
    front = keys[..., : heads.value_dim]
    return {
        "query": random(batch * rows, heads.heads, heads.key_dim),
        "key_cache": keys,
        "value_cache": front if heads.value_is_key else random(slots, heads.kv_heads, heads.value_dim),
        "slot_table": table.int().to(device),
        "request_ids": torch.arange(batch, device=device),
        "prefix_lens": torch.tensor(PREFIX_LENS, dtype=torch.int32, device=device),
        "tree_mask": ancestor_masks(torch.tensor([PARENTS] * batch), max_depth=rows).to(device),
        "softmax_scale": heads.key_dim**-0.5,
    }


def relative_error(result: torch.Tensor, inputs: dict) -> float:
    expected = exact_tree_attention(inputs)
    return ((result.double().cpu() - expected).norm() / expected.norm()).item()


def exact_tree_attention(inputs: dict) -> torch.Tensor:
    """Tree attention by its definition, in float64 on the CPU: [batch * rows, heads, value_dim]."""
    query, keys, values = (inputs[name].double().cpu() for name in ("query", "key_cache", "value_cache"))
    table, heads, rows = inputs["slot_table"].cpu(), query.shape[1], len(PARENTS)
    out = torch.empty((*query.shape[:2], values.shape[2]), dtype=torch.float64)
    for request, prefix in enumerate(PREFIX_LENS):
        for row in range(rows):
            slots = table[request, [*range(prefix), *(prefix + seen for seen in path_to(row))]].long()
            for head in range(heads):
                kv_head = head * keys.shape[1] // heads
                logits = keys[slots, kv_head] @ query[request * rows + row, head] * inputs["softmax_scale"]
                out[request * rows + row, head] = logits.softmax(0) @ values[slots, kv_head]
    return out


def path_to(row: int) -> list[int]:
    """The row and its ancestors."""
    path = []
    while row >= 0:
        path.append(row)
        row = PARENTS[row]
    return path


if __name__ == "__main__":
    main()
