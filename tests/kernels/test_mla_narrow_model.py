"""The narrow MLA kernel's own source, run on the CPU over a model of Hopper's instructions: equal to float64.

Every thread of every program runs: barriers, ring, swizzles, fragments, masks, splits. What the hardware does
behind the threads happens at once in one run and as late as it may in the other.
"""

import ctypes
import math
import subprocess
from pathlib import Path

import pytest
import torch
from tree_attention_inputs import MLA, Case, exact, make_inputs

import sglang_ddtree_patch.kernels.attention.hopper as hopper

HERE = Path(__file__).parent
SOURCE = Path(hopper.__path__[0]) / "mla_narrow.cu"
BLOCK = 64
CASE = MLA.with_(heads=8, page_size=64)
TOLERANCE = 4e-3  # of bf16 weights


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The kernel for a number of columns and of pieces, built once."""
    folder, built = tmp_path_factory.mktemp("model"), {}

    def build(columns: int, pieces: int) -> ctypes.CDLL:
        if (columns, pieces) not in built:
            path = folder / f"narrow_{columns}_{pieces}.so"
            command = ["g++", "-O1", "-std=c++17", "-shared", "-fPIC", "-w", f"-DCOLUMNS={columns}"]
            command += [f"-DPIECES={pieces}", f'-DKERNEL_SOURCE="{SOURCE}"']
            subprocess.run([*command, str(HERE / "mla_narrow_model.cpp"), "-o", str(path)], check=True)
            built[columns, pieces] = ctypes.CDLL(str(path))
        return built[columns, pieces]

    return build


def split_plan(lengths: list[int], rows: int, max_splits: int) -> list[int]:
    """Splits of each request, as the merge finds them."""
    blocks = [-(-(length + rows) // BLOCK) for length in lengths]
    share = -(-sum(blocks) // (max_splits - len(lengths) + 1))
    return [-(-count // share) for count in blocks]


def attend(
    library, inputs: dict, page_size: int, columns: int, splits: int, late: bool, seed: int = 0
) -> torch.Tensor:
    """Run the kernel's programs and merge what they leave, [batch * rows, heads, 512] in float64."""
    query, keys, table = inputs["query"], inputs["key_cache"], inputs["slot_table"]
    lengths, ids, mask = inputs["prefix_lens"], inputs["request_ids"], inputs["tree_mask"]
    batch, (tokens, heads, _) = len(ids), query.shape
    rows = tokens // batch
    packed = rows * heads
    tiles, pieces = -(-packed // columns), BLOCK // min(page_size, BLOCK)
    partial = torch.full((splits, packed, 512), torch.nan)
    lse = torch.full((splits, packed), torch.nan)
    pointer, wide = ctypes.c_void_p, (ids.dtype == torch.int64) + 2 * (lengths.dtype == torch.int64)
    stuck = library(columns, pieces).run_narrow(
        pointer(query.data_ptr()), ctypes.c_long(tokens * heads),
        pointer(keys.data_ptr()), ctypes.c_long(len(keys)), ctypes.c_long(keys.stride(0) * 2),
        *(pointer(tensor.data_ptr()) for tensor in (table, ids, lengths)),
        pointer(0 if mask is None else mask.data_ptr()), pointer(partial.data_ptr()), pointer(lse.data_ptr()),
        ctypes.c_long(table.stride(0)), wide, batch, rows, heads, 0 if mask is None else mask.shape[2], tiles,
        splits, ctypes.c_float(inputs["softmax_scale"] * math.log2(math.e)), int(late), seed,
    )  # fmt: skip
    assert stuck == 0, f"the threads of program {stuck - 1} wait for ever"
    out, first = [], 0
    for count in split_plan(lengths.tolist(), rows, splits):
        own = slice(first, first + count)
        weights = torch.softmax(lse[own].double() * math.log(2), 0)
        out.append((weights[..., None] * partial[own].double()).sum(0))
        first += count
    return torch.cat(out).view(tokens, heads, 512)


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """NaN where the result has one."""
    return ((result - expected).norm() / expected.norm()).item()


def check(
    library, case: Case, columns: int, splits: int, inputs: dict | None = None, tolerance: float = TOLERANCE
) -> None:
    inputs = inputs or make_inputs(case, "cpu", torch.bfloat16)
    expected = exact(inputs)[0]
    for late in (False, True):
        error = relative_error(attend(library, inputs, case.page_size, columns, splits, late), expected)
        assert error <= tolerance, f"{case}, late {late}: relative error {error:.2e}"


@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 8), (3, 24), (9, 72), (17, 72), (27, 72), (40, 24)], ids=lambda n: str(n)
)
def test_tiles_of_every_kind(rows, columns, library):
    """One tile and several, full and not, whole ones of padding between them and the next request."""
    check(library, CASE.with_(prefixes=(200, 61), rows=rows), columns, 5)


