"""Compile the launch that finishes a vendor's prefix for GPUs that need not be here.

    python tests/kernels/compile_finish.py          every tile shape for GPUs that a vendor's kernel serves
    python tests/kernels/compile_finish.py --tight  the largest tile of each kind of head on Hopper

Prints one JSON line each: capability, tile, shared memory used and allowed.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import torch
import triton
from compile_tree_attention import CASES, CompileOnly, DriverOf
from tree_attention_inputs import make_inputs

from sglang_ddtree_patch.kernels.attention import finish as public
from sglang_ddtree_patch.kernels.attention.configs import SHARED_MEMORY, gpu_class
from sglang_ddtree_patch.kernels.attention.finish import FinishConfig, finish_attention

HOPPER, AMPERE, COMPACT = (9, 0), (8, 0), (8, 9)
# What `choose_finish_config` may return for each kind of head, largest first, with the most keys at a time.
TILES = {
    "gqa": [(64, 128), (32, 128), (16, 128), (16, 64)],
    "gqa-wide": [(32, 256), (16, 256), (16, 128), (16, 64)],
    "mla": [(32, 256), (16, 256), (16, 128), (16, 64)],
}


def compile_one(
    capability: tuple[int, int], kind: str, config: FinishConfig
) -> triton.compiler.CompiledKernel:
    triton.runtime.driver.set_active(DriverOf(capability))
    public.finish_attention = CompileOnly(finish_attention)
    inputs = make_inputs(CASES[kind], "cpu", torch.bfloat16)
    query, values = inputs["query"], inputs["value_cache"]
    rows = len(query)
    public.finish_tree_attention(
        query.new_empty(rows, query.shape[1], values.shape[2]),
        torch.empty(1, query.shape[1], rows),
        block_slots=torch.zeros(1, rows, dtype=torch.int32),
        **{name: inputs[name] for name in ("query", "key_cache", "value_cache", "prefix_lens", "tree_mask")},
        softmax_scale=inputs["softmax_scale"],
        config=config,
    )
    return public.finish_attention.compiled


if __name__ == "__main__":
    tight = "--tight" in sys.argv
    for kind, tiles in TILES.items():
        capabilities = [HOPPER] if tight or kind == "mla" else [HOPPER, AMPERE, COMPACT]
        for capability in capabilities:
            for block_m, columns in tiles[:1] if tight else tiles:
                config = FinishConfig(block_m, columns, tail_block=64, warps=4 if kind == "gqa" else 8)
                report = {
                    "capability": capability,
                    "kind": kind,
                    "config": dataclasses.asdict(config),
                    "shared": compile_one(capability, kind, config).metadata.shared,
                    "allowed": SHARED_MEMORY[gpu_class(capability)],
                }
                print(json.dumps(report), flush=True)
