"""A vendor's kernel on the prefix and ours on the tree: equal to attention over both, in float64.

Without a GPU a prefix kernel in plain PyTorch stands in for the vendor's: it walks page table and lengths.
"""

import pytest
import torch
from tree_attention_inputs import Case, exact, make_inputs

from sglang_ddtree_patch.attention.kernel_choice import FA3, FLASHMLA, build_attention
from sglang_ddtree_patch.kernels.attention.prefix_pages import PrefixPages
from sglang_ddtree_patch.kernels.attention.reference import tree_attention_reference
from sglang_ddtree_patch.kernels.attention.vendor_attention import (
    PrefixThenTree,
    fa3_refusal,
    flash_mla_refusal,
)
from sglang_ddtree_patch.kernels.attention.verify_attention import AttentionShape, VerifyAttention

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
GQA = Case(heads=32, kv_heads=8, key_dim=128, value_dim=128, page_size=64)
MLA = Case(heads=8, kv_heads=1, key_dim=576, value_dim=512, page_size=64, mla=True)
LENGTHS = (5000, 1, 64, 16384, 0, 63)


def shape_of(case: Case, dtype: torch.dtype) -> AttentionShape:
    return AttentionShape(
        case.heads, case.kv_heads, case.key_dim, case.value_dim, case.mla, dtype, case.logit_cap > 0
    )


def attend(attention: VerifyAttention, inputs: dict, **options) -> torch.Tensor:
    """One layer of a prepared forward."""
    names = ("query", "key_cache", "value_cache", "tree_mask", "softmax_scale", "logit_cap")
    return attention.attend(**{name: inputs[name] for name in names}, **options)


