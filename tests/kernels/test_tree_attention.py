"""Tree verify attention: equal to the reference for every tree, length, page and head shape.

On a machine without a GPU the kernels run in Triton's interpreter, in float32 and small.
"""

import math

import pytest
import torch
import triton
import triton.language as tl
from tree_attention_checks import HAS_GPU, MANY_SPLITS, TOLERANCE, attend, check, everywhere
from tree_attention_inputs import MLA, Case, make_inputs

from sglang_ddtree_patch.kernels.attention.configs import (
    HeadShape,
    TreeAttentionConfig,
    choose_config,
    split_count,
)
from sglang_ddtree_patch.kernels.attention.split import split_plan
from sglang_ddtree_patch.kernels.attention.tree_attention import tree_attention, workspace_size


@everywhere
@pytest.mark.parametrize("tree", ["chain", "star", "comb", "random", "whole"])
def test_every_tree_is_masked_as_it_says(tree, device, dtype):
    check(Case(tree=tree, rows=9), device, dtype)


@everywhere
@pytest.mark.parametrize("rows", [1, 2, 17, 64, 65, 100])
def test_every_width_of_tree(rows, device, dtype):
    """65 rows take a second mask word; 100 rows x 2 heads take several row tiles."""
    check(Case(prefixes=(41,), rows=rows, kv_heads=2, heads=4), device, dtype)


@everywhere
@pytest.mark.parametrize("page_size", [1, 16, 32, 64, 128])
def test_lengths_around_page_and_block_boundaries(page_size, device, dtype):
    lengths = (0, 1, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129)
    case = Case(prefixes=lengths, rows=3, heads=2, kv_heads=1, page_size=page_size)
    check(case, device, dtype)


@everywhere
@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("block_n", [16, 32, 128])
def test_key_blocks_of_every_size(block_n, page_size, device, dtype):
    """Pages smaller and larger than a block, a tail in several pieces, masks of two words."""
    config = TreeAttentionConfig(block_m=64, block_n=block_n, warps=4, stages=3, programs_per_sm=2)
    case = Case(prefixes=(130, 3), rows=70, heads=2, kv_heads=1, page_size=page_size)
    check(case, device, dtype, config)


@everywhere
@pytest.mark.parametrize("prefixes", [(0,), (16,), (200, 0, 7), (28, 29, 41, 42, 43, 60)])
def test_splits_meet_where_blocks_do(prefixes, device, dtype):
    """Blocks of 16 keys over many splits: most splits hold one block, some requests one split."""
    check(Case(prefixes=prefixes, rows=6, heads=2, kv_heads=1), device, dtype, MANY_SPLITS)


def head_case(key_dim: int, value_dim: int, group: int, page_size: int) -> Case:
    shape = {"key_dim": key_dim, "value_dim": value_dim, "page_size": page_size}
    if key_dim == 576:
        return MLA.with_(heads=group, **shape)
    return Case(heads=2 * group, kv_heads=2, **shape)


@everywhere
@pytest.mark.parametrize(
    ("key_dim", "value_dim", "group", "page_size"),
    [
        (64, 64, 1, 16),
        (64, 64, 3, 1),
        (64, 64, 7, 64),
        (64, 64, 8, 128),
        (64, 64, 16, 32),
        (80, 80, 5, 16),
        (96, 96, 3, 64),
        (128, 128, 8, 32),
        (192, 192, 7, 16),
        (192, 128, 16, 1),
        (256, 256, 1, 128),
        (576, 512, 8, 1),
        (576, 512, 16, 64),
    ],
)
def test_every_head_shape_group_and_page_size(key_dim, value_dim, group, page_size, device, dtype):
    check(head_case(key_dim, value_dim, group, page_size).with_(prefixes=(80, 5), rows=3), device, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 16, 32, 64, 128])
