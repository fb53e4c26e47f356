"""Where the Triton kernels run: on NVIDIA GPUs. Every other device takes their plain PyTorch form."""

from __future__ import annotations

import torch


def has_kernels(device: torch.device | str) -> bool:
    """Whether a device runs our Triton kernels. ROCm's tensors call themselves "cuda" too."""
    return str(device).partition(":")[0] == "cuda" and torch.version.hip is None
