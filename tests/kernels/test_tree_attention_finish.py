"""Prefix kernel, then tree and merge in one launch: equal to attention over both, in float64.

The prefix part comes from the definition here, so the tests say what a vendor's kernel has to leave.
"""

import pytest
import torch
from tree_attention_inputs import MLA, Case, exact, make_inputs

from sglang_ddtree_patch.kernels.attention.finish import (
    FinishConfig,
    choose_finish_config,
    finish_tree_attention,
)
from sglang_ddtree_patch.kernels.attention.prefix_pages import PrefixPages, fill_prefix_pages
from sglang_ddtree_patch.kernels.attention.reference import tree_attention_reference

HAS_GPU = torch.cuda.is_available()
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SMALL = FinishConfig(block_m=16, columns=16, tail_block=16, warps=4)

on_cpu = pytest.param("cpu", torch.float32, marks=pytest.mark.skipif(HAS_GPU, reason="the GPU runs it"))
# In front of it on a GPU are kernels for 16-bit types alone.
on_gpu = [pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in (torch.bfloat16, torch.float16)]
everywhere = pytest.mark.parametrize(("device", "dtype"), [on_cpu, *on_gpu])


def pages_of(inputs: dict, page_size: int, rows: int) -> PrefixPages:
    batch = inputs["request_ids"].shape[0]
    pages = PrefixPages.allocate(inputs["slot_table"], page_size, batch, rows)
    fill_prefix_pages(pages, inputs["slot_table"], inputs["request_ids"], inputs["prefix_lens"], page_size)
    return pages


def finish(inputs: dict, page_size: int, config: FinishConfig | None = None, **changes) -> torch.Tensor:
    """The kernel behind an exact prefix, into a poisoned output."""
    query, batch = inputs["query"], inputs["request_ids"].shape[0]
    _, prefix_out, prefix_lse = exact(inputs)
    arguments = {
        "prefix_out": prefix_out.to(query),
        # Laid out as FlashMLA leaves it: heads innermost.
        "prefix_lse": prefix_lse.float().transpose(1, 2).contiguous().transpose(1, 2),
        "query": query,
        "block_slots": pages_of(inputs, page_size, query.shape[0] // batch).block_slots,
        **{name: inputs[name] for name in ("key_cache", "value_cache", "prefix_lens", "tree_mask")},
        **{name: inputs[name] for name in ("softmax_scale", "logit_cap")},
    }
    out = torch.full_like(arguments["prefix_out"], torch.nan)
    return finish_tree_attention(**arguments | {"out": out} | changes, config=config)


def check(case: Case, device: str, dtype: torch.dtype, config: FinishConfig | None = None) -> None:
    inputs = make_inputs(case, device, dtype)
    result, expected = finish(inputs, case.page_size, config).double(), exact(inputs)[0]
    error = ((result - expected).norm() / expected.norm()).item()
    assert error <= TOLERANCE[dtype], f"{case}: relative error {error:.2e}"


@everywhere
@pytest.mark.parametrize("tree", ["chain", "star", "comb", "random", "whole"])
def test_every_tree_is_masked_as_it_says(tree, device, dtype):
    check(Case(tree=tree, rows=9), device, dtype)


@everywhere
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 63, 64, 65, 130, 256])
def test_every_width_of_tree(rows, device, dtype):
    """From 65 rows on the mask has a second word; each width ends its last block of keys elsewhere."""
    check(Case(prefixes=(41,), rows=rows, kv_heads=2, heads=4), device, dtype)


@everywhere
@pytest.mark.parametrize(("rows", "kv_heads"), [(7, 2), (66, 1)])
def test_small_tiles_agree(rows, kv_heads, device, dtype):
    """Several row tiles, value chunks and blocks of keys, as on a GPU with much to fill."""
    check(Case(prefixes=(20, 0), rows=rows, heads=3 * kv_heads, kv_heads=kv_heads), device, dtype, SMALL)


@everywhere
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_lengths_around_page_boundaries(page_size, device, dtype):
    lengths = (0, 1, 15, 16, 17, 63, 64, 65, 128)
    case = Case(prefixes=lengths, rows=3, heads=2, kv_heads=1, page_size=page_size)
    check(case, device, dtype)


@everywhere
@pytest.mark.parametrize(
    "shape",
    [
        Case(heads=3, kv_heads=3),
        Case(heads=5, kv_heads=1),
        Case(heads=6, kv_heads=2, key_dim=96, value_dim=96),
        Case(heads=4, kv_heads=1, key_dim=128, value_dim=128),
        Case(heads=2, kv_heads=2, key_dim=192, value_dim=128),
        Case(heads=2, kv_heads=1, key_dim=256, value_dim=256),
        Case(heads=2, kv_heads=1, key_dim=80, value_dim=80),
        MLA,
    ],
    ids=lambda case: f"{case.heads}x{case.kv_heads}x{case.key_dim}x{case.value_dim}",
)
def test_every_head_shape(shape, device, dtype):
    check(shape.with_(prefixes=(40, 5, 0), rows=11), device, dtype)


@everywhere
def test_logits_are_capped_where_the_model_caps_them(device, dtype):
    check(Case(logit_cap=0.5), device, dtype)


@everywhere
def test_keys_and_values_are_scaled(device, dtype):
    """The prefix arrives scaled; doubling keys and values under half the scales changes nothing."""
    inputs = make_inputs(Case(), device, dtype)
    doubled = {"key_cache": inputs["key_cache"] * 2, "value_cache": inputs["value_cache"] * 2}
    result = finish(inputs, 16, **doubled, k_scale=0.5, v_scale=0.5)
    torch.testing.assert_close(result, finish(inputs, 16))


