"""The target's own text: prompts answered in batches, kept in pieces so that a run can be taken up again.

A drafter has to agree with its target and not with books, so it learns from what the target writes. Each
piece is one batch of prompts of nearly one length, padded on the left. Rows are greedy or sampled at one of
`TEMPERATURES`, in turn.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from fit import Unfinished, save_whole

TEMPERATURES = (0.0, 0.7, 0.0, 1.0)
SHORTEST = 8  # tokens of an answer worth learning from


@torch.no_grad()
def continue_batch(
    model, prompts: Sequence[list[int]], temperatures: Sequence[float], new_tokens: int, end_ids, device: str
) -> list[list[int]]:
    """Continue every prompt by at most `new_tokens`, its end token included; returns the new tokens alone."""
    longest = max(map(len, prompts))
    pad = next(iter(end_ids))
    ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts], device=device)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    mask = (torch.arange(longest, device=device) >= longest - lengths[:, None]).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    heat = torch.tensor(temperatures, device=device, dtype=torch.float32)[:, None]
    ends = torch.tensor(sorted(end_ids), device=device)
    step, cache, made = ids, None, []
    is_done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for count in range(new_tokens):
        out = model(
            input_ids=step,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache, logits = out.past_key_values, out.logits[:, -1].float()
        # The largest of logits / T plus Gumbel noise is a draw at temperature T.
        noise = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-20, 1 - 1e-7)))
        step = (logits + heat * noise).argmax(-1, keepdim=True)
        made.append(step)
        is_done |= torch.isin(step[:, 0], ends)
        if count % 16 == 15 and is_done.all():  # each look waits for the device
            break
        mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)
        positions = positions[:, -1:] + 1
    rows = torch.cat(made, dim=1).tolist()
    return [cut(row, end_ids) for row in rows]


def cut(tokens: list[int], end_ids) -> list[int]:
    """Up to and with the first end token."""
    end = next((i for i, token in enumerate(tokens) if token in end_ids), len(tokens))
    return tokens[: end + 1]


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
    load_model,
    groups: Sequence[list[list[int]]],
    folder: Path,
    new_tokens: int,
    end_ids,
    device,
    minutes,
    until,
) -> None:
    """Answer group after group until all are done or `minutes` are spent, one file each.

    Raises:
        Unfinished: the clock has passed `until` first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    finished, spent = folder / "finished", folder / "seconds"
    if finished.exists():
        return
    used = float(spent.read_text()) if spent.exists() else 0.0
    started, model, total = time.time() - used, load_model(), 0
    for index, prompts in enumerate(groups):
        path = folder / f"piece-{index:04d}.pt"
        if not path.exists():
            if time.time() - started > 60 * minutes:
                break
            if time.time() > until:
                raise Unfinished(f"own text: {index} of {len(groups)} pieces are done")
            temperatures = [TEMPERATURES[row % len(TEMPERATURES)] for row in range(len(prompts))]
            answers = continue_batch(model, prompts, temperatures, new_tokens, end_ids, device)
            pairs = zip(prompts, answers, strict=True)
            kept = [(len(p), p + a) for p, a in pairs if len(a) >= SHORTEST]
            save_whole(kept, path)
            total += sum(len(ids) - first for first, ids in kept)
            seconds = time.time() - started
            spent.write_text(f"{seconds:.1f}")
            print(
                f"[own text] piece {index + 1} of {len(groups)}, {total:,} tokens, {seconds:.0f} s "
                f"of at most {60 * minutes:.0f}",
                flush=True,
            )
    finished.write_text("")


def read_own_text(folder: Path) -> list[tuple[int, list[int]]]:
    """(prompt length, prompt and answer), shortest first."""
    pieces = [torch.load(path) for path in sorted(folder.glob("piece-*.pt"))]
    return sorted((pair for piece in pieces for pair in piece), key=lambda pair: len(pair[1]))


def draw_batch(texts: Sequence[tuple[int, list[int]]], tokens: int, blocks: int, device: str):
    """One step's sequences and anchors: ids [S, T], lengths [S], anchors [S, n].

    A text is drawn, and those just shorter join it until the step's tokens are reached. Anchors come from
    the answers alone, where a server drafts.
    """
    index = int(torch.randint(0, len(texts), ()))
    longest = len(texts[index][1])
    rows = texts[max(0, index + 1 - max(1, tokens // longest)) : index + 1]
    ids = torch.tensor([text + [0] * (longest - len(text)) for _, text in rows])
    lengths = torch.tensor([len(text) for _, text in rows])
    firsts = torch.tensor([first for first, _ in rows])
    count = max(1, min(blocks // len(rows), longest))
    share = torch.rand(len(rows), count).sort(dim=1).values
    anchors = firsts[:, None] + (share * (lengths - 1 - firsts)[:, None]).long()
    return ids.to(device), lengths.to(device), anchors.to(device)
