"""A drafter's weights in half the bytes: int8 with one scale a row, and back to bf16.

    scale[r] = max |w[r]| / 127        q[r] = round(w[r] / scale[r])        w'[r] = q[r] * scale[r]

Matrices are packed, vectors stay in bf16. A folder of packed weights holds the drafter's config.json and
`packed.safetensors`, with `NAME` in int8 and `NAME.scale` in float32; SGLang reads the folder it expands to.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from sglang_ddtree_patch.launch.weights import save_weights

PACKED = "packed.safetensors"
SCALE = ".scale"


def pack(weights: dict) -> dict:
    """Tensors by name -> int8 rows, scales and bf16 vectors by name."""
    import torch

    packed = {}
    for name, weight in weights.items():
        if weight.ndim != 2:
            packed[name] = weight.to(torch.bfloat16).contiguous()
            continue
        values = weight.float()
        scale = (values.abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        packed[name] = (values / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
        packed[name + SCALE] = scale
    return packed


def unpack(packed: dict) -> dict:
    """What `pack` made -> bf16 tensors by name."""
    import torch

    weights = {}
    for name, values in packed.items():
        if name.endswith(SCALE):
            continue
        if name + SCALE in packed:
            values = values.float() * packed[name + SCALE][:, None]
        weights[name] = values.to(torch.bfloat16)
    return weights


def write_packed(weights: dict, config: Path, folder: Path) -> int:
    """Pack `weights` into `folder`, beside a copy of the drafter's config.json; returns the file's bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(pack(weights), folder / PACKED)
    shutil.copyfile(config, folder / "config.json")
    return (folder / PACKED).stat().st_size


def expand(packed: Path, folder: Path) -> None:
    """Write the drafter that SGLang loads into `folder`, from a folder of packed weights."""
    from safetensors.torch import load_file

    folder.mkdir(parents=True, exist_ok=True)
    save_weights(unpack(load_file(packed / PACKED)), folder / "model.safetensors")
    shutil.copyfile(packed / "config.json", folder / "config.json")
