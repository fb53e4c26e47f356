"""Spec inputs of a DDTREE round, in SGLang's V2 schema."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.runtime_context import get_spec, max_speculative_num_draft_tokens
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2


@dataclass
class TreeVerifyInput(DFlashVerifyInput):
    """A target-verify forward over token trees instead of chains."""

    # [batch, width, words] int64 ancestor bitmasks (kernels/tree/build.py)
    tree_masks: torch.Tensor | None = None


@dataclass
class DDTreeDraftInput(DFlashDraftInputV2):
    """What the scheduler carries between rounds: bonus tokens and lengths, as for DFLASH."""

    def prepare_for_decode(self, batch: Any) -> None:
        """Reserve KV slots for a round; stock code counts the verify width alone.

        With a tree narrower than the drafter's block the draft forward would write slots that were
        never reserved.
        """
        with get_spec().override(speculative_num_draft_tokens=max_speculative_num_draft_tokens()):
            super().prepare_for_decode(batch)

    @classmethod
    def after(cls, *, bonus_tokens: torch.Tensor, new_seq_lens: torch.Tensor) -> DDTreeDraftInput:
        """The next round's input; ``bonus_tokens`` [batch] int64, ``new_seq_lens`` [batch] int64."""
        batch, device = new_seq_lens.shape[0], bonus_tokens.device
        return cls(
            topk_p=_nothing(batch, device, torch.float32),
            topk_index=_nothing(batch, device, torch.int64),
            bonus_tokens=bonus_tokens.to(torch.int64),
            new_seq_lens=new_seq_lens.to(torch.int64),
            hidden_states=_nothing(batch, device, torch.float16),
        )


@functools.cache
def _nothing(batch: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """What stands for a field of other algorithms: [batch, 0]."""
    return torch.empty((batch, 0), device=device, dtype=dtype)
