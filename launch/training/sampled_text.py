"""The target's own text: prompts answered in batches, kept in pieces so that a run can be taken up again.

A drafter has to agree with its target and not with books, so it learns from what the target writes, greedily
as drafters are judged. Each piece is one batch of prompts of nearly one length.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path

import torch
from answers import Answer, callers
from fit import Unfinished, save_whole

SHORTEST = 8  # tokens of an answer worth learning from


def batches(prompts: Sequence[list[int]], new_tokens: int, most_tokens: int, most_rows: int):
    """Prompts of nearly one length together: lists whose padded size, answers included, stays in bounds."""
    batch: list[list[int]] = []
    for prompt in sorted(prompts, key=len):
        if batch and (len(batch) == most_rows or (len(batch) + 1) * (len(prompt) + new_tokens) > most_tokens):
            yield batch
            batch = []
        batch.append(prompt)
    if batch:
        yield batch


def write_own_text(
    answer: Answer,
    at_once: int,
    groups: Sequence[list[list[int]]],
    folder: Path,
    new_tokens: int,
    minutes: float,
    until: float,
    began: float,
) -> None:
    """Answer group after group until all are done or `minutes` are spent, one file each.

    `answer` takes so many calls `at_once`. This run's minutes count from `began`.

    Raises:
        Unfinished: the clock has passed `until` first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    finished, spent = folder / "finished", folder / "seconds"
    if finished.exists():
        return
    used = float(spent.read_text()) if spent.exists() else 0.0
    started, total, kept_pieces = began - used, 0, 0
    paths = [folder / f"piece-{index:04d}.pt" for index in range(len(groups))]
    todo = [(prompts, path) for prompts, path in zip(groups, paths, strict=True) if not path.exists()]
    if time.time() > until:
        raise Unfinished(f"own text: {len(groups) - len(todo)} of {len(groups)} pieces are done")

    with callers(at_once) as pool:
        asked: dict[Future, tuple[list[list[int]], Path]] = {}

        def keep_answered() -> None:
            nonlocal total, kept_pieces
            for future in wait(asked, return_when=FIRST_COMPLETED).done:
                prompts, path = asked.pop(future)
                pairs = zip(prompts, future.result(), strict=True)
                kept = [(len(p), p + a) for p, a in pairs if len(a) >= SHORTEST]
                save_whole(kept, path)
                kept_pieces += 1
                total += sum(len(ids) - first for first, ids in kept)
            seconds = time.time() - started
            spent.write_text(f"{seconds:.1f}")
            print(
                f"[own text] {kept_pieces} of {len(todo)} pieces, {total:,} tokens, "
                f"{seconds:.0f} s of at most {60 * minutes:.0f}",
                flush=True,
            )

        for count, (prompts, path) in enumerate(todo):
            if len(asked) == at_once:
                keep_answered()
            # Each run answers something, however long its answerer took to get ready.
            if count > 0 and (time.time() - started > 60 * minutes or time.time() > until):
                break
            asked[pool.submit(answer, prompts, [0.0] * len(prompts), new_tokens)] = prompts, path
        while asked:
            keep_answered()
    done = sum(path.exists() for path in paths)
    if done < len(groups) and time.time() - started <= 60 * minutes:
        raise Unfinished(f"own text: {done} of {len(groups)} pieces are done")
    finished.write_text("")


def read_own_text(folder: Path) -> list[tuple[int, list[int]]]:
    """(prompt length, prompt and answer) of every answer."""
    pieces = [torch.load(path) for path in sorted(folder.glob("piece-*.pt"))]
    return [pair for piece in pieces for pair in piece]


def read_seconds(folder: Path) -> float:
    """What it took to write own text, of all runs together."""
    return float((folder / "seconds").read_text())
