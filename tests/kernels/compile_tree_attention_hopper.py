"""Compile the Hopper kernels of tree attention without a GPU and print what the assembler says of each.

    python tests/kernels/compile_tree_attention_hopper.py

One JSON line a configuration: kind, rows, programs meant for a multiprocessor, shared memory and spills in
bytes, warnings.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from compile_tree_attention import CompileOnly, DriverOf, Skip
from tree_attention_inputs import Case, make_inputs

from sglang_ddtree_patch.kernels.attention.configs import HeadShape
from sglang_ddtree_patch.kernels.attention.hopper import tree_attention as public

GQA = Case(prefixes=(1,), heads=32, kv_heads=8, key_dim=128, value_dim=128, page_size=64)
CASES = {
    "gqa-128": [GQA.with_(rows=rows) for rows in (16, 32, 48, 64)],  # one for each configuration
    "gqa-64": [GQA.with_(rows=17, key_dim=64, value_dim=64)],
    "mla": [GQA.with_(rows=17, heads=8, kv_heads=1, key_dim=576, value_dim=512, mla=True)],
}


def compiled(case: Case) -> triton.compiler.CompiledKernel:
    kernel = "split_attention_hopper_mla" if case.mla else "split_attention_hopper"
    stand_in = CompileOnly(KERNELS[kernel])
    setattr(public, kernel, stand_in)
    public.tree_attention_hopper(**make_inputs(case, "cpu", torch.bfloat16), page_size=case.page_size)
    return stand_in.compiled


def programs_per_sm(case: Case) -> int:
    head = HeadShape(case.key_dim, case.value_dim, case.mla, element_size=2)
    return public.choose_hopper_config(head, case.rows * case.heads // case.kv_heads).programs_per_sm


def assembler_report(ptx: str) -> str:
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [ptxas, "-v", "-arch=sm_90a", source, "-o", Path(folder, "kernel.cubin")]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    return result.stdout + result.stderr


KERNELS = {name: getattr(public, name) for name in ("split_attention_hopper", "split_attention_hopper_mla")}

if __name__ == "__main__":
    triton.runtime.driver.set_active(DriverOf((9, 0)))
    public.device_properties = lambda device: ((9, 0), 132)
    public.check_inputs = lambda *arguments: None  # it would refuse tensors that are not on a GPU
    public.merge_splits = Skip()
    for kind, cases in CASES.items():
        for case in cases:
            kernel = compiled(case)
            report = assembler_report(kernel.asm["ptx"])
            row = {
                "kind": kind,
                "rows": case.rows,
                "programs": programs_per_sm(case),
                "shared": kernel.metadata.shared,
                "spilled": sum(int(count) for count in re.findall(r"(\d+) bytes spill stores", report)),
                "warnings": [line for line in report.splitlines() if "warning" in line],
            }
            print(json.dumps(row), flush=True)