@everywhere
def test_sinks_join_the_denominator_of_their_heads(device, dtype):
    """Sinks from far below to far above what the logits reach."""
    case = Case(prefixes=(30, 0), rows=9, heads=6, kv_heads=2)
    inputs = make_inputs(case, device, dtype)
    sinks = torch.tensor([-40.0, -1.0, 0.0, 2.0, 5.0, 12.0], device=device)
    result = finish(inputs, 16, sinks=sinks).float()
    expected = tree_attention_reference(**inputs | {"query": inputs["query"].float()}, sinks=sinks)
    for head in range(case.heads):
        error = ((result - expected)[:, head].norm() / expected[:, head].norm()).item()
        assert error <= TOLERANCE[dtype], f"head {head}: relative error {error:.2e}"


@everywhere
def test_an_empty_prefix_changes_nothing(device, dtype):
    """Vendors leave infinities or nothing at all there; the padded rows of a graph are such requests."""
    inputs = make_inputs(Case(prefixes=(0, 30, 0), rows=4), device, dtype)
    assert exact(inputs)[1].isnan().any()
    result, expected = finish(inputs, 16).double(), exact(inputs)[0]
    assert ((result - expected).norm() / expected.norm()).item() <= TOLERANCE[dtype]


@everywhere
def test_a_row_that_sees_nothing_of_the_tree_keeps_the_prefix(device, dtype):
    inputs = make_inputs(Case(prefixes=(30, 0), rows=4), device, dtype)
    inputs["tree_mask"] = torch.zeros_like(inputs["tree_mask"])
    result = finish(inputs, 16)
    assert torch.equal(result[:4], exact(inputs)[1][:4].to(result))
    assert not result[4:].any()


@everywhere
def test_it_may_write_over_the_prefix(device, dtype):
    inputs = make_inputs(Case(rows=20), device, dtype)
    prefix_out = exact(inputs)[1].to(inputs["query"])
    result = finish(inputs, 16, SMALL, prefix_out=prefix_out, out=prefix_out)
    assert result.data_ptr() == prefix_out.data_ptr()
    assert torch.equal(result, finish(inputs, 16, SMALL))


@everywhere
def test_two_runs_give_the_same_bits(device, dtype):
    inputs = make_inputs(Case(prefixes=(150, 20), rows=20), device, dtype)
    assert torch.equal(finish(inputs, 16, SMALL), finish(inputs, 16, SMALL))


def test_a_lone_request_fills_a_large_gpu():
    """MLA with 8 heads and GQA with 8 KV heads, 17 rows, on 132 multiprocessors."""
    for kv_heads, heads, key_dim, value_dim in ((1, 8, 576, 512), (8, 32, 128, 128)):
        config = choose_finish_config(
            132, batch=1, rows=17, heads=heads, kv_heads=kv_heads, key_dim=key_dim, value_dim=value_dim
        )
        programs = kv_heads * -(-17 * heads // kv_heads // config.block_m) * (value_dim // config.columns)
        assert programs >= 64
    many = choose_finish_config(132, batch=32, rows=64, heads=32, kv_heads=8, key_dim=128, value_dim=128)
    assert (many.block_m, many.columns) == (64, 128)


@everywhere
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_pages_lengths_and_block_slots_follow_the_slot_table(page_size, device, dtype):
    case = Case(prefixes=(0, 1, 64, 65, 200), rows=5, page_size=page_size)
    inputs = make_inputs(case, device, dtype)
    pages = pages_of(inputs, page_size, case.rows)
    assert pages.lengths.tolist() == list(case.prefixes)
    assert pages.lengths.dtype == pages.page_table.dtype == torch.int32
    for index, (request, prefix) in enumerate(
        zip(inputs["request_ids"].tolist(), case.prefixes, strict=True)
    ):
        slots = inputs["slot_table"][request]
        count = -(-prefix // page_size)
        expected = slots[: count * page_size : page_size] // page_size
        assert torch.equal(pages.page_table[index, :count], expected)
        assert not pages.page_table[index, count:].any()
        assert torch.equal(pages.block_slots[index], slots[prefix : prefix + case.rows])


def test_pages_beyond_a_programs_share_are_written():
    slots = torch.arange(5000, dtype=torch.int32).flip(0)[None].contiguous()
    slots = slots.cuda() if HAS_GPU else slots
    inputs = {
        "slot_table": slots,
        "request_ids": torch.zeros(1, dtype=torch.int64, device=slots.device),
        "prefix_lens": torch.tensor([4900], device=slots.device),
    }
    assert torch.equal(pages_of(inputs, 1, 2).page_table[0, :4900], slots[0, :4900])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(9, 4, 64)}, "does not fit block slots"),
        ({"prefix_lse": torch.zeros(2, 5, 4)}, "log-sum-exp"),
        ({"tree_mask": torch.zeros(2, 5, 1, dtype=torch.int32)}, "tree_mask must be"),
    ],
)
def test_wrong_shapes_are_refused_in_words(change, message):
    inputs = make_inputs(Case(), "cpu", torch.float32)
    _, prefix_out, prefix_lse = exact(inputs)
    arguments = {
        "prefix_out": prefix_out.float(),
        "prefix_lse": prefix_lse.float(),
        "block_slots": torch.zeros(2, 5, dtype=torch.int32),
        **{
            name: inputs[name]
            for name in ("query", "key_cache", "value_cache", "prefix_lens", "tree_mask", "softmax_scale")
        },
    }
    with pytest.raises(ValueError, match=message):
        finish_tree_attention(**arguments | change)
