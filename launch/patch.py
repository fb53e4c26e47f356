"""`ddtree patch`: make an SGLang that cannot load plugins load this one, and take that back.

ddtree patch check
ddtree patch apply --root ~/src/sglang
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from sglang_ddtree_patch.contract_check import check_releases
from sglang_ddtree_patch.patches import patcher
from sglang_ddtree_patch.patches.in_tree import find_port, has_port
from sglang_ddtree_patch.patches.patcher import State, Status
from sglang_ddtree_patch.patches.releases import known_releases
from sglang_ddtree_patch.patches.tree import PatchRefusedError, SglangTree, find_tree

_EXAMPLE = """\
example:
  ddtree patch check
  ddtree patch apply --dry-run
  ddtree patch apply --root ~/src/sglang
  ddtree patch revert --root ~/src/sglang

DIR is an SGLang repository, the folder sglang/ or what holds it; by default the SGLang of this Python.
An SGLang that loads plugins needs none of this. Exit codes: 0 done, or already so; 1 refused; 2 wrong usage.
"""


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "patch",
        help="patch an SGLang tree that cannot load plugins",
        description="Make an SGLang tree that cannot load plugins load this one, or open the locks of one "
        "that has a DDTREE of its own; and take that back.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    tree = argparse.ArgumentParser(add_help=False)
    tree.add_argument("--root", type=Path, metavar="DIR", help="the tree; default: the installed SGLang")
    preview = argparse.ArgumentParser(add_help=False)
    preview.add_argument("--dry-run", action="store_true", help="print the diff and change nothing")
    for name, action, parents, example, words in (
        ("list", show_list, [], "", "the diffs that come with the package"),
        ("check", check, [tree], "", "whether apply would work, and DDTREE then serve; 1 if not"),
        ("apply", apply, [tree, preview], " --dry-run", "patch the tree, all files or none"),
        ("revert", revert, [tree, preview], " --root DIR", "put back the exact files that were there"),
        ("status", status, [tree], " --root DIR", "whether the tree is patched; 1 if not"),
    ):
        added = actions.add_parser(
            name, help=words, description=words, parents=parents,
            epilog=f"example:\n  ddtree patch {name}{example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        added.set_defaults(run=_with_one_line_errors(action))


def _with_one_line_errors(action):
    def run(arguments: argparse.Namespace) -> int:
        try:
            return action(arguments)
        except (PatchRefusedError, OSError, SyntaxError) as error:
            print(f"ddtree patch: {error}", file=sys.stderr)
            return 1

    return run


def show_list(arguments: argparse.Namespace) -> int:
    for release in known_releases():
        for path in release.diffs:
            print(f"SGLang {release.version}  {path}")
        for file in release.files:
            print(f"    {file.path}")
    print("\na tree with a DDTREE of its own: ddtree patch apply --dry-run --root DIR shows the changes")
    print("by hand: patch -p1 -d DIR < FILE, or git apply FILE, in the folder that holds sglang/")
    return 0


def check(arguments: argparse.Namespace) -> int:
    tree = find_tree(arguments.root)
    found = patcher.inspect(tree, known_releases())
    print(_sentence(tree, found))
    where = "" if arguments.root is None else f" --root {shlex.quote(str(arguments.root))}"
    if found.state is State.ABSENT and has_port(tree):
        print(f"{find_port(tree).describe()}\nthis can be patched: ddtree patch apply{where}")
    mismatches = _mismatches(tree, found)
    if mismatches:
        print(f"ddtree patch: {mismatches}", file=sys.stderr)
    elif found.state is State.ABSENT and not has_port(tree):
        print(f"the diffs fit: ddtree patch apply{where}; not needed where SGLang finds the plugin by itself")
    return 1 if mismatches or found.state is State.UNFINISHED else 0


def apply(arguments: argparse.Namespace) -> int:
    tree, releases = find_tree(arguments.root), known_releases()
    if arguments.dry_run:
        found = patcher.inspect(tree, releases)
        if found.state is State.ABSENT:
            refuse_what_would_not_serve(tree, found)
            return _print_bytes(patcher.diff(found.changes))
        print(_sentence(tree, found))
        return 1 if found.state is State.UNFINISHED else 0
    before = patcher.apply(tree, releases, lambda found: refuse_what_would_not_serve(tree, found))
    if before.state in (State.APPLIED, State.BY_HAND):
        print(f"already {before.state.value}, nothing done: SGLang {before.version} at {tree.package}")
        return 0
    if before.state is State.UNFINISHED:
        print("undid first what an interrupted run had left")
    after = patcher.inspect(tree, releases)
    print(_sentence(tree, after))
    print("the Python that runs this tree needs sglang-ddtree-patch installed")
    return 0


def revert(arguments: argparse.Namespace) -> int:
    tree, releases = find_tree(arguments.root), known_releases()
    if arguments.dry_run:
        found = patcher.inspect(tree, releases)
        if found.journal is not None:
            return _print_bytes(patcher.diff(patcher.changes_to_revert(found.journal)))
    else:
        found = patcher.revert(tree, releases)
    if found.state is State.BY_HAND:
        print(
            f"ddtree patch: {tree.package} was patched with another tool, and there is no record of the "
            "originals. Take it out with: patch -R -p1 (see: ddtree patch list)",
            file=sys.stderr,
        )
        return 1
    if found.state is State.ABSENT:
        print(f"not applied, nothing done: SGLang {found.version} at {tree.package}")
    else:
        print(f"reverted: SGLang {found.version} at {tree.package} has its own files again")
    return 0


def status(arguments: argparse.Namespace) -> int:
    tree = find_tree(arguments.root)
    found = patcher.inspect(tree, known_releases())
    print(_sentence(tree, found))
    return 0 if found.state in (State.APPLIED, State.BY_HAND) else 1


def _sentence(tree: SglangTree, found: Status) -> str:
    sentence = f"{found.state.value}: SGLang {found.version} at {tree.package}"
    if found.state is State.UNFINISHED:
        sentence += "; complete it with: ddtree patch apply, undo it with: ddtree patch revert"
    return sentence


def _mismatches(tree: SglangTree, found: Status) -> str | None:
    """Why the plugin, once loaded, would refuse this SGLang; None if it would serve.

    A port in the tree does not load the plugin; what it needs was looked for before it was patched.
    """
    if has_port(tree):
        return None
    report = check_releases(tree.package, tree.version() or found.version)
    return report.summary() if report.mismatches else None


def refuse_what_would_not_serve(tree: SglangTree, found: Status) -> None:
    """A patch behind which the plugin refuses the tree would only look like a success."""
    if mismatches := _mismatches(tree, found):
        raise PatchRefusedError(f"nothing was changed: {mismatches}")


def _print_bytes(data: bytes) -> int:
    """As they are: a diff must survive any locale and any line end."""
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
    return 0
