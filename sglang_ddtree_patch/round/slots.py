"""Slots of a round: KV slots and positions behind each committed length, and the drafter's input there.

Draft, verify and the drafter's KV write the same positions, so they share one plan of SGLang's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sglang_ddtree_patch.kernels.slots import next_slots
from sglang_ddtree_patch.round.block import BlockSizes


@dataclass(frozen=True)
class RoundSlots:
    """What the forwards of one round are given of the positions they write."""

    plan: Any  # SGLang's KVLocPlan over `BlockSizes.slots` columns
    positions: torch.Tensor  # [batch, draft] int64: those of the drafter's block
    block_ids: torch.Tensor  # [batch, draft] int64: root token, then mask tokens; valid until the next round


class SlotPlanner:
    """Plans the rounds of a target (SGLang's ModelRunner) and keeps the mask tokens of its blocks."""

    def __init__(self, target: Any, sizes: BlockSizes, mask_token_id: int):
        self._translator = target.kv_index_translator
        self._slot_table = target.req_to_token_pool.req_to_token
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
        count = self._sizes.slots
        block_ids = self._block_ids(prefix_lens.shape[0])
        slots, positions = next_slots(
            self._slot_table, request_ids, prefix_lens, root_tokens, block_ids, count
        )
        plan = self._translator.plan(
            req_pool_indices=request_ids,
            seq_lens=prefix_lens,
            seq_lens_cpu=host_lens,
            write_virtual=slots.flatten(),
            read_extent=count,
        )
        return RoundSlots(plan, positions, block_ids)

    def _block_ids(self, batch: int) -> torch.Tensor:
        if self._blocks is None or self._blocks.shape[0] < batch:
            shape = (batch, self._sizes.draft)
            self._blocks = torch.full(shape, self._mask_token_id, device=self._slot_table.device)
        return self._blocks[:batch]
