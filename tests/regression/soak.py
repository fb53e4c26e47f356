"""Random requests to random servers, ours against stock SGLang, for as long as you like.

    python tests/regression/soak.py --minutes 30           new seeds every time
    python tests/regression/soak.py --server-seed 7 --seed 7003    one case again, three times over

A server seed makes the settings of one DDTREE server, a seed the requests it is asked (server_settings.py,
workloads.py). Every answer is compared with that of stock SGLang without speculation to the same request
alone; after each case every KV slot must be free again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import threading
import time
import urllib.error
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TESTS / "server"))

from burst import burst_differences  # noqa: E402
from client_view import observe, view_differences  # noqa: E402
from server_settings import STOCK_ENVIRONMENT, ServerSettings, server_settings, stock_arguments  # noqa: E402
from serving import ENVIRONMENT, Oracle, used_tokens  # noqa: E402
from workloads import GENERATE, Call, workload  # noqa: E402

from sglang_ddtree_patch.launch.server_process import ServerProcess, ServerStartError  # noqa: E402
from sglang_ddtree_patch.launch.server_template import ServerTemplate  # noqa: E402

CASES_A_SERVER = 6
CALLS_A_CASE = 10
REPEATS = 3
Say = Callable[[str], None]


@dataclass
class Summary:
    servers: int = 0
    cases: int = 0
    calls: int = 0
    tokens: int = 0
    failures: list[str] = field(default_factory=list)  # one reproducer each


@dataclass(frozen=True)
class Case:
    """Calls, and what the client of a stock server sees of them."""

    seed: int
    calls: list[Call]
    expected: list[dict]


def judged_cases(stock: ServerProcess, settings: ServerSettings, seeds: Iterable[int]) -> Iterator[Case]:
    """A case for each seed; stock answers the next while the caller has the one before."""

    def judged(seed: int) -> Case:
        calls = workload(seed, settings.page, settings.chunk, CALLS_A_CASE)
        return Case(seed, calls, [observe(stock, call, gives_up=False) for call in calls])

    with ThreadPoolExecutor(1) as ahead:
        waiting = None
        for seed in seeds:
            ready, waiting = waiting, ahead.submit(judged, seed)
            if ready is not None:
                yield ready.result()
        if waiting is not None:
            yield waiting.result()


def run_case(ours: OurServer, case: Case) -> CaseResult:
    """Ask our server what stock was asked, compare, and count what is left in the pool."""
    ours.plant(case)
    found = ask_in_time(ours.server, case.calls)
    lines = []
    for index, (call, one, other) in enumerate(zip(case.calls, case.expected, found, strict=True)):
        different = view_differences(call, one, other)
        lines += [f"call {index} {call.path}{line}" for line in different[:8]]
        if different:
            lines.append(f"call {index} was {call}"[:1500])
    left = used_tokens(ours.server)
    if left:
        lines.append(f"{left} KV slots are not given back")
    return CaseResult(lines, len(case.calls), sum(map(completion_tokens, found)))


@dataclass(frozen=True)
class CaseResult:
    differences: list[str]
    calls: int
    tokens: int


def completion_tokens(view: dict) -> int:
    if view.get("usage"):
        return view["usage"]["completion_tokens"]
    return sum((one.get("meta_info") or {}).get("completion_tokens", 0) for one in view.get("choices", ()))


def ask_in_time(server: ServerProcess, calls: list[Call]) -> list[dict]:
    """Send each call its delay after the one before it; the views in the calls' order."""
    views: list[dict | None] = [None] * len(calls)

    def send(index: int) -> None:
        try:
            views[index] = observe(server, calls[index], gives_up=True)
        except (OSError, ValueError) as error:
            views[index] = {"status": f"no answer: {error!r}"}

    threads = []
    for index, call in enumerate(calls):
        time.sleep(call.delay)
        threads.append(threading.Thread(target=send, args=(index,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return views


class OurServer:
    """One DDTREE server of random settings, and the file its planted paths come from."""

    def __init__(self, settings: ServerSettings, launch: Callable, folder: Path):
        self.settings = settings
        self._reference = folder / "planted.json"
        self._reference.write_text("[]")
        environment = settings.environment
        if settings.has_planted_paths:
            environment["DDTREE_TEST_PLANT"] = str(self._reference)
        self.server = ServerProcess(settings.arguments, environment=environment, launcher=launch, grace=0)

    def __enter__(self) -> OurServer:
        self.server.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.server.__exit__(*exception)

    def plant(self, case: Case) -> None:
        """Let the drafts hold what stock answered to prompts that are given as tokens."""
        sequences = []
        for call, view in zip(case.calls, case.expected, strict=True):
            if call.path != GENERATE or view["status"] != 200 or "error" in view:
                continue
            ids = call.payload["input_ids"]
            prompts = [ids] if isinstance(ids[0], int) else ids
            copies = len(view["choices"]) // len(prompts)
            for index, choice in enumerate(view["choices"]):
                sequences.append([*prompts[index // copies], *choice.get("output_ids", [])])
        written = self._reference.with_suffix(".new")
        written.write_text(json.dumps(sequences))
        written.replace(self._reference)


def reproducer(model: str, server_seed: int, seed: int) -> str:
    return f"python tests/regression/soak.py --model {model} --server-seed {server_seed} --seed {seed}"


def run_server(
    template: ServerTemplate, stock: ServerProcess, model: str, server_seed: int, seeds: Iterable[int],
    summary: Summary, say: Say, deadline: float = float("inf"),
) -> None:  # fmt: skip
    """One server through its cases; what fails is added to the summary, and said."""
    settings = server_settings(server_seed, model)
    summary.servers += 1
    say(f"server {server_seed}: {settings}")
    seed = None
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            OurServer(settings, template.launch, Path(folder)) as ours,
        ):
            for case in judged_cases(stock, settings, until(deadline, seeds)):
                seed = case.seed
                result = run_case(ours, case)
                summary.cases += 1
                summary.calls += result.calls
                summary.tokens += result.tokens
                if result.differences:
                    report(result.differences, reproducer(model, server_seed, seed), summary, say)
    except (ServerStartError, OSError, urllib.error.URLError) as error:
        tail = ours.server.log_tail() if seed is not None else ""
        first = server_seed * 1000 if seed is None else seed
        report([f"the server failed: {error}\n{tail}"], reproducer(model, server_seed, first), summary, say)


def run_burst(
    template: ServerTemplate, stock: ServerProcess, options: argparse.Namespace, summary: Summary, say: Say
) -> None:
    """Many requests at once, to one server."""
    settings = server_settings(options.server_seed, options.model)
    say(f"server {options.server_seed}: {settings}")
    with tempfile.TemporaryDirectory() as folder, OurServer(settings, template.launch, Path(folder)) as ours:
        lines = burst_differences(Oracle(stock), ours.server, options.burst)
        left = used_tokens(ours.server)
    if left:
        lines.append(f"{left} KV slots are not given back")
    summary.servers, summary.cases, summary.calls = 1, 1, options.burst
    if lines:
        how = f"python tests/regression/soak.py --burst {options.burst} --server-seed {options.server_seed}"
        report(lines[:9], how, summary, say)


def until(deadline: float, seeds: Iterable[int]) -> Iterator[int]:
    return itertools.takewhile(lambda seed: time.monotonic() < deadline, seeds)


def report(lines: list[str], how: str, summary: Summary, say: Say) -> None:
    for line in lines:
        say(f"    {line}")
    say(f"  FAILED  {how}")
    summary.failures.append(how)


def main() -> int:
    options = parse_options()
    summary, started = Summary(), time.monotonic()
    deadline = started + 60 * options.minutes

    def say(line: str) -> None:
        print(f"{time.monotonic() - started:6.0f} s  {line}", flush=True)

    warm = {**ENVIRONMENT, "PYTHONPATH": str(TESTS / "server" / "planting")}
    with (
        ServerTemplate(warm) as template,
        ServerProcess(
            stock_arguments(options.model), environment=STOCK_ENVIRONMENT, launcher=template.launch, grace=0
        ) as stock,
    ):
        if options.burst:
            run_burst(template, stock, options, summary, say)
        elif options.seed is not None:
            seeds = [options.seed] * REPEATS
            run_server(template, stock, options.model, options.server_seed, seeds, summary, say)
        else:
            server_seed = options.server_seed
            while time.monotonic() < deadline:
                seeds = range(server_seed * 1000, server_seed * 1000 + CASES_A_SERVER)
                run_server(template, stock, options.model, server_seed, seeds, summary, say, deadline)
                say(f"so far {summary.cases} cases, {summary.calls} calls, {len(summary.failures)} failed")
                server_seed += 1
    print(
        f"{summary.servers} servers, {summary.cases} cases, {summary.calls} calls, {summary.tokens} tokens: "
        f"{len(summary.failures)} failed"
    )
    for how in summary.failures:
        print(f"  {how}")
    return 1 if summary.failures else 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="how long new cases are begun (10)")
    parser.add_argument("--model", default="tiny-gqa", choices=["tiny-gqa", "tiny-mla"])
    parser.add_argument("--server-seed", type=int, help="settings of the (first) server; random without it")
    parser.add_argument("--seed", type=int, help="one case of that server, run three times")
    parser.add_argument("--burst", type=int, help="that many short requests at once, instead: 2000")
    options = parser.parse_args()
    if options.seed is not None and options.server_seed is None:
        parser.error("--seed names a case of one server: add --server-seed")
    if options.server_seed is None:
        options.server_seed = int(time.time()) % 1_000_000
    return options


if __name__ == "__main__":
    sys.exit(main())