def prepare(attention: VerifyAttention, inputs: dict) -> None:
    batch = inputs["request_ids"].shape[0]
    attention.prepare(inputs["request_ids"], inputs["prefix_lens"], inputs["query"].shape[0] // batch)


def error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return ((result.double() - expected).norm() / expected.norm()).item()


class PlainPrefix(PrefixThenTree):
    """A prefix kernel in PyTorch that leaves infinities where a prefix is empty."""

    def _schedule_prefix(self, pages: PrefixPages) -> None:
        self.scheduled = pages

    def _attend_prefix(self, query, key_pages, value_pages, pages, softmax_scale, logit_cap):
        assert pages is self.scheduled
        batch, rows, heads, _ = query.shape
        out = query.new_full((batch, rows, heads, value_pages.shape[-1]), torch.inf)
        lse = query.new_full((batch, heads, rows), torch.inf)
        for index, length in enumerate(pages.lengths.tolist()):
            if length == 0:
                continue
            table = pages.page_table[index, : -(-length // self.page_size)].long()
            keys, values = (part[table].flatten(0, 1)[:length] for part in (key_pages, value_pages))
            group = heads // keys.shape[1]
            keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
            logits = torch.einsum("rhd,mhd->hrm", query[index], keys) * softmax_scale
            if logit_cap > 0:
                logits = logit_cap * torch.tanh(logits / logit_cap)
            lse[index] = logits.logsumexp(-1)
            out[index] = torch.einsum("hrm,mhd->rhd", logits.softmax(-1), values)
        return out, lse


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("rows", [1, 9])
def test_prefix_and_tree_make_up_the_whole(page_size, rows):
    case = Case(prefixes=(70, 0, 64, 33), rows=rows, page_size=page_size, logit_cap=3.0)
    inputs = make_inputs(case, "cpu", torch.float32)
    attention = PlainPrefix(inputs["slot_table"], shape_of(case, torch.float32), page_size)
    prepare(attention, inputs)
    for _ in range(2):  # two layers of one forward
        assert error(attend(attention, inputs), exact(inputs)[0]) <= 1e-5


def test_sinks_are_added_once_behind_the_prefix():
    case = Case(prefixes=(70, 0), sinks=True)
    inputs = make_inputs(case, "cpu", torch.float32)
    attention = PlainPrefix(inputs["slot_table"], shape_of(case, torch.float32), case.page_size)
    prepare(attention, inputs)
    expected = tree_attention_reference(**inputs).double()
    assert error(attend(attention, inputs, sinks=inputs["sinks"]), expected) <= 1e-5


def test_graphs_keep_their_memory_whatever_else_is_prepared():
    """Captured graphs read it by address: later forwards, larger ones too, must leave it where it is."""
    case = Case(prefixes=(20, 7, 40))
    inputs = make_inputs(case, "cpu", torch.float32)
    attention = PlainPrefix(inputs["slot_table"], shape_of(case, torch.float32), case.page_size)
    attention.reserve(2, case.rows)
    reserved = attention._reserved
    attention.reserve(1, case.rows)
    assert attention._reserved is reserved
    two = {name: inputs[name][:2] for name in ("request_ids", "prefix_lens", "tree_mask")}
    two |= {"query": inputs["query"][: 2 * case.rows]}
    prepare(attention, inputs | two)
    captured = attention.scheduled
    prepare(attention, inputs)  # a batch larger than any graph's
    assert attention.scheduled.page_table.data_ptr() != captured.page_table.data_ptr()
    assert error(attend(attention, inputs), exact(inputs)[0]) <= 1e-5
    prepare(attention, inputs | two)
    assert attention.scheduled.page_table.data_ptr() == captured.page_table.data_ptr()
    assert error(attend(attention, inputs | two), exact(inputs | two)[0]) <= 1e-5


def vendor(kernel: str, case: Case, inputs: dict) -> VerifyAttention:
    return build_attention(
        kernel, inputs["slot_table"], shape_of(case, inputs["query"].dtype), case.page_size
    )


def check(kernel: str, case: Case, dtype: torch.dtype = torch.bfloat16) -> None:
    inputs = make_inputs(case, "cuda", dtype)
    attention = vendor(kernel, case, inputs)
    prepare(attention, inputs)
    expected = exact(inputs)[0]
    for layer in range(2):
        found = error(attend(attention, inputs), expected)
        assert found <= TOLERANCE[dtype], f"{case}, layer {layer}: relative error {found:.2e}"


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
@pytest.mark.parametrize("rows", [1, 9, 17, 64, 256])
def test_fa3_then_tree(rows, page_size):
    check(FA3, GQA.with_(prefixes=LENGTHS, rows=rows, page_size=page_size))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (96, 96), (192, 192), (192, 128), (256, 256)])
def test_fa3_then_tree_at_every_head_size(key_dim, value_dim, dtype):
    heads = GQA.with_(heads=16, kv_heads=4, key_dim=key_dim, value_dim=value_dim)
    check(FA3, heads.with_(prefixes=LENGTHS, rows=17), dtype)
    check(FA3, heads.with_(prefixes=(300, 0), rows=5, logit_cap=20.0), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("tree", ["random", "whole"])
@pytest.mark.parametrize("heads", [8, 16, 128])
@pytest.mark.parametrize("rows", [1, 9, 17, 64])
def test_flash_mla_then_tree(rows, heads, tree):
    check(FLASHMLA, MLA.with_(prefixes=LENGTHS, rows=rows, heads=heads, tree=tree))


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "case"), [(FA3, GQA), (FLASHMLA, MLA)], ids=[FA3, FLASHMLA])
def test_one_graph_serves_every_length(kernel, case):
    """Captured at length 1, replayed at others: schedule, page table and lengths follow on the device."""
    lengths = [(1, 1), (9000, 40), (64, 16384), (0, 63)]
    cases = [case.with_(prefixes=(16384, 16384), rows=17, seed=1)]
    inputs = make_inputs(cases[0], "cuda", torch.bfloat16)
    attention = vendor(kernel, case, inputs)
    attention.reserve(4, 17)
    static = inputs | {"prefix_lens": torch.ones(2, dtype=torch.int64, device="cuda")}

    def forward() -> list[torch.Tensor]:
        prepare(attention, static)
        return [attend(attention, static) for _ in range(3)]

    forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers = forward()
    for prefixes in lengths:
        static["prefix_lens"].copy_(torch.tensor(prefixes))
        for layer in layers:
            layer.fill_(torch.nan)
        graph.replay()
        expected = exact(static)[0]
        for layer in layers:
            assert error(layer, expected) <= 1e-2, prefixes
        assert torch.equal(layers[0], layers[-1])


@pytest.mark.parametrize(
    ("refusal", "case", "page_size", "capability", "reason"),
    [
        (fa3_refusal, GQA, 64, (9, 0), None),
        (fa3_refusal, GQA, 1, (8, 0), None),
        (fa3_refusal, GQA.with_(key_dim=192), 64, (9, 0), None),
        (fa3_refusal, GQA, 64, (12, 0), "compute capability 8 and 9"),
        (fa3_refusal, MLA, 64, (9, 0), "no kernel for heads of 576/512"),
        (flash_mla_refusal, MLA, 64, (9, 0), None),
        (flash_mla_refusal, MLA, 32, (9, 0), "pages of 64"),
        (flash_mla_refusal, MLA, 64, (10, 0), "compute capability 9.0"),
        (flash_mla_refusal, MLA.with_(logit_cap=1.0), 64, (9, 0), "cap logits"),
        (flash_mla_refusal, GQA, 64, (9, 0), "MLA heads of 576/512"),
    ],
)
def test_what_a_vendor_cannot_serve_is_said_in_words(refusal, case, page_size, capability, reason):
    found = refusal(shape_of(case, torch.bfloat16), page_size, capability)
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize("refusal", [fa3_refusal, flash_mla_refusal])
def test_float32_is_never_a_vendors(refusal):
    case = GQA if refusal is fa3_refusal else MLA
    assert "not torch.float32" in refusal(shape_of(case, torch.float32), 64, (9, 0))
