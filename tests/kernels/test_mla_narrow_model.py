"""The narrow MLA kernel's own source, run on the CPU over a model of Hopper's instructions: equal to float64.

Every thread of every program runs: barriers, ring, swizzles, fragments, masks, splits. What the hardware does
behind the threads happens at once in one run and as late as it may in the other. The model stands in for
CUDA's driver, so what Python hands over is what a GPU would get.
"""

import ctypes
import math
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tree_attention_inputs import MLA, Case, exact, make_inputs

from sglang_ddtree_patch.kernels.attention.hopper import cuda_driver, mla_narrow
from sglang_ddtree_patch.kernels.attention.reference import tree_attention_reference
from sglang_ddtree_patch.kernels.attention.verify_attention import AttentionShape

HERE = Path(__file__).parent
SOURCES = Path(mla_narrow.__file__).parent
CASE = MLA.with_(heads=8, page_size=64)
TOLERANCE = 4e-3  # of bf16 weights


class Model:
    """Builds the kernel for a number of columns and of pieces, once, and launches it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.folder = folder
        self.programs_at_once = 1  # what the model's GPU would run
        self.late, self.seed = False, 0
        monkeypatch.setattr(mla_narrow, "narrow_kernel", self.kernel)
        monkeypatch.setattr(mla_narrow, "device_properties", lambda device: ((9, 0), self.programs_at_once))
        monkeypatch.setattr(cuda_driver, "_driver", lambda: self.library)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))

    def kernel(self, columns: int, keys_ahead: int, page_keys: int, dtype: torch.dtype, device: torch.device):
        # The map of the queries is made behind this, by the same library.
        path = self.folder / f"narrow_{columns}_{keys_ahead}_{page_keys}.so"
        if not path.exists():
            command = ["g++", "-O1", "-std=c++17", "-shared", "-fPIC", "-w", f"-DCOLUMNS={columns}"]
            command += [f"-DPIECES={64 // page_keys}", f"-DKEYS_AHEAD={keys_ahead}"]
            command += [f"-I{SOURCES}"]
            subprocess.run([*command, str(HERE / "mla_narrow_model.cpp"), "-o", str(path)], check=True)
        self.library = ctypes.CDLL(str(path))
        self.library.set_model(int(self.late), self.seed)
        return cuda_driver.Kernel(b"", "split_attention_narrow", mla_narrow.SHARED_BYTES)

    def launch(
        self, inputs: dict, page_size: int, columns: int, splits: int, keys_ahead: int
    ) -> tuple[torch.Tensor, ...]:
        """Partial outputs and their log-sum-exps, [splits, rows * heads, 512] and without the last axis."""
        query, batch = inputs["query"], len(inputs["request_ids"])
        packed = len(query) // batch * query.shape[1]
        workspace = torch.full((splits * packed * 513,), torch.nan)
        self.programs_at_once = splits * -(-packed // columns)
        mla_narrow.tree_attention_narrow(
            **inputs,
            page_size=page_size,
            workspace=workspace,
            config=mla_narrow.NarrowConfig(columns, keys_ahead),
        )
        assert self.library.stuck_program() == 0
        partial, lse = workspace[: splits * packed * 512], workspace[splits * packed * 512 :]
        return partial.view(splits, packed, 512), lse.view(splits, packed)


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture
def model(built, monkeypatch) -> Model:
    return Model(built, monkeypatch)


@pytest.fixture
def attend(model, monkeypatch):
    """Run the kernel and merge, in float64, what it leaves: [batch * rows, heads, 512]."""

    class Skip:
        def __getitem__(self, grid):
            return lambda *arguments, **options: None

    monkeypatch.setattr(mla_narrow, "merge_splits", Skip())

    def run(
        inputs: dict,
        page_size: int,
        columns: int,
        splits: int,
        late: bool,
        seed: int = 0,
        keys_ahead: int = 0,
    ):
        model.late, model.seed = late, seed
        partial, lse = model.launch(inputs, page_size, columns, splits, keys_ahead)
        lengths, tokens = inputs["prefix_lens"].tolist(), len(inputs["query"])
        out, first = [], 0
        for count in split_plan(lengths, tokens // len(lengths), splits):
            own = slice(first, first + count)
            weights = torch.softmax(lse[own].double() * math.log(2), 0)
            out.append((weights[..., None] * partial[own].double()).sum(0))
            first += count
        return torch.cat(out).view(tokens, -1, 512)

    return run


def split_plan(lengths: list[int], rows: int, max_splits: int) -> list[int]:
    """Splits of each request, as the merge finds them."""
    blocks = [-(-(length + rows) // mla_narrow.BLOCK) for length in lengths]
    share = -(-sum(blocks) // (max_splits - len(lengths) + 1))
    return [-(-count // share) for count in blocks]


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """NaN where the result has one."""
    return ((result - expected).norm() / expected.norm()).item()


def check(
    attend, case: Case, columns: int, splits: int, inputs: dict | None = None, tolerance: float = TOLERANCE
) -> None:
    inputs = inputs or make_inputs(case, "cpu", torch.bfloat16)
    expected = exact(inputs)[0]
    for late in (False, True):
        error = relative_error(attend(inputs, case.page_size, columns, splits, late), expected)
        assert error <= tolerance, f"{case}, late {late}: relative error {error:.2e}"


@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 8), (3, 24), (9, 72), (17, 72), (27, 72), (40, 24)], ids=lambda n: str(n)
)
def test_tiles_of_every_kind(rows, columns, attend):
    """One tile and several, full and not, whole ones of padding between them and the next request."""
    check(attend, CASE.with_(prefixes=(200, 61), rows=rows), columns, 5)


@pytest.mark.parametrize("tree", ["chain", "star", "comb", "random", "whole"])
def test_every_tree_is_masked_as_it_says(tree, attend):
    check(attend, CASE.with_(tree=tree, prefixes=(100, 3), rows=9), 72, 4)


@pytest.mark.parametrize("rows", [64, 65, 72, 140])
def test_masks_of_several_words(rows, attend):
    """One head, so that a tile has many rows; at 140 rows the tree is behind three blocks of keys."""
    check(attend, CASE.with_(heads=1, prefixes=(70, 0, 121), rows=rows), 72, 6)


@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_lengths_around_pages_and_blocks(page_size, attend):
    lengths = (0, 1, 15, 16, 17, 46, 47, 61, 62, 63, 64, 65, 111, 127, 128, 129, 191, 192)
    check(attend, CASE.with_(prefixes=lengths, rows=3, page_size=page_size), 24, 2 * len(lengths))


@pytest.mark.parametrize(("page_size", "columns"), [(16, 24), (64, 24)])
def test_slots_behind_the_tree_are_not_looked_up(page_size, columns, attend):
    """A load from where no slot is ends the model's launch."""
    inputs = make_inputs(
        CASE.with_(prefixes=(70, 1, 125), rows=3, page_size=page_size), "cpu", torch.bfloat16
    )
    for request, prefix in zip(inputs["request_ids"].tolist(), (70, 1, 125), strict=True):
        inputs["slot_table"][request, prefix + 3 :] = 1 << 30
    check(attend, CASE.with_(page_size=page_size), columns, 6, inputs)


