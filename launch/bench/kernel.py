"""Time tree verify attention against what the device allows.

    python -m sglang_ddtree_patch.launch.bench.kernel --json kernel.json

From a checkout that is the same command, in its root. Beside our kernels (`ddtree` is what a server
would run, `ddtree-triton` our best of any kind without a vendor's kernel) it times what a user would run
instead, where those packages are installed. Everything that verifies trees is first compared with the
float32 reference on the same input; what is off is not timed. Times are medians over replays of a CUDA
graph whose calls rotate over copies of the cache: one layer each, without what a forward prepares once.
``--configs sweep`` tries other tile shapes of the Triton kernel too and prints the best.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import json
import math
import shlex
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime

import torch
import triton

from sglang_ddtree_patch.attention.kernel_choice import ANY, VENDORS
from sglang_ddtree_patch.kernels.attention.configs import TreeAttentionConfig
from sglang_ddtree_patch.kernels.attention.tree_attention import tree_attention
from sglang_ddtree_patch.launch.bench.kernel_candidates import candidates
from sglang_ddtree_patch.launch.bench.kernel_contenders import (
    CANDIDATES,
    OURS,
    Contender,
    chosen,
    our_calls,
    preparing_calls,
)
from sglang_ddtree_patch.launch.bench.kernel_options import parse_options
from sglang_ddtree_patch.launch.bench.kernel_timing import graph_microseconds, measure_ceilings
from sglang_ddtree_patch.launch.bench.kernel_vendors import BASELINES
from sglang_ddtree_patch.launch.bench.kernel_workload import (
    PAGE_SIZE,
    SHAPES,
    Workload,
    reference_result,
    relative_error,
)

MODULE = "sglang_ddtree_patch.launch.bench.kernel"
WORST_ERROR = 1e-2
SWEEP_CONTEXTS = (65536, 16384)
COMPILE_CONTEXT = 200
MOST_BYTES = 40 << 30  # of KV; what needs more is left out
# What a kernel that cannot run a point answers: others go on.
FAILURES = (RuntimeError, ValueError, TypeError, AssertionError, triton.OutOfResources)
CONTENDERS = {contender.name: contender for contender in (*OURS, *BASELINES, *CANDIDATES)}
PACKAGES = ("torch", "triton", "sglang", "sglang-kernel", "flashinfer-python", "eagle-harness")


Launch = tuple[str, int, int, TreeAttentionConfig | None]  # shape, rows, batch, forced configuration


def launches_to_compile(options: argparse.Namespace) -> list[Launch]:
    """Every launch whose kernels differ from the others'."""
    launches: list[Launch] = [
        (shape, rows, batch, None)
        for shape in options.shapes
        for rows in options.rows
        for batch in options.batches
    ]
    if options.configs == "sweep":
        tried = set()
        for shape in options.shapes:
            for rows in options.rows:
                for config in candidates(SHAPES[shape], rows):
                    tile = (shape, config.block_m, config.block_n, config.warps, config.stages)
                    if tile not in tried:
                        tried.add(tile)
                        launches.append((shape, rows, 1, config))
    return launches


def compile_share(options: argparse.Namespace) -> None:
    """Compile, by running it once, every n-th launch; the files land in Triton's cache."""
    index, count = options.compile_share
    workloads: dict[tuple[str, int], Workload] = {}
    for shape, rows, batch, config in launches_to_compile(options)[index::count]:
        workload = workloads.setdefault(
            (shape, batch), Workload(SHAPES[shape], COMPILE_CONTEXT, batch, max(options.rows), copies=1)
        )
        try:
            if config is None:
                for positions in (COMPILE_CONTEXT, ANY):  # servers of short and of long contexts
                    for vendors in (True, False):
                        our_calls(workload, rows, vendors, positions)[0]()
            else:
                tree_attention(**workload.arguments(rows), page_size=PAGE_SIZE, config=config)
        except FAILURES as error:
            print(f"{shape}, {rows} rows, {config}: {error}", flush=True)


def compile_all(options: argparse.Namespace, argv: Sequence[str]) -> None:
    command = [sys.executable, "-m", MODULE, *argv, "--compile-share"]
    workers = [
        subprocess.Popen([*command, str(index), str(options.compilers)]) for index in range(options.compilers)
    ]
    for worker in workers:
        worker.wait()


def time_config(
    workload: Workload, rows: int, config: TreeAttentionConfig, expected: torch.Tensor
) -> tuple[float, float]:
    """Microseconds and relative error of the Triton kernel with one tile shape."""
    arguments = workload.arguments(rows)
    # Poisoned: whatever the kernels read of it they must have written.
    workspace = torch.full((64 << 20,), torch.nan, device="cuda")

    def call(ids: torch.Tensor) -> torch.Tensor:
        return tree_attention(
            **arguments | {"request_ids": ids}, page_size=PAGE_SIZE, workspace=workspace, config=config
        )

    error = relative_error(call(workload.request_ids[0]), expected)
    if not error <= WORST_ERROR:
        return math.nan, error
    return graph_microseconds([functools.partial(call, ids) for ids in workload.request_ids]), error


def time_contender(
    contender: Contender, workload: Workload, rows: int, expected: torch.Tensor
) -> tuple[float, float]:
    """Microseconds and relative error, NaN where it is wrong; no error where there is no tree."""
    calls = contender.make_calls(workload, rows)
    error = math.nan
    if contender.is_tree:
        error = relative_error(calls[0](), expected)
        if not error <= WORST_ERROR:
            return math.nan, error
    return graph_microseconds(calls), error


