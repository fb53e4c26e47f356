"""`ddtree doctor`: would DDTREE serve here, and if not, what is to be done?

Two checks take their time and run beside each other in processes of their own: the kernels are tried on
the device, and SGLang loads the plugin as it does when a server starts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from sglang_ddtree_patch import __version__
from sglang_ddtree_patch.launch.doctor import machine as doctor_machine
from sglang_ddtree_patch.launch.doctor import sglang_checks as doctor_sglang
from sglang_ddtree_patch.launch.doctor.check import Check, Status
from sglang_ddtree_patch.launch.doctor.models import check_pair

_EXAMPLE = """\
example:
  ddtree doctor
  ddtree doctor --model-path TARGET --draft DRAFT
  ddtree doctor --root ./unpacked-sglang-wheel

Exit code: 0 if serving would work, 1 if not (the lines marked "problem" say why), 2 for wrong usage.
"""


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="check whether DDTREE would serve on this machine",
        description="Check Python, torch, the GPU, SGLang, the plugin, its kernels, and two models.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model-path", metavar="TARGET", help="target model, checked with the drafter")
    parser.add_argument(
        "--draft", "--speculative-draft-model-path", metavar="DRAFT", dest="speculative_draft_model_path",
        help="its DFlash drafter",
    )  # fmt: skip
    parser.add_argument(
        "--root", type=Path, metavar="DIR",
        help="check contract and patches of the SGLang unpacked there, and nothing of this machine",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the same as a JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    target, draft = arguments.model_path, arguments.speculative_draft_model_path
    if (target is None) != (draft is None):
        print(
            "ddtree doctor: give --model-path and --draft together. "
            "See: ddtree doctor --help", file=sys.stderr,
        )  # fmt: skip
        return 2
    checks = examine_machine() if arguments.root is None else doctor_sglang.check_tree(arguments.root)
    if target is not None:
        checks += check_pair(target, draft)
    if arguments.json:
        print(as_json(checks))
    else:
        print(as_text(checks, max(shutil.get_terminal_size().columns, 80)))
        what = "Serving" if arguments.root is None else "Serving with the SGLang there"
        print(f"\n{what} {verdict(checks)}")
    return 0 if serves(checks) else 1


def examine_machine() -> list[Check]:
    """Everything about this machine, in the order a server would meet it."""
    kernels = doctor_machine.start_kernels_probe()
    patches = doctor_sglang.inspect_installed()
    has_port = patches is not None and patches.is_port
    sglang = doctor_sglang.check_port() if has_port else doctor_sglang.check_installed()
    plugin = None if has_port else doctor_sglang.start_plugin_probe(sglang)
    if plugin is not None:
        print("ddtree doctor: loading SGLang, which takes up to a minute ...", file=sys.stderr, flush=True)
    checks = [
        doctor_machine.check_python(),
        *doctor_machine.check_device_and_kernels(kernels),
        *sglang,
    ]
    if patches is not None:
        checks.append(doctor_sglang.check_patches(patches))
    if not has_port:  # which has no use for the plugin
        checks += doctor_sglang.check_plugin(plugin, is_patched=patches is not None and patches.loads_plugin)
    return [*checks, doctor_machine.check_settings()]


def serves(checks: Sequence[Check]) -> bool:
    return all(check.status is not Status.PROBLEM for check in checks)


def as_text(checks: Sequence[Check], columns: int) -> str:
    """The screen: a line a check, and below it what to do."""
    width = max(len(check.name) for check in checks)
    indent = " " * (width + 13)
    lines = [f"ddtree doctor: sglang-ddtree-patch {__version__}", ""]
    for check in checks:
        start = f"  {check.status:<7}  {check.name:<{width}}  "
        for first, text in ((start, check.found), (f"{indent}-> ", check.advice)):
            lines += textwrap.wrap(
                text, columns, initial_indent=first, subsequent_indent=" " * len(first),
                break_on_hyphens=False, break_long_words=False,
            )  # fmt: skip
    return "\n".join(lines)


def verdict(checks: Sequence[Check]) -> str:
    problems, warnings, untried = (
        sum(check.status is status for check in checks)
        for status in (Status.PROBLEM, Status.WARNING, Status.UNTRIED)
    )
    counted = [
        f"{problems} problem{'' if problems == 1 else 's'}",
        f"{warnings} warning{'' if warnings == 1 else 's'}",
        *([f"{untried} not tried"] if untried else []),
    ]
    return f"would {'work' if serves(checks) else 'not work'}: {', '.join(counted)}."


def as_json(checks: Sequence[Check]) -> str:
    listed = [dataclasses.asdict(check) for check in checks]
    return json.dumps({"version": __version__, "serves": serves(checks), "checks": listed}, indent=2)
