"""`ddtree doctor`: Python, torch, Triton, the device, and which implementation of tree attention it runs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import platform
import sys
from pathlib import Path

from sglang_ddtree_patch.errors import ConfigurationError
from sglang_ddtree_patch.launch.doctor.check import Check, ok, problem, untried, warning
from sglang_ddtree_patch.launch.doctor.probe import Probe, ProbeResult
from sglang_ddtree_patch.launch.sglang_install import INSTALL_HINT
from sglang_ddtree_patch.settings import CANDIDATES_VARIABLE, candidates_per_position

OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 13)
KERNELS = ("reference", "triton")
KERNELS_PROBE = "sglang_ddtree_patch.launch.doctor.probe_kernels"
NVIDIA_DRIVER = Path("/dev/nvidiactl")
COMES_WITH_SGLANG = f"It comes with SGLang: {INSTALL_HINT}"


def check_python(version: tuple[int, int] = sys.version_info[:2]) -> Check:
    found = platform.python_version()
    if version < OLDEST_PYTHON:
        return problem("Python", found, "Use Python 3.11 to 3.13.")
    if version > NEWEST_PYTHON:
        return warning("Python", found, "Not tried with this package: Python 3.11 to 3.13 are.")
    return ok("Python", found)


def check_settings() -> Check:
    """The environment variable that SGLang's flags do not carry; the kernel's own is checked where tried."""
    try:
        return ok("settings", f"{CANDIDATES_VARIABLE}={candidates_per_position()}")
    except ConfigurationError as error:
        return problem("settings", str(error), f"Unset {CANDIDATES_VARIABLE}.")


def start_kernels_probe() -> Probe | None:
    """Start trying the kernels; None where torch is not installed."""
    return Probe(KERNELS_PROBE) if importlib.util.find_spec("torch") is not None else None


def check_device_and_kernels(probe: Probe | None) -> list[Check]:
    if probe is None:
        missing = [problem("torch", "not installed", COMES_WITH_SGLANG), check_triton()]
        return missing + [untried(f"kernel {name}", "torch is not installed") for name in KERNELS]
    result = probe.result()
    if "device" not in result.reported:
        return [problem("torch", f"does not work: {result.error}", f"Install it again: {INSTALL_HINT}")]
    device = result.reported["device"]
    checks = [ok("torch", device["torch"]), check_triton(), check_cuda(device), check_gpu(device)]
    return checks + check_kernels(result)


def check_triton() -> Check:
    if importlib.util.find_spec("triton") is None:
        return problem("Triton", "not installed", COMES_WITH_SGLANG)
    return ok("Triton", importlib.metadata.version("triton"))


def check_cuda(device: dict) -> Check:
    if device["rocm"] is not None:
        return warning("CUDA", f"torch is built for ROCm {device['rocm']}", "Not tried on AMD GPUs.")
    if device["cuda"] is None:
        return warning("CUDA", "torch is built without it", f"For an NVIDIA GPU: {INSTALL_HINT}")
    return ok("CUDA", f"{device['cuda']}, as torch is built")


def check_gpu(device: dict) -> Check:
    if device["type"] == "cuda" and device["rocm"] is None:
        major, minor = device["capability"]
        count = f"{device['count']} x " if device["count"] > 1 else ""
        return ok("GPU", f"{count}{device['name']}, sm_{major}{minor}, {device['memory_gib']} GiB")
    if device["type"] != "cpu":
        return warning("GPU", device["name"], "Only NVIDIA GPUs and CPUs have been tried.")
    advice = "`ddtree serve` and `ddtree demo` use the CPU: exact and slow, for trying things out."
    if NVIDIA_DRIVER.exists():
        older = f"Look at nvidia-smi: the driver may be older than CUDA {device['cuda']}. Until then "
        return warning("GPU", "an NVIDIA driver is loaded, and torch sees no GPU", older + advice)
    return warning("GPU", "none", advice)


def check_kernels(result: ProbeResult) -> list[Check]:
    """One line an implementation; a problem is one that a server here would run, or one before it."""
    if "chosen" not in result.reported:
        return [problem("kernels", str(result.error), "Unset SGLANG_DDTREE_KERNEL.")]
    return [check_kernel(name, result) for name in KERNELS]


def check_kernel(name: str, result: ProbeResult) -> Check:
    reported, serves = result.reported, result.reported["chosen"] == name
    fails = problem if serves else warning
    other = next(kernel for kernel in KERNELS if kernel != name)
    advice = f"Set SGLANG_DDTREE_KERNEL={other}." if serves else "A server here does not use it."
    if name not in reported:
        before, behind = KERNELS[: KERNELS.index(name)], KERNELS[KERNELS.index(name) + 1 :]
        if any(kernel not in reported for kernel in before):
            return untried(f"kernel {name}", f"kernel {before[-1]} ended the trial")
        if reported["chosen"] in behind:
            fails, advice = problem, f"What serves here, {reported['chosen']}, could not be tried behind it."
        return fails(f"kernel {name}", f"does not run: {result.error}", advice)
    errors, precision = reported[name], reported["precision"]
    shown = ", ".join(f"{kind} {error:.0e}" for kind, error in errors.items())
    in_words = f"relative error in {precision['dtype']}: {shown}"
    if any(math.isnan(error) or error > precision["tolerance"] for error in errors.values()):
        return fails(f"kernel {name}", f"wrong results, {in_words}", advice)
    return ok(f"kernel {name}", f"{in_words}{'; serves here' if serves else ''}")
