"""What `ddtree bench serve` and `ddtree bench context` share: options, and one server after another.

Each contender's server is started alone, asked for the points that the results file lacks, and killed.
One at a time, because two would share the GPU while one is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sglang_ddtree_patch import __version__
from sglang_ddtree_patch.errors import ConfigurationError
from sglang_ddtree_patch.launch.bench.ceilings import CeilingsUnknown
from sglang_ddtree_patch.launch.bench.models import Subject, choose_subject
from sglang_ddtree_patch.launch.bench.progress import PointProgress
from sglang_ddtree_patch.launch.bench.record import Record
from sglang_ddtree_patch.launch.bench.servers import Contender, server_environment, server_flags
from sglang_ddtree_patch.launch.run_folder import RunFolder, exit_on_signals, run_folder
from sglang_ddtree_patch.launch.server_process import (
    CPU_ENVIRONMENT,
    Launcher,
    ServerProcess,
    ServerStartError,
    launch_python,
)
from sglang_ddtree_patch.launch.server_template import ServerTemplate
from sglang_ddtree_patch.launch.sglang_client import Budget, BudgetSpent, NotMeasured, ServerLost
from sglang_ddtree_patch.launch.sglang_install import has_accelerator, require_sglang
from sglang_ddtree_patch.launch.terminal import LiveLine
from sglang_ddtree_patch.settings import MAX_WIDTH

Row = dict[str, Any]
# (server, who it is, the columns that name a point) -> the other columns
Measure = Callable[[ServerProcess, Contender, Row], Row]
VERSIONED = ("sglang", "torch", "triton")
START_SECONDS = 900.0


@dataclass(frozen=True)
class Job:
    """A contender and the points to measure on it: the columns of a row that name it."""

    contender: Contender
    points: list[Row]


@dataclass
class Session:
    """One run of a benchmark command."""

    command: str  # "serve" or "context"
    subject: Subject
    given: tuple[str, ...]  # SGLang flags from the command line
    budget: Budget
    on_cpu: bool
    folder: RunFolder  # logs, and configs of shapes
    launcher: Launcher
    view: LiveLine

    def say(self, line: str) -> None:
        self.view.line(line)

    def progress(self, point: Row, prompts: int) -> PointProgress:
        """Shows how far this point is, while it is measured."""
        return PointProgress(self.view, name_of(point), prompts)

    def log_of(self, contender: Contender) -> Path:
        return self.folder.path / f"{contender.algorithm}-{contender.width}.log"

    @contextlib.contextmanager
    def serve(self, contender: Contender, most_requests: int) -> Iterator[ServerProcess]:
        """A ready server of the contender; killed at once afterwards, it holds nothing worth saving."""
        server = ServerProcess(
            server_flags(contender, self.subject, self.given, most_requests, self.on_cpu),
            environment=server_environment(contender, self.on_cpu),
            log_path=self.log_of(contender),
            ready_timeout=self.budget.timeout(START_SECONDS),
            launcher=self.launcher,
            grace=0,
            progress=self.view.progress,
        )
        self.say(f"{contender}: starting, log in {server.log_path}")
        with server:
            self.say(f"{contender}: ready after {server.ready_seconds:.0f} s")
            yield server


def add_common_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        required=True,
        help="a committed model (tiny-gqa), a shape with random weights (qwen3-8b-shapes), or a target's "
        "folder or Hugging Face name",
    )
    parser.add_argument("--draft", help="its DFlash drafter, where --model does not bring one")
    parser.add_argument("--name", help="what rows call the model (default: the last part of --model)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here, after each point")
    parser.add_argument("--resume", action="store_true", help="go on with FILE: measure what it lacks")
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="stop after this long and keep what there is"
    )
    parser.add_argument(
        "--page-size", type=int, default=64, help="of dflash and ddtree (default: %(default)s)"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="timings a point; the median counts (default: %(default)s)"
    )
    # SGLang flags that the command does not know itself go to every server.
    parser.set_defaults(takes_sglang_flags=True)


def run(
    command: str, arguments: argparse.Namespace, measure: Callable[[Session, argparse.Namespace], int]
) -> int:
    """Set a session up and hand it to the command's own part; returns the exit code."""
    if arguments.budget is not None and not arguments.budget > 0:
        print(f"ddtree bench {command}: --budget must be above 0.", file=sys.stderr)
        return 2
    if not require_sglang(f"bench {command}"):
        return 1
    exit_on_signals()
    try:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(run_folder("bench"))
            session = Session(
                command=command,
                subject=choose_subject(arguments.model, arguments.draft, arguments.name, folder.path),
                given=tuple(arguments.sglang_flags),
                budget=Budget(arguments.budget),
                on_cpu=not has_accelerator(),
                folder=folder,
                launcher=launch_python,
                view=LiveLine(is_shy=True),
            )
            if session.on_cpu:
                session.launcher = stack.enter_context(ServerTemplate(CPU_ENVIRONMENT)).launch
            return measure(session, arguments)
    except ConfigurationError as error:
        print(f"ddtree bench {command}: {error}", file=sys.stderr)
        return 2
    except CeilingsUnknown as error:
        print(f"ddtree bench {command}: {error}", file=sys.stderr)
        return 1


