"""What a server holds of the GPU's memory and of the machine's, read between the slices of a soak."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import psutil

MIB = 2**20


@dataclass(frozen=True)
class Memory:
    """In MiB."""

    gpu: float | None  # all that the device has given away, to this server and to others that stand still
    resident: float  # of the server's processes


class MemoryMeter:
    """Reads the memory of the server led by process `pid`, and of a GPU.

    `gpu` is what CUDA_VISIBLE_DEVICES calls it, its number or its UUID; None for no GPU.
    """

    def __init__(self, pid: int, gpu: str | None):
        leader = psutil.Process(pid)
        self._processes = [leader, *leader.children(recursive=True)]
        self._nvml = self._handle = None
        if gpu is not None:
            self._nvml = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            by_uuid, by_index = self._nvml.nvmlDeviceGetHandleByUUID, self._nvml.nvmlDeviceGetHandleByIndex
            self._handle = by_index(int(gpu)) if gpu.isdecimal() else by_uuid(gpu)

    def read(self) -> Memory:
        running = [process for process in self._processes if process.is_running()]
        resident = sum(process.memory_info().rss for process in running) / MIB
        used = None if self._nvml is None else self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used / MIB
        return Memory(used, round(resident, 1))
