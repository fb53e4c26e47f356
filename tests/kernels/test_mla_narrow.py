"""The narrow MLA kernel: compiles for Hopper without spills, and on one equals attention in float64."""

import re

import pytest
import torch
from tree_attention_inputs import MLA, Case, exact, make_inputs

from sglang_ddtree_patch.kernels.attention.hopper import cuda_source
from sglang_ddtree_patch.kernels.attention.hopper.cuda_source import compile_source, narrow_source

MLA_8, MLA_16 = (MLA.with_(heads=heads, page_size=64) for heads in (8, 16))
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
any_heads = pytest.mark.parametrize("shape", [MLA_8, MLA_16], ids=["8", "16"])


@pytest.mark.parametrize(
    ("columns", "pieces", "half_type", "keys_ahead"),
    [(72, 1, "bf16", 0), (72, 4, "f16", 9), (64, 1, "bf16", 5), (8, 1, "bf16", 0)],
)
def test_it_compiles_without_spills_or_serialized_products(columns, pieces, half_type, keys_ahead):
    """The assembler says when it makes products wait for one another, and it spills before it fails."""
    code, log = compile_source(narrow_source(columns, pieces, half_type, keys_ahead), ["--ptxas-options=-v"])
    assert code
    assert "Performance Loss" not in log, log
    assert re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", log) == ["0"] * 3, log
    assert "Used 128 registers" in log, log  # all that 512 threads may begin with