@pytest.mark.parametrize("group", [1, 3, 7, 8, 16])
@pytest.mark.parametrize(
    ("key_dim", "value_dim"),
    [(64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256), (576, 512)],
)
def test_all_head_shapes_with_all_groups_and_page_sizes(key_dim, value_dim, group, page_size):
    case = head_case(key_dim, value_dim, group, page_size).with_(prefixes=(300, 64, 1), rows=17)
    check(case, "cuda", torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("window", [None, 100])
def test_every_length_up_to_many_blocks_and_splits(window, rows):
    """Every length to 400, and those around the boundaries of blocks and splits to 6400."""
    lengths = [*range(400), *(64 * block + step for block in range(6, 100) for step in (-rows, -1, 0, 1))]
    for start in range(0, len(lengths), 48):
        case = Case(prefixes=tuple(lengths[start : start + 48]), rows=rows, page_size=64, window=window)
        check(case, "cuda", torch.bfloat16)


@everywhere
def test_logits_are_capped_where_the_model_caps_them(device, dtype):
    case = Case(logit_cap=0.5)
    check(case, device, dtype)
    assert not torch.equal(
        attend(make_inputs(case, device, dtype), case.page_size),
        attend(make_inputs(case.with_(logit_cap=0.0), device, dtype), case.page_size),
    )


@everywhere
def test_two_runs_give_the_same_bits(device, dtype):
    inputs = make_inputs(Case(prefixes=(150, 20)), device, dtype)
    assert torch.equal(attend(inputs, 16, MANY_SPLITS), attend(inputs, 16, MANY_SPLITS))


@everywhere
def test_padded_requests_change_nothing_and_come_out_finite(device, dtype):
    """Graph padding: requests of length 0 or 1 that point at the table's first row."""
    case = Case(prefixes=(90,), rows=4)
    inputs = make_inputs(case, device, dtype)
    alone = attend(inputs, case.page_size)
    padded = dict(inputs)
    padded["query"] = torch.cat([inputs["query"], torch.zeros_like(inputs["query"]).repeat(2, 1, 1)])
    padded["request_ids"] = torch.tensor([0, 0, 0], device=device)
    padded["prefix_lens"] = torch.tensor([90, 0, 1], device=device)
    padded["tree_mask"] = inputs["tree_mask"].repeat(3, 1, 1)
    result = attend(padded, case.page_size)
    assert result.isfinite().all()
    torch.testing.assert_close(result[:4], alone, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@everywhere
def test_a_row_that_sees_nothing_comes_out_finite(device, dtype):
    case = Case(prefixes=(0,), rows=4)
    inputs = make_inputs(case, device, dtype)
    inputs["tree_mask"] = torch.zeros_like(inputs["tree_mask"])
    assert attend(inputs, case.page_size).isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
@pytest.mark.parametrize("rows", [1, 9, 17, 64, 128])
@pytest.mark.parametrize(
    "shape", [Case(heads=32, kv_heads=8, key_dim=128, value_dim=128), MLA.with_(heads=8)], ids=["gqa", "mla"]
)
def test_serving_shapes(shape, rows, page_size, dtype):
    check(shape.with_(prefixes=(5000, 77, 16384, 0), rows=rows, page_size=page_size), "cuda", dtype)


@triton.jit
def _store_plan(
    prefix_lens, out, batch, rows, max_splits, window, BLOCK_N: tl.constexpr, BATCH_BLOCK: tl.constexpr
):
    splits, _ = split_plan(prefix_lens, batch, rows, max_splits, BLOCK_N, BATCH_BLOCK, window)
    tl.store(out + tl.arange(0, BATCH_BLOCK), splits)


@pytest.mark.parametrize("window", [1 << 30, 1000])
@pytest.mark.parametrize("lengths", [[0], [0, 0, 0], [185_000], [9, 100_000, 64, 3000], [16_384] * 8])
def test_splits_never_outgrow_the_launch_and_follow_the_lengths(lengths, window):
    device = "cuda" if HAS_GPU else "cpu"
    for max_splits in (2 * len(lengths), 33, 264):
        out = torch.zeros(8, dtype=torch.int32, device=device)
        prefix_lens = torch.tensor(lengths, device=device)
        _store_plan[(1,)](prefix_lens, out, len(lengths), 17, max_splits, window, 64, 8)
        splits = out.tolist()[: len(lengths)]
        blocks = [math.ceil((length + 17) / 64) - max(length - window, 0) // 64 for length in lengths]
        assert sum(splits) <= max_splits
        # No split holds much more than an even share of all blocks.
        share = math.ceil(sum(blocks) / (max_splits - len(lengths) + 1))
        assert all(math.ceil(b / s) <= share for b, s in zip(blocks, splits, strict=True))
        assert all(s <= b for b, s in zip(blocks, splits, strict=True))


def test_launch_shape_and_workspace_do_not_depend_on_lengths():
    head = HeadShape(128, 128, value_is_key=False, element_size=2)
    config = choose_config((9, 0), head, packed_rows=68)
    assert split_count(132, config, kv_heads=8, tiles=2, batch=1) == 132 * config.programs_per_sm // 16
    assert split_count(132, config, kv_heads=8, tiles=2, batch=100) == 200
    inputs = make_inputs(Case(), "cpu", torch.float32)
    size = workspace_size(
        torch.device("cpu"), HeadShape(64, 64, False, 4), max_batch=2, max_rows=5, heads=4, kv_heads=2
    )
    if not HAS_GPU:
        tree_attention(**inputs, page_size=16, workspace=torch.empty(size))
        with pytest.raises(ValueError, match="size it with workspace_size"):
            tree_attention(**inputs, page_size=16, workspace=torch.empty(100))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(10, 3, 64)}, "does not fit 2 requests"),
        ({"query": torch.zeros(10, 4, 128)[..., ::2]}, "must be contiguous"),
        ({"tree_mask": torch.zeros(2, 5, 1, dtype=torch.int32)}, "tree_mask must be"),
    ],
)
def test_wrong_shapes_are_refused_in_words(change, message):
    inputs = make_inputs(Case(), "cpu", torch.float32) | change
    with pytest.raises(ValueError, match=message):
        tree_attention(**inputs, page_size=16)


def test_gpus_that_cannot_run_it_are_refused_in_words():
    with pytest.raises(RuntimeError, match=r"8\.0 or newer"):
        choose_config((7, 5), HeadShape(128, 128, value_is_key=False, element_size=2), packed_rows=8)