def check_counts(arguments: argparse.Namespace, *names: str) -> None:
    """Refuse counts below 1, and trees wider than there are.

    Raises:
        ConfigurationError: names the first such option.
    """
    for name in names:
        values = getattr(arguments, name)
        values = values if isinstance(values, list) else [values]
        if min(values) < 1:
            raise ConfigurationError(f"--{name.replace('_', '-')} must be at least 1.")
        if name == "width" and max(values) > MAX_WIDTH:
            raise ConfigurationError(f"--width must be at most {MAX_WIDTH}.")


def header(session: Session, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What stands above the rows. `settings` is what must be the same for rows to be comparable."""
    return {
        "device": device_name(session.on_cpu),
        "versions": {
            "sglang-ddtree-patch": __version__,
            **{name: importlib.metadata.version(name) for name in VERSIONED},
        },
        "command": shlex.join(["ddtree", *sys.argv[1:]]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "settings": {
            **settings,
            "sglang_flags": [*session.subject.flags, *session.given],
            **({"environment": chosen} if (chosen := our_environment()) else {}),
        },
    }


def our_environment() -> dict[str, str]:
    """Settings of this package that the servers inherit."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("SGLANG_DDTREE_")}


def device_name(on_cpu: bool) -> str:
    if on_cpu:
        return f"CPU ({platform.machine()}, {os.cpu_count()} cores)"
    import torch

    return torch.cuda.get_device_name()


def measure_jobs(
    session: Session,
    record: Record,
    jobs: Sequence[Job],
    most_requests: int,
    measure: Measure,
) -> int:
    """Measure every point the record lacks.

    Returns the exit code: 0 if the end was reached or the budget was, 1 if a server failed, 130 for Ctrl-C.
    """
    failed = False
    try:
        for job in jobs:
            points = [point for point in job.points if not record.holds(point)]
            if not points:
                session.say(f"{job.contender}: nothing left to measure")
                continue
            try:
                with session.serve(job.contender, most_requests) as server:
                    for point in points:
                        measure_point(session, record, server, job.contender, point, measure)
            except (ServerStartError, ServerLost) as error:
                session.budget.check()
                failed = True
                session.folder.keep()
                session.view.end_progress()
                print(
                    f"ddtree bench {session.command}: {job.contender}: {error}\n"
                    f"All of its log stays in {session.log_of(job.contender)}",
                    file=sys.stderr,
                    flush=True,
                )
    except BudgetSpent:
        session.say(f"The budget is spent. {missing(record, jobs)}")
    except KeyboardInterrupt:
        session.say(f"\nStopped. {missing(record, jobs)}")
        return 130
    return 1 if failed else 0


def measure_point(
    session: Session,
    record: Record,
    server: ServerProcess,
    contender: Contender,
    point: Row,
    measure: Measure,
) -> None:
    """Measure one point, keep it and say so; one that cannot be measured is only said."""
    named = name_of(point)
    started = time.monotonic()
    try:
        row = {**point, **measure(server, contender, point)}
    except NotMeasured as error:
        session.say(f"  {named}: not measured: {error}")
        return
    record.add(row)
    session.say(
        f"  {named}: {row['tokens_per_second']:.1f} tok/s, {row['accept_length']:.2f} accepted, "
        f"{row['step_milliseconds']:.3f} ms a step (took {time.monotonic() - started:.1f} s)"
    )


def name_of(point: Row) -> str:
    """What sets it apart from the other points of its server."""
    return ", ".join(f"{name} {value}" for name, value in point.items() if name not in ("model", "width"))


def missing(record: Record, jobs: Sequence[Job]) -> str:
    """How far a run came that ended early, and how to go on."""
    points = [point for job in jobs for point in job.points]
    done = sum(record.holds(point) for point in points)
    text = f"{done} of {len(points)} points are measured"
    if record.path is None:
        return f"{text}; there is no --json to keep them in."
    return f"{text}, in {record.path}. The same command with --resume measures the rest."