def test_machine_code_is_kept_and_a_damaged_file_is_made_anew(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled = []

    def compile_once(source):
        compiled.append(source)
        return cuda_source.ELF + source.encode(), ""

    monkeypatch.setattr(cuda_source, "compile_source", compile_once)
    for _ in range(2):
        assert cuda_source.cached_code("one") == cuda_source.ELF + b"one"
    assert compiled == ["one"]
    (file,) = tmp_path.rglob("kernel.cubin")
    file.write_bytes(b"")
    assert cuda_source.cached_code("one") == cuda_source.ELF + b"one"
    assert file.read_bytes() == cuda_source.ELF + b"one"


@pytest.fixture
def attend():
    """Run the kernel into a poisoned output through a poisoned workspace."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("this kernel is Hopper's own")
    from sglang_ddtree_patch.kernels.attention.hopper.mla_narrow import tree_attention_narrow

    def run(inputs: dict, page_size: int, **options: object) -> torch.Tensor:
        query = inputs["query"]
        out = torch.full((*query.shape[:2], 512), torch.nan, dtype=query.dtype, device=query.device)
        workspace = torch.full((48 << 20,), torch.nan, device=query.device)
        return tree_attention_narrow(**inputs, page_size=page_size, out=out, workspace=workspace, **options)

    return run


def relative_error(result: torch.Tensor, inputs: dict) -> float:
    """NaN where the result has one."""
    expected = exact(inputs)[0]
    return ((result.double() - expected).norm() / expected.norm()).item()


def check(attend, case: Case, dtype: torch.dtype = torch.bfloat16, **options: object) -> None:
    inputs = make_inputs(case, "cuda", dtype)
    error = relative_error(attend(inputs, case.page_size, **options), inputs)
    assert error <= TOLERANCE[dtype], f"{case}: relative error {error:.2e}"


@pytest.mark.gpu
@any_heads
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [1, 2, 9, 17, 33, 64])
def test_serving_shapes(rows, dtype, shape, attend):
    check(attend, shape.with_(prefixes=(5000, 77, 16384, 0), rows=rows), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 32, 48, 64, 128])
@pytest.mark.parametrize("rows", [3, 17])
def test_lengths_around_pages_and_blocks(rows, page_size, attend):
    lengths = (0, 1, 15, 16, 17, 31, 46, 47, 48, 61, 62, 63, 64, 65, 111, 127, 128, 129, 191, 192)
    check(attend, MLA_8.with_(prefixes=lengths, rows=rows, page_size=page_size))


@pytest.mark.gpu
@pytest.mark.parametrize("most_columns", [8, 16, 24, 32, 40, 48, 56, 64])
def test_narrower_tiles(most_columns, attend):
    from sglang_ddtree_patch.kernels.attention.hopper.mla_narrow import NarrowConfig

    check(attend, MLA_8.with_(prefixes=(3000, 70), rows=9), config=NarrowConfig(most_columns))


@pytest.mark.gpu
@pytest.mark.parametrize("keys_ahead", [1, 5, 8, 9])
@pytest.mark.parametrize("rows", [9, 17])
def test_weights_given_out_later(rows, keys_ahead, attend):
    from sglang_ddtree_patch.kernels.attention.hopper.mla_narrow import NarrowConfig

    check(attend, MLA_8.with_(prefixes=(9000, 0, 70), rows=rows), config=NarrowConfig(keys_ahead=keys_ahead))


@pytest.mark.gpu
@any_heads
@pytest.mark.parametrize("tree", ["chain", "star", "comb", "random", "whole"])
def test_every_tree_is_masked_as_it_says(tree, shape, attend):
    check(attend, shape.with_(tree=tree, rows=40, prefixes=(100, 3)))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [65, 130, 256])
def test_masks_of_several_words(rows, attend):
    check(attend, MLA_8.with_(prefixes=(70, 0, 121), rows=rows))


@pytest.mark.gpu
@pytest.mark.parametrize("prefix", [190_000, 65_536])
def test_long_contexts(prefix, attend):
    check(attend, MLA_8.with_(prefixes=(prefix,), rows=17))


@pytest.mark.gpu
def test_many_requests(attend):
    lengths = tuple(torch.randint(0, 900, (70,), generator=torch.Generator().manual_seed(3)).tolist())
    check(attend, MLA_8.with_(prefixes=lengths, rows=5))


@pytest.mark.gpu
@any_heads
@pytest.mark.parametrize("rise", [20.0, 100.0, 1000.0, 1e5])
def test_maxima_that_rise_in_one_block(rise, shape, attend):
    """By 2 to the power of ``rise``, for some columns, at a block's end, its beginning and in the tree."""
    for at in (63, 64, 400, 700):
        inputs = make_inputs(shape.with_(prefixes=(700,), rows=9), "cuda", torch.bfloat16)
        slots = inputs["slot_table"][inputs["request_ids"][0].item(), :709].long()
        row = inputs["query"][4, 3].double()
        key = row / row.square().sum() * rise / inputs["softmax_scale"] * 0.6931471805599453
        inputs["key_cache"][slots[at], 0] = key.bfloat16()
        assert relative_error(attend(inputs, 64), inputs) <= 2e-2, at


@pytest.mark.gpu
@pytest.mark.parametrize("growth", [2.0**15, 2.0**7, 30.0])
def test_logits_that_rise_again_and_again(growth, attend):
    inputs = make_inputs(MLA_8.with_(prefixes=(700,), rows=9), "cuda", torch.bfloat16)
    slots = inputs["slot_table"][inputs["request_ids"][0].item(), :709].long()
    scale = torch.ones(709, device="cuda")
    scale[300:500], scale[500:] = growth**0.5, growth
    keys = inputs["key_cache"]
    keys[slots, :, -64:] = (keys[slots, :, -64:].float() * scale[:, None, None]).to(keys.dtype)
    assert relative_error(attend(inputs, 64), inputs) <= 2e-2


@pytest.mark.gpu
def test_equal_keys_and_one_huge_key(attend):
    inputs = make_inputs(MLA_8.with_(prefixes=(500,), rows=9), "cuda", torch.bfloat16)
    slots = inputs["slot_table"][inputs["request_ids"][0].item(), :509].long()
    inputs["key_cache"][slots] = inputs["key_cache"][slots[:1]]
    assert relative_error(attend(inputs, 64), inputs) <= 1e-2
    inputs["key_cache"][slots[77]] *= 1000
    assert relative_error(attend(inputs, 64), inputs) <= 1e-2


@pytest.mark.gpu
def test_sinks_join_the_denominator_of_their_heads(attend):
    inputs = make_inputs(MLA_8.with_(prefixes=(300, 5), rows=17, sinks=True), "cuda", torch.bfloat16)
    from sglang_ddtree_patch.kernels.attention.reference import tree_attention_reference

    expected = tree_attention_reference(**inputs | {"query": inputs["query"].float()})
    result = attend(inputs, 64).float()
    assert ((result - expected).norm() / expected.norm()).item() <= 1e-2


@pytest.mark.gpu
def test_a_row_that_sees_nothing_comes_out_finite(attend):
    inputs = make_inputs(MLA_8.with_(prefixes=(0,), rows=4), "cuda", torch.bfloat16)
    inputs["tree_mask"] = torch.zeros_like(inputs["tree_mask"])
    assert attend(inputs, 64).isfinite().all()


@pytest.mark.gpu
def test_runs_give_the_same_bits(attend):
    inputs = make_inputs(MLA_8.with_(prefixes=(30_000, 20), rows=17), "cuda", torch.bfloat16)
    first = attend(inputs, 64)
    assert all(torch.equal(attend(inputs, 64), first) for _ in range(20))


@pytest.mark.gpu
def test_one_graph_serves_every_length(attend):
    inputs = make_inputs(MLA_8.with_(prefixes=(4000, 900), rows=17), "cuda", torch.bfloat16)
    attend(inputs, 64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(inputs, 64)
    for lengths in ((4000, 900), (3999, 0), (1, 777), (64, 128)):
        inputs["prefix_lens"].copy_(torch.tensor(lengths))
        graph.replay()
        assert relative_error(out, inputs) <= 1e-2, lengths


def test_the_tile_is_as_narrow_as_the_rows_allow():
    from sglang_ddtree_patch.kernels.attention.hopper.mla_narrow import keys_of_a_load, tile_columns

    assert [tile_columns(rows, 72) for rows in (1, 8, 64, 72, 73, 136, 144, 264, 512)] == [
        8, 8, 64, 72, 40, 72, 72, 72, 64,
    ]  # fmt: skip
    assert [keys_of_a_load(page) for page in (16, 32, 48, 64, 96, 128)] == [16, 32, 16, 64, 32, 64]
