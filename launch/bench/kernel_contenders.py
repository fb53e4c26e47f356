"""What the kernel benchmark times: a name, and how to make its calls for a workload and a width."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang_ddtree_patch.attention.kernel_choice import build_attention, choose_kernel
from sglang_ddtree_patch.kernels.attention.verify_attention import AttentionShape
from sglang_ddtree_patch.launch.bench.kernel_workload import PAGE_SIZE, Workload
from sglang_ddtree_patch.settings import MLA_NARROW

# One call for each copy of the workload's cache, on the batch's queries; returns [batch * rows, heads, dim].
Calls = list[Callable[[], torch.Tensor]]


@dataclass(frozen=True)
class Contender:
    name: str
    make_calls: Callable[[Workload, int], Calls]  # raises ImportError where a package is missing
    is_tree: bool = True  # whether it verifies trees, so that its result can be checked
    page_size: int = PAGE_SIZE
    serves: Callable[[Workload, int], bool] = lambda workload, rows: True


def attention_shape(workload: Workload) -> AttentionShape:
    shape = workload.shape
    return AttentionShape(
        shape.heads, shape.kv_heads, shape.key_dim, shape.value_dim, shape.mla, torch.bfloat16
    )


def chosen(workload: Workload, rows: int, vendors: bool, positions: int | None = None) -> str:
    """The kernel of a server that holds contexts of so many positions; by default no longer ones."""
    positions = positions or workload.slot_table.shape[1]
    return choose_kernel(
        "cuda", attention_shape(workload), workload.page_size, rows, positions, vendors=vendors
    )


def our_calls(workload: Workload, rows: int, vendors: bool, positions: int | None = None) -> Calls:
    """What a server would run."""
    return kernel_calls(workload, rows, chosen(workload, rows, vendors, positions))


def kernel_calls(workload: Workload, rows: int, kernel: str) -> Calls:
    """Layers of prepared forwards: what a forward does once is not in their time."""
    shape = attention_shape(workload)
    arguments = workload.arguments(rows)
    names = ("query", "key_cache", "value_cache", "tree_mask", "softmax_scale")
    layer = {name: arguments[name] for name in names}

    def call(request_ids: torch.Tensor) -> Callable[[], torch.Tensor]:
        attention = build_attention(kernel, workload.slot_table, shape, workload.page_size)
        attention.reserve(workload.batch, rows)
        attention.prepare(request_ids, workload.prefix_lens, rows)
        return lambda: attention.attend(**layer)

    return [call(ids) for ids in workload.request_ids]


def preparing_calls(workload: Workload, rows: int) -> list[Callable[[], None]]:
    """What the chosen kernel does once a forward."""
    shape = attention_shape(workload)
    attention = build_attention(
        chosen(workload, rows, vendors=True), workload.slot_table, shape, workload.page_size
    )
    attention.reserve(workload.batch, rows)
    return [
        functools.partial(attention.prepare, ids, workload.prefix_lens, rows) for ids in workload.request_ids
    ]


OURS = (
    Contender("ddtree", lambda workload, rows: our_calls(workload, rows, vendors=True)),
    Contender("ddtree-triton", lambda workload, rows: our_calls(workload, rows, vendors=False)),
)
# Ours, but chosen by no server.
CANDIDATES = (
    Contender(
        "ddtree-mla-narrow",
        lambda workload, rows: kernel_calls(workload, rows, MLA_NARROW),
        serves=lambda workload, rows: workload.shape.mla and torch.cuda.get_device_capability() == (9, 0),
    ),
)
