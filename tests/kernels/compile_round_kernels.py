"""Compile the kernels around the two forwards of a round for GPUs that need not be here.

Prints one JSON line each: capability, kernel, size, and of its PTX the number of reductions over a whole warp
in one instruction, the widest load in bytes, and the order of loads, barriers and stores: things of which the
interpreter knows nothing.
"""

from __future__ import annotations

import itertools
import json
import re

import torch
import triton
from compile_tree_attention import CompileOnly, DriverOf

from sglang_ddtree_patch.kernels import commit, slots_kernel
from sglang_ddtree_patch.kernels.accept import walk_kernel as accept_kernel
from sglang_ddtree_patch.kernels.tree import build_kernel as tree_kernel
from sglang_ddtree_patch.kernels.tree import candidates_kernel

CAPABILITIES = [(8, 0), (9, 0), (10, 0), (12, 0)]
# Width, block, candidates: the least, the usual, and the largest of each, whose masks have several words.
VOCABULARY = 151936
SIZES = [(1, 1, 1), (17, 16, 8), (256, 32, 64)]


def memory_order(ptx: str) -> list[str]:
    """What is done to memory, from the top of the code to its end, runs of a kind said once."""
    kinds = {"ld.global": "load", "st.global": "store", "bar": "barrier"}
    found = re.findall(r"\b(ld\.global|st\.global|bar)(?:\.|rier)", ptx)
    return [kind for kind, _ in itertools.groupby(kinds[name] for name in found)]


def widest_load(ptx: str) -> int:
    """Bytes of a thread's widest load from global memory."""
    loads = re.findall(r"ld\.global(?:\.\w+(?:::\w+)?)*?(?:\.v(\d))?\.b(\d+)", ptx)
    return max(int(count or 1) * int(bits) // 8 for count, bits in loads)


def compile_kernels(width: int, block: int, candidates: int) -> dict[str, str]:
    """PTX of each kernel; shapes and types are all that reaches the compiler."""
    kernels = {
        "slots": (slots_kernel, "_next_slots"),
        "scan": (candidates_kernel, "_scan_tiles"),
        "pick": (candidates_kernel, "_pick_best"),
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

    logits = torch.empty(2, VOCABULARY, dtype=torch.bfloat16)
    candidates_kernel.top_log_probs_triton(logits, candidates)
    lens = torch.zeros(1, dtype=torch.int64)
    slots_kernel.next_slots_triton(
        torch.zeros(4, 4096, dtype=torch.int32), lens, lens, lens, lens.new_zeros(1, block), max(width, block)
    )
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
                    "widest_load": widest_load(ptx),
                    "order": memory_order(ptx),
                }
                print(json.dumps(report), flush=True)