def test_more_requests_than_a_warp_has_lanes_and_programs_without_work(attend):
    generator = torch.Generator().manual_seed(3)
    lengths = tuple(torch.randint(0, 200, (70,), generator=generator).tolist())
    check(attend, CASE.with_(heads=4, prefixes=lengths, rows=2), 8, 150)


def test_a_long_request_goes_round_the_ring(attend):
    check(attend, CASE.with_(prefixes=(3000, 90), rows=9), 72, 4)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("keys_ahead", [0, 9])
def test_any_order_of_threads_and_loads(keys_ahead, seed, attend):
    inputs = make_inputs(CASE.with_(prefixes=(500,), rows=9), "cpu", torch.bfloat16)
    first = attend(inputs, 64, 72, 2, late=False)
    assert torch.equal(attend(inputs, 64, 72, 2, late=True, seed=seed, keys_ahead=keys_ahead), first)


def test_ids_and_lengths_of_either_width(attend):
    inputs = make_inputs(CASE.with_(prefixes=(100, 30), rows=3), "cpu", torch.bfloat16)
    expected = attend(inputs, 64, 24, 4, late=False)
    inputs["request_ids"], inputs["prefix_lens"] = inputs["request_ids"].int(), inputs["prefix_lens"].long()
    assert torch.equal(attend(inputs, 64, 24, 4, late=False), expected)


