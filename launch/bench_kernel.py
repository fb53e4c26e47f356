"""Time tree verify attention against what the device allows.

    python -m sglang_ddtree_patch.launch.bench_kernel --json kernel.json

From a checkout that is the same command, in its root. Every measured launch is first compared with the
float32 reference on the same input; one that is off is not timed. Times are medians over replays of a CUDA
graph whose calls rotate over copies of the cache. ``--configs sweep`` also tries other tile shapes and
prints the best.
"""

from __future__ import annotations

import argparse
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

from sglang_ddtree_patch.kernels.tree_attention import tree_attention
from sglang_ddtree_patch.kernels.tree_attention_configs import TreeAttentionConfig
from sglang_ddtree_patch.launch.kernel_candidates import candidates
from sglang_ddtree_patch.launch.kernel_timing import graph_microseconds, measure_ceilings
from sglang_ddtree_patch.launch.kernel_vendors import vendor_calls
from sglang_ddtree_patch.launch.kernel_workload import PAGE_SIZE, SHAPES, Workload, relative_error

MODULE = "sglang_ddtree_patch.launch.bench_kernel"
WORST_ERROR = 1e-2
SWEEP_CONTEXTS = (65536, 16384)
COMPILE_CONTEXT = 200
ROWS = (1, 9, 17, 33, 64)
POINTS = [(1024, 1), (16384, 1), (16384, 8), (65536, 1), (189440, 1)]  # context, batch


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ddtree bench kernel", description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the results here")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["gqa-32x8x128", "mla-8x576x512"])
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, help="widths of the tree")
    parser.add_argument("--contexts", nargs="+", type=int, help="only these context lengths")
    parser.add_argument("--configs", choices=["table", "sweep"], default="table", help="which tile shapes")
    parser.add_argument("--budget", type=float, default=140, help="seconds after which a sweep stops")
    parser.add_argument("--compilers", type=int, default=12, help="processes that compile beforehand")
    parser.add_argument("--compile-share", nargs=2, type=int, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


Launch = tuple[str, int, int, TreeAttentionConfig | None]  # shape, rows, batch, forced configuration


def launches_to_compile(options: argparse.Namespace) -> list[Launch]:
    """Every launch whose kernels differ from the others'."""
    launches = [
        (shape, rows, batch, None) for shape in options.shapes for rows in options.rows for batch in (1, 8)
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
            tree_attention(**workload.arguments(rows), page_size=PAGE_SIZE, config=config)
        except (triton.OutOfResources, RuntimeError) as error:
            print(f"{shape}, {rows} rows, {config}: {error}", flush=True)


def compile_all(options: argparse.Namespace, argv: Sequence[str]) -> None:
    command = [sys.executable, "-m", MODULE, *argv, "--compile-share"]
    workers = [
        subprocess.Popen([*command, str(index), str(options.compilers)]) for index in range(options.compilers)
    ]
    for worker in workers:
        worker.wait()


def time_tree(
    workload: Workload, rows: int, config: TreeAttentionConfig | None = None
) -> tuple[float, float]:
    """Microseconds and relative error of tree verify at one point."""
    arguments = workload.arguments(rows)

    def call(ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return tree_attention(
            **arguments | {"request_ids": ids},
            page_size=PAGE_SIZE,
            out=out,
            workspace=workspace,
            config=config,
        )

    shape = workload.shape
    query = arguments["query"]
    # Poisoned: whatever the kernels read of it they must have written.
    workspace = torch.full((64 << 20,), torch.nan, device="cuda")
    poisoned = torch.full((query.shape[0], shape.heads, shape.value_dim), torch.nan, device="cuda").bfloat16()
    error = relative_error(call(workload.request_ids[0], poisoned), arguments)
    if not error <= WORST_ERROR:
        return math.nan, error
    return graph_microseconds([lambda ids=ids: call(ids, poisoned) for ids in workload.request_ids]), error


def measure(options: argparse.Namespace, ceilings: dict[str, float]) -> list[dict]:
    """The table: every shape, point and width with the table's configurations, vendor kernels beside them."""
    results = []
    for name in options.shapes:
        for context, batch in POINTS:
            if options.contexts and context not in options.contexts:
                continue
            workload = Workload(SHAPES[name], context, batch, max(options.rows))
            for rows in options.rows:
                microseconds, error = time_tree(workload, rows)
                timed = [("ddtree-triton", microseconds)]
                if vendor := vendor_calls(workload, rows):
                    timed.append((vendor[0], graph_microseconds(vendor[1])))
                limit = workload.limit_microseconds(rows, ceilings)
                for kernel, spent in timed:
                    results.append(
                        {
                            "kernel": kernel, "shape": name, "context": context, "rows": rows, "batch": batch,
                            "page_size": PAGE_SIZE, "microseconds": None if math.isnan(spent) else spent,
                            "limit_microseconds": limit,
                        }
                    )  # fmt: skip
                    print(
                        f"{kernel:16} {name:15} {context:7} x {batch} {rows:3} rows {spent:9.1f} us "
                        f"{limit:8.1f} at best ({limit / spent:4.0%})  error {error:.1e}",
                        flush=True,
                    )
            del workload
    return results


def sweep(options: argparse.Namespace, deadline: float) -> None:
    """Try the candidates at two contexts and print the fastest by the product of their times."""
    times: dict[tuple[str, int], dict] = defaultdict(lambda: defaultdict(list))
    for context in SWEEP_CONTEXTS:
        for name in options.shapes:
            workload = Workload(SHAPES[name], context, 1, max(options.rows))
            for rows in options.rows:
                for config in candidates(SHAPES[name], rows):
                    if time.monotonic() > deadline:
                        print("sweep: out of time", context, name, rows, flush=True)
                        break
                    try:
                        spent, error = time_tree(workload, rows, config)
                    except (triton.OutOfResources, RuntimeError) as error:
                        print(f"FAILED {name} {rows} rows {config}: {error}", flush=True)
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


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    options = parse_arguments(argv)
    torch.manual_seed(0)
    if options.compile_share:
        compile_share(options)
        return
    deadline = time.monotonic() + options.budget
    compile_all(options, argv)
    print(f"compiled, {deadline - time.monotonic():.0f} s left", flush=True)
    ceilings = measure_ceilings()
    print(f"copy {ceilings['copy_gb_s']:.0f} GB/s, bf16 {ceilings['bf16_tflop_s']:.0f} TFLOP/s", flush=True)
    results = measure(options, ceilings)
    if options.json:
        report = {
            "device": torch.cuda.get_device_name(),
            "versions": {"torch": torch.__version__, "triton": triton.__version__},
            "command": shlex.join(["python", "-m", MODULE, *argv]),
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "ceilings": ceilings,
            "rows": results,
        }
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)
    if options.configs == "sweep":
        sweep(options, deadline)


if __name__ == "__main__":
    main()
