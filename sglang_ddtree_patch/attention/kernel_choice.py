"""Which implementation of tree attention serves: decided once, from device, shapes and one setting.

The choice depends on shapes and on the longest context a server may hold, never on a request's: lengths are
known on the device only, and one CUDA graph serves them all. Kernels are imported when they are asked for:
Triton must not be before a process without a GPU has turned its interpreter on.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import NamedTuple

import torch

from sglang_ddtree_patch.errors import ConfigurationError
from sglang_ddtree_patch.kernels.attention.configs import gpu_class
from sglang_ddtree_patch.kernels.attention.verify_attention import AttentionShape, OneCall, VerifyAttention
from sglang_ddtree_patch.kernels.device import has_kernels
from sglang_ddtree_patch.settings import (
    AUTO,
    FA3,
    FLASHMLA,
    HOPPER,
    KERNEL_VARIABLE,
    KERNELS,
    MLA_NARROW,
    REFERENCE,
    TRITON,
)

VENDORS = frozenset({FA3, FLASHMLA})

ANY = 1 << 30


class Preference(NamedTuple):
    """Kernels, best first, for up to so many packed rows and positions.

    Packed rows are tree rows times query heads a KV head; positions are the longest context a server holds.
    """

    kernels: tuple[str, ...]
    rows: int = ANY
    positions: int = ANY


# By GPU class and kind of head; the first that fits counts. Whatever is not in the table, or none of its
# kernels serves, runs TRITON. With MLA the two cross between 16k and 64k, by the number of rows.
PREFERENCES: dict[tuple[str, str], list[Preference]] = {
    ("hopper", "gqa"): [Preference((HOPPER,), rows=192), Preference((HOPPER, FA3))],
    ("hopper", "gqa-wide"): [Preference((FA3, HOPPER))],
    ("hopper", "mla"): [Preference((HOPPER, FLASHMLA), positions=40960), Preference((FLASHMLA, HOPPER))],
}


def asked_kernel() -> str:
    """What `SGLANG_DDTREE_KERNEL` says.

    Raises:
        ConfigurationError: it names no implementation.
    """
    asked = os.environ.get(KERNEL_VARIABLE, AUTO)
    if asked != AUTO and asked not in KERNELS:
        raise ConfigurationError(
            f"{KERNEL_VARIABLE}={asked!r} is no implementation of tree attention: "
            f"set it to {', '.join((AUTO, *KERNELS[:-1]))} or {KERNELS[-1]}."
        )
    return asked


def own_kernel(device: str) -> str:
    """The one of ours that serves every shape on a device: Triton on NVIDIA GPUs, the reference elsewhere."""
    asked = asked_kernel()
    if asked in (TRITON, REFERENCE):
        return asked
    return TRITON if has_kernels(device) else REFERENCE


def choose_kernel(
    device: str, shape: AttentionShape, page_size: int, rows: int, positions: int, *, vendors: bool = True
) -> str:
    """The implementation for one kind of layer at one width of the tree.

    Args:
        device: SGLang's name of the device.
        shape: heads of one rank.
        page_size: positions of a page.
        rows: rows of the block.
        positions: columns of the slot table: the longest context that any request may have.
        vendors: False leaves out kernels that are not ours, for benchmarks.

    Raises:
        ConfigurationError: `SGLANG_DDTREE_KERNEL` names none, or one that cannot serve the model.
    """
    asked, own = asked_kernel(), own_kernel(device)
    if asked in (TRITON, REFERENCE):
        return asked
    if own == REFERENCE or not device.startswith("cuda"):
        if asked != AUTO:
            raise ConfigurationError(f"{KERNEL_VARIABLE}={asked} needs an NVIDIA GPU: unset it.")
        return own
    capability = torch.cuda.get_device_capability()
    if asked != AUTO:
        if reason := refusal(asked, shape, page_size, capability):
            raise ConfigurationError(
                f"{KERNEL_VARIABLE}={asked} cannot serve this model: {reason}. "
                f"Unset it, or set it to {TRITON}."
            )
        return asked
    for kernel in preferred(capability, shape, rows, positions):
        if (vendors or kernel not in VENDORS) and refusal(kernel, shape, page_size, capability) is None:
            return kernel
    return TRITON


def preferred(
    capability: tuple[int, int], shape: AttentionShape, rows: int, positions: int
) -> tuple[str, ...]:
    """The table's kernels for a shape, best first."""
    table = PREFERENCES.get((gpu_class(capability), shape.head.kind), [Preference(())])
    return next(
        preference.kernels
        for preference in table
        if rows * shape.group <= preference.rows and positions <= preference.positions
    )


def refusal(kernel: str, shape: AttentionShape, page_size: int, capability: tuple[int, int]) -> str | None:
    """Why a kernel cannot serve a shape on a GPU, its package missing included; None where it can."""
    if shape.windowed:
        return f"only {TRITON} and {REFERENCE} serve sliding windows, and the model has layers with one"
    if kernel == HOPPER:
        return _hopper_refusal(shape, page_size, capability)
    if kernel == MLA_NARROW:
        from sglang_ddtree_patch.kernels.attention.hopper.mla_narrow import narrow_refusal

        return narrow_refusal(shape, page_size, capability)
    from sglang_ddtree_patch.kernels.attention.vendor_attention import fa3_refusal, flash_mla_refusal

    reason = {FA3: fa3_refusal, FLASHMLA: flash_mla_refusal}[kernel](shape, page_size, capability)
    return reason or missing_package(kernel)


@functools.cache
def missing_package(kernel: str) -> str | None:
    """What keeps a vendor's kernel from being imported, in words; None where nothing does."""
    try:
        build_attention(kernel, torch.empty(0), AttentionShape(1, 1, 1, 1, False, torch.bfloat16), 1)
    except ImportError as error:
        return f"its package cannot be imported ({str(error).strip().splitlines()[0]})"
    return None


def _hopper_refusal(shape: AttentionShape, page_size: int, capability: tuple[int, int]) -> str | None:
    from sglang_ddtree_patch.kernels.attention.hopper.tree_attention import supports

    if supports(shape.head, page_size, capability):
        return None
    return f"on compute capability 9.0 it serves bfloat16 and float16 in pages of 64; this is {shape}"


def build_attention(
    kernel: str, slot_table: torch.Tensor, shape: AttentionShape, page_size: int
) -> VerifyAttention:
    """An implementation over a slot table.

    Raises:
        ImportError: a vendor's package is missing.
    """
    if kernel in VENDORS:
        from sglang_ddtree_patch.kernels.attention import vendor_attention

        implementation = vendor_attention.FA3 if kernel == FA3 else vendor_attention.FlashMLA
        return implementation(slot_table, shape, page_size)
    if kernel == MLA_NARROW:
        from sglang_ddtree_patch.kernels.attention.hopper.mla_narrow import NarrowMLA

        return NarrowMLA(slot_table, shape, page_size)
    return OneCall(slot_table, own_function(kernel, page_size))


def own_function(kernel: str, page_size: int) -> Callable[..., torch.Tensor]:
    """One of our implementations, with the arguments of `tree_attention` but for the page size."""
    if kernel == REFERENCE:
        from sglang_ddtree_patch.kernels.attention.reference import tree_attention_reference

        return tree_attention_reference
    if kernel == HOPPER:
        from sglang_ddtree_patch.kernels.attention.hopper.tree_attention import tree_attention_hopper

        return functools.partial(tree_attention_hopper, page_size=page_size)
    from sglang_ddtree_patch.kernels.attention.tree_attention import tree_attention

    return functools.partial(tree_attention, page_size=page_size)
