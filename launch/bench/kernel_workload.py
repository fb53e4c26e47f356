"""What the kernel benchmark measures: model shapes and one paged cache for a context length."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch

from sglang_ddtree_patch.kernels.attention.reference import tree_attention_reference
from sglang_ddtree_patch.kernels.tree.build import ancestor_masks

PAGE_SIZE = 64
# KV that one CUDA graph reads before it comes back to a buffer: four times an H200's L2.
COLD_BYTES = 256 << 20
MOST_COPIES = 48
# A cache this large is cold after one pass: one copy will do.
LARGE_BYTES = 1 << 30


@dataclass(frozen=True)
class ModelShape:
    name: str
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    mla: bool = False

    @property
    def kv_bytes(self) -> int:
        """bf16 bytes of one position in one layer."""
        return 2 * self.kv_heads * (self.key_dim if self.mla else self.key_dim + self.value_dim)

    def flops(self, context: int, rows: int) -> int:
        return 2 * context * rows * self.heads * (self.key_dim + self.value_dim)


SHAPES = {
    "gqa-32x8x128": ModelShape("gqa-32x8x128", 32, 8, 128, 128),
    "mla-8x576x512": ModelShape("mla-8x576x512", 8, 1, 576, 512, mla=True),
    "mla-16x576x512": ModelShape("mla-16x576x512", 16, 1, 576, 512, mla=True),
}


class Workload:
    """A batch at one context length, over several copies of its cache so that none is in L2.

    The copies are other requests of one pool: copy ``i`` of the batch is ``request_ids[i]``.
    """

    def __init__(
        self, shape: ModelShape, context: int, batch: int, most_rows: int, copies: int | None = None
    ):
        self.shape, self.context, self.batch = shape, context, batch
        bytes_each = shape.kv_bytes * context * batch
        least = 2 if bytes_each < LARGE_BYTES else 1
        self.copies = copies or max(least, min(MOST_COPIES, -(-COLD_BYTES // bytes_each)))
        requests = self.copies * batch
        slots = requests * -(-(context + most_rows) // PAGE_SIZE) * PAGE_SIZE
        self._deal_pages(requests, slots, PAGE_SIZE)
        bf16 = {"dtype": torch.bfloat16, "device": "cuda"}
        self.keys = torch.empty(slots, shape.kv_heads, shape.key_dim, **bf16).normal_()
        if shape.mla:
            self.values = self.keys[..., : shape.value_dim]
        else:
            self.values = torch.empty(slots, shape.kv_heads, shape.value_dim, **bf16).normal_()
        self.request_ids = torch.arange(requests, device="cuda").view(self.copies, batch)
        self.prefix_lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")

    def _deal_pages(self, requests: int, slots: int, page_size: int) -> None:
        """Give every request its pages, in random order."""
        self.page_size = page_size
        order = torch.randperm(slots // page_size, device="cuda").view(requests, -1)
        within = torch.arange(page_size, device="cuda")
        self.page_table = order.int()
        self.slot_table = (order[:, :, None] * page_size + within).view(requests, -1).int()

    def repaged(self, page_size: int) -> Workload:
        """The same cache, dealt out in pages of another size."""
        if page_size == self.page_size:
            return self
        other = copy.copy(self)
        other._deal_pages(len(self.slot_table), len(self.keys), page_size)
        return other

    def arguments(self, rows: int, copy: int = 0) -> dict:
        """Arguments of `tree_attention` but for the page size: a random tree of ``rows`` rows."""
        generator = torch.Generator().manual_seed(rows)
        parents = [-1] + [int(torch.randint(row, (1,), generator=generator)) for row in range(1, rows)]
        masks = ancestor_masks(torch.tensor([parents]), max_depth=rows).expand(self.batch, -1, -1)
        shape = self.shape
        torch.manual_seed(rows)
        return {
            "query": torch.randn(
                self.batch * rows, shape.heads, shape.key_dim, dtype=torch.bfloat16, device="cuda"
            ),
            "key_cache": self.keys,
            "value_cache": self.values,
            "slot_table": self.slot_table,
            "request_ids": self.request_ids[copy],
            "prefix_lens": self.prefix_lens,
            "tree_mask": masks.contiguous().cuda(),
            "softmax_scale": shape.key_dim**-0.5,
        }

    def limit_microseconds(self, rows: int, ceilings: dict[str, float]) -> float:
        """The larger of reading the prefix once and the arithmetic of the rows."""
        reading = self.batch * self.context * self.shape.kv_bytes / ceilings["copy_gb_s"] / 1e3
        arithmetic = self.batch * self.shape.flops(self.context, rows) / ceilings["bf16_tflop_s"] / 1e6
        return max(reading, arithmetic)


def reference_result(arguments: dict) -> torch.Tensor:
    """Tree attention in float32."""
    return tree_attention_reference(**arguments | {"query": arguments["query"].float()})


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """NaN where the result has one."""
    return ((result - expected).norm() / expected.norm()).item()
