"""Read a machine's NVIDIA GPUs through NVML, many times a second, while something else drives them.

`pynvml` comes with SGLang and is imported here alone, and late. What it cannot give (no library, no GPU, no
rights, a virtual or partitioned GPU) is missing from the readings and said in `lacks`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean
from types import ModuleType
from typing import Any

EVERY_SECONDS = 0.05
# NVML's utilization is a mean over up to this long, so that readings at the start of a phase speak of the one
# before it.
LAG_SECONDS = 0.5


@dataclass(frozen=True)
class Reading:
    """One GPU at one moment; None is what it does not tell."""

    seconds: float
    gpu: int
    sm_percent: float | None  # of the time, a kernel was running; however small
    memory_percent: float | None  # of the time, the memory controller was reading or writing
    power_watts: float | None
    power_limit_watts: float | None
    sm_mhz: float | None
    sm_mhz_most: float | None
    memory_mhz: float | None


@dataclass(frozen=True)
class Load:
    """The means of readings, over time and GPUs."""

    gpus: tuple[int, ...]
    sm_percent: float | None = None
    memory_percent: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    sm_mhz: float | None = None
    sm_mhz_most: float | None = None
    memory_mhz: float | None = None


FIELDS = tuple(name for name in Load.__dataclass_fields__ if name != "gpus")


class Gpus:
    """The GPUs of this machine, or the reason why they cannot be read.

    nvml: the pynvml module; None where none is to be read, because of what `lack` says.
    chosen: indexes as nvidia-smi has them; all if empty.
    """

    def __init__(self, nvml: ModuleType | None, chosen: Sequence[int] = (), lack: str = ""):
        self.lacks: list[str] = [lack] if lack else []
        self.names: dict[int, str] = {}
        self._nvml = nvml
        self._handles: dict[int, Any] = {}
        if nvml is None:
            return
        try:
            nvml.nvmlInit()
            for index in chosen or range(nvml.nvmlDeviceGetCount()):
                self._handles[index] = nvml.nvmlDeviceGetHandleByIndex(index)
                self.names[index] = str(nvml.nvmlDeviceGetName(self._handles[index]))
        except nvml.NVMLError as error:
            self._handles.clear()
            self.lacks.append(f"GPU load: NVML gives no GPU here ({error})")
            return
        if not self._handles:
            self.lacks.append("GPU load: this machine has no NVIDIA GPU")

    @property
    def readable(self) -> bool:
        return bool(self._handles)

    def read(self) -> list[Reading]:
        """One reading of each GPU."""
        nvml = self._nvml
        if nvml is None:
            return []
        return [self._read(nvml, index, handle) for index, handle in self._handles.items()]

    def _read(self, nvml: ModuleType, gpu: int, handle: Any) -> Reading:
        ask = functools.partial(self._ask, nvml.NVMLError)
        use = ask("utilization", nvml.nvmlDeviceGetUtilizationRates, handle)
        power = ask("power", nvml.nvmlDeviceGetPowerUsage, handle)
        limit = ask("the power limit", nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        return Reading(
            seconds=time.monotonic(),
            gpu=gpu,
            sm_percent=None if use is None else use.gpu,
            memory_percent=None if use is None else use.memory,
            power_watts=None if power is None else power / 1000,
            power_limit_watts=None if limit is None else limit / 1000,
            sm_mhz=ask("clocks", nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            sm_mhz_most=ask("clocks", nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM),
            memory_mhz=ask("clocks", nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
        )

    def _ask(self, refusal: type[Exception], what: str, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except refusal as error:
            lack = f"{what}: NVML does not give it ({error})"
            if lack not in self.lacks:
                self.lacks.append(lack)
            return None


def local_gpus(chosen: Sequence[int]) -> Gpus:
    """This machine's GPUs, with the pynvml that is installed."""
    if importlib.util.find_spec("pynvml") is None:
        return Gpus(None, lack="GPU load: the package nvidia-ml-py is not installed")
    return Gpus(importlib.import_module("pynvml"), chosen)


class Sampler:
    """Reads GPUs from a thread of its own for the length of a `with` block.

    show: called in that thread with each GPU's newest reading.
    """

    def __init__(
        self, gpus: Gpus, show: Callable[[list[Reading]], None], every_seconds: float = EVERY_SECONDS
    ):
        self._readings: list[Reading] = []
        self._gpus, self._show, self._every_seconds = gpus, show, every_seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Sampler:
        if self._gpus.readable:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def between(self, start: float, end: float) -> list[Reading]:
        """Readings of that time, the first of them left out where it is long enough."""
        settled = start + LAG_SECONDS if end - start > 2 * LAG_SECONDS else start
        return [reading for reading in self._readings if settled <= reading.seconds <= end]

    def _run(self) -> None:
        while not self._ended.wait(self._every_seconds):
            newest = self._gpus.read()
            self._readings += newest
            self._show(newest)


def load_of(readings: Sequence[Reading], most_gpus: int) -> Load | None:
    """Means over the busiest GPUs, which are taken for the server's; None without a reading."""
    by_gpu: dict[int, list[Reading]] = {}
    for reading in readings:
        by_gpu.setdefault(reading.gpu, []).append(reading)
    if not by_gpu:
        return None

    def busy(gpu: int) -> float:
        return mean((one.sm_percent or 0) + (one.power_watts or 0) / 1e4 for one in by_gpu[gpu])

    chosen = tuple(sorted(sorted(by_gpu, key=busy, reverse=True)[:most_gpus]))
    values = {}
    for name in FIELDS:
        known = [
            getattr(one, name) for gpu in chosen for one in by_gpu[gpu] if getattr(one, name) is not None
        ]
        values[name] = round(mean(known), 1) if known else None
    return Load(chosen, **values)
