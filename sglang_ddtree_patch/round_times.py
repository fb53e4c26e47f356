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

    def __init__(self, events: Any):
        """
        Args:
            events: torch's module of a device with events (torch.cuda); None for the host's clock.
        """
        self._events = events
        self._start = self._now()
        self._ends: dict[str, Any] = {}

    def mark(self, part: str) -> None:
        """The end of a part, one of `PARTS`."""
        self._ends[part] = self._now()

    def seconds(self) -> dict[str, float] | None:
        """Seconds by part, on the device's clock; None while the device has not reached the last mark."""
        marks = [self._start, *self._ends.values()]
        if self._events is None:
            spans = [end - start for start, end in itertools.pairwise(marks)]
        elif not marks[-1].query():
            return None
        else:
            spans = [start.elapsed_time(end) / 1000 for start, end in itertools.pairwise(marks)]
        return dict(zip(self._ends, spans, strict=True))

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


class RoundClock:
    """Starts the times of each round of a server."""

    def __init__(self, device: torch.device | str, is_running: bool):
        is_host = torch.device(device).type == "cpu"
        self._events = None if is_host else torch.get_device_module(device)
        self.is_running = is_running

    def start(self) -> RoundTimes | Untimed:
        return RoundTimes(self._events) if self.is_running else Untimed()
