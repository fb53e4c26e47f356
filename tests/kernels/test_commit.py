"""Commit on pools small enough to check row by row: our kernel, and the pool's own move by offset."""

from itertools import pairwise

import pytest
import torch

from sglang_ddtree_patch.kernels.accept.walk import AcceptedPath, accept_greedy
from sglang_ddtree_patch.kernels.commit import RowBuffers, commit_rows
from sglang_ddtree_patch.round.commit import move_by_offset, path_hidden_states

LAYERS = 3
PREFIX = 11  # not a multiple of any page size but 1, so that blocks straddle pages


class FakePool:
    """KV of `LAYERS` layers whose content names the layer and the position that wrote it."""

    def __init__(self, slots: int):
        self.buffers = [torch.full((slots, 2), -1) for _ in range(LAYERS)]

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        for buffer in self.buffers:
            buffer[tgt_loc] = buffer[src_loc]


def slot_rows(batch: int, positions: int, page_size: int, order: str) -> torch.Tensor:
    """[batch, positions] slots: whole pages of a pool, in order or scattered over all requests."""
    pages = -(-positions // page_size)
    ids = torch.arange(1, batch * pages + 1)
    if order == "scattered":
        ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(page_size))]
    slots = ids.view(batch, pages, 1) * page_size + torch.arange(page_size)
    return slots.flatten(1)[:, :positions]


def random_walks(batch: int, width: int, path: int) -> AcceptedPath:
    """Walks of every length from 1 to `path` along random rows of the block."""
    generator = torch.Generator().manual_seed(width * path)
    tokens = torch.arange(width).expand(batch, width)  # a row's token is its own number
    parents = torch.full((batch, width), -1)
    predictions = torch.full((batch, width), -1)
    for i in range(batch):
        length = i % path + 1
        rows = [0, *(torch.randperm(width - 1, generator=generator)[: length - 1].sort().values + 1).tolist()]
        for parent, row in pairwise(rows):
            parents[i, row] = parent
            predictions[i, parent] = row
    return accept_greedy(tokens, parents, predictions, path)


def written_block(slots: torch.Tensor, pool_slots: int) -> FakePool:
    """A pool after verify: every position of every request holds (request, position)."""
    pool = FakePool(pool_slots)
    batch, positions = slots.shape
    for layer, buffer in enumerate(pool.buffers):
        request = torch.arange(batch)[:, None].expand(batch, positions)
        position = torch.arange(positions).expand(batch, positions)
        buffer[slots] = torch.stack([request, position + 1000 * layer], -1)
    return pool


def commit_by_kernel(pool: FakePool, slots: torch.Tensor, accepted: AcceptedPath) -> None:
    commit_rows(RowBuffers.of(pool.buffers), slots.contiguous(), accepted.rows)


@pytest.fixture(params=[move_by_offset, commit_by_kernel], ids=["pool's move", "kernel"])
def commit(request):
    return request.param


@pytest.fixture(params=[1, 4, 16, 64], ids=lambda size: f"page {size}")
def page_size(request) -> int:
    return request.param


@pytest.mark.parametrize("order", ["in order", "scattered"])
@pytest.mark.parametrize(("width", "draft"), [(1, 8), (2, 8), (8, 8), (17, 16), (64, 16), (8, 16)])
def test_accepted_path_is_contiguous_after_commit(commit, page_size, order, width, draft):
    batch, path, block = 20, min(width, draft), max(width, draft)
    slots = slot_rows(batch, PREFIX + block + 3, page_size, order)
    pool = written_block(slots, int(slots.max()) + 2 * page_size)
    before = [buffer.clone() for buffer in pool.buffers]
    accepted = random_walks(batch, width, path)
    commit(pool, slots[:, PREFIX : PREFIX + block], accepted)
    for layer, buffer in enumerate(pool.buffers):
        for i in range(batch):
            length = int(accepted.commit_lengths[i])
            rows = accepted.rows[i, :length].tolist()
            committed = buffer[slots[i, PREFIX : PREFIX + length]]
            assert committed.tolist() == [[i, PREFIX + row + 1000 * layer] for row in rows]
            # The prefix, and everything past the committed length, is as verify left it.
            untouched = torch.cat([slots[i, :PREFIX], slots[i, PREFIX + length :]])
            assert torch.equal(buffer[untouched], before[layer][untouched])
    others = torch.ones(len(before[0]), dtype=torch.bool)
    others[slots.flatten()] = False
    for buffer in pool.buffers:
        assert (buffer[others] == -1).all()


