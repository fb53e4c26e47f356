"""kernels/accept/walk.py, in plain PyTorch and as a kernel, against a plain walk over dictionaries."""

import dataclasses
from collections.abc import Callable

import pytest
import torch

from sglang_ddtree_patch.kernels.accept.walk import AcceptedPath, accept_greedy, accept_greedy_torch
from sglang_ddtree_patch.kernels.accept.walk_kernel import accept_greedy_triton
from sglang_ddtree_patch.kernels.tree.build import build_token_tree_torch

PREFIX_LEN = 1000
Accept = Callable[..., AcceptedPath]


def fields(accepted: AcceptedPath) -> dict[str, torch.Tensor]:
    return {field.name: getattr(accepted, field.name) for field in dataclasses.fields(accepted)}


def by_kernel(tokens, parents, predictions, path: int, prefix_lens=None) -> AcceptedPath:
    """The kernel's walks: compiled where there is a GPU, else interpreted; inputs and result on the CPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arguments = [tokens.to(device), parents.to(device), predictions.to(device), path]
    lens = None if prefix_lens is None else prefix_lens.to(device)
    accepted = fields(accept_greedy_triton(*arguments, lens))
    return AcceptedPath(**{name: None if value is None else value.cpu() for name, value in accepted.items()})


@pytest.fixture(params=[accept_greedy_torch, by_kernel], ids=["PyTorch", "kernel"])
def accept(request) -> Accept:
    return request.param


@pytest.fixture
def batch(accept) -> int:
    """Interpreted walks take a hundredth of a second each."""
    return 16 if accept is accept_greedy_torch else 4


def walk(tokens: list[int], parents: list[int], predictions: list[int], path: int) -> list[int]:
    """The accepted rows, root first."""
    children: dict[int, dict[int, int]] = {}
    for row, parent in enumerate(parents):
        if parent >= 0:
            children.setdefault(parent, {}).setdefault(tokens[row], row)
    rows = [0]
    while len(rows) < path:
        following = children.get(rows[-1], {}).get(predictions[rows[-1]])
        if following is None:
            break
        rows.append(following)
    return rows


def assert_is_the_walk(accept: Accept, tokens, parents, predictions, path: int) -> AcceptedPath:
    batch, width = tokens.shape
    accepted = accept(tokens, parents, predictions, path, PREFIX_LEN * torch.arange(batch))
    for i in range(batch):
        guesses = predictions[i].tolist()
        rows = walk(tokens[i].tolist(), parents[i].tolist(), guesses, path)
        assert accepted.commit_lengths[i] == len(rows)
        assert accepted.new_lens[i] == PREFIX_LEN * i + len(rows)
        assert accepted.rows[i].tolist() == rows + list(range(len(rows), path))
        assert torch.equal(accepted.block_rows[i], accepted.rows[i] + width * i)
        assert accepted.tokens[i, : len(rows)].tolist() == [guesses[row] for row in rows]
        assert accepted.bonus_tokens[i] == guesses[rows[-1]]
    return accepted


def random_round(seed: int, batch: int, width: int, draft: int, candidates: int, agreement: float):
    """Trees of a random drafter, and a target that agrees with a child of a row that often."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(batch, draft - 1, candidates, generator=generator)
    log_probs = logits.log_softmax(-1).sort(-1, descending=True).values
    # A small vocabulary: the same token stands in many branches, though once among siblings.
    tokens = torch.stack(
        [torch.randperm(candidates + 2, generator=generator)[:candidates] for _ in range(batch * (draft - 1))]
    ) if draft > 1 else torch.zeros(0, candidates, dtype=torch.int64)
    roots = torch.randint(0, candidates + 2, (batch,), generator=generator)
    tree = build_token_tree_torch(roots, tokens.view(batch, draft - 1, candidates), log_probs, width)
    predictions = torch.randint(0, candidates + 2, (batch, width), generator=generator)
    for i in range(batch):
        for row in range(width):
            below = (tree.parents[i] == row).nonzero().flatten()
            if len(below) and torch.rand((), generator=generator) < agreement:
                child = below[torch.randint(len(below), (), generator=generator)]
                predictions[i, row] = tree.tokens[i, child]
    return tree, predictions


SHAPES = [(1, 8), (2, 8), (8, 8), (8, 16), (17, 2), (33, 16), (64, 16), (65, 32), (5, 1)]


@pytest.mark.parametrize(("width", "draft"), SHAPES)
@pytest.mark.parametrize("agreement", [0.0, 0.7, 1.0])
def test_accepted_rows_are_the_targets_own_walk(accept, batch, width, draft, agreement):
    tree, predictions = random_round(width + draft, batch, width, draft, candidates=6, agreement=agreement)
    assert_is_the_walk(accept, tree.tokens, tree.parents, predictions, path=min(width, draft))


