"""The implementations of tree verify attention behind one interface: `prepare` a forward, `attend` a layer.

What is the same for every layer (which pages, how long, how the work is dealt) is made once a forward, on
the device, so that a CUDA graph that records both calls serves every context length.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sglang_ddtree_patch.kernels.attention.configs import HeadShape


@dataclass(frozen=True)
class AttentionShape:
    """The attention heads of one rank's layer."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    value_is_key: bool  # MLA: the value is the front of the key
    dtype: torch.dtype  # of keys and values, and of queries unless it is float8
    capped: bool = False  # whether logits are capped
    windowed: bool = False  # whether rows see a sliding window of the prefix alone

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    @property
    def head(self) -> HeadShape:
        return HeadShape(self.key_dim, self.value_dim, self.value_is_key, self.dtype.itemsize)

    def __str__(self) -> str:
        kind = "MLA" if self.value_is_key else "GQA"
        heads = f"{kind} {self.heads}/{self.kv_heads} heads of {self.key_dim}/{self.value_dim}"
        return f"{heads} with a window" if self.windowed else heads


class VerifyAttention(ABC):
    """Attention of a block of tree rows to a paged prefix and to the block itself."""

    def __init__(self, slot_table: torch.Tensor):
        self.slot_table = slot_table  # [requests, positions] int32, the slot of each logical position

    @abstractmethod
    def reserve(self, max_batch: int, rows: int) -> None:
        """Allocate, before graphs are captured, what they will read by address."""

    @abstractmethod
    def prepare(self, request_ids: torch.Tensor, prefix_lens: torch.Tensor, rows: int) -> None:
        """Get ready for the layers of one forward. Waits for nothing; may be recorded into a graph.

        Args:
            request_ids: [batch] integers, rows of the slot table.
            prefix_lens: [batch] integers, committed lengths.
            rows: rows of each request's block.
        """

    @abstractmethod
    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        tree_mask: torch.Tensor | None,
        *,
        softmax_scale: float,
        logit_cap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of one layer of the prepared forward, as `tree_attention` describes it.

        These are the arguments that every implementation takes; others of `tree_attention` only some.
        """


class OneCall(VerifyAttention):
    """A function with the arguments of `tree_attention` that reads the slot table itself."""

    _batch: tuple[torch.Tensor, torch.Tensor]  # of the forward being run: `prepare` sets it

    def __init__(self, slot_table: torch.Tensor, function: Callable[..., torch.Tensor]):
        super().__init__(slot_table)
        self._function = function

    def reserve(self, max_batch: int, rows: int) -> None:
        """Nothing: lengths and slots are read where they lie."""

    def prepare(self, request_ids: torch.Tensor, prefix_lens: torch.Tensor, rows: int) -> None:
        self._batch = request_ids, prefix_lens

    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        tree_mask: torch.Tensor | None,
        **options: Any,
    ) -> torch.Tensor:
        request_ids, prefix_lens = self._batch
        return self._function(
            query, key_cache, value_cache, self.slot_table, request_ids, prefix_lens, tree_mask, **options
        )