def keys_of(inputs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """The key cache and the slots of its first request, in the order of their positions."""
    count = inputs["prefix_lens"][0].item() + len(inputs["query"]) // len(inputs["prefix_lens"])
    return inputs["key_cache"], inputs["slot_table"][inputs["request_ids"][0].item(), :count].long()


@pytest.mark.parametrize("rise", [3.0, 20.0, 100.0, 1000.0, 1e5])
@pytest.mark.parametrize("at", [63, 64, 130, 331])
def test_maxima_that_rise_in_one_block(rise, at, attend):
    """By 2 to the power of ``rise``, for some columns, less than the slack and more."""
    inputs = make_inputs(CASE.with_(prefixes=(331,), rows=9), "cpu", torch.bfloat16)
    keys, slots = keys_of(inputs)
    row = inputs["query"][4, 3].double()
    # A key along one query: its logit in base 2 is `rise`, and the other queries' anything.
    key = row / row.square().sum() * rise / inputs["softmax_scale"] / math.log2(math.e)
    keys[slots[at], 0] = key.to(keys.dtype)
    check(attend, CASE, 72, 2, inputs, tolerance=2e-2)


@pytest.mark.parametrize("growth", [2.0**15, 2.0**7, 30.0])
def test_logits_that_rise_again_and_again(growth, attend):
    inputs = make_inputs(CASE.with_(prefixes=(700,), rows=9), "cpu", torch.bfloat16)
    keys, slots = keys_of(inputs)
    scale = torch.ones(709)
    scale[300:500], scale[500:] = growth**0.5, growth
    keys[slots, :, -64:] = (keys[slots, :, -64:].float() * scale[:, None, None]).to(keys.dtype)
    check(attend, CASE, 72, 3, inputs, tolerance=2e-2)


def test_equal_keys_and_one_huge_key(attend):
    inputs = make_inputs(CASE.with_(prefixes=(300,), rows=9), "cpu", torch.bfloat16)
    keys, slots = keys_of(inputs)
    keys[slots] = keys[slots[:1]]
    check(attend, CASE, 72, 2, inputs)
    keys[slots[77]] *= 1000
    check(attend, CASE, 72, 2, inputs)


def test_a_row_that_sees_nothing_comes_out_finite(attend):
    inputs = make_inputs(CASE.with_(prefixes=(0,), rows=3), "cpu", torch.bfloat16)
    inputs["tree_mask"] = torch.zeros_like(inputs["tree_mask"])
    assert not attend(inputs, 64, 24, 2, late=True).any()


def test_with_the_merge_behind_it(model):
    inputs = make_inputs(
        CASE.with_(heads=2, prefixes=(300, 0), rows=3, page_size=16, sinks=True), "cpu", torch.bfloat16
    )
    model.programs_at_once = 5
    out = torch.full((6, 2, 512), torch.nan)
    mla_narrow.tree_attention_narrow(**inputs, page_size=16, out=out)
    expected = tree_attention_reference(**inputs | {"query": inputs["query"].float()})
    assert relative_error(out, expected) <= TOLERANCE


def test_what_a_server_runs_was_compiled_when_memory_was_reserved(model, attend, monkeypatch):
    asked = []

    def kernel(*key):
        asked.append(key)
        return model.kernel(*key)

    monkeypatch.setattr(mla_narrow, "narrow_kernel", kernel)
    inputs = make_inputs(CASE.with_(heads=2, prefixes=(70, 5), rows=3, page_size=16), "cpu", torch.bfloat16)
    table, ids, lengths = (inputs.pop(name) for name in ("slot_table", "request_ids", "prefix_lens"))
    shape = AttentionShape(2, 1, 576, 512, True, torch.bfloat16)
    attention = mla_narrow.NarrowMLA(table, shape, page_size=16)
    attention.reserve(2, rows=3)
    attention.prepare(ids, lengths, rows=3)
    attention.attend(**inputs)
    assert len(asked) == 2
    assert asked[0] == asked[1]
