"""The choice of widths, against simulated servers: costs, drafters and loads of many kinds, all noisy.

A simulation is judged by the time it takes for its tokens, beside that of the best fixed width in hindsight,
once it has warmed up.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from sglang_ddtree_patch.widths.commit_forecast import CommitForecast
from sglang_ddtree_patch.widths.policy import EXPLORE_EVERY, RoundSeen, WidthPolicy, choices
from sglang_ddtree_patch.widths.step_costs import FEW, SAMPLES, StepCosts, cell_of

WIDTHS = choices(64)
DEPTHS = 15
WARM_ROUNDS, ROUNDS = 2000, 5000
LAG = 2  # rounds under way when a choice is made

# Seconds of a round: (batch, width, context) -> seconds. Width 1 drafts nothing.


def like_a_gpu(batch: int, width: int, context: int) -> float:
    """Tiles of 64 rows, free up to where arithmetic takes over from weights; the prefix read once a tile."""
    rows = 64 * math.ceil(batch * width / 64)
    draft = 1e-3 if width > 1 else 0.0
    return draft + 5e-3 + 3e-5 * max(0, rows - 128) + 2e-8 * context * math.ceil(width / 32)


def flat(batch: int, width: int, context: int) -> float:
    return 5e-3


def linear(batch: int, width: int, context: int) -> float:
    return 1e-3 + 1e-4 * batch * width


COSTS = {"like a GPU": like_a_gpu, "flat": flat, "linear": linear}

# Accept length to expect: (width, round) -> tokens.


def good(width: int, round_: int) -> float:
    return 3.5 * (1 - math.exp((1 - width) / 12))


def bad(width: int, round_: int) -> float:
    return 0.02 * math.log2(width)


def changing(width: int, round_: int) -> float:
    return (good if round_ // 1500 % 2 else bad)(width, round_)


DRAFTERS = {"good": good, "bad": bad, "changing": changing}

# (tokens until the load changes, [(batch, context)]), again and again.
LOADS = {
    "one request": [(1, 2_000)],
    "many requests": [(32, 64_000)],
    "long contexts": [(8, 800_000)],
    "loads that change": [(1, 3_000), (2, 6_000), (8, 40_000), (32, 100_000), (48, 90_000)],
}
TOKENS_A_LOAD = 1500


@dataclass
class Server:
    """A server of which only the clock runs."""

    cost: Callable[[int, int, int], float]
    accept: Callable[[int, int], float]
    load: list[tuple[int, int]]
    overconfidence: float = 1.3

    def loads(self) -> Iterator[tuple[int, int]]:
        """The load of the next round; sent the tokens of the last one."""
        while True:
            for load in self.load:
                done = 0.0
                while done < TOKENS_A_LOAD:
                    done += yield load

    def drafted(self, width: int, round_: int) -> float:
        """What the drafter makes itself believe, more so at depth."""
        return self.accept(width, round_) * (1 + (self.overconfidence - 1) * (1 + math.log2(width)) / 7)

    def run(self, policy: WidthPolicy, rounds: int = ROUNDS) -> Run:
        """Serve; what counts is behind the warm-up, and its time without the noise, which is luck."""
        noise = random.Random(1)
        loads, run, under_way = self.loads(), Run(), []
        batch, context = next(loads)
        for round_ in range(rounds):
            width = policy.choose(batch, context)
            # A host that is busy elsewhere now and then.
            seconds = self.cost(batch, width, context) * noise.lognormvariate(0, 0.05)
            seconds *= 8 if noise.random() < 0.002 else 1
            chance, draws = self.accept(width, round_) / DEPTHS, min(batch, 8)
            accepted = sum(noise.random() < chance for _ in range(draws * DEPTHS)) / draws
            spread = 0.5 / math.sqrt(batch)
            mood = noise.lognormvariate(-(spread**2) / 2, spread)
            expected = [mood * self.drafted(w, round_) * noise.lognormvariate(0, spread / 5) for w in WIDTHS]
            under_way.append(
                RoundSeen(batch, context, width, accepted, None if width == 1 else expected, seconds)
            )
            if len(under_way) > LAG:
                policy.learn(under_way.pop(0))
            if round_ >= WARM_ROUNDS:
                run.add(round_, batch, context, width, self.cost(batch, width, context))
            batch, context = loads.send(batch * (1 + self.accept(width, round_)))
        return run

    def seconds_with(self, width: int, run: Run) -> float:
        """How long a fixed width takes for what a run has said."""
        return sum(
            tokens / (batch * (1 + self.accept(width, round_))) * self.cost(batch, width, context)
            for round_, batch, context, tokens in run.said(self)
        )


class Run:
    """The rounds of a simulation that count."""

    def __init__(self):
        self.seconds = 0.0
        self.widths: Counter[int] = Counter()
        self._rounds: list[tuple[int, int, int, int]] = []

    def add(self, round_: int, batch: int, context: int, width: int, seconds: float) -> None:
        self.seconds += seconds
        self.widths[width] += 1
        self._rounds.append((round_, batch, context, width))

    def said(self, server: Server) -> Iterator[tuple[int, int, int, float]]:
        for round_, batch, context, width in self._rounds:
            yield round_, batch, context, batch * (1 + server.accept(width, round_))


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("cost", COSTS)
def test_no_fixed_width_is_faster_by_more_than_three_percent(cost: str, drafter: str, load: str) -> None:
    server = Server(COSTS[cost], DRAFTERS[drafter], LOADS[load])
    run = server.run(WidthPolicy(WIDTHS))
    fixed = {width: server.seconds_with(width, run) for width in WIDTHS}
    best = min(fixed, key=fixed.__getitem__)
    assert run.seconds <= 1.03 * fixed[best], f"width {best}: {fixed}, chosen: {run.widths}"


def test_where_loads_or_texts_change_it_beats_every_fixed_width() -> None:
    server = Server(like_a_gpu, changing, LOADS["loads that change"])
    run = server.run(WidthPolicy(WIDTHS))
    assert run.seconds < 0.98 * min(server.seconds_with(width, run) for width in WIDTHS)


@pytest.mark.parametrize(
    ("drafter", "batch", "most"), [(good, 1, {64, 32}), (good, 48, {2, 4}), (bad, 48, {1})]
)
def test_many_requests_take_narrow_widths_and_a_bad_drafter_none(drafter, batch, most) -> None:
    run = Server(like_a_gpu, drafter, [(batch, 2_000 * batch)]).run(WidthPolicy(WIDTHS))
    assert sum(run.widths[width] for width in most) > 0.95 * run.widths.total(), run.widths


def test_exploration_is_bounded_never_ends_and_leaves_hopeless_widths() -> None:
    """The largest commits most and costs least; the next ones are half as good, the narrowest a hundredth."""
    costs = dict(zip(WIDTHS, (1.0, 0.5, 0.3, 0.1, 7e-3, 9e-3, 5e-3), strict=True))
    server = Server(lambda batch, width, context: costs[width], good, LOADS["one request"])
    rounds = 64 * EXPLORE_EVERY
    run = server.run(WidthPolicy(WIDTHS), rounds=WARM_ROUNDS + rounds)
    others = sum(run.widths[width] for width in (16, 32))
    assert 2 <= others <= rounds / EXPLORE_EVERY + 1, run.widths
    assert run.widths[WIDTHS[-1]] == rounds - others, run.widths


@pytest.mark.parametrize("untimed", [3, 12, 15, 60])
def test_a_width_that_brought_no_time_is_looked_at_again(untimed: int) -> None:
    """As while every answer is so short that each round follows a prefill."""
    policy, chosen = WidthPolicy(choices(16)), Counter()
    lengths = {1: 0.0, 2: 0.8, 4: 1.6, 8: 3.0, 16: 5.0}
    for round_ in range(600):
        width = policy.choose(4, 2000)
        chosen[width] += 1
        expected = None if width == 1 else list(lengths.values())
        seconds = None if round_ < untimed else 0.01 + 0.0002 * width
        policy.learn(RoundSeen(4, 2000, width, lengths[width], expected, seconds))
    assert chosen.most_common(1)[0][0] == 16
    assert chosen[16] > 400


def test_every_width_is_looked_at_before_any_is_judged() -> None:
    policy = WidthPolicy(WIDTHS)
    first = [policy.choose(1, 100) for _ in range(FEW * len(WIDTHS))]
    assert Counter(first) == dict.fromkeys(WIDTHS, FEW)
    assert policy.choose(1, 100) == WIDTHS[-1], "nothing has come back yet: the largest"


@pytest.mark.parametrize(
    ("widest", "widths"),
    [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (16, (1, 2, 4, 8, 16)), (24, (1, 2, 4, 8, 16, 24))],
)
def test_the_widths_are_powers_of_two_and_the_largest(widest: int, widths: tuple[int, ...]) -> None:
    assert choices(widest) == widths


def test_a_cost_is_the_median_of_the_last_rounds() -> None:
    costs, cell = StepCosts(), cell_of(1, 100)
    assert costs.seconds(cell) == {}
    for seconds in [100.0, *[1.0] * 3, 50.0, 1.0]:
        costs.add(cell, 8, seconds)
    assert costs.seconds(cell) == {8: 1.0}
    for _ in range(SAMPLES):
        costs.add(cell, 8, 2.0)
    assert costs.seconds(cell) == {8: 2.0}


def test_a_new_load_takes_its_neighbours_costs_in_its_own_measure() -> None:
    costs = StepCosts()
    near, far, new = cell_of(8, 10_000), cell_of(1, 10_000), cell_of(11, 10_000)
    for width, seconds in ((4, 1.0), (16, 3.0)):
        costs.add(near, width, seconds)
    for width, seconds in ((4, 0.5), (64, 5.0)):
        costs.add(far, width, seconds)
    assert costs.seconds(new) == {4: 1.0, 16: 3.0, 64: 10.0}
    for _ in range(FEW):
        costs.add(new, 4, 1.5)
    assert costs.seconds(new) == {4: 1.5, 16: 4.5, 64: 15.0}


def test_a_round_that_compiled_kernels_does_not_speak_for_its_width() -> None:
    costs, known, new = StepCosts(), cell_of(1, 100), cell_of(8, 100)
    for width in (4, 8, 16):
        costs.add(known, width, 1.0)
    costs.add(new, 4, 2.0)
    costs.add(new, 8, 2.0)
    costs.add(new, 16, 500.0)
    assert costs.seconds(new)[16] == 2.0
    costs.add(new, 16, 3.0)
    costs.add(new, 16, 3.0)
    assert costs.seconds(new)[16] == 3.0


def test_loads_that_cost_alike_share_a_cell() -> None:
    assert cell_of(1, 100) == cell_of(1, 900)
    assert cell_of(30, 60_000) == cell_of(33, 60_000)
    assert len({cell_of(batch, 100) for batch in (1, 2, 4, 8, 16, 32)}) == 6
    assert len({cell_of(1, context) for context in (100, 2_000, 8_000, 64_000)}) == 4


def test_the_forecast_follows_what_was_accepted() -> None:
    forecast = CommitForecast((1, 4, 16))
    assert forecast.commit_lengths() == {1: 1.0, 4: 1.0, 16: 1.0}
    for _ in range(400):
        forecast.add(4, 1.0, [0.0, 2.0, 4.0], requests=1)
        forecast.add(16, 3.0, [0.0, 2.0, 4.0], requests=1)
    lengths = forecast.commit_lengths()
    assert lengths[1] == 1.0
    assert lengths[4] == pytest.approx(2.0, rel=0.05)
    assert lengths[16] == pytest.approx(4.0, rel=0.05)


def test_a_width_that_has_not_run_takes_the_ratio_of_the_others_and_is_no_worse_than_a_narrower_one() -> None:
    forecast = CommitForecast((1, 4, 16, 64))
    for _ in range(400):
        forecast.add(4, 1.0, [0.0, 2.0, 4.0, 4.1], requests=8)
    lengths = forecast.commit_lengths()
    assert lengths[16] == pytest.approx(3.0, rel=0.05)
    for _ in range(400):
        forecast.add(64, 0.1, [0.0, 2.0, 4.0, 4.1], requests=8)
    lengths = forecast.commit_lengths()
    assert lengths[64] == max(lengths.values())