def test_without_the_move_a_branch_leaves_the_wrong_rows_in_front(commit):
    """The negative control: what the test above looks at does tell a commit from none."""
    slots = slot_rows(1, PREFIX + 4, 16, "scattered")
    accepted = accept_greedy(
        torch.tensor([[5, 6, 7, 8]]), torch.tensor([[-1, 0, 0, 2]]), torch.tensor([[7, 0, 8, 9]]), path=4
    )
    assert accepted.rows[0, :3].tolist() == [0, 2, 3]
    pool = written_block(slots, int(slots.max()) + 1)
    front = slots[0, PREFIX : PREFIX + 3]
    assert pool.buffers[0][front, 1].tolist() == [PREFIX, PREFIX + 1, PREFIX + 2]
    commit(pool, slots[:, PREFIX:], accepted)
    assert pool.buffers[0][front, 1].tolist() == [PREFIX, PREFIX + 2, PREFIX + 3]


def test_a_chain_stays_where_it_is(commit):
    slots = slot_rows(1, PREFIX + 8, 4, "scattered")
    pool = written_block(slots, int(slots.max()) + 1)
    before = pool.buffers[1].clone()
    parents, predictions = torch.arange(-1, 7)[None], torch.arange(1, 9)[None]
    commit(pool, slots[:, PREFIX:], accept_greedy(torch.arange(8)[None], parents, predictions, 8))
    assert torch.equal(pool.buffers[1], before)


def test_a_pool_that_moves_rows_in_any_order_commits_the_same():
    """SGLang's GPU move has no barrier between reading and writing the rows of a launch."""

    class UnorderedPool(FakePool):
        def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
            for index in torch.randperm(len(tgt_loc)).tolist():
                super().move_kv_cache(tgt_loc[index : index + 1], src_loc[index : index + 1])

    slots = slot_rows(20, PREFIX + 17, 16, "scattered")[:, PREFIX:]
    accepted = random_walks(20, 17, 16)
    whole = written_block(slots, int(slots.max()) + 1)
    move_by_offset(whole, slots, accepted)
    for _ in range(5):
        unordered = UnorderedPool(len(whole.buffers[0]))
        unordered.buffers = written_block(slots, int(slots.max()) + 1).buffers
        move_by_offset(unordered, slots, accepted)
        assert torch.equal(whole.buffers[0], unordered.buffers[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("path", [1, 2, 8, 16])
def test_the_kernel_moves_every_layout_of_row(dtype, device, path):
    """Keys and values of 3 layers, rows of different widths, rows strided in a larger buffer."""
    batch, width = (3, 9) if device == "cpu" else (32, 33)
    path = min(path, width)
    slots = slot_rows(batch, PREFIX + width, 16, "scattered")[:, PREFIX:].contiguous().to(device)
    accepted = random_walks(batch, width, path)
    rows = accepted.rows.to(device)
    count = int(slots.max()) + 1
    buffers = [torch.randn(count, *shape, device=device).to(dtype) for shape in ((2, 64), (1, 576), (5, 8))]
    buffers.append(torch.randn(count, 4, 16, device=device).to(dtype)[:, :2])
    expected = [buffer.clone() for buffer in buffers]
    for buffer in expected:
        raw = buffer.view(torch.uint8)
        for request in range(batch):
            for offset, row in enumerate(rows[request].tolist()):
                raw[slots[request, offset]] = raw[slots[request, row]]
    commit_rows(RowBuffers.of(buffers), slots, rows)
    for buffer, wanted in zip(buffers, expected, strict=True):
        assert torch.equal(buffer.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


def test_rows_that_the_kernel_cannot_move_are_refused_in_words():
    with pytest.raises(ValueError, match="whole words of 8 bytes"):
        RowBuffers.of([torch.zeros(4, 3, dtype=torch.bfloat16)])


def test_hidden_states_of_the_path_come_in_path_order():
    accepted = random_walks(6, 9, 5)
    hidden = torch.arange(6 * 9 * 2).view(6, 9, 2)
    padded = torch.cat([hidden.flatten(0, 1), torch.full((3, 2), -1)])  # a forward's alignment
    picked = path_hidden_states(padded, accepted).view(6, 5, 2)
    for i in range(6):
        assert torch.equal(picked[i], hidden[i, accepted.rows[i]])
