"""Tree verify attention for layers that do more: sliding windows, sinks, a pool of their own, float8 caches.

Keys that no window reaches are poisoned (tree_attention_inputs.py), so reading one would show.
"""

import pytest
import torch
import triton
import triton.language as tl
from tree_attention_checks import HAS_GPU, MANY_SPLITS, attend, check, everywhere
from tree_attention_inputs import E4M3_BITS, FLOAT8, MLA, Case, make_inputs

from sglang_ddtree_patch.kernels.attention.configs import INTERPRETER_CONFIG, HeadShape
from sglang_ddtree_patch.kernels.attention.split import float_of
from sglang_ddtree_patch.kernels.attention.tree_attention import plan_tree_attention

ONE_HEAD = Case(heads=2, kv_heads=1)
HEADS = ONE_HEAD.with_(heads=6, kv_heads=2)  # groups of 3


@everywhere
@pytest.mark.parametrize("tree", ["chain", "random", "whole"])
@pytest.mark.parametrize("window", [0, 5, 63, 500])
def test_a_window_counts_positions_in_the_tree_as_in_the_prefix(window, tree, device, dtype):
    """Down to windows shorter than the tree is deep, where a row no longer sees its own ancestors."""
    check(ONE_HEAD.with_(prefixes=(0, 3, 80), rows=9, tree=tree, window=window), device, dtype)


@everywhere
@pytest.mark.parametrize(("tree", "window"), [("chain", 90), ("comb", 10), ("comb", 66)])
def test_depths_are_counted_over_all_words_of_a_mask(tree, window, device, dtype):
    check(ONE_HEAD.with_(prefixes=(100,), rows=100, tree=tree, window=window), device, dtype)


@everywhere
@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
def test_windows_that_end_around_page_and_block_boundaries(page_size, device, dtype):
    lengths = (31, 32, 33, 47, 48, 49, 95, 96, 97, 159, 160, 161)
    check(ONE_HEAD.with_(prefixes=lengths, rows=3, window=32, page_size=page_size), device, dtype)


@everywhere
@pytest.mark.parametrize("prefixes", [(0,), (200, 0, 41)])
def test_the_splits_of_a_window_meet_where_blocks_do(prefixes, device, dtype):
    check(ONE_HEAD.with_(prefixes=prefixes, rows=6, window=70), device, dtype, MANY_SPLITS)


@everywhere
@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_a_layer_finds_its_keys_in_a_pool_of_its_own(page_size, device, dtype):
    """As SGLang keeps layers with a window: pages that left it have no slots, the map leads to page 0."""
    case = ONE_HEAD.with_(prefixes=(150, 7, 40), page_size=page_size, window=20, mapped=True)
    check(case, device, dtype)


@everywhere
@pytest.mark.parametrize("case", [HEADS, HEADS.with_(window=20), HEADS.with_(tree="whole", logit_cap=5.0)])
def test_sinks_join_the_denominator_of_their_heads_once(case, device, dtype):
    """Once for all splits, each head its own."""
    check(case.with_(sinks=True, prefixes=(70, 0)), device, dtype, MANY_SPLITS)


@everywhere
def test_a_sink_of_minus_infinity_is_none(device, dtype):
    case = HEADS.with_(prefixes=(40,))
    inputs = make_inputs(case, device, dtype)
    without = attend(inputs, case.page_size)
    inputs["sinks"] = torch.full((case.heads,), -torch.inf, device=device)
    assert torch.equal(attend(inputs, case.page_size), without)


@everywhere
@pytest.mark.parametrize("cache_dtype", [*FLOAT8, E4M3_BITS])
@pytest.mark.parametrize(
    "shape",
    [
        HEADS,
        HEADS.with_(key_dim=128, value_dim=128, window=20, sinks=True, mapped=True),
        MLA.with_(heads=2),
    ],
    ids=["gqa", "windowed", "mla"],
)
def test_float8_caches_are_scaled(shape, cache_dtype, device, dtype):
    check(shape.with_(prefixes=(40, 5), rows=3, cache_dtype=cache_dtype), device, dtype)


@triton.jit
def _convert(codes, out):
    each = tl.arange(0, 256)
    tl.store(out + each, float_of(tl.load(codes + each), tl.float32))


def test_e4m3_is_read_from_its_bits_where_no_instruction_converts_it():
    device = "cuda" if HAS_GPU else "cpu"
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    found = torch.empty(256, device=device)
    _convert[(1,)](codes, found)
    expected = codes.view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@everywhere
@pytest.mark.parametrize(
    "shape",
    [
        Case(heads=8, kv_heads=1),
        Case(heads=2, kv_heads=2, key_dim=192, value_dim=128),
        MLA.with_(heads=2),
    ],
    ids=["mqa", "split", "mla"],
)
def test_every_kind_of_head_has_windows_and_sinks(shape, device, dtype):
    check(shape.with_(prefixes=(70, 5), window=30, sinks=True, mapped=True), device, dtype)


@everywhere
def test_two_runs_give_the_same_bits(device, dtype):
    case = HEADS.with_(prefixes=(150, 20), window=70, sinks=True, mapped=True)
    inputs = make_inputs(case, device, dtype)
    assert torch.equal(attend(inputs, 16, MANY_SPLITS), attend(inputs, 16, MANY_SPLITS))


def test_a_window_is_cut_into_no_more_splits_than_it_has_blocks():
    """So that a long context adds neither programs nor partial results to a layer with a window."""
    head = HeadShape(64, 64, False, 4)
    shape = {"batch": 3, "rows": 5, "heads": 2, "kv_heads": 1}
    device = torch.device("cpu")
    narrow = plan_tree_attention(device, head, **shape, window=100, config=MANY_SPLITS)
    assert narrow.splits == 3 * (7 + 1)  # 105 positions in blocks of 16, from anywhere in a block
    assert plan_tree_attention(device, head, **shape, config=MANY_SPLITS).splits == 24
    assert plan_tree_attention(device, head, **shape, window=0, config=INTERPRETER_CONFIG).splits == 6


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
@pytest.mark.parametrize("rows", [1, 9, 17, 64, 128])
@pytest.mark.parametrize("window", [127, 1023])
def test_windowed_serving_shapes(window, rows, page_size, dtype):
    """gpt-oss: 64 query heads, 8 KV heads, 64 wide, sinks; prefixes shorter and longer than the window."""
    shape = Case(heads=64, kv_heads=8, window=window, sinks=True, mapped=True)
    check(shape.with_(prefixes=(5000, 77, 16384, 0), rows=rows, page_size=page_size), "cuda", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("cache_dtype", FLOAT8)
@pytest.mark.parametrize("rows", [1, 17, 64])
@pytest.mark.parametrize(
    "shape", [Case(heads=32, kv_heads=8, key_dim=128, value_dim=128), MLA.with_(heads=8)], ids=["gqa", "mla"]
)
def test_float8_serving_shapes(shape, rows, cache_dtype):
    case = shape.with_(prefixes=(5000, 77, 16384, 0), rows=rows, page_size=64, cache_dtype=cache_dtype)
    check(case, "cuda", torch.bfloat16)
