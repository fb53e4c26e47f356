"""GPUs as NVML shows them, from a module that stands in for pynvml."""

import threading
import time
from types import SimpleNamespace

import pytest

from sglang_ddtree_patch.launch.probe import gpu_sampler
from sglang_ddtree_patch.launch.probe.gpu_sampler import Gpus, Load, Reading, Sampler, load_of


class FakeNvml:
    """Two GPUs, the second busy; `missing` functions are not supported."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2

    class NVMLError(Exception):
        pass

    def __init__(self, *missing: str, count: int = 2, no_library: bool = False):
        self._missing, self._count, self._no_library = missing, count, no_library
        self.reads = 0

    def __getattribute__(self, name: str):
        if name.startswith("nvmlDevice") and name in object.__getattribute__(self, "_missing"):
            return self._refuse
        return object.__getattribute__(self, name)

    def _refuse(self, *arguments):
        raise self.NVMLError("Not Supported")

    def nvmlInit(self):
        if self._no_library:
            raise self.NVMLError("NVML Shared Library Not Found")

    def nvmlDeviceGetCount(self):
        return self._count

    def nvmlDeviceGetHandleByIndex(self, index):
        if index >= self._count:
            raise self.NVMLError("Invalid Argument")
        return index

    def nvmlDeviceGetName(self, handle):
        return f"card {handle}"

    def nvmlDeviceGetUtilizationRates(self, handle):
        self.reads += 1
        return SimpleNamespace(gpu=99 * handle, memory=12 * handle)

    def nvmlDeviceGetPowerUsage(self, handle):
        return 80_000 + 120_000 * handle

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):
        return 700_000

    def nvmlDeviceGetClockInfo(self, handle, kind):
        return {1: 1980, 2: 3201}[kind]

    def nvmlDeviceGetMaxClockInfo(self, handle, kind):
        return 1980


def test_a_reading_has_watts_percents_and_clocks():
    gpus = Gpus(FakeNvml())
    assert gpus.names == {0: "card 0", 1: "card 1"}
    busy = gpus.read()[1]
    assert (busy.sm_percent, busy.memory_percent) == (99, 12)
    assert (busy.power_watts, busy.power_limit_watts) == (200, 700)
    assert (busy.sm_mhz, busy.sm_mhz_most, busy.memory_mhz) == (1980, 1980, 3201)
    assert gpus.lacks == []


def test_the_server_is_taken_to_be_on_the_busiest_gpus():
    readings = Gpus(FakeNvml()).read()
    assert load_of(readings, 1).gpus == (1,)
    both = load_of(readings, 2)
    assert (both.gpus, both.sm_percent, both.power_watts) == ((0, 1), 49.5, 140)
    assert load_of([], 1) is None


def test_gpus_can_be_chosen():
    assert Gpus(FakeNvml(), [0]).names == {0: "card 0"}


@pytest.mark.parametrize(
    ("nvml", "chosen", "words"),
    [
        (FakeNvml(no_library=True), (), "NVML gives no GPU here (NVML Shared Library Not Found)"),
        (FakeNvml(), (5,), "NVML gives no GPU here (Invalid Argument)"),
        (FakeNvml(count=0), (), "this machine has no NVIDIA GPU"),
    ],
)
def test_no_gpu_is_said_once_and_reads_nothing(nvml, chosen, words):
    gpus = Gpus(nvml, chosen)
    assert not gpus.readable
    assert words in gpus.lacks[0]
    assert gpus.read() == []
    with Sampler(gpus, lambda readings: None, 0.001) as sampler:
        time.sleep(0.01)
    assert sampler.between(0, 1e12) == []


def test_what_one_gpu_does_not_tell_is_said_once_and_the_rest_is_read():
    gpus = Gpus(FakeNvml("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage"))
    load = load_of(gpus.read() + gpus.read(), 2)
    assert (load.sm_percent, load.memory_percent, load.power_watts) == (None, None, None)
    assert (load.power_limit_watts, load.sm_mhz) == (700, 1980)
    assert gpus.lacks == [
        "utilization: NVML does not give it (Not Supported)",
        "power: NVML does not give it (Not Supported)",
    ]


def test_a_machine_without_pynvml_says_what_to_install(monkeypatch):
    monkeypatch.setattr(gpu_sampler.importlib.util, "find_spec", lambda name: None)
    assert gpu_sampler.local_gpus([]).lacks == ["GPU load: the package nvidia-ml-py is not installed"]


def test_the_sampler_reads_beside_the_program_and_ends_with_its_block():
    nvml, shown = FakeNvml(), threading.Event()
    with Sampler(Gpus(nvml), lambda readings: shown.set(), 0.001) as sampler:
        started = time.monotonic()
        assert shown.wait(5)
    read = nvml.reads
    assert sampler.between(started - 1, time.monotonic())
    time.sleep(0.02)
    assert nvml.reads == read


def reading(seconds: float, **values: float) -> Reading:
    empty = dict.fromkeys(gpu_sampler.FIELDS)
    return Reading(seconds=seconds, gpu=0, **{**empty, **values})


def test_readings_that_still_speak_of_the_phase_before_are_left_out_of_a_long_one():
    sampler = Sampler(Gpus(None), lambda readings: None)
    sampler._readings = [reading(0.1 * tenth) for tenth in range(50)]
    assert [round(one.seconds, 1) for one in sampler.between(1.0, 1.3)] == [1.0, 1.1, 1.2, 1.3]
    assert round(sampler.between(1.0, 4.0)[0].seconds, 1) == 1.5


def test_means_leave_out_what_was_not_told():
    load = load_of([reading(0, sm_percent=90.0), reading(1, sm_percent=100.0, sm_mhz=1000.0), reading(2)], 1)
    assert load == Load((0,), sm_percent=95.0, sm_mhz=1000.0)
