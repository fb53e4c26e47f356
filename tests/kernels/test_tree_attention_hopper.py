"""The Hopper kernels of tree verify attention: equal to the reference, as tree_attention is.

Gluon has no interpreter, so they run on a GPU alone; here the compiler is all there is to ask.
"""

import pytest
import torch
from tree_attention_inputs import MLA, Case, make_inputs

from sglang_ddtree_patch.kernels.attention.reference import tree_attention_reference

GQA = Case(heads=32, kv_heads=8, key_dim=128, value_dim=128, page_size=64)
SHAPES = {
    "gqa-128": GQA,
    "gqa-64": GQA.with_(heads=14, kv_heads=2, key_dim=64, value_dim=64),
    "mha": GQA.with_(heads=4, kv_heads=4),
    "mla-8": MLA.with_(heads=8, page_size=64),
    "mla-16": MLA.with_(heads=16, page_size=64),
}
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
any_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
pytestmark = pytest.mark.gpu


@pytest.fixture
def attend():
    """Run the kernels into a poisoned output."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("these kernels are Hopper's own")
    from sglang_ddtree_patch.kernels.attention.hopper.tree_attention import tree_attention_hopper

    def run(inputs: dict, page_size: int, **options: object) -> torch.Tensor:
        query, value_dim = inputs["query"], inputs["value_cache"].shape[2]
        out = torch.full((*query.shape[:2], value_dim), torch.nan, dtype=query.dtype, device=query.device)
        return tree_attention_hopper(**inputs, page_size=page_size, out=out, **options)

    return run


def relative_error(result: torch.Tensor, inputs: dict) -> float:
    expected = tree_attention_reference(**inputs | {"query": inputs["query"].float()})
    return ((result.float() - expected).norm() / expected.norm()).item()


def check(attend, case: Case, dtype: torch.dtype = torch.bfloat16) -> None:
    inputs = make_inputs(case, "cuda", dtype)
    error = relative_error(attend(inputs, case.page_size), inputs)
    assert error <= TOLERANCE[dtype], f"{case}: relative error {error:.2e}"


@any_shape
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("page_size", [64, 128])
@pytest.mark.parametrize("rows", [1, 9, 17, 64, 65, 128, 256])
def test_serving_shapes(shape, rows, page_size, dtype, attend):
    check(attend, shape.with_(prefixes=(5000, 77, 16384, 0), rows=rows, page_size=page_size), dtype)


@any_shape
@pytest.mark.parametrize("tree", ["chain", "star", "comb", "random", "whole"])
def test_every_tree_is_masked_as_it_says(tree, shape, attend):
    check(attend, shape.with_(tree=tree, rows=40, prefixes=(100, 3)))


@any_shape
@pytest.mark.parametrize("rows", [3, 17, 66])
def test_lengths_around_block_boundaries(rows, shape, attend):
    lengths = (0, 1, 31, 46, 47, 48, 61, 62, 63, 64, 65, 111, 127, 128, 129, 191, 192)
    check(attend, shape.with_(prefixes=lengths, rows=rows))


@any_shape
@pytest.mark.parametrize("prefix", [190_000, 65_536, 1 << 15])
def test_long_contexts(prefix, shape, attend):
    check(attend, shape.with_(prefixes=(prefix,), rows=17))


@any_shape
def test_many_requests(shape, attend):
    lengths = tuple(int(n) for n in torch.randint(0, 900, (70,), generator=torch.Generator().manual_seed(3)))
    check(attend, shape.with_(prefixes=lengths, rows=5))


@any_shape
def test_logits_are_capped_where_the_model_caps_them(shape, attend):
    check(attend, shape.with_(logit_cap=0.5, prefixes=(300, 5)))


@any_shape
def test_sinks_join_the_denominator_of_their_heads(shape, attend):
    check(attend, shape.with_(sinks=True, prefixes=(300, 5), rows=17))


@any_shape
@pytest.mark.parametrize("growth", [2.0**15, 2.0**7, 30.0])
def test_logits_that_rise_steeply(growth, shape, attend):
    """A row's maximum rises by far more than a float32 weight can hold, from one block to the next."""
    inputs = make_inputs(shape.with_(prefixes=(700,), rows=9), "cuda", torch.bfloat16)
    positions = inputs["slot_table"][inputs["request_ids"][0].item(), :709].long()
    scale = torch.ones(709, device="cuda")
    scale[300:500] = growth**0.5
    scale[500:] = growth
    keys = inputs["key_cache"]
    keys[positions, :, -64:] = (keys[positions, :, -64:].float() * scale[:, None, None]).to(keys.dtype)
    result = attend(inputs, shape.page_size)
    assert result.isfinite().all()
    assert relative_error(result, inputs) <= 2e-2


@any_shape
def test_equal_keys_and_one_huge_key(shape, attend):
    inputs = make_inputs(shape.with_(prefixes=(500,), rows=9), "cuda", torch.bfloat16)
    positions = inputs["slot_table"][inputs["request_ids"][0].item(), :509].long()
    inputs["key_cache"][positions] = inputs["key_cache"][positions[:1]]
    assert relative_error(attend(inputs, shape.page_size), inputs) <= 1e-2
    inputs["key_cache"][positions[77]] *= 1000
    assert relative_error(attend(inputs, shape.page_size), inputs) <= 1e-2


@any_shape
def test_two_runs_give_the_same_bits(shape, attend):
    inputs = make_inputs(shape.with_(prefixes=(3000, 20), rows=17), "cuda", torch.bfloat16)
    assert torch.equal(attend(inputs, 64), attend(inputs, 64))


@any_shape
def test_one_graph_serves_every_length(shape, attend):
    case = shape.with_(prefixes=(4000, 900), rows=17)
    inputs = make_inputs(case, "cuda", torch.bfloat16)
    attend(inputs, 64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(inputs, 64)
    for lengths in ((4000, 900), (3999, 0), (1, 777), (64, 128)):
        inputs["prefix_lens"].copy_(torch.tensor(lengths))
        graph.replay()
        assert relative_error(out, inputs) <= 1e-2, lengths


@any_shape
def test_a_row_that_sees_nothing_comes_out_finite(shape, attend):
    inputs = make_inputs(shape.with_(prefixes=(0,), rows=4), "cuda", torch.bfloat16)
    inputs["tree_mask"] = torch.zeros_like(inputs["tree_mask"])
    assert attend(inputs, 64).isfinite().all()
