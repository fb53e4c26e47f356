"""A training step of the drafter: its texts, the target's hidden states for them, the loss.

On a GPU the pieces of the drafter and of the loss are compiled where Triton can: each is a dozen passes over
memory otherwise.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from drafter import Drafter, draft_loss
from fit import autocast
from head_loss import score_rows
from kept_features import KeptFeatures, room_for_features
from text_batches import Plan, Texts, endless, plan_epoch


def can_compile(device: str) -> bool:
    """Triton builds a launcher for each kernel, so it needs a C compiler and Python's headers."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_paths("posix_prefix")["include"]) / "Python.h"
    has_triton = importlib.util.find_spec("triton") is not None
    return device == "cuda" and has_triton and compiler is not None and header.exists()


class DraftSteps:
    """loss_of(step, progress) for `fit`."""

    def __init__(
        self,
        drafter: Drafter,
        target,
        layers: Sequence[int],
        texts: Sequence[tuple[int, list[int]]],
        step_tokens: int,
        step_blocks: int,
        soft: float,
        device: str,
    ) -> None:
        self._drafter, self._target, self._device, self._soft = drafter, target, device, soft
        self._size = (step_tokens, step_blocks)
        self._texts = Texts(texts, device)
        last = target.config.num_hidden_layers - 1  # what it says goes before its head
        self._features = KeptFeatures(target, (*layers, last) if soft else layers, self._texts)
        self._width = drafter.fc.in_features
        self._score = score_rows
        is_compiled = can_compile(device)
        if is_compiled:
            drafter.compile_pieces()
            self._score = torch.compile(score_rows, dynamic=False)
        print(
            f"[train] {len(texts):,} texts of {len(self._texts.tokens):,} tokens, "
            f"{'compiled' if is_compiled else 'not compiled'}",
            flush=True,
        )
        if device == "cuda":
            self._try()
        self._features.keep(room_for_features(device), step_tokens)
        self._plans = endless(self._texts, self._features.count, *self._size)

    def _try(self) -> None:
        """A step on the longest texts, which takes the most memory of all."""
        longest = self._texts.sizes.argmax()[None]
        torch.cuda.reset_peak_memory_stats()
        with autocast(self._device):
            (plan,) = plan_epoch(self._texts.row_lengths, longest, *self._size, self._device)
            loss = self._loss(plan, False)
        loss.backward()
        self._drafter.zero_grad(set_to_none=True)

    def __call__(self, step: int, progress: float) -> torch.Tensor:
        return self._loss(*next(self._plans))

    def _loss(self, plan: Plan, is_kept: bool) -> torch.Tensor:
        batch = self._texts.gather(plan)
        found = self._features.of(batch, is_kept)
        return draft_loss(
            self._drafter,
            self._target,
            found[..., : self._width],
            batch.ids,
            batch.anchors,
            batch.lengths,
            found[..., self._width :],
            self._soft,
            self._score,
        )
