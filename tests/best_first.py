"""The tree as the paper defines it, popped from a heap one prefix at a time, and inputs to compare trees on.

Scores are float32 sums taken one depth after another, in the heap as in the code, so that a tie is the
same tie in both: with any other order of summation "equal" scores would differ in their last bit.
"""

import heapq
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from sglang_ddtree_patch.kernels.tree.build import TokenTree, mask_words

ROOT_TOKEN = 7_000_000
PREFIX_LEN = 1000


@dataclass(frozen=True)
class Node:
    token: int
    parent: int  # row
    ranks: tuple[int, ...]
    score: float


def best_first(log_probs: np.ndarray, tokens: np.ndarray, width: int) -> list[Node]:
    """The rows behind the root, popped best first: by score, then shallower, then smaller ranks."""
    depths, candidates = log_probs.shape
    heap: list[tuple[float, int, tuple[int, ...], int]] = []

    def push_children(score: np.float32, ranks: tuple[int, ...], row: int) -> None:
        if len(ranks) == depths:
            return
        for rank in range(candidates):
            with np.errstate(over="ignore"):
                child = np.float32(score + log_probs[len(ranks), rank])
            if child > -np.inf:  # neither -inf nor NaN
                heapq.heappush(heap, (-float(child), len(ranks) + 1, (*ranks, rank), row))

    nodes: list[Node] = []
    push_children(np.float32(0), (), 0)
    while heap and len(nodes) < width - 1:
        negated, depth, ranks, parent = heapq.heappop(heap)
        nodes.append(Node(int(tokens[depth - 1, ranks[-1]]), parent, ranks, -negated))
        push_children(np.float32(-negated), ranks, len(nodes))
    return nodes


def tokens_for(depths: int, candidates: int, batch: int = 1) -> torch.Tensor:
    """A different token for every request, depth and rank, so that a token names its candidate."""
    return torch.arange(batch * depths * candidates).view(batch, depths, candidates)


def inputs(log_probs: torch.Tensor, width: int) -> dict:
    """Arguments of `build_token_tree` for `log_probs` [batch, depths, candidates]."""
    batch, depths, candidates = log_probs.shape
    return {
        "root_tokens": ROOT_TOKEN + torch.arange(batch),
        "candidate_tokens": tokens_for(depths, candidates, batch),
        "log_probs": log_probs,
        "width": width,
        "prefix_lens": PREFIX_LEN * torch.arange(batch),
    }


def assert_is_best_first(tree: TokenTree, log_probs: torch.Tensor, width: int) -> None:
    """Every field of the trees of `inputs(log_probs, width)`, row by row, against the heap."""
    batch, depths, candidates = log_probs.shape
    tokens = tokens_for(depths, candidates, batch)
    masks = masks_as_integers(tree.masks)
    assert tree.masks.shape == (batch, width, mask_words(width))
    for request in range(batch):
        nodes = best_first(log_probs[request].float().numpy(), tokens[request].numpy(), width)
        root = ROOT_TOKEN + request
        padding = width - 1 - len(nodes)
        assert tree.node_counts[request] == len(nodes) + 1
        assert tree.tokens[request].tolist() == [root, *(n.token for n in nodes), *[root] * padding]
        assert tree.parents[request].tolist() == [-1, *(n.parent for n in nodes), *[-1] * padding]
        depth_of_row = [0, *(len(n.ranks) for n in nodes), *[0] * padding]
        assert tree.depths[request].tolist() == depth_of_row
        assert tree.positions[request].tolist() == [PREFIX_LEN * request + depth for depth in depth_of_row]
        scores = [0.0, *(n.score for n in nodes), *[-np.inf] * padding]
        assert tree.scores[request].tolist() == scores
        seen = [1]
        for row, node in enumerate(nodes, start=1):
            assert node.parent < row
            seen.append(seen[node.parent] | 1 << row)
        seen += [1 << row for row in range(len(nodes) + 1, width)]
        assert masks[request] == seen


def masks_as_integers(masks: torch.Tensor) -> list[list[int]]:
    """Bitmask words as one Python integer a row: bit 64 * word + j."""
    unsigned = masks.numpy().view(np.uint64)
    return [[sum(int(word) << 64 * i for i, word in enumerate(row)) for row in rows] for rows in unsigned]


def descending_log_probs(generator: torch.Generator, batch: int, depths: int, candidates: int, scale: float):
    """The top of a random softmax: larger `scale`, more peaked."""
    logits = scale * torch.randn(batch, depths, 4 * candidates, generator=generator)
    return logits.log_softmax(-1).sort(-1, descending=True).values[..., :candidates].contiguous()


def tied_log_probs(generator: torch.Generator, batch: int, depths: int, candidates: int, steps: int):
    """A few multiples of 1/8, zero among them: sums are exact, so most scores tie."""
    return -torch.randint(0, steps, (batch, depths, candidates), generator=generator).sort(-1).values / 8.0


def broken_log_probs(generator: torch.Generator, batch: int, depths: int, candidates: int):
    """Random ones whose tails, at times all of a position, are -inf or NaN; equal ones among the rest."""
    log_probs = descending_log_probs(generator, batch, depths, candidates, 2.0).bfloat16().float()
    possible = torch.randint(0, 2 * candidates + 1, (batch, depths, 1), generator=generator)
    bad = torch.where(torch.rand(batch, 1, 1, generator=generator) < 0.5, torch.nan, -torch.inf)
    return torch.where(torch.arange(candidates) < possible, log_probs, bad)


@st.composite
def any_log_probs(draw: st.DrawFn) -> torch.Tensor:
    """Arbitrary float32, infinities and NaN included, at any small shape: [1, depths, candidates]."""
    depths, candidates = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    value = st.one_of(
        st.sampled_from([0.0, -0.0, -0.5, -1.0, -1e-30, -1e30, -3.4e38, -float("inf"), float("nan")]),
        st.floats(max_value=0.0, width=32),
    )
    values = draw(st.lists(value, min_size=depths * candidates, max_size=depths * candidates))
    rows = torch.tensor(values, dtype=torch.float32).view(1, depths, candidates)
    # Best first, impossible ones last: what candidate_topk promises.
    rows = torch.where(rows.isnan(), -torch.inf, rows).sort(-1, descending=True).values
    return torch.where(rows.isinf() & torch.tensor(draw(st.booleans())), torch.nan, rows)
