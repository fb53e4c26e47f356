"""The target's hidden states of as many texts as memory has room for, computed once before training.

They are what a step would spend most on, and take 5.8 KB a token for SmolLM2 in bf16: 10 million tokens are
58 GB. Texts past the room are read by the target anew whenever they are drawn.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch
from targets import features
from text_batches import Batch, Texts

GPU_SHARE = 0.8  # of what a step leaves free
CPU_SHARE = 0.25  # of free memory, as others live there too


class KeptFeatures:
    """The features of the first `count` texts, [tokens, F * H]; those of others on demand."""

    def __init__(self, target, layers: Sequence[int], texts: Texts) -> None:
        self.count = 0
        self._target, self._layers, self._texts = target, layers, texts
        self._kept = torch.empty(0)

    @torch.no_grad()
    def of(self, batch: Batch, is_kept: bool) -> torch.Tensor:
        """[S, T, F * H]; `is_kept` says that all of the batch's texts are."""
        if is_kept:
            return self._kept.index_select(0, batch.places.flatten()).unflatten(0, batch.places.shape)
        return features(self._target, batch.ids, self._layers)

    @torch.no_grad()
    def keep(self, room: int, batch_tokens: int) -> None:
        """Compute what fits `room` bytes, in batches of at most so many tokens."""
        started, texts, target = time.time(), self._texts, self._target
        width = len(self._layers) * target.get_input_embeddings().weight.shape[1]
        bytes_each = width * target.dtype.itemsize
        self.count = int((texts.ends * bytes_each <= room).sum())
        tokens = int(texts.ends[self.count - 1]) if self.count else 0
        self._kept = torch.empty(tokens, width, dtype=target.dtype, device=texts.device)
        for rows in self._groups(batch_tokens):
            sizes, begins = texts.sizes[rows].tolist(), (texts.ends - texts.sizes)[rows].tolist()
            longest = max(texts.row_lengths[row] for row in rows)
            ids = torch.zeros(len(rows), longest, dtype=torch.int64, device=texts.device)
            for row, (begin, size) in enumerate(zip(begins, sizes, strict=True)):
                ids[row, :size] = texts.tokens[begin : begin + size]
            found = features(target, ids, self._layers)
            for row, (begin, size) in enumerate(zip(begins, sizes, strict=True)):
                self._kept[begin : begin + size] = found[row, :size]
        if texts.device == "cuda":
            torch.cuda.synchronize()
        print(
            f"[train] hidden states of {self.count:,} of {len(texts):,} texts are kept: {tokens:,} tokens, "
            f"{tokens * bytes_each / 1e9:.1f} GB, {time.time() - started:.0f} s",
            flush=True,
        )

    def _groups(self, batch_tokens: int):
        """The kept texts' indices, neighbours in length together."""
        group: list[int] = []
        for index in self._texts.sizes[: self.count].argsort().tolist():
            length = self._texts.row_lengths[index]
            if group and (len(group) + 1) * length > batch_tokens:
                yield group
                group = []
            group.append(index)
        if group:
            yield group


def room_for_features(device: str) -> int:
    """Bytes, after a trial step on a GPU: what the step took at its peak stays free."""
    if device == "cpu":
        return int(CPU_SHARE * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    step = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return int(GPU_SHARE * max(0, free - step))
