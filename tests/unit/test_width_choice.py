"""From a round's results to the next width: what is drafted, accepted and timed reaches the policy."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_ddtree_patch.kernels.tree.build import build_token_tree_torch
from sglang_ddtree_patch.metrics.round_times import Untimed
from sglang_ddtree_patch.round.block import BlockSizes
from sglang_ddtree_patch.round.result import RoundResult, settle_round
from sglang_ddtree_patch.widths.agreement import EXCHANGED, Alone, Together
from sglang_ddtree_patch.widths.choice import ChosenWidth, FixedWidth
from sglang_ddtree_patch.widths.policy import RoundSeen

SIZES = BlockSizes(width=12, draft=8, candidates=4, widest=12)


def batch_of(*lengths: int, are_known: bool = True) -> SimpleNamespace:
    """A ScheduleBatch of a decode round; without known lengths, as under overlap scheduling."""
    return SimpleNamespace(
        reqs=[SimpleNamespace(is_retracted=False, finished=lambda: False) for _ in lengths],
        seq_lens_cpu=torch.tensor(lengths) if are_known else None,
        spec_info=SimpleNamespace(nxt_kv_lens_cpu=None, nxt_kv_lens_sum=sum(lengths) + 100),
    )


class Policy:
    """Stands for `WidthPolicy`: takes what it is told."""

    def __init__(self, width: int):
        self.width = width
        self.asked: list[tuple[int, int]] = []
        self.seen: list[RoundSeen] = []

    def choose(self, batch: int, context: int) -> int:
        self.asked.append((batch, context))
        return self.width

    def learn(self, seen: RoundSeen) -> None:
        self.seen.append(seen)


@pytest.fixture
def chosen() -> ChosenWidth:
    choice = ChosenWidth(SIZES, "cpu", Alone())
    choice._policy = Policy(4)
    return choice


def test_a_fixed_width_is_the_largest_and_learns_nothing():
    choice = FixedWidth(SIZES)
    assert choice.choose(batch_of(3)) == (SIZES, 0)
    assert choice.expected(None) is None
    choice.learn(12, 0, [1], None, None)


def test_a_chosen_width_keeps_the_slots_of_the_largest(chosen):
    sizes, context = chosen.choose(batch_of(30, 5))
    assert (sizes.width, sizes.path, sizes.slots, context) == (4, 4, 12, 35)
    assert sizes.columns(sizes.width) == slice(0, 4)
    assert chosen.choose(batch_of(30, 5, are_known=False))[1] == 135
    assert chosen._policy.asked == [(2, 35), (2, 135)]


def test_the_widths_are_powers_of_two_and_the_largest():
    choice, seen = ChosenWidth(SIZES, "cpu", Alone()), set()
    for _ in range(40):
        seen.add(choice.choose(batch_of(3))[0].width)
    assert sorted(seen) == list(choice.widths) == [1, 2, 4, 8, 12]
    assert FixedWidth(SIZES).widths == (12,)


def test_a_settled_round_tells_the_policy_what_was_drafted_accepted_and_timed(chosen):
    log_probs = torch.tensor([[[0.5, 0.25], [0.5, 0.5]], [[1.0, 0.0], [0.25, 0.25]]]).log()
    tree = build_token_tree_torch(
        torch.zeros(2, dtype=torch.int64), torch.zeros((2, 2, 2), dtype=torch.int64), log_probs, SIZES.widest
    )
    times = Untimed()
    times.step_seconds = lambda: 0.25
    result = RoundResult(
        width=4, node_counts=tree.node_counts, times=times, context=35, expected=chosen.expected(tree),
        choice=chosen, num_correct_drafts_per_req_cpu=[3, 0],
    )  # fmt: skip
    reporter = SimpleNamespace(current_scheduler_metrics_enabled=False)
    settle_round([[1], [2]], SimpleNamespace(metrics_reporter=reporter), result, batch_of(30, 5))
    (seen,) = chosen._policy.seen
    assert (seen.batch, seen.context, seen.width) == (2, 35, 4)
    assert (seen.accept_length, seen.seconds) == (1.5, 0.25)
    # First request .5, .25, .25, .25, then .125 twice; the second 1, .25, .25 and no more.
    assert seen.expected == pytest.approx([0.0, 0.75, 1.25, 1.5, 1.5])


def test_what_other_algorithms_leave_is_passed_by():
    settle_round([[1]], SimpleNamespace(), SimpleNamespace(), batch_of(3))


class Wire:
    """Stands for torch's broadcast between two ranks that call it in turn, the first one first."""

    def __init__(self):
        self.calls = 0

    def broadcast(self, values: torch.Tensor, source: int, group: object) -> None:
        assert (source, group) == (4, self)
        if self.calls % 2 == 0:
            self.values = values.clone()
        values.copy_(self.values)
        self.calls += 1


def ranks_of_clocks(ranks: list[Alone] | list[Together]) -> list[list[int]]:
    """What each rank chooses over many rounds: the second one's clock finds wide rounds dear."""
    choices = [ChosenWidth(SIZES, "cpu", rank) for rank in ranks]
    widths: list[list[int]] = [[], []]
    for round_ in range(400):
        for rank, choice in enumerate(choices):
            sizes, context = choice.choose(batch_of(300))
            widths[rank].append(sizes.width)
            seconds = (1 + 0.5 * rank * sizes.width) * (1 + round_ % 7 / 50)
            expected = None if sizes.width == 1 else torch.tensor([[0.0, 0.5, 0.9, 1.4, 1.6]])
            unknown = (round_ + rank) % 5 == 0
            choice.learn(sizes.width, context, [1], expected, None if unknown else seconds)
    return widths


def test_ranks_choose_by_the_clock_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire()
    monkeypatch.setattr(torch.distributed, "broadcast", wire.broadcast)
    first, second = ranks_of_clocks([Together(wire, 4), Together(wire, 4)])
    assert first == second
    assert wire.calls == 2 * (400 // EXCHANGED)
    assert first.count(12) > 300, "it learns nothing"
    alone = ranks_of_clocks([Alone(), Alone()])
    assert alone[0] != alone[1]
