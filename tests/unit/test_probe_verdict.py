"""What the probes conclude from figures, as words."""

import pytest

from sglang_ddtree_patch.launch.probe import gpu_verdict
from sglang_ddtree_patch.launch.probe.gpu_sampler import Load
from sglang_ddtree_patch.launch.probe.verdict import (
    BROKEN,
    BROKEN_LONG,
    HARD,
    HEALTHY,
    UNCLEAR,
    Pair,
    judge,
    overall,
)


def words(*pairs: Pair) -> list[str]:
    return [verdict.word for verdict in judge(pairs)]


def test_a_drafter_that_holds_on_both_texts_is_healthy():
    pairs = [Pair(1000, 6.8, 2.1, 1.0), Pair(64000, 6.5, 1.9, 1.0)]
    assert words(*pairs) == [HEALTHY, HEALTHY]
    assert overall(judge(pairs)) == "healthy: the drafter holds up to 64000 tokens"


def test_prose_that_is_not_guessed_is_hard_where_the_sentence_still_is():
    pairs = [Pair(1000, 6.8, 2.1, 1.0), Pair(64000, 6.5, 0.3, 1.0)]
    assert words(*pairs) == [HEALTHY, HARD]
    assert overall(judge(pairs)) == "text is hard: the drafter holds up to 64000 tokens"


def test_a_chain_of_one_drafted_token_can_be_healthy():
    assert words(Pair(1000, 0.97, 0.6, 1.0)) == [HEALTHY]


def test_a_drafter_that_fails_where_the_sentence_still_repeats_is_broken_at_long_context():
    pairs = [Pair(64000, 0.4, 0.1, 1.0), Pair(1000, 6.8, 2.1, 1.0), Pair(16000, 6.0, 2.0, 1.0)]
    verdicts = judge(pairs)
    assert [verdict.word for verdict in verdicts] == [HEALTHY, HEALTHY, BROKEN_LONG]
    assert "6.80 at 1000 tokens" in verdicts[-1].because
    assert overall(verdicts).startswith("drafter broken at long context, from 64000 tokens on")


def test_half_of_what_it_was_is_broken_too_however_much_that_still_is():
    assert words(Pair(1000, 12.0, 2.0, 1.0), Pair(64000, 6.0, 2.0, 1.0)) == [HEALTHY, BROKEN_LONG]


def test_a_slow_decline_is_seen_against_the_best_length_not_the_one_before():
    lengths = [Pair(1000, 8.0, 2.0, 1.0), Pair(4000, 6.0, 2.0, 1.0), Pair(16000, 4.5, 2.0, 1.0)]
    assert words(*lengths) == [HEALTHY, HEALTHY, BROKEN_LONG]


def test_a_drafter_that_never_guesses_is_broken_at_every_length():
    pairs = [Pair(1000, 0.02, 0.0, 1.0), Pair(64000, 0.0, 0.0, 1.0)]
    assert words(*pairs) == [BROKEN, BROKEN]
    assert overall(judge(pairs)).startswith("drafter broken, from 1000 tokens on")


def test_a_target_that_leaves_the_sentence_clears_its_drafter_of_blame():
    verdicts = judge([Pair(1000, 6.8, 2.1, 1.0), Pair(64000, 0.4, 0.1, 0.2)])
    assert [verdict.word for verdict in verdicts] == [HEALTHY, UNCLEAR]
    assert "after 20% of its answer" in verdicts[-1].because


def test_a_target_that_leaves_the_sentence_gives_no_verdict_however_much_is_guessed():
    pairs = [Pair(1000, 1.6, 1.5, 0.02), Pair(4000, 6.8, 2.1, 1.0), Pair(16000, 1.0, 0.9, 0.1)]
    assert words(*pairs) == [UNCLEAR, HEALTHY, UNCLEAR]


def test_one_length_says_nothing_of_longer_ones():
    assert overall(judge([Pair(400, 6.8, 2.1, 1.0)])) == "healthy at 400 tokens, the only length measured"


def test_prose_that_was_refused_leaves_the_verdict_on_the_drafter():
    assert words(Pair(1000, 6.8, None, 1.0)) == [HEALTHY]


def load(sm=None, memory=None, power=None, limit=700.0) -> Load:
    return Load((0,), sm_percent=sm, memory_percent=memory, power_watts=power, power_limit_watts=limit)


@pytest.mark.parametrize(
    ("seen", "fraction", "verdict"),
    [
        # The old path: one program a head, 185k of context.
        (load(99, 2, 160), 0.003, gpu_verdict.HIDES_IDLE),
        (load(99, 2, 160), None, gpu_verdict.HIDES_IDLE),
        (load(99, None, None), 0.003, gpu_verdict.HIDES_IDLE),
        # Any one sign of work is work: weights at short context, arithmetic in prefill, KV at long context.
        (load(99, 80, 300), 0.01, gpu_verdict.WORKS),
        (load(99, 20, 650), None, gpu_verdict.WORKS),
        (load(99, 20, 300), 0.7, gpu_verdict.WORKS),
        (load(30, 10, 150), 0.02, gpu_verdict.WAITS),
        (load(97, 40, 300), 0.2, gpu_verdict.PARTLY),
        (load(75, 5, 120), 0.01, gpu_verdict.PARTLY),
        # Without NVML.
        (None, 0.6, gpu_verdict.WORKS),
        (None, 0.01, gpu_verdict.PARTLY),
        (None, None, gpu_verdict.UNKNOWN),
        (load(99, None, None), None, gpu_verdict.UNKNOWN),
        # Power without a limit to hold it to is no sign.
        (load(99, None, 300, None), None, gpu_verdict.UNKNOWN),
    ],
)
def test_sm_percent_alone_never_makes_a_gpu_work(seen, fraction, verdict):
    assert gpu_verdict.judge(seen, fraction)[0] == verdict


def test_the_reason_names_the_figures_there_are():
    _, because = gpu_verdict.judge(load(99, 2, 160), 0.003)
    assert because.startswith("SM 99 %, memory controller 2 %, 160 of 700 W, KV at 0.3% of the copy rate: ")
