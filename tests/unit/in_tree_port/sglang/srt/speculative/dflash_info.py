"""The verify step: slots for the block, then what the target's logits accept of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.managers.schedule_batch import assign_req_to_token


@dataclass
class DFlashVerifyInput:
    draft_token: torch.Tensor  # [batch * draft_token_num], the root first
    positions: torch.Tensor
    draft_token_num: int
    custom_mask: torch.Tensor | None = None
    parents: torch.Tensor | None = None  # [batch, draft_token_num] of a tree; None: a chain

    def prepare_for_verify(self, batch, page_size: int):
        batch.input_ids, batch.positions = self.draft_token, self.positions
        batch.out_cache_loc = batch.alloc(batch.seq_lens, batch.seq_lens + self.draft_token_num)

    def verify(self, *, batch, logits_output: torch.Tensor, page_size: int):
        """Greedy. Returns the new current tokens and how many rows each request keeps."""
        bs, width = len(batch.reqs), self.draft_token_num
        predicted = logits_output.argmax(-1).view(bs, width).tolist()
        tokens = self.draft_token.view(bs, width).tolist()
        paths = [self._accepted_path(i, tokens[i], predicted[i]) for i in range(bs)]
        bonus = []
        for i, req in enumerate(batch.reqs):
            req.output_ids += [tokens[i][row] for row in paths[i][1:]] + [predicted[i][paths[i][-1]]]
            bonus.append(req.output_ids[-1])
        commit_lens = torch.tensor([len(path) for path in paths])

        block = batch.out_cache_loc.view(bs, width)
        if self.parents is None and page_size > 1:
            ends = batch.seq_lens + commit_lens
            kept = -(-ends // page_size) * page_size - batch.seq_lens
            batch.token_to_kv_pool_allocator.free(block[torch.arange(width) >= kept[:, None]])
        else:
            accepted = torch.zeros(bs, width, dtype=torch.bool)
            for i, path in enumerate(paths):
                accepted[i, path] = True
            batch.token_to_kv_pool_allocator.free(block[~accepted])
        # Accepted rows of a tree are anywhere in the block: their slots become the next positions'.
        batch.out_cache_loc = torch.cat([block[i, path] for i, path in enumerate(paths)])
        ends = batch.seq_lens + commit_lens
        table = batch.req_to_token_pool.req_to_token
        assign_req_to_token(table, batch.req_pool_indices, batch.seq_lens, ends, batch.out_cache_loc)
        batch.seq_lens.add_(commit_lens)
        return torch.tensor(bonus), commit_lens

    def _accepted_path(self, i: int, tokens: list[int], predicted: list[int]) -> list[int]:
        parents = range(-1, len(tokens) - 1) if self.parents is None else self.parents[i].tolist()
        path = [0]
        while True:
            fitting = [
                row
                for row, parent in enumerate(parents)
                if row > 0 and parent == path[-1] and tokens[row] == predicted[path[-1]]
            ]
            if not fitting:
                return path
            path.append(fitting[0])
