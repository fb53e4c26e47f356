"""A committed target with its linear layers rounded to four bits, packed as GPTQ checkpoints are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

GROUP = 128  # inputs that share a scale
BITS, ZERO = 4, 8  # symmetric: the number that stands for nothing
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONFIG = {
    "quant_method": "gptq", "bits": BITS, "group_size": GROUP, "desc_act": False, "sym": True,
    "checkpoint_format": "gptq", "lm_head": False,
}  # fmt: skip


def int4(source: Path, folder: Path) -> Path:
    """Write the model of `source` to `folder`, its linear layers in four bits."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": CONFIG}
    (folder / "config.json").write_text(json.dumps(config))
    weights: dict[str, torch.Tensor] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        layer, _, kind = name.rpartition(".")
        if kind == "weight" and layer.endswith(LINEAR):
            weights |= {f"{layer}.{part}": value for part, value in packed(weight).items()}
        else:
            weights[name] = weight
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def packed(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a GPTQ layer for `weight` [outputs, inputs], rounded to the nearest."""
    outputs, inputs = weight.shape
    groups = weight.float().T.reshape(inputs // GROUP, GROUP, outputs)
    scales = (groups.abs().amax(1) / (ZERO - 1)).clamp(min=1e-8).half()
    numbers = (groups / scales[:, None].float()).round().clamp(-ZERO, ZERO - 1) + ZERO
    return {
        "qweight": pack(numbers.reshape(inputs, outputs)),
        # Checkpoints hold one less than the zero.
        "qzeros": pack(torch.full_like(scales, ZERO - 1).T).T.contiguous(),
        "scales": scales,
        "g_idx": torch.arange(inputs, dtype=torch.int32) // GROUP,
    }


def pack(numbers: torch.Tensor) -> torch.Tensor:
    """[rows, columns] of four-bit numbers as int32 [rows / 8, columns], the first row in the lowest bits."""
    rows, columns = numbers.shape
    eight = numbers.to(torch.int64).reshape(rows // 8, 8, columns)
    words = (eight << BITS * torch.arange(8)[:, None]).sum(1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpacked(layer: dict[str, torch.Tensor]) -> torch.Tensor:
    """What a packed layer computes with: [outputs, inputs]."""
    words = layer["qweight"].to(torch.int64)[:, None] & 0xFFFFFFFF
    numbers = (words >> BITS * torch.arange(8)[:, None] & 2**BITS - 1).flatten(0, 1) - ZERO
    return (numbers * layer["scales"][layer["g_idx"].long()].float()).T
