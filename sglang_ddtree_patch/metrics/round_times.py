"""How long the parts of a round take, without waiting for any of them.

On a GPU each mark is a CUDA event behind what has been launched so far, read when the round's results have
reached the host anyway; elsewhere a forward ends before it returns, and a mark is the host's clock.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch

# In the order of a round; each ends where the next begins.
PARTS = ("draft", "tree", "verify", "choose", "commit")


class RoundTimes:
    """The marks of one round, the first of them at its start."""

    def __init__(self, events: Any, end_before: Any = None, has_parts: bool = True):
        """
        Args:
            events: torch's module of a device with events (torch.cuda); None for the host's clock.
            end_before: the last mark of the round right before; None if something else ran between them.
            has_parts: False where nobody asks for more than the round's end; a mark costs the host a launch.
        """
        self._events = events
        self._end_before = end_before
        self._has_parts = has_parts
        self._start = self._now() if has_parts else None
        self._ends: dict[str, Any] = {}

    def mark(self, part: str) -> None:
        """The end of a part, one of `PARTS`."""
        if self._has_parts or part == PARTS[-1]:
            self._ends[part] = self._now()

    @property
    def end(self) -> Any:
        """The last mark."""
        return next(reversed(self._ends.values()))

    def seconds(self) -> dict[str, float] | None:
        """Seconds by part, on the device's clock; None while the device has not reached the last mark, and
        where parts are not marked."""
        if not self._has_parts or not self._has_ended():
            return None
        marks = [self._start, *self._ends.values()]
        spans = [self._between(start, end) for start, end in itertools.pairwise(marks)]
        return dict(zip(self._ends, spans, strict=True))

    def step_seconds(self) -> float | None:
        """Seconds from the end of the round before to the end of this one, None where they are not known."""
        if self._end_before is None or not self._has_ended():
            return None
        return self._between(self._end_before, self.end)

    def _has_ended(self) -> bool:
        return self._events is None or self.end.query()

    def _between(self, start: Any, end: Any) -> float:
        return end - start if self._events is None else start.elapsed_time(end) / 1000

    def _now(self) -> Any:
        if self._events is None:
            return time.perf_counter()
        event = self._events.Event(enable_timing=True)
        event.record()
        return event


class Untimed:
    """Stands for `RoundTimes` where nobody asks for them."""

    def mark(self, part: str) -> None:
        pass

    def seconds(self) -> None:
        return None

    def step_seconds(self) -> None:
        return None


class RoundClock:
    """Starts the times of each round of a server."""

    def __init__(self, device: torch.device | str, is_running: bool, has_parts: bool = True):
        """
        Args:
            device: whose time it is.
            is_running: whether anybody asks.
            has_parts: as for `RoundTimes`.
        """
        is_host = torch.device(device).type == "cpu"
        self._events = None if is_host else torch.get_device_module(device)
        self._is_running, self._has_parts = is_running, has_parts
        self._before: RoundTimes | None = None

    def start(self) -> RoundTimes | Untimed:
        if not self._is_running:
            return Untimed()
        end_before = None if self._before is None else self._before.end
        self._before = RoundTimes(self._events, end_before, self._has_parts)
        return self._before

    def interrupt(self) -> None:
        """Something else than a round runs, so the next one does not follow on the last."""
        self._before = None
