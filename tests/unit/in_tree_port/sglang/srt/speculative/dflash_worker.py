"""DFLASH, and the tree that a port made of it."""

from __future__ import annotations

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput


class DFlashWorker:
    """Drafts from a table of guesses, which stands for the draft model, and verifies with the target."""

    def __init__(self, server_args, target_worker, guesses):
        self.server_args = server_args
        self.target_worker = target_worker
        self.page_size = server_args.page_size
        self.width = server_args.speculative_num_draft_tokens
        self.is_ddtree = server_args.speculative_algorithm == "DDTREE"
        self.guesses = guesses  # (request, length) -> candidates of each following position, best first

    def _prepare_for_speculative_decoding(self, batch, bonus_tokens):
        if self.is_ddtree:
            # The walk may take rows from anywhere in the block.
            if self.page_size != 1:
                raise RuntimeError(
                    "DDTREE currently requires --page-size 1 because accepted tree nodes are "
                    "non-contiguous in the verify block"
                )
            verify_input = self._build_ddtree_verify_input(batch, bonus_tokens)
        else:
            verify_input = self._build_chain_verify_input(batch, bonus_tokens)
        verify_input.prepare_for_verify(batch, self.page_size)
        batch.spec_info = verify_input
        batch.forward_mode = ForwardMode.TARGET_VERIFY

    def forward_batch_generation(self, batch, bonus_tokens):
        self._prepare_for_speculative_decoding(batch, bonus_tokens)
        verify_input = batch.spec_info
        logits_output = self.target_worker.forward(batch)
        (
            new_bonus_tokens,
            commit_lens,
        ) = verify_input.verify(
            batch=batch,
            logits_output=logits_output,
            page_size=self.page_size,
        )
        batch.forward_mode = ForwardMode.DECODE
        return new_bonus_tokens, commit_lens

    def _build_chain_verify_input(self, batch, bonus_tokens):
        rows = []
        for i, (token, length) in enumerate(zip(bonus_tokens.tolist(), batch.seq_lens.tolist(), strict=True)):
            best = [candidates[0] for candidates in self.guesses(i, length)]
            rows.append([token, *best][: self.width])
        positions = batch.seq_lens[:, None] + torch.arange(self.width)
        return DFlashVerifyInput(torch.tensor(rows).flatten(), positions.flatten(), self.width)

    def _build_ddtree_verify_input(self, batch, bonus_tokens):
        """Level by level; the last candidate of a level has the next level below it."""
        tokens, parents, depths, masks = [], [], [], []
        for i, (token, length) in enumerate(zip(bonus_tokens.tolist(), batch.seq_lens.tolist(), strict=True)):
            row_tokens, row_parents, row_depths = [token], [-1], [0]
            parent = 0
            for depth, candidates in enumerate(self.guesses(i, length), start=1):
                for candidate in candidates:
                    row_tokens.append(candidate)
                    row_parents.append(parent)
                    row_depths.append(depth)
                parent = len(row_tokens) - 1
            tokens.append(row_tokens[: self.width])
            parents.append(row_parents[: self.width])
            depths.append(row_depths[: self.width])
            masks.append(self._mask(length, parents[-1]).flatten())
        positions = batch.seq_lens[:, None] + torch.tensor(depths)
        return DFlashVerifyInput(
            draft_token=torch.tensor(tokens).flatten(),
            positions=positions.flatten(),
            draft_token_num=self.width,
            custom_mask=torch.cat(masks),
            parents=torch.tensor(parents),
        )

    def _mask(self, prefix: int, parents: list[int]) -> torch.Tensor:
        mask = torch.zeros(len(parents), prefix + len(parents), dtype=torch.bool)
        mask[:, :prefix] = True
        for row in range(len(parents)):
            ancestor = row
            while ancestor >= 0:
                mask[row, prefix + ancestor] = True
                ancestor = parents[ancestor]
        return mask