@pytest.mark.parametrize("tree", ["chain", "star", "comb", "random", "whole"])
def test_every_tree_is_masked_as_it_says(tree, library):
    check(library, CASE.with_(tree=tree, prefixes=(100, 3), rows=9), 72, 4)


@pytest.mark.parametrize("rows", [60, 64, 65, 72, 140])
def test_masks_of_several_words(rows, library):
    """One head, so that a tile has many rows; at 140 rows the tree is behind three blocks of keys."""
    check(library, CASE.with_(heads=1, prefixes=(70, 0, 121), rows=rows), 72, 6)


@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_lengths_around_pages_and_blocks(page_size, library):
    lengths = (0, 1, 15, 16, 17, 46, 47, 61, 62, 63, 64, 65, 111, 127, 128, 129, 191, 192)
    check(library, CASE.with_(prefixes=lengths, rows=3, page_size=page_size), 24, 2 * len(lengths))


def test_more_requests_than_a_warp_has_lanes_and_programs_without_work(library):
    generator = torch.Generator().manual_seed(3)
    lengths = tuple(torch.randint(0, 200, (70,), generator=generator).tolist())
    check(library, CASE.with_(heads=4, prefixes=lengths, rows=2), 8, 150)


def test_a_long_request_goes_round_the_ring(library):
    check(library, CASE.with_(prefixes=(3000, 90), rows=9), 72, 3)


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_threads_and_loads(seed, library):
    inputs = make_inputs(CASE.with_(prefixes=(500,), rows=9), "cpu", torch.bfloat16)
    first = attend(library, inputs, 64, 72, 2, late=False)
    assert torch.equal(attend(library, inputs, 64, 72, 2, late=True, seed=seed), first)


def test_ids_and_lengths_of_either_width(library):
    inputs = make_inputs(CASE.with_(prefixes=(100, 30), rows=3), "cpu", torch.bfloat16)
    expected = attend(library, inputs, 64, 24, 4, late=False)
    inputs["request_ids"], inputs["prefix_lens"] = inputs["request_ids"].int(), inputs["prefix_lens"].long()
    assert torch.equal(attend(library, inputs, 64, 24, 4, late=False), expected)


def keys_of(inputs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """The key cache and the slots of its first request, in the order of their positions."""
    count = inputs["prefix_lens"][0].item() + len(inputs["query"]) // len(inputs["prefix_lens"])
    return inputs["key_cache"], inputs["slot_table"][inputs["request_ids"][0].item(), :count].long()


@pytest.mark.parametrize("rise", [3.0, 20.0, 100.0, 1000.0, 1e5])
@pytest.mark.parametrize("at", [63, 64, 130, 331])
def test_maxima_that_rise_in_one_block(rise, at, library):
    """By 2 to the power of ``rise``, for some columns, less than the slack and more."""
    inputs = make_inputs(CASE.with_(prefixes=(331,), rows=9), "cpu", torch.bfloat16)
    keys, slots = keys_of(inputs)
    row = inputs["query"][4, 3].double()
    # A key along one query: its logit in base 2 is `rise`, and the other queries' anything.
    key = row / row.square().sum() * rise / inputs["softmax_scale"] / math.log2(math.e)
    keys[slots[at], 0] = key.to(keys.dtype)
    check(library, CASE, 72, 2, inputs, tolerance=2e-2)


@pytest.mark.parametrize("growth", [2.0**15, 2.0**7, 30.0])
def test_logits_that_rise_again_and_again(growth, library):
    inputs = make_inputs(CASE.with_(prefixes=(700,), rows=9), "cpu", torch.bfloat16)
    keys, slots = keys_of(inputs)
    scale = torch.ones(709)
    scale[300:500], scale[500:] = growth**0.5, growth
    keys[slots, :, -64:] = (keys[slots, :, -64:].float() * scale[:, None, None]).to(keys.dtype)
    check(library, CASE, 72, 3, inputs, tolerance=2e-2)


def test_equal_keys_and_one_huge_key(library):
    inputs = make_inputs(CASE.with_(prefixes=(300,), rows=9), "cpu", torch.bfloat16)
    keys, slots = keys_of(inputs)
    keys[slots] = keys[slots[:1]]
    check(library, CASE, 72, 2, inputs)
    keys[slots[77]] *= 1000
    check(library, CASE, 72, 2, inputs)


def test_a_row_that_sees_nothing_comes_out_finite(library):
    inputs = make_inputs(CASE.with_(prefixes=(0,), rows=3), "cpu", torch.bfloat16)
    inputs["tree_mask"] = torch.zeros_like(inputs["tree_mask"])
    assert not attend(library, inputs, 64, 24, 2, late=True).any()
