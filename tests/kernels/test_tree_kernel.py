"""kernels/tree/build_kernel.py against the heap, and by the thousand against build.py where there is a GPU.

Without one the kernel runs in Triton's interpreter, some 10 ms a row: a few hundred trees, mostly narrow.
"""

import dataclasses

import pytest
import torch
from best_first import (
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

from sglang_ddtree_patch.kernels.tree.build import TokenTree, build_token_tree, build_token_tree_torch
from sglang_ddtree_patch.kernels.tree.build_kernel import build_token_tree_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def to_device(arguments: dict, device: str) -> dict:
    return {name: value if name == "width" else value.to(device) for name, value in arguments.items()}


def fields(tree: TokenTree) -> dict[str, torch.Tensor]:
    return {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}


def build(log_probs: torch.Tensor, width: int) -> TokenTree:
    """The kernel's trees, on the CPU."""
    tree = build_token_tree_triton(**to_device(inputs(log_probs, width), DEVICE))
    return TokenTree(**{name: value.cpu() for name, value in fields(tree).items()})


def check(log_probs: torch.Tensor, width: int) -> None:
    assert_is_best_first(build(log_probs, width), log_probs, width)


@pytest.mark.parametrize("width", [1, 2, 3, 17, 33])
def test_a_random_tree_is_the_best_first_tree_row_by_row(width):
    generator = torch.Generator().manual_seed(width)
    for depths, candidates, scale in [(1, 1, 1.0), (1, 8, 1.0), (7, 8, 3.0), (15, 4, 0.1), (31, 64, 4.0)]:
        check(descending_log_probs(generator, 2, depths, candidates, scale), width)


@pytest.mark.parametrize("width", [64, 65, 129, 256])
def test_a_wide_tree_is_the_best_first_tree_row_by_row(width):
    generator = torch.Generator().manual_seed(width)
    check(descending_log_probs(generator, 1, 15, 8, 3.0), width)


@pytest.mark.parametrize("width", [8, 34])
@pytest.mark.parametrize("steps", [1, 2, 4], ids=lambda steps: f"{steps} distinct values")
def test_ties_break_by_score_then_depth_then_ranks(width, steps):
    generator = torch.Generator().manual_seed(100 * width + steps)
    for depths, candidates in [(4, 3), (7, 8), (31, 2)]:
        check(tied_log_probs(generator, 2, depths, candidates, steps), width)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(log_probs=any_log_probs(), width=st.integers(1, 20))
def test_any_candidates_give_the_best_first_tree(log_probs, width):
    check(log_probs, width)


@pytest.mark.parametrize("width", [5, 20])
def test_broken_candidates_give_the_best_first_tree_of_the_others(width):
    generator = torch.Generator().manual_seed(width)
    for depths, candidates in [(1, 8), (7, 4), (15, 3)]:
        check(broken_log_probs(generator, 4, depths, candidates), width)


def test_a_certain_drafter_gives_a_chain_and_padding():
    log_probs = torch.full((1, 15, 8), -torch.inf)
    log_probs[..., 0] = 0.0
    check(log_probs, 24)


def test_a_uniform_drafter_fills_the_shallow_depths_first():
    check(torch.full((1, 15, 8), -2.0794415), 40)


def test_no_drafted_position_leaves_the_root_and_padding():
    check(torch.zeros(2, 0, 8), 4)


def test_a_candidate_rounded_above_certainty_counts_as_certain():
    log_probs = torch.tensor([[[1e-6, -9.0], [1e-6, -9.0], [1e-6, -9.0]]])
    assert build(log_probs, 4).parents.tolist() == [[-1, 0, 1, 2]]
    assert_is_best_first(build(log_probs, 6), log_probs.clamp(max=0.0), 6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_scores_are_summed_in_float32_whatever_the_input(dtype):
    generator = torch.Generator().manual_seed(3)
    check(descending_log_probs(generator, 2, 15, 8, 2.0).to(dtype), 33)


def test_positions_are_depths_where_no_lengths_were_given():
    arguments = to_device(inputs(torch.zeros(2, 3, 2), 4), DEVICE) | {"prefix_lens": None}
    for build_it in (build_token_tree_triton, build_token_tree_torch):
        tree = build_it(**arguments)
        assert torch.equal(tree.positions, tree.depths)
        assert tree.depths.max() > 0


def test_a_tree_beyond_32_bits_is_refused():
    with pytest.raises(ValueError, match="300 rows over 9000 positions of 1 candidates is too large"):
        build(torch.zeros(1, 9000, 1), 300)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1, 2, 16, 17, 33, 64, 65, 100, 256])
def test_thousands_of_trees_equal_the_reference(width):
    """512 trees at once for each shape and kind; two of them against the heap as well."""
    generator = torch.Generator().manual_seed(width)
    for depths in (1, 7, 15, 31):
        for candidates in (1, 8, 64):
            shape = (512, depths, candidates)
            for log_probs in (
                descending_log_probs(generator, *shape, 3.0),
                # What bfloat16 logits give: equal candidates at most positions.
                descending_log_probs(generator, *shape, 1.0).bfloat16().float(),
                tied_log_probs(generator, *shape, 3),
                broken_log_probs(generator, *shape),
            ):
                arguments = to_device(inputs(log_probs, width), "cuda")
                expected = fields(build_token_tree_torch(**arguments))
                tree = build_token_tree_triton(**arguments)
                for name, value in fields(tree).items():
                    assert torch.equal(value, expected[name]), (shape, name)
                check(log_probs[:2], width)


@pytest.mark.gpu
def test_a_captured_build_follows_its_inputs():
    """The public function takes the kernel on a GPU, waits for nothing and replays on new candidates."""
    generator = torch.Generator().manual_seed(1)
    samples = [descending_log_probs(generator, 32, 15, 8, 3.0) for _ in range(3)]
    arguments = to_device(inputs(samples[0], 64), "cuda")
    build_token_tree(**arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tree = build_token_tree(**arguments)
    for log_probs in samples:
        arguments["log_probs"].copy_(log_probs)
        graph.replay()
        assert_is_best_first(
            TokenTree(**{name: value.cpu() for name, value in fields(tree).items()}), log_probs, 64
        )


def test_requests_of_a_batch_do_not_touch_each_other():
    generator = torch.Generator().manual_seed(5)
    log_probs = torch.cat([descending_log_probs(generator, 2, 15, 8, scale) for scale in (0.1, 4.0)])
    log_probs[1] = -torch.inf
    together = fields(build(log_probs, 20))
    for i in range(4):
        arguments = inputs(log_probs, 20) | {"candidate_tokens": tokens_for(15, 8, 4)}
        alone = {name: value if name == "width" else value[i : i + 1] for name, value in arguments.items()}
        for name, value in fields(build_token_tree_triton(**to_device(alone, DEVICE))).items():
            assert torch.equal(value.cpu(), together[name][i : i + 1]), (i, name)
