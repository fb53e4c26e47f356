"""What the device allows, measured in a process of its own, so that its memory is free again afterwards."""

from __future__ import annotations

import json
import subprocess
import sys


class CeilingsUnknown(RuntimeError):
    """The device could not be measured, for example because a server holds all of its memory."""


def measure_ceilings() -> dict[str, float]:
    """Copy rate (GB/s, bytes read and written) and dense bf16 rate (TFLOP/s)."""
    return _measure("measure_ceilings()")


def measure_copy_rate() -> float:
    """Copy rate alone, in little memory: for a device that serves meanwhile."""
    return _measure("copy_rate(SMALL_COPY)")


def _measure(call: str):
    module = "sglang_ddtree_patch.launch.bench.kernel_timing"
    code = f"import json; from {module} import *; print(json.dumps({call}))"
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    if result.returncode != 0:
        said = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
        raise CeilingsUnknown(f"the device's copy rate could not be measured: {said[-1]}")
    return json.loads(result.stdout.splitlines()[-1])
