"""What `ddtree probe gpu` shows: a live line of the GPU while a phase runs, and a table of the phases."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_ddtree_patch.launch.probe.gpu_sampler import Reading
from sglang_ddtree_patch.launch.terminal import LiveLine

BAR = 10  # characters
_LINE = "{:<8}{:>9}{:>11}{:>9}{:>8}{:>9}{:>7}{:>6}{:>6}{:>11}{:>7}".format
HEADINGS = (
    "phase",
    "prompt",
    "tok/s",
    "step ms",
    "KV GB/s",
    "of copy",
    "growth",
    "SM %",
    "mem %",
    "power W",
    "SM MHz",
)


class GpuView:
    """Readings come from the sampler's thread, phases and rows from the program's.

    most_gpus: that many are shown, the busiest at the moment.
    """

    def __init__(self, live: LiveLine, most_gpus: int):
        self._live, self._most_gpus = live, most_gpus
        self._lock = threading.Lock()
        self._phase = ""  # empty between phases
        self._bars: list[str] = []

    def phase(self, text: str) -> None:
        with self._lock:
            self._phase = text
            self._draw()

    def show(self, readings: Sequence[Reading]) -> None:
        by_load = sorted(readings, key=lambda reading: reading.sm_percent or 0, reverse=True)
        with self._lock:
            self._bars = [bars(reading) for reading in by_load[: self._most_gpus]]
            if self._phase:
                self._draw()

    def _draw(self) -> None:
        self._live.progress(" | ".join([self._phase, *self._bars]))

    def line(self, text: str = "") -> None:
        with self._lock:
            self._phase = ""
            self._live.end_progress()
            self._live.line(text)

    def headings(self) -> None:
        self.line(_LINE(*HEADINGS))

    def row(self, row: Mapping[str, Any]) -> None:
        self.line(
            _LINE(
                row["phase"], row["prompt_tokens"], number(row["tokens_per_second"], ".1f"),
                number(row["step_milliseconds"], ".2f"), number(row["kv_gb_s"], ".1f"),
                number(row["limit_fraction"], ".1%"), number(row["growth_fraction"], ".0%"),
                number(row["sm_percent"], ".0f"), number(row["memory_percent"], ".0f"),
                f"{number(row['power_watts'], '.0f')}/{number(row['power_limit_watts'], '.0f')}",
                number(row["sm_mhz"], ".0f"),
            )
        )  # fmt: skip


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def bars(reading: Reading) -> str:
    """One GPU at this moment, on part of a line."""
    power = None
    if reading.power_watts is not None and reading.power_limit_watts:
        power = 100 * reading.power_watts / reading.power_limit_watts
    shown = [f"GPU {reading.gpu}"]
    for name, percent in (("SM", reading.sm_percent), ("mem", reading.memory_percent), ("power", power)):
        filled = round((percent or 0) / 100 * BAR)
        shown.append(f"{name} {'#' * filled}{'.' * (BAR - filled)} {number(percent, '3.0f')}%")
    if reading.sm_mhz is not None:
        shown.append(f"{reading.sm_mhz:.0f} MHz")
    return " ".join(shown)
