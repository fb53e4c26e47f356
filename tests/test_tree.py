"""kernels/tree.py against a heap that pops one prefix at a time, which is how the paper defines the tree.

Scores are float32 sums taken one depth after another, in the heap as in the code, so that a tie is the
same tie in both: with any other order of summation "equal" scores would differ in their last bit.
"""

import heapq
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_ddtree_patch.kernels.tree import (
    TokenTree,
    ancestor_masks,
    build_token_tree,
    mask_words,
    unpack_masks,
)

ROOT_TOKEN = 7_000_000


@dataclass(frozen=True)
class Node:
    token: int
    parent: int  # row
    ranks: tuple[int, ...]


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
        nodes.append(Node(int(tokens[depth - 1, ranks[-1]]), parent, ranks))
        push_children(np.float32(-negated), ranks, len(nodes))
    return nodes


def tokens_for(depths: int, candidates: int, batch: int = 1) -> torch.Tensor:
    """A different token for every request, depth and rank, so that a token names its candidate."""
    return torch.arange(batch * depths * candidates).view(batch, depths, candidates)


def build(log_probs: torch.Tensor, width: int) -> TokenTree:
    """The trees of `log_probs` [batch, depths, candidates]."""
    batch, depths, candidates = log_probs.shape
    roots = ROOT_TOKEN + torch.arange(batch)
    return build_token_tree(roots, tokens_for(depths, candidates, batch), log_probs, width)


def assert_is_best_first(log_probs: torch.Tensor, width: int) -> None:
    """Every field of the batch's trees, row by row, against the heap."""
    batch, depths, candidates = log_probs.shape
    tokens = tokens_for(depths, candidates, batch)
    tree = build(log_probs, width)
    masks = masks_as_integers(tree.masks)
    assert tree.masks.shape == (batch, width, mask_words(width))
    for request in range(batch):
        nodes = best_first(log_probs[request].float().numpy(), tokens[request].numpy(), width)
        root = ROOT_TOKEN + request
        padding = width - 1 - len(nodes)
        assert tree.node_counts[request] == len(nodes) + 1
        assert tree.tokens[request].tolist() == [root, *(n.token for n in nodes), *[root] * padding]
        assert tree.parents[request].tolist() == [-1, *(n.parent for n in nodes), *[-1] * padding]
        assert tree.depths[request].tolist() == [0, *(len(n.ranks) for n in nodes), *[0] * padding]
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


WIDTHS = (1, 2, 3, 8, 17, 33, 63, 64, 65, 128, 129, 256)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_random_tree_is_the_best_first_tree_row_by_row(width):
    generator = torch.Generator().manual_seed(width)
    for depths, candidates, scale in [
        (1, 1, 1.0), (1, 8, 1.0), (7, 1, 2.0), (3, 2, 0.5), (7, 8, 3.0), (15, 8, 6.0), (15, 4, 0.1),
        (31, 2, 4.0), (31, 16, 8.0), (7, 64, 2.0),
    ]:
        batch = 24 if width <= 64 else 6
        assert_is_best_first(descending_log_probs(generator, batch, depths, candidates, scale), width)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("steps", [1, 2, 4], ids=lambda steps: f"{steps} distinct values")
def test_ties_break_by_score_then_depth_then_ranks(width, steps):
    """Log-probs of a few multiples of 1/8, zero among them: sums are exact, so most scores tie."""
    generator = torch.Generator().manual_seed(100 * width + steps)
    for depths, candidates in [(1, 8), (4, 3), (7, 8), (15, 8), (31, 2)]:
        grid = torch.randint(0, steps, (12, depths, candidates), generator=generator)
        assert_is_best_first(-grid.sort(-1).values / 8.0, width)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_candidates_give_the_best_first_tree(data):
    """Arbitrary float32, infinities and NaN included, at any shape."""
    depths, candidates = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    width = data.draw(st.integers(1, 80))
    value = st.one_of(
        st.sampled_from([0.0, -0.0, -0.5, -1.0, -1e-30, -1e30, -3.4e38, -float("inf"), float("nan")]),
        st.floats(max_value=0.0, width=32),
    )
    values = data.draw(st.lists(value, min_size=depths * candidates, max_size=depths * candidates))
    rows = torch.tensor(values, dtype=torch.float32).view(depths, candidates)
    # Best first, NaN last: what candidate_topk promises.
    rows = torch.where(rows.isnan(), -torch.inf, rows).sort(-1, descending=True).values
    rows = torch.where(rows.isinf() & torch.tensor(data.draw(st.booleans())), torch.nan, rows)
    assert_is_best_first(rows[None], width)


def test_a_certain_drafter_gives_a_chain():
    """One-hot: log-prob 0 for the first candidate, minus infinity for the others."""
    log_probs = torch.full((1, 15, 8), -torch.inf)
    log_probs[..., 0] = 0.0
    tree = build(log_probs, 64)
    assert tree.node_counts.tolist() == [16]
    assert tree.parents[0].tolist() == [-1, *range(15), *[-1] * 48]
    assert_is_best_first(log_probs, 64)


