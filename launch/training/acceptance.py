"""Accept length of a drafter on its target's own greedy text, in plain float32 PyTorch.

Greedy verification never changes the text, so a round needs no target of its own: the target writes its
continuation once, one forward over prompt and continuation gives every hidden state a round would have
seen, and rounds then walk along the known text. A round at anchor `a` drafts from the context before
`a`, accepts the longest drafted path that agrees with the text after `a`, and the next anchor is one
past it (the bonus token).
"""

from __future__ import annotations

import heapq

import torch
import torch.nn.functional as F
from targets import greedy, logits_and_features
from vocabulary import END_ID

CHUNK = 32  # anchors drafted in one forward


def best_first_tree(log_probs: list[list[float]], budget: int) -> set[tuple[int, ...]]:
    """The `budget - 1` best rank tuples of a block, by summed log-probability, root not counted.

    log_probs[d][r] is the log-probability of the r-th best token at depth d + 1, falling in r. A prefix
    enters the heap when its parent and its better sibling have left it, so nodes leave in order of
    score; ties go to the smaller depth, then the smaller ranks.
    """
    depth, width = len(log_probs), len(log_probs[0])
    heap = [(-log_probs[0][0], 1, (0,))]
    chosen: set[tuple[int, ...]] = set()
    while heap and len(chosen) < budget - 1:
        cost, level, path = heapq.heappop(heap)
        chosen.add(path)
        rank = path[-1]
        if rank + 1 < width:
            step = log_probs[level - 1][rank] - log_probs[level - 1][rank + 1]
            heapq.heappush(heap, (cost + step, level, (*path[:-1], rank + 1)))
        if level < depth:
            heapq.heappush(heap, (cost - log_probs[level][0], level + 1, (*path, 0)))
    return chosen


def accepted(ranks: list[int | None], tree: set[tuple[int, ...]]) -> int:
    """How far the text's own path runs inside the tree; ranks[d] is the text's token's rank or None."""
    for depth in range(len(ranks)):
        if ranks[depth] is None or tuple(ranks[: depth + 1]) not in tree:
            return depth
    return len(ranks)


@torch.no_grad()
def draft_everywhere(target, drafter, ids: torch.Tensor, first: int, last: int, top_k: int):
    """Top-K log-probs and tokens for a block at every anchor in [first, last): lists [anchors][B-1][K]."""
    _, features = logits_and_features(target, ids)
    table, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    log_probs, tokens = [], []
    for start in range(first, last, CHUNK):
        anchors = torch.arange(start, min(start + CHUNK, last), device=ids.device)
        hidden = drafter(features, ids, anchors, table)[0, :, 1:]
        top = F.log_softmax(F.linear(hidden, head).float(), dim=-1).topk(top_k, dim=-1)
        log_probs += top.values.tolist()
        tokens += top.indices.tolist()
    return log_probs, tokens


def rounds(text: list[int], first: int, last: int, drafted, top_k: int, budget: int | None):
    """Accept length of each round from `first` until `last`; budget None walks the top-1 chain."""
    log_probs, tokens = drafted
    lengths, anchor = [], first
    while anchor < last:
        truth = text[anchor + 1 : anchor + 1 + len(tokens[anchor - first])]
        block = tokens[anchor - first][: len(truth)]
        ranks = [row.index(token) if token in row else None for row, token in zip(block, truth, strict=True)]
        if budget is None:
            length = next((d for d, rank in enumerate(ranks) if rank != 0), len(ranks))
        else:
            length = accepted(ranks, best_first_tree(log_probs[anchor - first], budget))
        lengths.append(length)
        anchor += length + 1
    return lengths


@torch.no_grad()
def evaluate(
    target,
    drafter,
    tokenizer,
    prompts: list[dict],
    device: str,
    new_tokens: int = 160,
    top_k: int = 8,
    budgets=(8, 16, 32, 64),
) -> dict:
    """Mean accept length by budget and kind of prompt, and a few continuations to read."""
    block = drafter.block
    policies = {"chain": None, **{f"tree_{n}": n for n in budgets}}
    found: dict[str, dict[str, list[int]]] = {}
    samples = []
    for prompt in prompts:
        start = tokenizer.encode(prompt["text"], add_special_tokens=False).ids
        ids = greedy(target, torch.tensor([start], device=device), new_tokens + block)
        text, first = ids[0].tolist(), len(start)
        last = first + new_tokens
        if END_ID in text[first:]:  # a server stops there, and so do its rounds
            end = text.index(END_ID, first)
            text, last = text[: end + 1], min(last, end)
        if len(samples) < 3 or (prompt["kind"] == "chat" and len(samples) < 6):
            samples.append({"prompt": prompt["text"], "text": tokenizer.decode(text[first:last])})
        if last <= first:
            continue
        drafted = draft_everywhere(target, drafter, ids[:, : len(text)], first, last, top_k)
        for name, budget in policies.items():
            lengths = rounds(text, first, last, drafted, top_k, budget)
            for kind in ("all", prompt["kind"]):
                found.setdefault(kind, {}).setdefault(name, []).extend(lengths)
    accept = {kind: {name: round(sum(x) / len(x), 3) for name, x in by.items()} for kind, by in found.items()}
    counted = {name: len(lengths) for name, lengths in found["all"].items()}
    return {
        "accept_length": accept,
        "rounds": counted,
        "prompts": len(prompts),
        "new_tokens": new_tokens,
        "top_k": top_k,
        "block_size": block,
        "samples": samples,
    }
