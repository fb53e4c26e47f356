"""What a round costs the host and makes it wait for, read from a profiler trace of a server that decodes."""

from __future__ import annotations

import gzip
import json
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median

# CUDA calls that return when the device has got somewhere: streams, events, the device, blocking copies.
WAITS = re.compile(r"cu(da)?(Device|Ctx|Stream|Event)Synchronize(_\w+)?|cu(da)?Memcpy(?!\w*Async)\w*")
LAUNCH = re.compile(r"cu(da)?GraphLaunch(_\w+)?")
# On the device, a copy that the host's call waited for although its name says otherwise.
PAGEABLE = "Memcpy DtoH (Device -> Pageable)"
# What is launched from the host, by itself or as part of a graph.
LAUNCHES = re.compile(r"cu(da)?(Launch\w+|GraphLaunch\w*|Memcpy\w*Async\w*|Memset\w*Async\w*)")
# Graphs a round launches, in order; SGLang has the first two.
DFLASH_GRAPHS, DDTREE_GRAPHS = ("draft", "verify"), ("draft", "verify", "commit")


def host_waits(trace: dict) -> Counter[str]:
    """Calls that wait for the device, by name, in a trace as torch's profiler exports it."""
    calls = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    waits = Counter(
        event["name"] for event in calls
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and WAITS.fullmatch(event["name"])
    )  # fmt: skip
    waits[PAGEABLE] = sum(event.get("cat") == "gpu_memcpy" and event["name"] == PAGEABLE for event in calls)
    return +waits


def rounds(trace: dict, graphs: Sequence[str]) -> float:
    """Decode rounds in a trace, each of which launches ``graphs``."""
    return len(_calls(trace, LAUNCH)) / len(graphs)


def host_costs(trace: dict, graphs: Sequence[str]) -> dict[str, dict[str, float]]:
    """What the host launches in a round up to each of its ``graphs``, from the last one of the round before.

    Returns:
        By part ("to draft", ..., and "round" for all of them), medians over the rounds: "launches" of
        kernels, copies and graphs, and "microseconds" on the host's clock. The profiler slows the host down,
        so times compare algorithms; how long a round takes, a server without one tells.
    """
    launched = _calls(trace, LAUNCHES)
    ends = [n for n, call in enumerate(launched) if LAUNCH.fullmatch(call["name"])]
    parts = [f"to {graph}" for graph in graphs]
    found: dict[str, list[tuple[int, float]]] = {part: [] for part in (*parts, "round")}
    for first in range(len(graphs), len(ends) - len(graphs) + 1, len(graphs)):
        before, last = ends[first - 1], ends[first + len(graphs) - 1]
        place = before
        for part, end in zip(parts, ends[first : first + len(graphs)], strict=True):
            found[part].append((end - place, launched[end]["ts"] - launched[place]["ts"]))
            place = end
        found["round"].append((last - before, launched[last]["ts"] - launched[before]["ts"]))
    return {
        part: {
            "launches": median(count for count, _ in seen),
            "microseconds": median(spent for _, spent in seen),
        }
        for part, seen in found.items()
        if seen
    }


def _calls(trace: dict, names: re.Pattern[str]) -> list[dict]:
    """CUDA's calls of these names, in the order of time."""
    calls = [
        event for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in ("cuda_runtime", "cuda_driver")
        and names.fullmatch(event["name"])
    ]  # fmt: skip
    return sorted(calls, key=lambda call: call["ts"])


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