@pytest.mark.parametrize(("width", "draft"), SHAPES)
@pytest.mark.parametrize("agreement", [0.0, 0.7, 1.0])
def test_accept_length_commit_length_and_depth_cannot_contradict(accept, batch, width, draft, agreement):
    tree, predictions = random_round(width * draft, batch, width, draft, candidates=4, agreement=agreement)
    path = min(width, draft)
    accepted = accept(tree.tokens, tree.parents, predictions, path)
    accept_lengths = accepted.commit_lengths - 1
    last_rows = accepted.rows.gather(1, accept_lengths[:, None].long())
    assert torch.equal(tree.depths.gather(1, last_rows)[:, 0], accept_lengths.long())
    assert torch.equal(predictions.gather(1, last_rows)[:, 0], accepted.bonus_tokens)
    last_tokens = accepted.tokens.gather(1, accept_lengths[:, None].long())[:, 0]
    assert torch.equal(last_tokens, accepted.bonus_tokens)
    assert accepted.commit_lengths.min() >= 1
    assert accepted.commit_lengths.max() <= path


def test_a_walk_takes_every_row_of_a_chain_that_the_target_agrees_with(accept):
    tokens = torch.tensor([[5, 6, 7, 8]])
    parents = torch.tensor([[-1, 0, 1, 2]])
    accepted = assert_is_the_walk(accept, tokens, parents, torch.tensor([[6, 7, 8, 9]]), path=4)
    assert accepted.commit_lengths.tolist() == [4]
    assert accepted.tokens.tolist() == [[6, 7, 8, 9]]


def test_padding_is_never_accepted_though_it_carries_the_roots_token(accept):
    tokens = torch.tensor([[5, 6, 5, 5]])
    parents = torch.tensor([[-1, 0, -1, -1]])
    accepted = assert_is_the_walk(accept, tokens, parents, torch.tensor([[5, 5, 5, 5]]), path=4)
    assert accepted.commit_lengths.tolist() == [1]
    assert accepted.rows.tolist() == [[0, 1, 2, 3]]


def test_a_walk_that_has_ended_never_starts_again(accept):
    """Row 1 is refused at the root, though row 2 below it would match what its own row predicts."""
    tokens, parents = torch.tensor([[5, 6, 7]]), torch.tensor([[-1, 0, 1]])
    accepted = assert_is_the_walk(accept, tokens, parents, torch.tensor([[9, 7, 8]]), path=3)
    assert accepted.commit_lengths.tolist() == [1]
    assert accepted.bonus_tokens.tolist() == [9]


def test_a_path_limit_ends_the_walk_with_the_last_rows_own_prediction(accept):
    tokens, parents = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[-1, 0, 1, 2]])
    accepted = assert_is_the_walk(accept, tokens, parents, torch.tensor([[6, 7, 8, 9]]), path=2)
    assert accepted.tokens.tolist() == [[6, 7]]
    assert accepted.bonus_tokens.tolist() == [7]


def test_a_walk_moves_forward_along_the_block(accept):
    """Rows grow strictly and never stand before their offset, which is why they can be moved in order."""
    tree, predictions = random_round(3, 8, 33, 16, candidates=6, agreement=1.0)
    rows = accept(tree.tokens, tree.parents, predictions, 16).rows
    lengths = accept(tree.tokens, tree.parents, predictions, 16).commit_lengths
    for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
        walked = row[:length]
        assert walked == sorted(set(walked))
        assert all(a >= k for k, a in enumerate(walked))


def test_requests_of_a_batch_walk_alone(accept):
    tree, predictions = random_round(4, 12, 17, 8, candidates=4, agreement=0.8)
    together = accept(tree.tokens, tree.parents, predictions, 8)
    for i in range(12):
        one = slice(i, i + 1)
        alone = accept(tree.tokens[one], tree.parents[one], predictions[one], 8)
        for field in ("rows", "tokens", "commit_lengths", "bonus_tokens"):
            assert torch.equal(getattr(together, field)[one], getattr(alone, field))


def test_counts_come_in_the_types_the_scheduler_expects(accept):
    tree, predictions = random_round(5, 2, 8, 8, candidates=4, agreement=0.5)
    accepted = accept(tree.tokens, tree.parents, predictions, 8)
    assert accepted.commit_lengths.dtype == torch.int32
    assert accepted.tokens.dtype == accepted.rows.dtype == accepted.bonus_tokens.dtype == torch.int64


def test_new_lengths_are_left_out_where_no_lengths_were_given(accept):
    tree, predictions = random_round(6, 2, 8, 8, candidates=4, agreement=0.5)
    assert accept(tree.tokens, tree.parents, predictions, 8).new_lens is None


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "draft"), [*SHAPES, (16, 16), (100, 32), (256, 32)])
def test_thousands_of_walks_equal_the_reference(width, draft):
    """512 trees at once, each along 8 sets of predictions; the public function takes the kernel on a GPU."""
    tree, predictions = random_round(width + draft, 64, width, draft, candidates=6, agreement=0.9)
    generator = torch.Generator().manual_seed(width)
    many = {name: getattr(tree, name).repeat(8, 1).cuda() for name in ("tokens", "parents")}
    lens = torch.randint(0, 1 << 20, (512,), generator=generator).cuda()
    for share in torch.linspace(0, 0.3, 8):
        wrong = torch.rand(512, width, generator=generator) < share
        other = torch.randint(0, 8, (512, width), generator=generator)
        guesses = torch.where(wrong, other, predictions.repeat(8, 1)).cuda()
        arguments = (many["tokens"], many["parents"], guesses, min(width, draft), lens)
        expected = fields(accept_greedy_torch(*arguments))
        for name, value in fields(accept_greedy(*arguments)).items():
            assert torch.equal(value, expected[name]), name
