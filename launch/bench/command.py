"""`ddtree bench`: measure the kernels, a server's decoding, and how a step grows with context.

ddtree bench kernel     tree verify attention against what the device allows (needs an NVIDIA GPU)
ddtree bench serve      tokens a second and step time against the number of requests at once
ddtree bench context    step time and the share of the memory limit against context length
ddtree bench plot       a results file of any of these as a figure
"""

from __future__ import annotations

import argparse
import sys

from sglang_ddtree_patch.launch.bench import context as bench_context
from sglang_ddtree_patch.launch.bench import serve as bench_serve
from sglang_ddtree_patch.launch.bench.kernel_options import parse_options
from sglang_ddtree_patch.launch.plots import command as plots
from sglang_ddtree_patch.launch.sglang_install import has_nvidia_gpu, require_sglang

_EXAMPLE = """\
example:
  ddtree bench serve --model tiny-gqa --batch 1 8 --json serve.json
  ddtree bench plot serve.json
  ddtree bench kernel --help
"""


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure kernels and servers, with and without trees",
        description="Measure kernels and servers, with and without trees; docs/benchmarks.md says how.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    kernel = actions.add_parser("kernel", help="tree verify attention by itself", add_help=False)
    kernel.set_defaults(run=run_kernel, takes_sglang_flags=True)
    bench_serve.add_parser(actions)
    bench_context.add_parser(actions)
    plots.add_parser(actions)


def run_kernel(arguments: argparse.Namespace) -> int:
    """Hand all flags to the kernel benchmark, which imports torch, once they are right."""
    parse_options(arguments.sglang_flags)
    if not require_sglang("bench kernel"):
        return 1
    if not has_nvidia_gpu():
        print(
            "ddtree bench kernel: torch sees no NVIDIA GPU here, and this times GPU kernels. "
            "On a CPU: ddtree bench serve, ddtree bench context",
            file=sys.stderr,
        )
        return 1
    from sglang_ddtree_patch.launch.bench import kernel as bench_kernel

    bench_kernel.main(arguments.sglang_flags)
    return 0
