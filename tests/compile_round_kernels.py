"""Compile the kernels between the two forwards (tree, accept, commit) for GPUs that need not be here.

Prints one JSON line each: capability, kernel, size, and of its PTX the number of reductions over a whole warp
in one instruction and the order of loads, barriers and stores, of which the interpreter knows nothing.
"""

from __future__ import annotations

import itertools
import json
import re

import torch
import triton
from compile_tree_attention import CompileOnly, DriverOf

from sglang_ddtree_patch.kernels import accept_kernel, commit, tree_kernel

CAPABILITIES = [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)]
# Width, block, candidates: one for each power of two of rows, up to the largest of each.
SIZES = [(1, 1, 1), (17, 16, 8), (64, 16, 8), (100, 8, 64), (256, 32, 64)]


def memory_order(ptx: str) -> list[str]:
    """What is done to memory, from the top of the code to its end, runs of a kind said once."""
    kinds = {"ld.global": "load", "st.global": "store", "bar": "barrier"}
    found = re.findall(r"\b(ld\.global|st\.global|bar)(?:\.|rier)", ptx)
    return [kind for kind, _ in itertools.groupby(kinds[name] for name in found)]


def compile_kernels(width: int, block: int, candidates: int) -> dict[str, str]:
    """PTX of each kernel; shapes and types are all that reaches the compiler."""
    kernels = {
        "tree": (tree_kernel, "_build_tree"),
        "accept": (accept_kernel, "_walk"),
        "commit": (commit, "_move_rows"),
    }
    compilers = {}
    for name, (module, attribute) in kernels.items():
        kernel = getattr(module, attribute)
        kernel = kernel.kernel if isinstance(kernel, CompileOnly) else kernel
        compilers[name] = CompileOnly(kernel)
        setattr(module, attribute, compilers[name])

    lens = torch.zeros(1, dtype=torch.int64)
    shape = (1, block - 1, candidates)
    tree = tree_kernel.build_token_tree_triton(
        lens, torch.zeros(shape, dtype=torch.int64), torch.zeros(shape), width, lens
    )
    accepted = accept_kernel.accept_greedy_triton(
        tree.tokens, tree.parents, tree.tokens, min(width, block), lens
    )
    layers = [torch.zeros(4, 8, 128, dtype=torch.bfloat16), torch.zeros(4, 1, 576, dtype=torch.bfloat16)]
    slots = torch.zeros(1, max(width, block), dtype=torch.int64)
    commit.commit_rows(commit.RowBuffers.of(layers), slots, accepted.rows)
    return {name: compiler.compiled.asm["ptx"] for name, compiler in compilers.items()}


if __name__ == "__main__":
    for capability in CAPABILITIES:
        triton.runtime.driver.set_active(DriverOf(capability))
        for size in SIZES:
            for kernel, ptx in compile_kernels(*size).items():
                report = {
                    "capability": capability,
                    "kernel": kernel,
                    "size": size,
                    "reductions": ptx.count("redux.sync"),
                    "order": memory_order(ptx),
                }
                print(json.dumps(report), flush=True)
