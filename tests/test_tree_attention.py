"""Tree verify attention: equal to the reference for every tree, length, page and head shape.

On a machine without a GPU the kernels run in Triton's interpreter, in float32 and small.
"""

import math

import pytest
import torch
import triton
import triton.language as tl
from tree_attention_inputs import MLA, Case, make_inputs

from sglang_ddtree_patch.kernels.reference import tree_attention_reference
from sglang_ddtree_patch.kernels.tree_attention import plan_tree_attention, tree_attention, workspace_size
from sglang_ddtree_patch.kernels.tree_attention_configs import (
    HeadShape,
    TreeAttentionConfig,
    choose_config,
    split_count,
)
from sglang_ddtree_patch.kernels.tree_attention_split import split_plan

HAS_GPU = torch.cuda.is_available()
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
MANY_SPLITS = TreeAttentionConfig(block_m=16, block_n=16, warps=4, stages=2, programs_per_sm=24)

on_cpu = pytest.param("cpu", torch.float32, marks=pytest.mark.skipif(HAS_GPU, reason="the GPU runs it"))
on_gpu = [pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in TOLERANCE]
everywhere = pytest.mark.parametrize(("device", "dtype"), [on_cpu, *on_gpu])


def attend(inputs: dict, page_size: int, config: TreeAttentionConfig | None = None) -> torch.Tensor:
    """Run the kernels into a poisoned output through a poisoned workspace."""
    query, kv_heads, value_dim = inputs["query"], inputs["key_cache"].shape[1], inputs["value_cache"].shape[2]
    batch, heads = inputs["request_ids"].shape[0], query.shape[1]
    shared = inputs["key_cache"].data_ptr() == inputs["value_cache"].data_ptr()
    head = HeadShape(query.shape[2], value_dim, value_is_key=shared, element_size=query.element_size())
    rows = query.shape[0] // batch
    plan = plan_tree_attention(
        query.device, head, batch=batch, rows=rows, heads=heads, kv_heads=kv_heads, config=config
    )
    elements = plan.workspace_elements(rows, heads, value_dim)
    workspace = torch.full((elements,), torch.nan, device=query.device)
    out = torch.full((query.shape[0], heads, value_dim), torch.nan, dtype=query.dtype, device=query.device)
    return tree_attention(**inputs, page_size=page_size, out=out, workspace=workspace, config=config)


def check(case: Case, device: str, dtype: torch.dtype, config: TreeAttentionConfig | None = None) -> None:
    inputs = make_inputs(case, device, dtype)
    result = attend(inputs, case.page_size, config).double()
    expected = tree_attention_reference(**{**inputs, "query": inputs["query"].float()}).double()
    error = ((result - expected).norm() / expected.norm()).item()
    assert error <= TOLERANCE[dtype], f"{case}: relative error {error:.2e}"


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
    case = Case(prefixes=(130, 64, 3), rows=70, heads=2, kv_heads=1, page_size=page_size)
    check(case, device, dtype, config)


@everywhere
@pytest.mark.parametrize("prefixes", [(0,), (13,), (16,), (200, 0, 7), (300,)])
def test_splits_meet_where_blocks_do(prefixes, device, dtype):
    """Blocks of 16 keys over many splits: most splits hold one block, some requests one split."""
    check(Case(prefixes=prefixes, rows=6, heads=2, kv_heads=2), device, dtype, MANY_SPLITS)


@everywhere
@pytest.mark.parametrize(
    "shape",
    [
        Case(heads=3, kv_heads=3),
        Case(heads=5, kv_heads=1),
        Case(heads=6, kv_heads=2, key_dim=96, value_dim=96),
        Case(heads=4, kv_heads=1, key_dim=128, value_dim=128),
        Case(heads=2, kv_heads=2, key_dim=192, value_dim=192),
        Case(heads=2, kv_heads=2, key_dim=192, value_dim=128),
        Case(heads=2, kv_heads=1, key_dim=256, value_dim=256),
        Case(heads=2, kv_heads=1, key_dim=80, value_dim=80),
        MLA,
        MLA.with_(page_size=64, tree="chain"),
    ],
    ids=lambda case: f"{case.heads}x{case.kv_heads}x{case.key_dim}x{case.value_dim}",
)
def test_every_head_shape(shape, device, dtype):
    check(shape.with_(prefixes=(80, 5)), device, dtype)


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


@pytest.mark.gpu
@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("shape", [Case(key_dim=128, value_dim=128), MLA], ids=["gqa", "mla"])
def test_float8_caches_are_scaled(shape, cache_dtype):
    inputs = make_inputs(shape, "cuda", torch.bfloat16)
    stored = inputs["key_cache"].to(cache_dtype)
    values = stored[..., : shape.value_dim] if shape.mla else inputs["value_cache"].to(cache_dtype)
    result = tree_attention(
        **inputs | {"key_cache": stored, "value_cache": values},
        page_size=shape.page_size, k_scale=0.5, v_scale=2.0,
    )  # fmt: skip
    scaled = inputs | {"key_cache": stored.float() * 0.5, "value_cache": values.float() * 2.0}
    expected = tree_attention_reference(**scaled | {"query": inputs["query"].float()})
    assert (result - expected).norm() / expected.norm() < 1e-2


@triton.jit
def _store_plan(prefix_lens, out, batch, rows, max_splits, BLOCK_N: tl.constexpr, BATCH_BLOCK: tl.constexpr):
    splits, _ = split_plan(prefix_lens, batch, rows, max_splits, BLOCK_N, BATCH_BLOCK)
    tl.store(out + tl.arange(0, BATCH_BLOCK), splits)


@pytest.mark.parametrize("lengths", [[0], [0, 0, 0], [185_000], [9, 100_000, 64, 3000], [16_384] * 8])
def test_splits_never_outgrow_the_launch_and_follow_the_lengths(lengths):
    device = "cuda" if HAS_GPU else "cpu"
    for max_splits in (2 * len(lengths), 33, 264):
        out = torch.zeros(8, dtype=torch.int32, device=device)
        prefix_lens = torch.tensor(lengths, device=device)
        _store_plan[(1,)](prefix_lens, out, len(lengths), 17, max_splits, 64, 8)
        splits = out.tolist()[: len(lengths)]
        blocks = [math.ceil((length + 17) / 64) for length in lengths]
        assert sum(splits) <= max_splits
        # No split holds much more than an even share of all blocks.
        share = math.ceil(sum(blocks) / (max_splits - len(lengths) + 1))
        assert all(math.ceil(b / s) <= share for b, s in zip(blocks, splits, strict=True))


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
