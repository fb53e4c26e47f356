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

from sglang_ddtree_patch.errors import ConfigurationError
from sglang_ddtree_patch.launch.doctor.models import looks_local
from sglang_ddtree_patch.launch.serve_defaults import (
    DRAFT_FLAGS,
    PAGE_SIZE,
    TARGET_FLAGS,
    WIDEST_DEFAULT,
    Default,
    choose_defaults,
    first_given,
    is_ddtree,
)
from sglang_ddtree_patch.launch.server_process import CPU_ENVIRONMENT
from sglang_ddtree_patch.launch.sglang_install import has_accelerator, require_sglang
from sglang_ddtree_patch.settings import (
    ALGORITHM,
    AUTO,
    CANDIDATES_VARIABLE,
    DEFAULT_WIDTH,
    FIXED,
    KERNEL_VARIABLE,
    KERNELS,
    WIDTHS_VARIABLE,
)

# Short names of ours, and what SGLang calls the same.
SHORT_FLAGS = {
    "draft": ("PATH", "--speculative-draft-model-path", "the DFlash drafter"),
    "width": (
        "N",
        "--speculative-num-draft-tokens",
        f"rows of the verify block, root included (default: {DEFAULT_WIDTH} to {WIDEST_DEFAULT}, by the "
        "target's heads)",
    ),
    "block": ("N", "--speculative-dflash-block-size", "positions the drafter proposes, root included"),
}
SHORT_VARIABLES = {
    "candidates": ("K", CANDIDATES_VARIABLE, "candidates kept at each position"),
    "widths": ("WAY", WIDTHS_VARIABLE, f"how wide trees are: {FIXED} (--width) or {AUTO} (at most that)"),
    "kernel": ("NAME", KERNEL_VARIABLE, f"tree attention: {AUTO} or one of {', '.join(KERNELS)}"),
}

_EXAMPLE = f"""\
example:
  ddtree serve --model-path Qwen/Qwen3-8B --draft z-lab/Qwen3-8B-DFlash-b16 --width 33
  ddtree serve --model-path TARGET --draft DRAFT --tp-size 16 --nnodes 2 --node-rank 0 \\
      --dist-init-addr HOST:PORT

Every flag of sglang.launch_server is taken, and a flag you give is never changed. What you leave open is
filled in and printed with the reason: algorithm, attention backend, page size ({PAGE_SIZE}), tree width, the
drafter's window, and the CPU platform where torch sees no accelerator. This process then becomes
sglang.launch_server. On several nodes, type the same on each.
"""


@dataclass(frozen=True)
class ServerPlan:
    """What is started: SGLang flags, and variables to set on top of the environment."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    filled: tuple[Default, ...]  # the part of `arguments` that the user did not give

    def command(self) -> str:
        """The same server as a line for a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        words = [sys.executable, "-m", "sglang.launch_server", *self.arguments]
        return " ".join([*variables, shlex.join(words)])

    def explanation(self) -> str:
        """A line for each flag that was filled in."""
        width = max((len(f"{default.flag} {default.value}") for default in self.filled), default=0)
        return "\n".join(f"  {f'{d.flag} {d.value}':<{width}}  {d.reason}" for d in self.filled)


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="start an SGLang server with DDTREE",
        description="Start an SGLang server with DDTREE and the ddtree-verify attention backend.",
        usage="ddtree serve --model-path TARGET --draft DRAFT [SGLang flags]",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for name, (metavar, same_as, words) in {**SHORT_FLAGS, **SHORT_VARIABLES}.items():
        parser.add_argument(f"--{name}", metavar=metavar, help=f"{words}; short for {same_as}")
    parser.add_argument(
        "--print-command", action="store_true", help="print the command that would run, and stop"
    )
    parser.set_defaults(run=run, takes_sglang_flags=True)


