"""`ddtree serve`: SGLang's own server with DDTREE's flags filled in where the user left them out.

This process becomes `python -m sglang.launch_server`, so signals, exit code and log are SGLang's.
"""

import argparse
import itertools
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from sglang_ddtree_patch.launch.server_process import CPU_ENVIRONMENT
from sglang_ddtree_patch.launch.sglang_install import has_accelerator, require_sglang
from sglang_ddtree_patch.settings import ALGORITHM, BACKEND

PAGE_SIZE = "64"

_EXAMPLE = """\
example:
  ddtree serve --model-path Qwen/Qwen3-8B --speculative-draft-model-path z-lab/Qwen3-8B-DFlash-b16 \\
      --speculative-num-draft-tokens 33

Every flag of sglang.launch_server is taken, and a flag you give is never changed. Filled in if absent:
  --speculative-algorithm DDTREE --attention-backend ddtree-verify --page-size 64
and where torch sees no accelerator: --device cpu --dtype float32, with SGLANG_PLATFORM=ddtree_cpu and
TRITON_INTERPRET=1 in the environment: exact and slow, for trying things out.
"""


@dataclass(frozen=True)
class ServerPlan:
    """What is started: SGLang flags, and variables to set on top of the environment."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    filled: tuple[str, ...]  # the part of `arguments` that the user did not give

    def command(self) -> str:
        """The same server as a line for a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        words = [sys.executable, "-m", "sglang.launch_server", *self.arguments]
        return " ".join([*variables, shlex.join(words)])


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="start an SGLang server with DDTREE",
        description="Start an SGLang server with DDTREE and the ddtree-verify attention backend.",
        usage="ddtree serve --model-path TARGET --speculative-draft-model-path DRAFT [SGLang flags]",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--print-command", action="store_true", help="print the command that would run, and stop"
    )
    parser.set_defaults(run=run, takes_sglang_flags=True)


def run(arguments: argparse.Namespace) -> int:
    flags = arguments.sglang_flags
    missing = missing_flag(flags)
    if missing is not None:
        print(f"ddtree serve: {missing} See: ddtree serve --help", file=sys.stderr)
        return 2
    device_is_open = flag_value(flags, "--device") is None and "SGLANG_PLATFORM" not in os.environ
    plan = plan_server(flags, on_cpu=device_is_open and not has_accelerator())
    if arguments.print_command:
        print(plan.command())
        return 0
    if not require_sglang("serve"):
        return 1
    print(f"ddtree serve: filled in {' '.join(plan.filled) or 'nothing'}")
    print(f"ddtree serve: {plan.command()}", flush=True)
    return become_server(plan)


def become_server(plan: ServerPlan) -> NoReturn:
    os.execve(
        sys.executable,
        [sys.executable, "-m", "sglang.launch_server", *plan.arguments],
        {**os.environ, **plan.environment},
    )


def plan_server(flags: Sequence[str], *, on_cpu: bool) -> ServerPlan:
    """Fill in what the flags leave open. Pure: what is decided here can be read and tested alone."""
    given = {**flags_in_config(flag_value(flags, "--config")), **named_flags(flags)}
    filled = ["--device", "cpu"] if on_cpu and "--device" not in given else []
    if on_cpu and "--dtype" not in given:
        # bf16 sends SGLang's drafter through kernels that a CPU can only interpret: ten times slower.
        filled += ["--dtype", "float32"]
    if given.get("--speculative-algorithm", ALGORITHM).upper() == ALGORITHM:
        for name, value in (
            ("--speculative-algorithm", ALGORITHM),
            ("--attention-backend", BACKEND),
            ("--page-size", PAGE_SIZE),
        ):
            if name not in given:
                filled += [name, value]
    # Ours stand first: where a flag is given twice, or shortened, the later one wins.
    return ServerPlan((*filled, *flags), CPU_ENVIRONMENT if on_cpu else {}, tuple(filled))


def missing_flag(flags: Sequence[str]) -> str | None:
    """What to say when a flag is missing that no server can do without, before SGLang is imported."""
    given = {**flags_in_config(flag_value(flags, "--config")), **named_flags(flags)}
    if not {"--model-path", "--model"} & given.keys():
        return "no target model: add --model-path PATH."
    is_ddtree = given.get("--speculative-algorithm", ALGORITHM).upper() == ALGORITHM
    if is_ddtree and not {"--speculative-draft-model-path", "--speculative-draft-model"} & given.keys():
        return f"{ALGORITHM} needs a DFlash drafter: add --speculative-draft-model-path PATH."
    return None


def named_flags(flags: Sequence[str]) -> dict[str, str]:
    """Each flag's first value ("" if it has none), from `--name value` and `--name=value` alike."""
    values = {}
    for flag, following in itertools.pairwise([*flags, "--"]):
        if flag.startswith("--"):
            name, equals, value = flag.partition("=")
            values[name] = value if equals or following.startswith("--") else following
    return values


def flag_value(flags: Sequence[str], name: str) -> str | None:
    return named_flags(flags).get(name)


def flags_in_config(path: str | None) -> dict[str, str]:
    """Top-level scalar settings of SGLang's --config YAML as flags, so that they count as given."""
    if path is None or not Path(path).is_file():
        return {}
    settings = re.findall(r"^([A-Za-z][\w-]*)[ \t]*:[ \t]*([^#\n]*)", Path(path).read_text(), re.MULTILINE)
    return {f"--{name.replace('_', '-')}": value.strip().strip("'\"") for name, value in settings}
