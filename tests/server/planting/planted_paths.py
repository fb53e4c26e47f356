"""A test plugin that replaces the drafter's candidates by the true continuation behind decoys.

A drafter that is often wrong hides most bugs of a tree round, because accepted paths stay trivial. Here
every round's candidates hold the continuation a reference file gives, and decoys that rank before it, so
that accepted paths are long and not contiguous in the block: rows like 0, 2, 5, 8, 11.

    DDTREE_TEST_PLANT      JSON file: a list of token lists, prompt and continuation in one; another file may
                           take its place while the server runs
    DDTREE_TEST_NO_COMMIT  set: accepted rows are not moved, which must give wrong tokens
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

DECOY = 5


def load() -> None:
    """Hook the draft step of this process; nothing without DDTREE_TEST_PLANT."""
    reference = os.environ.get("DDTREE_TEST_PLANT")
    if not reference:
        return
    from sglang_ddtree_patch.round import commit_graphs, worker

    planted_file = PlantedFile(Path(reference))
    drafted = worker.draft_candidates

    def planted(owner, batch, plan, sizes):
        sequences = planted_file.sequences()
        candidates = drafted(owner, batch, plan, sizes)
        tokens, log_probs = candidates.tokens.clone(), candidates.log_probs.clone()
        for index, (request, length) in enumerate(zip(batch.reqs, batch.seq_lens.tolist(), strict=True)):
            plant(tokens[index], log_probs[index], continuation(sequences, request, length), length)
        return type(candidates)(tokens=tokens, log_probs=log_probs)

    worker.draft_candidates = planted
    if os.environ.get("DDTREE_TEST_NO_COMMIT"):
        worker.TargetKVCommit = commit_graphs.TargetKVCommit = LeftInPlace


class LeftInPlace:
    """Stands for the commit of the target's KV, in graphs and outside them: moves nothing."""

    is_recordable = False

    def __init__(self, pool):
        pass

    def __call__(self, slots, accepted):
        pass


class PlantedFile:
    def __init__(self, path: Path):
        self._path = path
        self._read_at: int | None = None
        self._sequences: list[list[int]] = []

    def sequences(self) -> list[list[int]]:
        changed_at = self._path.stat().st_mtime_ns
        if changed_at != self._read_at:
            self._sequences, self._read_at = json.loads(self._path.read_text()), changed_at
        return self._sequences


def continuation(sequences: list[list[int]], request, length: int) -> list[int]:
    """The reference tokens behind the root, which stands at position `length`."""
    prompt = list(request.origin_input_ids)
    for sequence in sequences:
        if sequence[: len(prompt)] == prompt:
            return sequence[length + 1 :]
    return []


def plant(tokens: torch.Tensor, log_probs: torch.Tensor, truth: list[int], round_start: int) -> None:
    """Two candidates a position in one request's [depths, candidates]: a decoy and the truth.

    At two depths, other ones from round to round, the decoy ranks first and almost as likely as the
    truth: its whole subtree then lies between the true path's rows.
    """
    log_probs[:, 2:] = -torch.inf
    for depth, token in enumerate(truth[: tokens.shape[0]]):
        decoy = DECOY if token != DECOY else DECOY + 1
        decoy_first = depth in (round_start % 2, round_start % 2 + 2)
        true_rank = 1 if decoy_first else 0
        tokens[depth, true_rank], tokens[depth, 1 - true_rank] = token, decoy
        log_probs[depth, 0], log_probs[depth, 1] = -0.1, -0.11 if decoy_first else -3.0
