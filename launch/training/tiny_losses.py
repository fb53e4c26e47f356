"""What the tiny models learn from: losses on the corpus, and the targets' own text."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from drafter import draft_loss
from targets import features, greedy
from vocabulary import ASSISTANT, BOS_ID, SPECIALS


def windows(stream: torch.Tensor, count: int, length: int) -> torch.Tensor:
    """`count` random windows of the token stream: int64 [count, length]."""
    starts = torch.randint(0, len(stream) - length, (count, 1), device=stream.device)
    return stream[starts + torch.arange(length, device=stream.device)].long()


def target_loss(model, stream: torch.Tensor, tokens: int, progress: float) -> torch.Tensor:
    """Next-token cross entropy; the last fifth of the run reads long windows, for long contexts."""
    length = 512 if progress < 0.8 else 2048
    ids = windows(stream, max(1, tokens // length), length + 1)
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model, stream: torch.Tensor, device: str, length: int = 512, limit: int = 64) -> float:
    """Mean next-token loss over consecutive windows of the held-out files."""
    count = min(limit, (len(stream) - 1) // length)
    ids = stream[: count * length + 1].long()
    total = 0.0
    for start in range(0, count, 8):
        rows = [ids[i * length : (i + 1) * length + 1] for i in range(start, min(count, start + 8))]
        batch = torch.stack(rows).to(device)
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits.float()
        total += F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum").item()
    return round(total / (count * length), 4)


def chat_openings(stream: np.ndarray) -> dict[int, list[int]]:
    """Length -> starts of every training exchange's opening, from <|bos|> to the line after the role."""
    begins = np.flatnonzero(stream == BOS_ID)
    answers = np.flatnonzero(stream == SPECIALS.index(ASSISTANT))
    found: dict[int, list[int]] = {}
    latest = np.searchsorted(begins, answers, side="right") - 1
    for answer, index in zip(answers, latest, strict=True):
        if index >= 0:
            found.setdefault(int(answer + 2 - begins[index]), []).append(int(begins[index]))
    return {length: starts for length, starts in found.items() if 16 <= length <= 96}


def own_text(
    model, stream: np.ndarray, device: str, groups: int, rows: int, new_tokens: int, seed: int = 0
) -> list[tuple[int, torch.Tensor]]:
    """The target's greedy continuations of training prompts, in groups of one prompt length.

    Each group is (prompt length, int16 [rows, tokens]). Every second group holds distinct openings of
    exchanges; the others start inside a document.
    """
    draw, openings, made = random.Random(seed), chat_openings(stream), []
    common = sorted(openings, key=lambda length: -len(openings[length]))[:24]
    tokens = torch.from_numpy(stream.astype(np.int64))
    for group in range(groups):
        if group % 2 == 0 and common:
            length = common[group // 2 % len(common)]
            starts = torch.tensor(draw.sample(openings[length], min(rows, len(openings[length]))))
        else:
            length = draw.choice((32, 64, 128, 192))
            starts = torch.randint(0, len(tokens) - length, (rows,))
        prompt = tokens[starts[:, None] + torch.arange(length)].to(device)
        made.append((length, greedy(model, prompt, new_tokens).to(torch.int16).cpu()))
        print(f"[own text] {group + 1} of {groups}", flush=True)
    return made


def drafter_loss(
    drafter, target, stream, own, rows: int, blocks: int, step: int, device: str
) -> torch.Tensor:
    """Nine steps in ten read the target's own text, the tenth reads the corpus in long windows."""
    block = drafter.block
    if step % 10 == 9:
        length, rows = 1536, max(1, rows // 3)
        ids, first = windows(stream, rows, length), 1
    else:
        first, text = own[step % len(own)]
        ids = text[torch.randint(0, len(text), (rows,), device=text.device)].long().to(device)
        length = ids.shape[1]
    places = torch.randperm(length - block - first, device=device)[:blocks] + first
    with torch.no_grad():
        context = features(target, ids)
    return draft_loss(drafter, target, context, ids, places.sort().values.expand(rows, -1))
