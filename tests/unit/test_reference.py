"""kernels/attention/reference.py against a dense masked softmax in float64, gathered one key at a time."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from sglang_ddtree_patch.kernels.attention.reference import tree_attention_reference
from sglang_ddtree_patch.kernels.tree.build import ancestor_masks


@dataclass(frozen=True)
class Shape:
    """Heads and widths of one layer; `latent` shares the key's first columns as the value (MLA)."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    latent: bool = False


SHAPES = {
    "MHA": Shape(4, 4, 16, 16),
    "GQA": Shape(8, 2, 16, 16),
    "MQA": Shape(6, 1, 16, 16),
    "value narrower than key": Shape(4, 2, 24, 8),
    "MLA": Shape(4, 1, 32 + 8, 32, latent=True),
}
PREFIXES = (0, 1, 15, 16, 17, 63, 64, 200)


@dataclass
class Case:
    """A paged pool full of NaN but for the slots the requests own."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    slot_table: torch.Tensor
    request_ids: torch.Tensor
    prefix_lens: torch.Tensor
    parents: torch.Tensor

    @classmethod
    def make(cls, shape: Shape, prefixes=PREFIXES, rows=17, page_size=16, seed=0, dtype=torch.float32):
        generator = torch.Generator().manual_seed(seed)
        batch, longest = len(prefixes), max(prefixes) + rows
        pages = -(-longest // page_size)
        ids = torch.randperm(batch * pages, generator=generator).view(batch, pages, 1) + 1
        slots = (ids * page_size + torch.arange(page_size)).flatten(1)
        pool = (batch * pages + 1) * page_size
        keys = torch.full((pool, shape.kv_heads, shape.key_dim), torch.nan, dtype=dtype)
        values = torch.full((pool, shape.kv_heads, shape.value_dim), torch.nan, dtype=dtype)
        # Rows of the table belong to requests in another order than the batch's.
        request_ids = torch.randperm(batch + 2, generator=generator)[:batch]
        table = torch.zeros((batch + 2, slots.shape[1]), dtype=torch.int32)
        for i, prefix in enumerate(prefixes):
            table[request_ids[i], : prefix + rows] = slots[i, : prefix + rows].int()
            used = slots[i, : prefix + rows]
            keys[used] = torch.randn(len(used), *keys.shape[1:], generator=generator).to(dtype)
            values[used] = torch.randn(len(used), *values.shape[1:], generator=generator).to(dtype)
        parents = torch.full((batch, rows), -1)
        for row in range(1, rows - 1):  # the last row stays padding: it sees itself alone
            parents[:, row] = torch.randint(0, row, (batch,), generator=generator)
        return cls(
            query=torch.randn(batch * rows, shape.heads, shape.key_dim, generator=generator).to(dtype),
            key_cache=keys,
            value_cache=keys[..., : shape.value_dim] if shape.latent else values,
            slot_table=table,
            request_ids=request_ids,
            prefix_lens=torch.tensor(prefixes),
            parents=parents,
        )

    def attend(self, masked: bool = True, **options) -> torch.Tensor:
        masks = ancestor_masks(self.parents, max_depth=self.parents.shape[1]) if masked else None
        return tree_attention_reference(
            self.query,
            self.key_cache,
            self.value_cache,
            self.slot_table,
            self.request_ids,
            self.prefix_lens,
            masks,
            **options,
        )

    def path(self, request: int, row: int) -> list[int]:
        """The row and its ancestors, from itself to its root."""
        rows = [row]
        while (parent := int(self.parents[request, rows[-1]])) >= 0:
            rows.append(parent)
        return rows

    def visible_places(self, request: int, row: int, masked: bool, window: int | None) -> list[int]:
        """Places in the slot table of the keys a row sees, a window counted by position: depth, not row."""
        prefix, rows = int(self.prefix_lens[request]), self.parents.shape[1]
        position = {place: place for place in range(prefix)}
        if masked:
            for block_row in self.path(request, row):
                position[prefix + block_row] = prefix + len(self.path(request, block_row)) - 1
            own = prefix + len(self.path(request, row)) - 1
        else:
            position |= {place: place for place in range(prefix, prefix + rows)}
            own = prefix + row
        return [place for place, at in position.items() if window is None or abs(own - at) <= window]

    def expected(
        self,
        scale: float,
        cap: float = 0.0,
        masked: bool = True,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> np.ndarray:
        rows = self.parents.shape[1]
        group = self.query.shape[1] // self.key_cache.shape[1]
        out = np.empty((*self.query.shape[:2], self.value_cache.shape[2]))
        for index in range(len(self.query)):
            request, row = divmod(index, rows)
            places = self.visible_places(request, row, masked, window)
            slots = self.slot_table[self.request_ids[request], places].long()
            for head in range(self.query.shape[1]):
                keys = self.key_cache[slots, head // group].double().numpy()
                values = self.value_cache[slots, head // group].double().numpy()
                logits = keys @ self.query[index, head].double().numpy() * scale
                if cap:
                    logits = cap * np.tanh(logits / cap)
                sink = -np.inf if sinks is None else float(sinks[head])
                top = max(logits.max(), sink)
                weights = np.exp(logits - top)
                out[index, head] = weights @ values / (weights.sum() + np.exp(sink - top))
        return out


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_rows_attend_to_the_prefix_and_their_ancestors_alone(shape, page_size):
    """Unused slots of the pool hold NaN, so a key too many would show."""
    case = Case.make(shape, page_size=page_size, seed=page_size)
    scale = 1 / math.sqrt(shape.key_dim)
    torch.testing.assert_close(
        case.attend(softmax_scale=scale), torch.from_numpy(case.expected(scale)).float(), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("rows", [1, 2, 64, 65, 130])
def test_any_width_of_block_is_masked_by_its_words(rows):
    case = Case.make(SHAPES["GQA"], prefixes=(5, 0, 30), rows=rows, seed=rows)
    torch.testing.assert_close(
        case.attend(softmax_scale=0.25), torch.from_numpy(case.expected(0.25)).float(), rtol=1e-5, atol=1e-6
    )


def test_without_a_mask_every_row_sees_the_whole_block():
    case = Case.make(SHAPES["GQA"], rows=8)
    expected = torch.from_numpy(case.expected(0.25, masked=False)).float()
    torch.testing.assert_close(case.attend(masked=False, softmax_scale=0.25), expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(expected, case.attend(softmax_scale=0.25))


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_a_logit_cap_squashes_logits_before_the_softmax(cap):
    case = Case.make(SHAPES["GQA"], rows=8)
    expected = torch.from_numpy(case.expected(1.0, cap=cap)).float()
    torch.testing.assert_close(case.attend(softmax_scale=1.0, logit_cap=cap), expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(expected, case.attend(softmax_scale=1.0), atol=1e-3)


@pytest.mark.parametrize("masked", [True, False], ids=["tree", "no mask"])
@pytest.mark.parametrize("window", [0, 1, 2, 5, 16, 63, 500])
def test_a_window_reaches_back_by_position_and_both_ways_without_a_mask(window, masked):
    """Small windows cut ancestors off by their depth, larger ones cut the prefix of deep rows further in."""
    case = Case.make(SHAPES["GQA"], rows=12, seed=window)
    case.parents[0, 1:11] = torch.arange(10)  # a chain as deep as it is wide, beside random trees
    expected = torch.from_numpy(case.expected(0.25, masked=masked, window=window)).float()
    found = case.attend(masked=masked, softmax_scale=0.25, window=window)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, -1])
def test_no_window_is_the_whole_prefix(window):
    case = Case.make(SHAPES["GQA"], prefixes=(0, 40), rows=4)
    expected = case.attend(softmax_scale=0.25)
    assert torch.equal(case.attend(softmax_scale=0.25, window=window), expected)
    assert not torch.allclose(case.attend(softmax_scale=0.25, window=39), expected)


def test_keys_before_the_window_are_not_read():
    """What left the window may be gone: other pools hand its slots to other requests."""
    case = Case.make(SHAPES["GQA"], prefixes=(40, 9), rows=5)
    expected = case.attend(softmax_scale=0.25, window=16)
    gone = case.slot_table[case.request_ids[0], : 40 - 16].long()
    case.key_cache[gone] = torch.nan
    case.value_cache[gone] = torch.nan
    assert torch.equal(case.attend(softmax_scale=0.25, window=16), expected)


def test_a_sink_joins_the_denominator_of_its_head_alone():
    case = Case.make(SHAPES["GQA"], rows=6)
    sinks = torch.tensor([-torch.inf, -3.0, 0.0, 1.0, 2.0, 4.0, 9.0, 30.0])
    expected = torch.from_numpy(case.expected(0.25, sinks=sinks)).float()
    torch.testing.assert_close(case.attend(softmax_scale=0.25, sinks=sinks), expected, rtol=1e-5, atol=1e-6)
    # A sink of minus infinity is none; another column in the sum may round otherwise.
    torch.testing.assert_close(
        case.attend(softmax_scale=0.25, sinks=sinks)[:, 0], case.attend(softmax_scale=0.25)[:, 0]
    )


def test_a_cache_of_its_own_is_found_through_the_slot_map():
    """Layers with a window may live in a smaller pool, whose slots a map gives for each slot of the table."""
    case = Case.make(SHAPES["GQA"], prefixes=(5, 30), rows=4)
    order = torch.randperm(len(case.key_cache), generator=torch.Generator().manual_seed(0))
    expected = case.attend(softmax_scale=0.25)
    slot_map = torch.empty_like(order)
    slot_map[order] = torch.arange(len(order))
    case.key_cache, case.value_cache = case.key_cache[order], case.value_cache[order]
    assert torch.equal(case.attend(softmax_scale=0.25, slot_map=slot_map), expected)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_keys_and_values_are_multiplied_by_their_scales(dtype):
    case = Case.make(SHAPES["GQA"], prefixes=(20,), rows=4)
    case.key_cache, case.value_cache = case.key_cache.to(dtype), case.value_cache.to(dtype)
    found = case.attend(softmax_scale=0.25, k_scale=0.5, v_scale=2.0)
    case.key_cache, case.value_cache = case.key_cache.float() * 0.5, case.value_cache.float() * 2.0
    expected = torch.from_numpy(case.expected(0.25)).float()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_row_the_mask_hides_changes_nothing():
    case = Case.make(SHAPES["MLA"], prefixes=(20,), rows=9)
    case.parents[:] = torch.tensor([[-1, 0, 1, 2, 0, 4, 5, 0, -1]])
    before = case.attend(softmax_scale=0.2)
    hidden = case.slot_table[case.request_ids[0], 20 + 4].long()  # row 4: seen by rows 4, 5 and 6
    case.key_cache[hidden] = 100.0
    after = case.attend(softmax_scale=0.2)
    changed = (before != after).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == [4, 5, 6]


def test_a_batch_attends_as_each_request_alone():
    case = Case.make(SHAPES["GQA"])
    together = case.attend(softmax_scale=0.25).view(len(PREFIXES), 17, 8, 16)
    for i in range(len(PREFIXES)):
        alone = Case(
            case.query.view(len(PREFIXES), 17, 8, 16)[i],
            case.key_cache,
            case.value_cache,
            case.slot_table,
            case.request_ids[i : i + 1],
            case.prefix_lens[i : i + 1],
            case.parents[i : i + 1],
        )
        assert torch.equal(together[i], alone.attend(softmax_scale=0.25))


def test_low_precision_inputs_are_computed_in_float32_and_returned_as_they_came():
    case = Case.make(SHAPES["GQA"], dtype=torch.bfloat16)
    attended = case.attend(softmax_scale=0.25)
    assert attended.dtype == torch.bfloat16
    assert torch.equal(
        attended,
        Case(
            case.query.float(),
            case.key_cache.float(),
            case.value_cache.float(),
            case.slot_table,
            case.request_ids,
            case.prefix_lens,
            case.parents,
        )
        .attend(softmax_scale=0.25)
        .bfloat16(),
    )


def test_the_result_is_written_into_out_where_one_is_given():
    case = Case.make(SHAPES["GQA"], prefixes=(5,), rows=4)
    out = torch.full((4, 8, 16), torch.nan)
    assert case.attend(softmax_scale=0.25, out=out) is out
    assert torch.equal(out, case.attend(softmax_scale=0.25))
