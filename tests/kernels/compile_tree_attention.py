"""Compile the table's configurations of tree attention for GPUs that need not be here.

    python tests/kernels/compile_tree_attention.py          every entry and variant for every capability
    python tests/kernels/compile_tree_attention.py --tight  those that come nearest to the GPU's shared
                                                            memory, as far as that is known

Prints one JSON line each: capability, kind, bytes an element, variant, configuration, shared memory used and
allowed.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator

import torch
import triton
from tree_attention_inputs import E4M3_BITS, FLOAT8, Case, make_inputs
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler

from sglang_ddtree_patch.kernels.attention import tree_attention as public
from sglang_ddtree_patch.kernels.attention.configs import (
    CONFIGS,
    SHARED_MEMORY,
    TreeAttentionConfig,
    gpu_class,
)
from sglang_ddtree_patch.kernels.attention.merge import merge_splits
from sglang_ddtree_patch.kernels.attention.split import split_attention

CAPABILITIES = {
    "hopper": [(9, 0)],
    "blackwell": [(10, 0)],
    "ampere": [(8, 0)],
    "compact": [(8, 6), (8, 9), (12, 0)],
}
DTYPES = {2: torch.bfloat16, 4: torch.float32}
# The widest head of each kind, one request of one page: only shapes and strides reach the compiler.
CASES = {
    "gqa": Case(prefixes=(1,), rows=4, heads=8, kv_heads=2, key_dim=128, value_dim=128, page_size=64),
    "gqa-wide": Case(prefixes=(1,), rows=4, heads=8, kv_heads=2, key_dim=256, value_dim=256, page_size=64),
    "mla": Case(
        prefixes=(1,), rows=4, heads=8, kv_heads=1, key_dim=576, value_dim=512, page_size=64, mla=True
    ),
}
# What a layer may ask for besides: the window is shorter than the tree, so its code is the longest there is.
E4M3, E5M2 = FLOAT8
VARIANTS = {
    "plain": {},
    "windowed": {"window": 2, "sinks": True, "mapped": True},
    "e4m3": {"cache_dtype": E4M3},
    "e4m3 bits": {"cache_dtype": E4M3_BITS},
    "e5m2": {"cache_dtype": E5M2},
}
# Beside "plain" for every kind of head: each variant once, where shared memory is scarce.
TIGHT_VARIANTS = {
    ("compact", "gqa"): ["windowed", "e5m2"],
    ("compact", "mla"): ["e4m3"],
    ("ampere", "mla"): ["e4m3 bits"],
}


def variants(name: str, capability: tuple[int, int], kind: str, tight: bool) -> list[str]:
    """The variants to compile; e4m3 as itself where the GPU converts it, else from its bits."""
    wanted = ["plain", *TIGHT_VARIANTS.get((name, kind), [])] if tight else list(VARIANTS)
    other = "e4m3 bits" if capability >= (8, 9) else "e4m3"
    return [variant for variant in wanted if variant != other]


class DriverOf:
    """A Triton driver for a GPU that is not there: enough to compile, not to launch."""

    def __init__(self, capability: tuple[int, int]):
        self.target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch  # keeps the compiled kernels of two GPUs apart

    def get_current_stream(self, device: int) -> int:
        return 0


class CompileOnly:
    """Stands in for a kernel: a launch compiles it and keeps what came out."""

    def __init__(self, kernel: triton.runtime.JITFunction):
        self.kernel = kernel
        self.compiled = None

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            self.compiled = self.kernel.warmup(*arguments, grid=grid, **constants)

        return launch


class Skip:
    """Stands in for a kernel that is not wanted."""

    def __getitem__(self, grid):
        return lambda *arguments, **constants: None


def stop_at_llvm_ir() -> None:
    """Leave out LLVM's optimizer and the assembler: minutes, when shared memory is known already."""

    def stages_left(backend=None, stages=None, options=None, language=None, capability=None):
        if backend is None:  # asked for what tells these kernels from others in Triton's cache
            return "stop at LLVM IR", "stop-at-llvm-ir"
        stages["ptx"] = lambda source, metadata: metadata.update(name="not assembled") or ""
        stages["cubin"] = lambda source, metadata: b""
        return None

    compiler.llvm.optimize_module = lambda *arguments, **options: None
    knobs.runtime.add_stages_inspection_hook = stages_left


def shared_memory(
    capability: tuple[int, int], kind: str, size: int, variant: str, config: TreeAttentionConfig
) -> int:
    """Bytes of shared memory that the compiled kernel uses."""
    triton.runtime.driver.set_active(DriverOf(capability))
    public.split_attention, public.merge_splits = CompileOnly(split_attention), CompileOnly(merge_splits)
    case = CASES[kind].with_(**VARIANTS[variant])
    public.tree_attention(**make_inputs(case, "cpu", DTYPES[size]), page_size=case.page_size, config=config)
    return public.split_attention.compiled.metadata.shared


def entries(tight: bool) -> Iterator[tuple[tuple[int, int], str, int, str, TreeAttentionConfig]]:
    for (name, kind, size), table in CONFIGS.items():
        if tight and not (size == 2 and (kind == "mla" or name == "compact")):
            continue
        capabilities = CAPABILITIES["compact" if name == "any" else name]
        for capability in capabilities[-1:] if tight else capabilities:
            for variant in variants(name, capability, kind, tight):
                for _, config in table[-1:] if tight else table:
                    yield capability, kind, size, variant, config


if __name__ == "__main__":
    tight = "--tight" in sys.argv
    if tight:
        stop_at_llvm_ir()
    for capability, kind, size, variant, config in entries(tight):
        report = {
            "capability": capability,
            "kind": kind,
            "element_size": size,
            "variant": variant,
            "config": dataclasses.asdict(config),
            "shared": shared_memory(capability, kind, size, variant, config),
            "allowed": SHARED_MEMORY[gpu_class(capability)],
        }
        print(json.dumps(report), flush=True)