def measure_point(
    workload: Workload, options: argparse.Namespace, ceilings: dict[str, float], missing: set[str]
) -> list[dict]:
    """Every kernel and width on one shape, context and batch."""
    results, name = [], workload.shape.name
    by_page_size = {PAGE_SIZE: workload}
    for rows in options.rows:
        limit, expected = workload.limit_microseconds(rows, ceilings), {}
        for contender in (CONTENDERS[kernel] for kernel in options.kernels):
            if contender.name in missing or not contender.serves(workload, rows):
                continue
            page_size = contender.page_size
            if page_size not in by_page_size:
                by_page_size[page_size] = workload.repaged(page_size)
            paged = by_page_size[page_size]
            if page_size not in expected:
                expected[page_size] = reference_result(paged.arguments(rows))
            try:
                spent, error = time_contender(contender, paged, rows, expected[page_size])
            except ImportError as failure:
                missing.add(contender.name)
                print(
                    f"{contender.name}: skipped, its package cannot be imported ({first_line(failure)})",
                    flush=True,
                )
                continue
            except FAILURES as failure:
                print(
                    f"{contender.name} {name} {workload.context} {rows} rows FAILED: {first_line(failure)}",
                    flush=True,
                )
                continue
            results.append(
                {
                    "kernel": contender.name, "shape": name, "context": workload.context, "rows": rows,
                    "batch": workload.batch, "page_size": page_size,
                    "microseconds": None if math.isnan(spent) else spent, "limit_microseconds": limit,
                }
            )  # fmt: skip
            detail = f"error {error:.1e}" if contender.is_tree else "no tree"
            if contender in OURS:
                detail += f"  {chosen(workload, rows, vendors=contender is OURS[0])}"
            print(
                f"{contender.name:18} {name:15} {workload.context:7} x {workload.batch:<2} {rows:3} rows "
                f"{spent:9.1f} us {limit:8.1f} at best ({limit / spent:4.0%})  {detail}",
                flush=True,
            )
        if chosen(workload, rows, vendors=True) in VENDORS:
            prepare = graph_microseconds(preparing_calls(workload, rows))
            print(f"{'':18} prepared once a forward: {prepare:.1f} us", flush=True)
    return results


def measure(options: argparse.Namespace, ceilings: dict[str, float], deadline: float, report: dict) -> None:
    """The table, one request first. The file is written after every point: an end by force loses one."""
    missing: set[str] = set()
    for batch in options.batches:
        for context in options.contexts:
            for name in options.shapes:
                point = f"{name} {context} x {batch}"
                if SHAPES[name].kv_bytes * context * batch > MOST_BYTES:
                    print(f"{point}: skipped, more KV than {MOST_BYTES >> 30} GiB", flush=True)
                    continue
                if time.monotonic() > deadline:
                    print(f"{point}: not measured, out of time", flush=True)
                    continue
                workload = Workload(SHAPES[name], context, batch, max(options.rows))
                report["rows"] += measure_point(workload, options, ceilings, missing)
                del workload
                torch.cuda.empty_cache()
                if options.json:
                    with open(options.json, "w") as file:
                        json.dump(report, file, indent=1)


def sweep(options: argparse.Namespace, deadline: float) -> None:
    """Try the candidates at two contexts and print the fastest by the product of their times."""
    times: dict[tuple[str, int], dict] = defaultdict(lambda: defaultdict(list))
    for context in SWEEP_CONTEXTS:
        for name in options.shapes:
            workload = Workload(SHAPES[name], context, 1, max(options.rows))
            for rows in options.rows:
                expected = reference_result(workload.arguments(rows))
                for config in candidates(SHAPES[name], rows):
                    if time.monotonic() > deadline:
                        print("sweep: out of time", context, name, rows, flush=True)
                        break
                    try:
                        spent, error = time_config(workload, rows, config, expected)
                    except (triton.OutOfResources, RuntimeError) as failure:
                        print(f"FAILED {name} {rows} rows {config}: {failure}", flush=True)
                        continue
                    if math.isnan(spent):
                        print(f"WRONG {name} {context} {rows} rows {config}: error {error}", flush=True)
                    times[name, rows][config].append(spent)
            del workload
    for (name, rows), by_config in times.items():
        complete = {config: spent for config, spent in by_config.items() if len(spent) == len(SWEEP_CONTEXTS)}
        print(f"{name} {rows} rows, at {SWEEP_CONTEXTS}:")
        for config, spent in sorted(complete.items(), key=lambda item: math.prod(item[1]))[:6]:
            shown = ", ".join(f"{value:.1f}" for value in spent)
            print(
                f"    {shown} us  ({config.block_m}, {config.block_n}, {config.warps}, {config.stages}, "
                f"{config.programs_per_sm})",
                flush=True,
            )


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def installed_versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    options = parse_options(argv)
    torch.manual_seed(0)
    if options.compile_share:
        compile_share(options)
        return
    deadline = time.monotonic() + options.budget
    compile_all(options, argv)
    print(f"compiled, {deadline - time.monotonic():.0f} s left", flush=True)
    ceilings = measure_ceilings()
    print(f"copy {ceilings['copy_gb_s']:.0f} GB/s, bf16 {ceilings['bf16_tflop_s']:.0f} TFLOP/s", flush=True)
    report = {
        "device": torch.cuda.get_device_name(),
        "versions": installed_versions(),
        "command": shlex.join(["python", "-m", MODULE, *argv]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "ceilings": ceilings,
        "rows": [],
    }
    measure(options, ceilings, deadline, report)
    if options.configs == "sweep":
        sweep(options, deadline)


if __name__ == "__main__":
    main()
