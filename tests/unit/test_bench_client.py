"""What of a batch is counted, and what becomes of answers that are none."""

import pytest

from sglang_ddtree_patch.launch.bench.client import BatchTiming, RequestProgress, steady_window, total
from sglang_ddtree_patch.launch.sglang_client import Budget, BudgetSpent, NotMeasured


def request(*events: tuple[float, int], rounds: int, accepted: int = 0) -> RequestProgress:
    progress = RequestProgress()
    for seconds, tokens in events[:-1]:
        progress.add(seconds, {"completion_tokens": tokens, "finish_reason": None})
    seconds, tokens = events[-1]
    progress.add(
        seconds,
        {
            "completion_tokens": tokens,
            "finish_reason": {"type": "length"},
            "spec_verify_ct": rounds,
            "spec_num_correct_drafts": accepted,
        },
    )
    return progress


def test_one_request_is_timed_from_its_first_token_to_its_last_in_whole_rounds():
    timing = steady_window([request((10.0, 1), (10.5, 17), (12.0, 41), rounds=10, accepted=30)])
    assert timing == BatchTiming(seconds=2.0, tokens=40, rounds=10, accepted=30, request_rounds=10)
    assert timing.tokens_per_second == 20
    assert timing.step_milliseconds == 200
    assert timing.accept_length == 3


def test_a_server_without_speculation_takes_a_round_a_token():
    progress = RequestProgress()
    progress.add(0.0, {"completion_tokens": 1, "finish_reason": None})
    progress.add(4.0, {"completion_tokens": 9, "finish_reason": {"type": "length"}})
    timing = steady_window([progress])
    assert (timing.step_milliseconds, timing.accept_length) == (500, 0)


def test_only_the_time_in_which_all_requests_decode_counts():
    # The first waits a second for the second one's prefill, and the second goes on alone for a second.
    early = request((0.0, 1), (2.0, 5), (4.0, 13), rounds=6)
    late = request((1.0, 1), (5.0, 25), rounds=6)
    timing = steady_window([early, late])
    assert timing.seconds == 3.0  # 1.0 to 4.0
    assert timing.tokens == (13 - 3) + (19 - 1)
    # 12 tokens in 6 rounds and 24 in 6: the early one took 5 rounds in the window, the late one 4.5.
    assert timing.rounds == pytest.approx((10 / 2 + 18 / 4) / 2)


def test_tokens_between_two_events_lie_on_a_straight_line():
    progress = request((1.0, 1), (2.0, 5), (4.0, 6), rounds=3)
    assert [progress.tokens_at(seconds) for seconds in (0.0, 1.0, 1.5, 2.0, 3.0, 9.0)] == [1, 1, 3, 5, 5.5, 6]


def test_requests_that_never_decode_together_are_not_timed():
    with pytest.raises(NotMeasured, match="--new-tokens"):
        steady_window([request((0.0, 1), (1.0, 9), rounds=2), request((2.0, 1), (3.0, 9), rounds=2)])
    with pytest.raises(NotMeasured, match="--new-tokens"):
        steady_window([request((0.0, 1), rounds=0)])


def test_batches_add_up_by_what_happened_not_by_their_rates():
    fast = BatchTiming(seconds=1, tokens=300, rounds=100, accepted=200, request_rounds=100)
    slow = BatchTiming(seconds=3, tokens=100, rounds=100, accepted=0, request_rounds=100)
    both = total([fast, slow])
    assert (both.tokens_per_second, both.step_milliseconds, both.accept_length) == (100, 20, 1)


def test_a_budget_bounds_every_call_and_ends():
    assert Budget().timeout(30) == 30
    assert 0 < Budget(5).timeout(30) <= 5
    with pytest.raises(BudgetSpent):
        Budget(0).timeout()
