"""`ddtree models`: what models come with the package, and where they lie.

ddtree models                  a table
ddtree models path tiny-gqa    the folder holding target/ and draft/
"""

from __future__ import annotations

import argparse
import sys

from sglang_ddtree_patch import model_catalog
from sglang_ddtree_patch.errors import ConfigurationError


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "models",
        help="list the small models that come with the package",
        description="The small models that come with the package.",
        epilog="example:\n  ddtree models\n  ddtree models path tiny-gqa\n",
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
    path.add_argument("name", help=" or ".join(model_catalog.names()))
    path.set_defaults(run=show_path)


def show_table(args: argparse.Namespace) -> int:
    width = max(map(len, model_catalog.names()))
    for name in model_catalog.names():
        model = model_catalog.entry(name)
        print(f"{name:<{width}}  {model.weight_bytes() / 1e6:4.1f} MB  {model.description}")
    name = model_catalog.names()[0]
    print(f"\nserve one: ddtree serve --model-path $(ddtree models path {name})/target \\")
    print(f"    --speculative-draft-model-path $(ddtree models path {name})/draft")
    return 0


def show_path(args: argparse.Namespace) -> int:
    try:
        print(model_catalog.path(args.name))
    except ConfigurationError as error:
        print(f"ddtree models: {error}", file=sys.stderr)
        return 2
    return 0
