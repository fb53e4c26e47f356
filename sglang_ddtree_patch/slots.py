"""Slots of a round: KV slots and positions behind each committed length, and the drafter's input there.

Draft, verify and the drafter's KV write the same positions, so they share one plan of SGLang's, which it
makes in one launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sglang_ddtree_patch.block import BlockSizes


@dataclass(frozen=True)
class RoundSlots:
    """What the forwards of one round are given of the positions they write."""

    plan: Any  # SGLang's KVLocPlan over `BlockSizes.slots` columns
    positions: torch.Tensor  # [batch, draft] int64: those of the drafter's block
    block_ids: torch.Tensor  # [batch, draft] int64: root token, then mask tokens; valid until the next round


class SlotPlanner:
    """Plans rounds; keeps the mask tokens of the drafter's block, which never change."""

    def __init__(self, translator: Any, sizes: BlockSizes, mask_token_id: int):
        self._translator = translator  # SGLang's KVIndexTranslator of the target
        self._sizes = sizes
        self._mask_token_id = mask_token_id
        self._blocks: torch.Tensor | None = None  # [most requests so far, draft]

    def __call__(
        self,
        *,
        request_ids: torch.Tensor,
        prefix_lens: torch.Tensor,
        host_lens: torch.Tensor | None,
        root_tokens: torch.Tensor,
    ) -> RoundSlots:
        """Plan one round.

        Args:
            request_ids: [batch] int64, rows of the slot table.
            prefix_lens: [batch] int64, committed lengths.
            host_lens: [batch], a bound of the same on the host.
            root_tokens: [batch] int64, the last committed token of each request.
        """
        sizes, batch = self._sizes, prefix_lens.shape[0]
        positions = torch.empty((batch, sizes.slots), dtype=torch.int64, device=prefix_lens.device)
        block_ids = self._block_ids(batch, prefix_lens.device)
        plan = self._translator.plan_uniform_extend(
            req_pool_indices=request_ids,
            seq_lens=prefix_lens,
            seq_lens_cpu=host_lens,
            width=sizes.slots,
            positions_out=positions,
            anchor_src=root_tokens,
            anchor_out=block_ids,
        )
        return RoundSlots(plan, positions[:, : sizes.draft].contiguous(), block_ids)

    def _block_ids(self, batch: int, device: torch.device) -> torch.Tensor:
        if self._blocks is None or self._blocks.shape[0] < batch:
            self._blocks = torch.full((batch, self._sizes.draft), self._mask_token_id, device=device)
        return self._blocks[:batch]
