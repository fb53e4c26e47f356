"""Times and metrics of a round, without a server: what is marked and observed is what is shown."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from sglang_ddtree_patch.metrics.round_metrics import ACCEPT_LENGTHS, NODE_COUNTS, SECONDS, RoundMetrics
from sglang_ddtree_patch.metrics.round_times import PARTS, RoundClock, RoundTimes
from sglang_ddtree_patch.settings import MAX_DRAFT_BLOCK, MAX_WIDTH


class Device:
    """Stands for torch.cuda: an event is passed when the device has come to it."""

    def __init__(self):
        self.recorded, self.passed = 0, 0
        self.waits = 0

    def Event(self, enable_timing):
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, device):
        self._device = device
        self.at: int | None = None

    def record(self):
        self._device.recorded += 1
        self.at = self._device.recorded

    def query(self):
        return self.at <= self._device.passed

    def synchronize(self):
        self._device.waits += 1

    def elapsed_time(self, end):
        assert self.query()
        assert end.query(), "torch would raise, or wait"
        return 1000.0 * (end.at - self.at)


def test_times_are_told_when_the_device_has_passed_the_last_mark_and_nothing_waits():
    device = Device()
    times = RoundTimes(device)
    for part in PARTS:
        times.mark(part)
    for passed in range(len(PARTS) + 1):
        device.passed = passed
        assert times.seconds() is None
    device.passed += 1
    assert times.seconds() == dict.fromkeys(PARTS, 1.0)
    assert device.waits == 0


@pytest.mark.gpu
def test_a_gpus_times_are_its_own_and_reading_them_does_not_wait():
    device = torch.device("cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        times = RoundClock(device, is_running=True).start()
        torch.cuda._sleep(200_000_000)  # cycles: about 0.1 s
        times.mark("draft")
        times.mark("tree")
        early = times.seconds()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert early is None
    torch.cuda.synchronize()
    seconds = times.seconds()
    assert 0.02 < seconds["draft"] < 1.0
    assert 0 <= seconds["tree"] < 0.005


def test_without_a_device_of_its_own_the_hosts_clock_tells(monkeypatch):
    ticks = iter([10.0, 10.5, 12.5])
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))
    times = RoundClock("cpu", is_running=True).start()
    times.mark("draft")
    times.mark("tree")
    assert times.seconds() == {"draft": 0.5, "tree": 2.0}


def test_a_step_lasts_from_the_end_of_the_round_before_if_nothing_ran_between(monkeypatch):
    ticks = iter([1.0, 2.0, 5.0, 7.0, 20.0, 21.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))
    clock, seen = RoundClock("cpu", is_running=True), []
    for is_interrupted in (False, False, True):
        if is_interrupted:
            clock.interrupt()
        times = clock.start()
        times.mark("commit")
        seen.append((times.seconds()["commit"], times.step_seconds()))
    assert seen == [(1.0, None), (2.0, 5.0), (1.0, None)]


def test_a_step_is_told_when_the_device_has_passed_its_end():
    device = Device()
    first = RoundTimes(device)
    first.mark("commit")
    second = RoundTimes(device, first.end)
    second.mark("commit")
    device.passed = 3
    assert second.step_seconds() is None
    device.passed = 4
    assert (first.step_seconds(), second.step_seconds()) == (None, 2.0)


def test_where_steps_alone_are_asked_for_only_their_ends_are_marked():
    device, seen = Device(), []
    clock = RoundClock("cpu", is_running=True, has_parts=False)
    clock._events = device
    for step in range(1, 3):
        times = clock.start()
        for part in PARTS:
            times.mark(part)
        assert device.recorded == step
        device.passed = step
        seen.append((times.seconds(), times.step_seconds()))
    assert seen == [(None, None), (None, 1.0)]


def test_a_clock_that_nobody_asked_for_marks_nothing(monkeypatch):
    monkeypatch.setattr("time.perf_counter", lambda: pytest.fail("asked for the time"))
    times = RoundClock("cpu", is_running=False).start()
    times.mark("draft")
    assert (times.seconds(), times.step_seconds()) == (None, None)


def test_buckets_hold_every_length_count_and_time_there_can_be():
    assert ACCEPT_LENGTHS[0] == 0
    assert ACCEPT_LENGTHS[-1] == MAX_DRAFT_BLOCK - 1
    assert NODE_COUNTS[0] == 1
    assert NODE_COUNTS[-1] == MAX_WIDTH
    assert SECONDS[0] == 1e-5
    assert 8 < SECONDS[-1] < 16
    assert list(SECONDS) == sorted(set(SECONDS))


class Recorded:
    """A metric class of another backend than Prometheus, as an embedding program may give SGLang."""

    made: dict[str, Recorded]

    def __init__(self, name, documentation, labelnames, buckets=None):
        self.seen, self.labelnames = [], set(labelnames)
        type(self).made[name] = self

    def labels(self, **labels):
        assert set(labels) == self.labelnames
        return SimpleNamespace(
            observe=lambda value: self.seen.append((value, labels.get("part"))),
            inc=lambda: self.seen.append((1, labels["width"])),
        )


def test_another_backend_is_told_each_observation():
    class Here(Recorded):
        made = {}  # noqa: RUF012

    collector = SimpleNamespace(labels={"model_name": "m"}, _counter_cls=Here, _histogram_cls=Here)
    metrics = RoundMetrics(collector)
    metrics.count_round(width=8, accept_lengths=[3, 0, 3], node_counts=[8, 8, 2], seconds={"tree": 0.5})
    metrics.count_round(width=4, accept_lengths=[1], node_counts=[4], seconds=None)
    seen = {name.removeprefix("sglang:ddtree_"): sorted(metric.seen) for name, metric in Here.made.items()}
    assert seen == {
        "rounds_total": [(1, 4), (1, 8)],
        "accept_length": [(0, None), (1, None), (3, None), (3, None)],
        "nodes": [(2, None), (4, None), (8, None), (8, None)],
        "round_seconds": [(0.5, None)],
        "part_seconds": [(0.5, "tree")],
    }


_PAGE = """
from types import SimpleNamespace
from sglang_ddtree_patch.metrics.round_metrics import RoundMetrics
collector = SimpleNamespace(labels={"model_name": "m"}, _counter_cls=None, _histogram_cls=None)
metrics = RoundMetrics(collector)
metrics.count_round(8, accept_lengths=[3, 0, 3, 31], node_counts=[8, 8, 2, 256], seconds={"tree": 100.0})
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_prometheus_shows_several_equal_values_as_if_observed_one_by_one(tmp_path):
    """In a process of its own: prometheus_client decides once whether processes share metrics."""
    result = subprocess.run(
        [sys.executable, "-c", _PAGE],
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    page = set(result.stdout.splitlines())
    for line in (
        'sglang:ddtree_accept_length_sum{model_name="m"} 37.0',
        'sglang:ddtree_accept_length_count{model_name="m"} 4.0',
        'sglang:ddtree_accept_length_bucket{le="0.0",model_name="m"} 1.0',
        'sglang:ddtree_accept_length_bucket{le="2.0",model_name="m"} 1.0',
        'sglang:ddtree_accept_length_bucket{le="3.0",model_name="m"} 3.0',
        'sglang:ddtree_nodes_bucket{le="8.0",model_name="m"} 3.0',
        'sglang:ddtree_nodes_sum{model_name="m"} 274.0',
        'sglang:ddtree_rounds_total{model_name="m",width="8"} 1.0',
        # Longer than any bucket.
        'sglang:ddtree_part_seconds_bucket{le="+Inf",model_name="m",part="tree"} 1.0',
        'sglang:ddtree_part_seconds_sum{model_name="m",part="tree"} 100.0',
    ):
        assert line in page, result.stdout
