"""The flags of `ddtree bench kernel`, apart from what needs torch, so that help comes without it."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from sglang_ddtree_patch.launch.token_counts import parse_tokens, shown_tokens
from sglang_ddtree_patch.settings import MAX_WIDTH

SHAPES = {
    "gqa-32x8x128": "32 query heads on 8 KV heads of 128, as in Qwen3-8B and Llama 3 8B",
    "mla-8x576x512": "8 heads on one latent of 576, values of 512: Kimi K2 at --tp-size 8",
    "mla-16x576x512": "16 heads on one latent: DeepSeek V3 at --tp-size 8, DeepSeek V2 Lite",
}
KERNELS = {
    "ddtree": "what a server would run here: our own, or a vendor's on the prefix with our tree behind it",
    "ddtree-triton": "our best kernel with no vendor's in it, of any kind: Triton, and on Hopper Gluon",
    "fa3-prefix": "FlashAttention 3 on the prefix alone, a yardstick: it verifies no tree (GQA)",
    "flashmla-prefix": "FlashMLA on the prefix alone, likewise (MLA)",
    "sglang-triton-tree": "stock SGLang's Triton backend at page size 1, the tree as its custom mask",
    "flashinfer-tree": "FlashInfer FA2, the tree as its custom mask over the whole prefix (GQA)",
    "eagle-tail": "eagle-harness's FlashInfer FA2 with a mask of the tail (GQA, one request, 2 to 64 rows)",
    "ddtree-mla-narrow": "our CUDA C++ kernel for few rows of MLA, which no server chooses yet (MLA, Hopper)",
}
SHAPE_NAMES, KERNEL_NAMES = tuple(SHAPES), tuple(KERNELS)
ROWS = (1, 9, 17, 33, 64, 128)
CONTEXTS = (1024, 16384, 65536, 131072, 189440)
BATCHES = (1, 8, 32)

_EXAMPLE = """\
example:
  ddtree bench kernel --shapes gqa-32x8x128 --rows 17 33 --contexts 64k --batches 1 --json kernel.json
  ddtree bench kernel --kernels ddtree ddtree-triton fa3-prefix --contexts 1k 16k 64k --budget 300
  ddtree bench plot kernel.json

One layer's whole tree verify (prefix, tree, merge) in bf16, pages of 64 unless said otherwise. Each line
printed is a row of the file: the time of one call in microseconds, and what the device would need at best:
the KV read once at its copy rate, or the arithmetic at its bf16 rate, whichever is more.
"""


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """Exits with 0 behind help, with 2 behind wrong usage."""
    parser = argparse.ArgumentParser(
        prog="ddtree bench kernel",
        description="Time tree verify attention against what the device allows (needs an NVIDIA GPU).",
        epilog=f"kernels:\n{_listed(KERNELS)}\n\nshapes:\n{_listed(SHAPES)}\n\n{_EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here, after each point")
    parser.add_argument(
        "--shapes", nargs="+", choices=SHAPE_NAMES, default=SHAPE_NAMES, metavar="SHAPE",
        help="attention shapes, as listed below (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--kernels", nargs="+", choices=KERNEL_NAMES, default=KERNEL_NAMES, metavar="KERNEL",
        help="what to time, as listed below; one whose package is not installed is said and left out "
        "(default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--rows", nargs="+", type=int, default=ROWS, metavar="N",
        help=f"widths of the tree, root included (default: {_joined(ROWS)})",
    )  # fmt: skip
    parser.add_argument(
        "--contexts", nargs="+", type=parse_tokens, default=CONTEXTS, metavar="TOKENS",
        help="lengths of the prefix, such as 1k 64k or 1024 65536 "
        f"(default: {_joined(map(shown_tokens, CONTEXTS))})",
    )  # fmt: skip
    parser.add_argument(
        "--batches", nargs="+", type=int, default=BATCHES, metavar="N",
        help=f"requests at once (default: {_joined(BATCHES)})",
    )  # fmt: skip
    parser.add_argument(
        "--configs", choices=["table", "sweep"], default="table",
        help="tile shapes of our Triton kernel: those of its table, or afterwards also try others and "
        "print the best (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--budget", type=float, default=1800, metavar="SECONDS",
        help="end after this long with what is measured (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--compilers", type=int, default=12, metavar="N",
        help="processes that compile beforehand (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--compile-share", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    for name in ("rows", "batches"):
        if min(getattr(options, name)) < 1:
            parser.error(f"--{name} must be at least 1")
    if max(options.rows) > MAX_WIDTH:
        parser.error(f"--rows must be at most {MAX_WIDTH}")
    if options.compilers < 1:
        parser.error("--compilers must be at least 1")
    if options.json is not None and not options.json.parent.is_dir():
        parser.error(f"--json: there is no folder {options.json.parent}")
    return options


def _listed(meanings: Mapping[str, str]) -> str:
    width = max(map(len, meanings))
    return "\n".join(f"  {name:<{width}}  {meaning}" for name, meaning in meanings.items())


def _joined(values: Iterable) -> str:
    return " ".join(map(str, values))
