"""The flags of `ddtree bench kernel`, apart from what needs torch, so that help comes without it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

SHAPE_NAMES = ("gqa-32x8x128", "mla-8x576x512", "mla-16x576x512")
KERNEL_NAMES = (
    "ddtree",
    "ddtree-triton",
    "fa3-prefix",
    "flashmla-prefix",
    "sglang-triton-tree",
    "flashinfer-tree",
    "eagle-tail",
)
ROWS = (1, 9, 17, 33, 64, 128)
CONTEXTS = (1024, 16384, 65536, 131072, 189440)
BATCHES = (1, 8, 32)

_EXAMPLE = """\
example:
  ddtree bench kernel --shapes gqa-32x8x128 --rows 17 33 --contexts 65536 --batches 1 --json kernel.json
"""


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """Exits with 0 behind help, with 2 behind wrong usage."""
    parser = argparse.ArgumentParser(
        prog="ddtree bench kernel",
        description="Time tree verify attention against what the device allows (needs an NVIDIA GPU).",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", help="write the results here")
    parser.add_argument("--shapes", nargs="+", choices=SHAPE_NAMES, default=SHAPE_NAMES)
    parser.add_argument("--kernels", nargs="+", choices=KERNEL_NAMES, default=KERNEL_NAMES)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, help="widths of the tree")
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--configs", choices=["table", "sweep"], default="table", help="which tile shapes")
    parser.add_argument(
        "--budget", type=float, default=1800, help="seconds after which it ends with what is measured"
    )
    parser.add_argument("--compilers", type=int, default=12, help="processes that compile beforehand")
    parser.add_argument("--compile-share", nargs=2, type=int, help=argparse.SUPPRESS)
    return parser.parse_args(argv)
