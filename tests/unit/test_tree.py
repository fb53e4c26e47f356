"""kernels/tree/build.py in plain PyTorch against a heap that pops one prefix at a time (best_first.py)."""

import numpy as np
import pytest
import torch
from best_first import (
    ROOT_TOKEN,
    any_log_probs,
    assert_is_best_first,
    broken_log_probs,
    descending_log_probs,
    inputs,
    tied_log_probs,
    tokens_for,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_ddtree_patch.kernels.tree.build import (
    TokenTree,
    ancestor_masks,
    build_token_tree_torch,
    expected_accept_lengths,
    root_only_tree,
    unpack_masks,
)


def build(log_probs: torch.Tensor, width: int) -> TokenTree:
    return build_token_tree_torch(**inputs(log_probs, width))


def check(log_probs: torch.Tensor, width: int) -> None:
    assert_is_best_first(build(log_probs, width), log_probs, width)


WIDTHS = (1, 2, 3, 8, 17, 33, 63, 64, 65, 128, 129, 256)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_random_tree_is_the_best_first_tree_row_by_row(width):
    generator = torch.Generator().manual_seed(width)
    for depths, candidates, scale in [
        (1, 1, 1.0), (1, 8, 1.0), (7, 1, 2.0), (3, 2, 0.5), (7, 8, 3.0), (15, 8, 6.0), (15, 4, 0.1),
        (31, 2, 4.0), (31, 16, 8.0), (7, 64, 2.0),
    ]:
        batch = 24 if width <= 64 else 6
        check(descending_log_probs(generator, batch, depths, candidates, scale), width)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("steps", [1, 2, 4], ids=lambda steps: f"{steps} distinct values")
def test_ties_break_by_score_then_depth_then_ranks(width, steps):
    generator = torch.Generator().manual_seed(100 * width + steps)
    for depths, candidates in [(1, 8), (4, 3), (7, 8), (15, 8), (31, 2)]:
        check(tied_log_probs(generator, 12, depths, candidates, steps), width)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(log_probs=any_log_probs(), width=st.integers(1, 80))
def test_any_candidates_give_the_best_first_tree(log_probs, width):
    check(log_probs, width)


def test_a_certain_drafter_gives_a_chain():
    """One-hot: log-prob 0 for the first candidate, minus infinity for the others."""
    log_probs = torch.full((1, 15, 8), -torch.inf)
    log_probs[..., 0] = 0.0
    tree = build(log_probs, 64)
    assert tree.node_counts.tolist() == [16]
    assert tree.parents[0].tolist() == [-1, *range(15), *[-1] * 48]
    check(log_probs, 64)


def test_a_uniform_drafter_fills_the_shallow_depths_first():
    log_probs = torch.full((1, 15, 8), -np.log(8.0), dtype=torch.float32)
    tree = build(log_probs, 64)
    assert tree.depths[0].tolist() == [0, *[1] * 8, *[2] * 55]
    check(log_probs, 64)


@pytest.mark.parametrize("bad", [-torch.inf, torch.nan], ids=["-inf", "nan"])
@pytest.mark.parametrize("width", [2, 8, 65])
def test_nothing_below_an_impossible_candidate_enters_the_tree(bad, width):
    generator = torch.Generator().manual_seed(width)
    log_probs = descending_log_probs(generator, 16, 7, 4, 1.0)
    log_probs[::2, 3, 2:] = bad
    log_probs[1::2, 2] = bad  # a whole depth: no path goes past it
    log_probs[5] = bad  # no candidate at all
    check(log_probs, width)
    assert build(log_probs, width).depths[1::2].max() <= 2
    assert build(log_probs, width).node_counts[5] == 1


@pytest.mark.parametrize("width", [2, 17, 64, 100])
def test_broken_candidates_give_the_best_first_tree_of_the_others(width):
    generator = torch.Generator().manual_seed(width)
    for depths, candidates in [(1, 8), (7, 8), (15, 4), (31, 3)]:
        check(broken_log_probs(generator, 16, depths, candidates), width)


def test_a_candidate_rounded_above_certainty_counts_as_certain():
    """Logit minus log-partition may come out a little above 0; a child must not beat its parent."""
    log_probs = torch.tensor([[[1e-6, -9.0], [1e-6, -9.0], [1e-6, -9.0]]])
    assert build(log_probs, 4).parents.tolist() == [[-1, 0, 1, 2]]
    check(log_probs.clamp(max=0.0), 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scores_are_summed_in_float32_whatever_the_input(dtype):
    generator = torch.Generator().manual_seed(3)
    check(descending_log_probs(generator, 8, 15, 8, 2.0).to(dtype), 33)


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
    together = build_token_tree_torch(roots, tokens, log_probs, 65)
    for i in range(13):
        alone = build_token_tree_torch(roots[i : i + 1], tokens[i : i + 1], log_probs[i : i + 1], 65)
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


@pytest.mark.parametrize("width", [1, 2, 7, 64, 65, 130])
def test_the_first_rows_are_the_tree_of_that_width(width):
    generator = torch.Generator().manual_seed(width)
    for log_probs in (
        descending_log_probs(generator, 2, 7, 8, 3.0),
        broken_log_probs(generator, 3, 4, 3),
        tied_log_probs(generator, 2, 5, 4, 2),
    ):
        widest = build(log_probs, 130)
        assert_is_best_first(widest.narrowed(width), log_probs, width)


def test_expected_accept_lengths_are_what_a_drafter_that_is_right_about_itself_would_see():
    """Drawn from the drafter's own distributions, position by position, walks are as long as expected."""
    generator = torch.Generator().manual_seed(5)
    full = (1.5 * torch.randn(1, 5, 6, generator=generator)).log_softmax(-1)
    log_probs, ranks = full.sort(-1, descending=True)
    widths = [1, 2, 5, 12, 40]
    arguments = inputs(log_probs, 40) | {"candidate_tokens": ranks}
    tree = build_token_tree_torch(**arguments)
    expected = expected_accept_lengths(tree, torch.tensor(widths))
    draws = 20_000
    truth = torch.multinomial(full[0].exp(), draws, replacement=True, generator=generator)  # [depths, draws]
    for width, length in zip(widths, expected[0].tolist(), strict=True):
        cut = tree.narrowed(width)
        row, walked = torch.zeros(draws, dtype=torch.int64), torch.zeros(draws)
        alive = torch.ones(draws, dtype=torch.bool)
        for tokens in truth:
            is_next = (cut.parents[0] == row[:, None]) & (cut.tokens[0] == tokens[:, None])
            alive &= is_next.any(1)
            row = torch.where(alive, is_next.to(torch.int8).argmax(1), row)
            walked += alive
        assert walked.mean().item() == pytest.approx(length, abs=0.04), width
    assert expected[0, 0] == 0.0


def test_a_root_alone_expects_nothing():
    tree = root_only_tree(torch.tensor([3, 4]), 1, torch.tensor([10, 20]))
    assert expected_accept_lengths(tree, torch.tensor([1])).tolist() == [[0.0], [0.0]]
    assert tree.positions.tolist() == [[10], [20]]
    assert tree.masks.tolist() == [[[1]], [[1]]]
