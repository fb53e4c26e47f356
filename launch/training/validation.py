"""What a drafter in training is worth on texts that it never learns from: always the same ones and anchors.

Forward passes have the shapes of training steps and keep their graphs, so that nothing is compiled anew.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from drafter import Drafter, draft
from fit import autocast
from targets import features
from text_batches import Batch, Texts, plan_epoch

MOST_TEXTS = 512
SHARE = 0.02  # of all texts, where they are fewer
ROWS = 4096  # whose logits stand in memory together


def split(
    texts: Sequence[tuple[int, list[int]]], most: int = MOST_TEXTS
) -> tuple[list[tuple[int, list[int]]], list[tuple[int, list[int]]]]:
    """Texts to learn from and texts held back, the same for the same texts; a single one is both."""
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(1)).tolist()
    count = max(1, min(most, int(SHARE * len(texts))))
    held = [texts[index] for index in order[:count]]
    return [texts[index] for index in order[count:]] or held, held


class Validation:
    """judge() for `fit`: loss, accept length of the chain at any anchor, and how often a token is right."""

    def __init__(
        self,
        drafter: Drafter,
        target,
        layers: Sequence[int],
        texts: Sequence[tuple[int, list[int]]],
        step_tokens: int,
        step_blocks: int,
        device: str,
    ) -> None:
        self._drafter, self._target, self._layers, self._device = drafter, target, layers, device
        held = Texts(texts, device)
        devices = [torch.cuda.current_device()] if device == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(0)
            plans = plan_epoch(held.row_lengths, torch.arange(len(held)), step_tokens, step_blocks, device)
            self._batches = [held.gather(plan) for plan in plans]

    def __call__(self) -> dict[str, float]:
        found = [self._look(batch) for batch in self._batches]
        loss, weight, accepted, blocks = torch.stack([sums for sums, _, _ in found]).sum(dim=0).tolist()
        hits = torch.stack([hits for _, hits, _ in found]).sum(dim=0)
        right = (hits / torch.stack([counted for _, _, counted in found]).sum(dim=0).clamp(min=1)).tolist()
        return {
            "loss": round(loss / weight, 4),
            "accept": round(accepted / blocks, 3),
            "first": round(right[0], 3),
            "fourth": round(right[min(3, len(right) - 1)], 3),
        }

    def _look(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Weighted loss, its weight, accepted tokens and blocks [4]; hits and tokens by position [B - 1]."""
        table = self._target.get_input_embeddings().weight
        head = self._target.get_output_embeddings().weight
        with torch.no_grad():
            context = features(self._target, batch.ids, self._layers)
        with autocast(self._device):
            made = draft(self._drafter, table, context, batch.ids, batch.anchors, batch.lengths)
        with torch.no_grad():
            hidden, truth = made.hidden.flatten(0, 2), made.truth.flatten()
            surprise, best = torch.empty_like(truth, dtype=torch.float32), torch.empty_like(truth)
            for start in range(0, len(truth), ROWS):
                part = slice(start, start + ROWS)
                logits = (hidden[part] @ head.to(hidden.dtype).T).float()
                hit = logits.gather(1, truth[part][:, None])[:, 0]
                surprise[part], best[part] = logits.logsumexp(dim=1) - hit, logits.argmax(dim=1)
            counted = made.weight > 0
            is_hit = (best == truth).view_as(counted) & counted
            accepted = is_hit.long().cumprod(dim=2).sum()
            surprise = surprise.view_as(made.weight)
            sums = [(surprise * made.weight).sum(), made.weight.sum(), accepted, batch.anchors.numel()]
            return (
                torch.stack([torch.as_tensor(x, dtype=torch.float64, device=truth.device) for x in sums]),
                is_hit.sum(dim=(0, 1)),
                counted.sum(dim=(0, 1)),
            )
