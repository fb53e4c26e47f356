"""Accept length of a drafter on its target's own greedy text, in plain PyTorch.

Greedy verification never changes the text, so a round needs no target of its own: the target writes its
continuation once, one forward over prompt and continuation gives every hidden state a round would have
seen, and rounds then walk along the known text. A round at anchor `a` drafts from the context before
`a`, accepts the longest drafted path that agrees with the text after `a`, and the next anchor is one
past it (the bonus token). Trees are those a server builds: kernels/tree/build.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from targets import features

from sglang_ddtree_patch.kernels.tree.build import build_token_tree

CHUNK = 32  # anchors drafted in one forward
NO_TOKEN = -1  # stands for the text past its end


@dataclass(frozen=True)
class Text:
    """A prompt and the target's greedy continuation of it, which starts at `first`."""

    kind: str
    ids: list[int]
    first: int
    last: int  # no round starts here or later; tokens from here on are only looked at


@torch.no_grad()
def draft_everywhere(target, drafter, text: Text, layers: Sequence[int], top_k: int, device: str):
    """Top-K log-probs and tokens of a block at every anchor: two tensors [anchors, B - 1, K]."""
    ids = torch.tensor([text.ids], device=device)
    context = features(target, ids, layers)
    table, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    log_probs, tokens = [], []
    for start in range(text.first, text.last, CHUNK):
        anchors = torch.arange(start, min(start + CHUNK, text.last), device=device)[None]
        hidden = drafter(context.to(drafter.fc.weight.dtype), ids, anchors, table.to(drafter.fc.weight.dtype))
        logits = F.linear(hidden[0, :, 1:], head.to(hidden.dtype))
        top = F.log_softmax(logits.float(), dim=-1).topk(top_k, dim=-1)
        log_probs.append(top.values)
        tokens.append(top.indices)
    return torch.cat(log_probs), torch.cat(tokens)


def truth_after(text: Text, depth: int, device) -> torch.Tensor:
    """The text's token at each anchor and the `depth` after it: int64 [anchors, depth + 1]."""
    padded = torch.tensor(text.ids + [NO_TOKEN] * depth, device=device)
    anchors = torch.arange(text.first, text.last, device=device)
    return padded[anchors[:, None] + torch.arange(depth + 1, device=device)]


def accepted(log_probs: torch.Tensor, tokens: torch.Tensor, truth: torch.Tensor, width: int) -> list[int]:
    """How far the text runs inside the `width`-row tree of each anchor."""
    tree = build_token_tree(truth[:, 0], tokens, log_probs, width)
    parents = tree.parents.clamp(min=0)
    is_next = tree.tokens == truth.gather(1, tree.depths)
    is_on_path = torch.zeros_like(is_next)
    is_on_path[:, 0] = True
    for row in range(1, width):  # parents stand before their children
        parent = is_on_path.gather(1, parents[:, row : row + 1])[:, 0]
        is_on_path[:, row] = parent & is_next[:, row]
    return (tree.depths * is_on_path).amax(dim=1).tolist()


def chain_accepted(tokens: torch.Tensor, truth: torch.Tensor) -> list[int]:
    """The same for the drafter's best chain."""
    return (tokens[:, :, 0] == truth[:, 1:]).long().cumprod(dim=1).sum(dim=1).tolist()


def rounds(lengths: Sequence[int]) -> Iterable[int]:
    """Accept lengths of the rounds a server takes, of those at every anchor."""
    anchor = 0
    while anchor < len(lengths):
        yield lengths[anchor]
        anchor += lengths[anchor] + 1


def evaluate(
    target,
    drafter,
    texts: Sequence[Text],
    layers: Sequence[int],
    device: str,
    top_k: int = 8,
    widths: Sequence[int] = (8, 16, 32, 64),
) -> dict:
    """Mean accept length by policy and kind of prompt, over all rounds of that kind."""
    found: dict[str, dict[str, list[int]]] = {}
    for text in texts:
        log_probs, tokens = draft_everywhere(target, drafter, text, layers, top_k, device)
        truth = truth_after(text, tokens.shape[1], device)
        by_policy = {"chain": chain_accepted(tokens, truth)}
        by_policy |= {f"tree_{width}": accepted(log_probs, tokens, truth, width) for width in widths}
        for kind in ("all", text.kind):
            for name, lengths in by_policy.items():
                found.setdefault(kind, {}).setdefault(name, []).extend(rounds(lengths))
    accept = {kind: {name: round(sum(x) / len(x), 3) for name, x in by.items()} for kind, by in found.items()}
    return {
        "accept_length": accept,
        "rounds": {name: len(lengths) for name, lengths in found["all"].items()},
        "prompts": len(texts),
        "top_k": top_k,
        "block_size": drafter.block,
    }
