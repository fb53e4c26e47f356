"""What a round makes the host wait for, read from a profiler trace of a server that decodes."""

from __future__ import annotations

import gzip
import json
import re
import time
import urllib.request
from collections import Counter
from pathlib import Path

# CUDA calls that return when the device has got somewhere: streams, events, the device, blocking copies.
WAITS = re.compile(r"cu(da)?(Device|Ctx|Stream|Event)Synchronize(_\w+)?|cu(da)?Memcpy(?!\w*Async)\w*")
LAUNCH = re.compile(r"cu(da)?GraphLaunch(_\w+)?")
# On the device, a copy that the host's call waited for although its name says otherwise.
PAGEABLE = "Memcpy DtoH (Device -> Pageable)"
GRAPHS_A_ROUND = 2  # draft and verify


def host_waits(trace: dict) -> Counter[str]:
    """Calls that wait for the device, by name, in a trace as torch's profiler exports it."""
    calls = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    waits = Counter(
        event["name"] for event in calls
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and WAITS.fullmatch(event["name"])
    )  # fmt: skip
    waits[PAGEABLE] = sum(event.get("cat") == "gpu_memcpy" and event["name"] == PAGEABLE for event in calls)
    return +waits


def rounds(trace: dict) -> float:
    """Decode rounds in a trace: each launches the draft's graph and the verify's."""
    launches = sum(
        event.get("ph") == "X" and bool(LAUNCH.fullmatch(event["name"])) for event in trace["traceEvents"]
    )
    return launches / GRAPHS_A_ROUND


def record_trace(url: str, folder: Path, steps: int, timeout: float = 120) -> dict:
    """Let a server that is decoding profile its next steps; the trace, once it is written whole."""
    wanted = {"output_dir": str(folder), "num_steps": steps, "activities": ["CPU", "GPU"]}
    request = urllib.request.Request(
        f"{url}/start_profile", json.dumps(wanted).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout):
        pass
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        for path in folder.glob("*.trace.json.gz"):
            try:
                return json.loads(gzip.decompress(path.read_bytes()))
            except (EOFError, ValueError):  # half written
                pass
        time.sleep(0.5)
    raise TimeoutError(f"no trace in {folder} after {timeout:.0f} s")
