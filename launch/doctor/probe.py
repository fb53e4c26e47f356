"""Run a check in a Python of its own, and read what it reports even if it dies half way.

Some checks must not happen in the doctor's own process: Triton decides when it is imported whether it
interprets, a kernel may take the process down, and SGLang loads plugins once. A probe is a module that
calls `report` after each step; what it did not come to report is missing from the result.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

# SGLang and its dependencies print to stdout too while they are imported.
_PREFIX = "ddtree-probe: "
TIMEOUT_SECONDS = 600


def report(name: str, value: Any) -> None:
    """Called in the probe: pass one result on."""
    print(f"{_PREFIX}{json.dumps({name: value})}", flush=True)


@dataclass(frozen=True)
class ProbeResult:
    """What a probe reported, and the last thing it said if it then failed."""

    reported: dict[str, Any]
    error: str | None


class Probe:
    """A probe that runs beside others from the moment this object exists."""

    def __init__(self, module: str):
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", module],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )

    def result(self) -> ProbeResult:
        """Wait for the probe to end."""
        try:
            output, errors = self._process.communicate(timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            output, _ = self._process.communicate()
            return ProbeResult(_reported(output), f"no answer within {TIMEOUT_SECONDS} s")
        if self._process.returncode == 0:
            return ProbeResult(_reported(output), None)
        lines = [line for line in errors.splitlines() if line.strip()]
        last = lines[-1].strip() if lines else f"ended with exit code {self._process.returncode}"
        return ProbeResult(_reported(output), last)


def _reported(output: str) -> dict[str, Any]:
    reported: dict[str, Any] = {}
    for line in output.splitlines():
        if line.startswith(_PREFIX):
            reported |= json.loads(line.removeprefix(_PREFIX))
    return reported
