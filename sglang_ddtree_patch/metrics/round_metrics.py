"""Prometheus metrics of the rounds, beside SGLang's own and with its labels (docs/metrics.md).

They are on where SGLang's are (`--enable-metrics`), in the scheduler's process, and served at its /metrics.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_ddtree_patch.metrics.round_times import PARTS
from sglang_ddtree_patch.settings import MAX_DRAFT_BLOCK, MAX_WIDTH

PREFIX = "sglang:ddtree_"
ACCEPT_LENGTHS = tuple(range(MAX_DRAFT_BLOCK))
NODE_COUNTS = tuple(2**power for power in range(MAX_WIDTH.bit_length()))
# 10 us to about 10 s, two a doubling in the middle of which most parts lie.
SECONDS = tuple(round(1e-5 * 2 ** (step / 2), 8) for step in range(41))


class RoundMetrics:
    """The metrics of one scheduler."""

    def __init__(self, collector: Any):
        """
        Args:
            collector: SGLang's SchedulerMetricsCollector, whose labels and Prometheus classes ours take.
        """
        # prometheus_client decides at its import whether several processes share metrics, so not before
        # SGLang has imported it.
        from prometheus_client import Counter as PrometheusCounter
        from prometheus_client import Histogram as PrometheusHistogram

        self._labels = collector.labels
        self._is_prometheus = collector._histogram_cls is None
        counter = collector._counter_cls or PrometheusCounter
        histogram = collector._histogram_cls or PrometheusHistogram
        names = list(self._labels)
        self._rounds = counter(
            PREFIX + "rounds_total", "Decode rounds, by rows of the verify block.", [*names, "width"]
        )
        self._accept_length = histogram(
            PREFIX + "accept_length", "Drafted tokens accepted, of a request in a round.", names,
            buckets=ACCEPT_LENGTHS,
        ).labels(**self._labels)  # fmt: skip
        self._nodes = histogram(
            PREFIX + "nodes", "Nodes of the tree, root included, of a request in a round.", names,
            buckets=NODE_COUNTS,
        ).labels(**self._labels)  # fmt: skip
        self._round_seconds = histogram(
            PREFIX + "round_seconds", "Time of a round on the device, first part to last.", names,
            buckets=SECONDS,
        ).labels(**self._labels)  # fmt: skip
        part_seconds = histogram(
            PREFIX + "part_seconds", "Time of a round's part on the device.", [*names, "part"],
            buckets=SECONDS,
        )  # fmt: skip
        self._part_seconds = {part: part_seconds.labels(**self._labels, part=part) for part in PARTS}

    def count_round(
        self,
        width: int,
        accept_lengths: Sequence[int],
        node_counts: Sequence[int],
        seconds: Mapping[str, float] | None,
    ) -> None:
        """Count one round.

        Args:
            width: rows of the verify block.
            accept_lengths: drafted tokens accepted, of each request.
            node_counts: nodes, of each request.
            seconds: by part; None where they are not known.
        """
        self._rounds.labels(**self._labels, width=width).inc()
        for length, requests in Counter(accept_lengths).items():
            self._observe(self._accept_length, length, requests)
        for nodes, requests in Counter(node_counts).items():
            self._observe(self._nodes, nodes, requests)
        if seconds is None:
            return
        self._observe(self._round_seconds, sum(seconds.values()), 1)
        for part, spent in seconds.items():
            self._observe(self._part_seconds[part], spent, 1)

    def _observe(self, histogram: Any, value: float, times: int) -> None:
        """Observe a value several times over.

        One observation costs as much as all of them at once, and a round has one a request. SGLang takes the
        same way into Prometheus' histogram for its token latencies.
        """
        if not self._is_prometheus:
            for _ in range(times):
                histogram.observe(value)
            return
        histogram._sum.inc(value * times)
        bounds = histogram._upper_bounds
        histogram._buckets[next(i for i, bound in enumerate(bounds) if value <= bound)].inc(times)


@functools.cache
def metrics_beside(collector: Any) -> RoundMetrics:
    """The metrics that go with SGLang's collector, registered when the first round is counted."""
    return RoundMetrics(collector)
