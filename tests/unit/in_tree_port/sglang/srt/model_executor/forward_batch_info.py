"""One forward of a model."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch


class ForwardMode(enum.Enum):
    EXTEND = enum.auto()
    DECODE = enum.auto()
    TARGET_VERIFY = enum.auto()
    IDLE = enum.auto()

    def is_extend(self):
        return self is ForwardMode.EXTEND

    def is_target_verify(self):
        return self is ForwardMode.TARGET_VERIFY

    def is_idle(self):
        return self is ForwardMode.IDLE


@dataclass
class ForwardBatch:
    forward_mode: ForwardMode
    input_ids: torch.Tensor
    positions: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor  # in TARGET_VERIFY without the block
    out_cache_loc: torch.Tensor
    attn_backend: Any
    spec_info: Any = None

    def prefix_lens(self) -> list[int]:
        if self.forward_mode.is_extend():
            return [0] * len(self.seq_lens)
        behind = 0 if self.forward_mode.is_target_verify() else 1
        return (self.seq_lens - behind).tolist()

    def rows(self) -> list[int]:
        if self.forward_mode.is_extend():
            return self.seq_lens.tolist()
        width = self.spec_info.draft_token_num if self.forward_mode.is_target_verify() else 1
        return [width] * len(self.seq_lens)