def test_a_uniform_drafter_fills_the_shallow_depths_first():
    log_probs = torch.full((1, 15, 8), -np.log(8.0), dtype=torch.float32)
    tree = build(log_probs, 64)
    assert tree.depths[0].tolist() == [0, *[1] * 8, *[2] * 55]
    assert_is_best_first(log_probs, 64)


@pytest.mark.parametrize("bad", [-torch.inf, torch.nan], ids=["-inf", "nan"])
@pytest.mark.parametrize("width", [2, 8, 65])
def test_nothing_below_an_impossible_candidate_enters_the_tree(bad, width):
    generator = torch.Generator().manual_seed(width)
    log_probs = descending_log_probs(generator, 16, 7, 4, 1.0)
    log_probs[::2, 3, 2:] = bad
    log_probs[1::2, 2] = bad  # a whole depth: no path goes past it
    log_probs[5] = bad  # no candidate at all
    assert_is_best_first(log_probs, width)
    assert build(log_probs, width).depths[1::2].max() <= 2
    assert build(log_probs, width).node_counts[5] == 1


def test_a_candidate_rounded_above_certainty_counts_as_certain():
    """Logit minus log-partition may come out a little above 0; a child must not beat its parent."""
    log_probs = torch.tensor([[[1e-6, -9.0], [1e-6, -9.0], [1e-6, -9.0]]])
    assert build(log_probs, 4).parents.tolist() == [[-1, 0, 1, 2]]
    assert_is_best_first(log_probs.clamp(max=0.0), 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scores_are_summed_in_float32_whatever_the_input(dtype):
    generator = torch.Generator().manual_seed(3)
    assert_is_best_first(descending_log_probs(generator, 8, 15, 8, 2.0).to(dtype), 33)


@pytest.mark.parametrize("depths", [0, 15])
def test_width_one_is_the_root_alone(depths):
    tree = build(torch.zeros(2, depths, 8), 1)
    assert tree.tokens.tolist() == [[ROOT_TOKEN], [ROOT_TOKEN + 1]]
    assert tree.masks.tolist() == [[[1]], [[1]]]
    assert (tree.parents.tolist(), tree.node_counts.tolist()) == ([[-1], [-1]], [1, 1])


def test_no_drafted_position_leaves_the_root_and_padding():
    tree = build(torch.zeros(1, 0, 8), 4)
    assert tree.tokens.tolist() == [[ROOT_TOKEN] * 4]
    assert tree.parents.tolist() == [[-1] * 4]
    assert tree.masks.flatten().tolist() == [1, 2, 4, 8]
    assert (tree.node_counts.tolist(), tree.depths.tolist()) == ([1], [[0] * 4])


def test_requests_of_a_batch_do_not_touch_each_other():
    generator = torch.Generator().manual_seed(5)
    log_probs = torch.cat(
        [descending_log_probs(generator, 3, 15, 8, scale) for scale in (0.1, 1.0, 4.0, 20.0)]
        + [torch.full((1, 15, 8), -torch.inf)]
    )
    roots, tokens = ROOT_TOKEN + torch.arange(13), tokens_for(15, 8, 13)
    together = build_token_tree(roots, tokens, log_probs, 65)
    for i in range(13):
        alone = build_token_tree(roots[i : i + 1], tokens[i : i + 1], log_probs[i : i + 1], 65)
        for field in ("tokens", "parents", "depths", "masks", "node_counts"):
            assert torch.equal(getattr(together, field)[i : i + 1], getattr(alone, field)), (i, field)


def test_more_width_only_appends_rows():
    """The best 16 are the first 16 of the best 256: a wider tree never accepts less."""
    generator = torch.Generator().manual_seed(6)
    log_probs = descending_log_probs(generator, 8, 15, 8, 2.0)
    widest = build(log_probs, 256)
    for width in (2, 16, 17, 64, 65):
        tree = build(log_probs, width)
        assert torch.equal(tree.tokens, widest.tokens[:, :width])
        assert torch.equal(tree.parents, widest.parents[:, :width])


@pytest.mark.parametrize("width", [1, 5, 63, 64, 65, 128, 200])
def test_unpacked_masks_show_each_row_its_ancestors_and_itself(width):
    generator = torch.Generator().manual_seed(width)
    parents = torch.full((3, width), -1)
    for row in range(1, width):
        parents[:, row] = torch.randint(-1, row, (3,), generator=generator)
    visible = unpack_masks(ancestor_masks(parents, max_depth=width))
    for request in range(3):
        for row in range(width):
            expected, ancestor = {row}, int(parents[request, row])
            while ancestor >= 0:
                expected.add(ancestor)
                ancestor = int(parents[request, ancestor])
            assert set(visible[request, row].nonzero().flatten().tolist()) == expected
