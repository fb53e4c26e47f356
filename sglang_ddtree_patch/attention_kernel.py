"""Which implementation of tree attention a server runs: decided once, from the device and one setting."""

from __future__ import annotations

import os

from sglang_ddtree_patch.errors import ConfigurationError
from sglang_ddtree_patch.kernels.device import has_kernels

KERNEL_VARIABLE = "SGLANG_DDTREE_KERNEL"
REFERENCE = "reference"  # plain PyTorch, any device; reads lengths on the host, so it runs outside graphs
TRITON = "triton"  # our split-key kernels: NVIDIA GPUs from sm_80, or Triton's interpreter
AUTO = "auto"


def choose_kernel(device: str) -> str:
    """The implementation for a device: Triton on NVIDIA GPUs, the reference elsewhere.

    `SGLANG_DDTREE_KERNEL` forces one, for comparisons.

    Raises:
        ConfigurationError: the setting names no implementation.
    """
    asked = os.environ.get(KERNEL_VARIABLE, AUTO)
    if asked not in (AUTO, REFERENCE, TRITON):
        raise ConfigurationError(
            f"{KERNEL_VARIABLE}={asked!r} is no implementation of tree attention: "
            f"set it to {AUTO}, {TRITON} or {REFERENCE}."
        )
    if asked != AUTO:
        return asked
    return TRITON if has_kernels(device) else REFERENCE