def run(arguments: argparse.Namespace) -> int:
    short = {name: value for name in SHORT_FLAGS if (value := getattr(arguments, name)) is not None}
    variables = {
        variable: value
        for name, (_, variable, _) in SHORT_VARIABLES.items()
        if (value := getattr(arguments, name)) is not None
    }
    flags = [*long_flags(short), *arguments.sglang_flags]
    try:
        wrong = twice_given(short, arguments.sglang_flags) or missing_flag(flags) or missing_model(flags)
    except ConfigurationError as error:
        wrong = str(error)
    if wrong is not None:
        print(f"ddtree serve: {wrong} See: ddtree serve --help", file=sys.stderr)
        return 2
    device_is_open = flag_value(flags, "--device") is None and "SGLANG_PLATFORM" not in os.environ
    plan = plan_server(flags, variables, on_cpu=device_is_open and not has_accelerator())
    if arguments.print_command:
        print(plan.command())
        return 0
    if not require_sglang("serve"):
        return 1
    if plan.filled:
        print(f"ddtree serve: filled in\n{plan.explanation()}")
    print(f"ddtree serve: {plan.command()}", flush=True)
    return become_server(plan)


def become_server(plan: ServerPlan) -> NoReturn:
    os.execve(
        sys.executable,
        [sys.executable, "-m", "sglang.launch_server", *plan.arguments],
        {**os.environ, **plan.environment},
    )


def plan_server(
    flags: Sequence[str], variables: Mapping[str, str] | None = None, *, on_cpu: bool
) -> ServerPlan:
    """Fill in what the flags leave open. What is decided here can be read and tested alone."""
    filled = choose_defaults(given_flags(flags), on_cpu=on_cpu)
    # Ours stand first: where a flag is given twice, or shortened, the later one wins.
    added = itertools.chain.from_iterable((default.flag, default.value) for default in filled)
    environment = {**(CPU_ENVIRONMENT if on_cpu else {}), **(variables or {})}
    return ServerPlan((*added, *flags), environment, filled)


def long_flags(short: Mapping[str, str]) -> list[str]:
    """Our short flags as SGLang's own."""
    return [word for name, value in short.items() for word in (SHORT_FLAGS[name][1], value)]


def twice_given(short: Mapping[str, str], flags: Sequence[str]) -> str | None:
    """What to say when a short flag and SGLang's own name for it are both there."""
    given = given_flags(flags)
    for name in short:
        if SHORT_FLAGS[name][1] in given:
            return f"--{name} is short for {SHORT_FLAGS[name][1]}: give one of them."
    return None


def missing_flag(flags: Sequence[str]) -> str | None:
    """What to say when a flag is missing that no server can do without, before SGLang is imported."""
    given = given_flags(flags)
    config = flag_value(flags, "--config")
    lacks_target = not first_given(given, TARGET_FLAGS)
    lacks_draft = is_ddtree(given) and not first_given(given, DRAFT_FLAGS)
    if config is not None and not Path(config).is_file() and (lacks_target or lacks_draft):
        return f"--config {config} is no file."
    if lacks_target:
        return "no target model: add --model-path PATH."
    if lacks_draft:
        return f"{ALGORITHM} needs a DFlash drafter: add --draft PATH (--speculative-draft-model-path)."
    return None


def missing_model(flags: Sequence[str]) -> str | None:
    """What to say of a model's path where nothing is; names and URLs are left to SGLang."""
    given = given_flags(flags)
    for name in (*TARGET_FLAGS, *DRAFT_FLAGS):
        path = given.get(name, "")
        if looks_local(path) and not Path(path).exists():
            return f"{name} {path}: nothing is there. Give a model's folder, or its Hugging Face name."
    return None


def given_flags(flags: Sequence[str]) -> dict[str, str]:
    """Flags by name, with those of a --config file."""
    return {**flags_in_config(flag_value(flags, "--config")), **named_flags(flags)}


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
    """Top-level scalar settings of SGLang's --config YAML as flags, so that they count as given.

    Raises:
        ConfigurationError: it is no text.
    """
    if path is None:
        return {}
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError:  # said by missing_flag where something is missing then, else by SGLang
        return {}
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"--config {path} is no text: give a YAML file.") from error
    settings = re.findall(r"^([A-Za-z][\w-]*)[ \t]*:[ \t]*([^#\n]*)", text, re.MULTILINE)
    return {f"--{name.replace('_', '-')}": value.strip().strip("'\"") for name, value in settings}
