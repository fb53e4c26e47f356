"""`ddtree bench serve`: tokens a second, accept length and step time against the number of requests at once.

Servers one after another: `plain` (stock SGLang, no speculation, its own choice of backend and page),
`dflash` (stock DFLASH, the drafter's best chain) and `ddtree` at each width asked for. Every batch size
sends the same prompts in the same order: `--prompts` of them, or one batch if that is more, in batches of
that size. A pass over them without timing comes first, so that prompts are cached, kernels compiled and the
batch size warm. Then each repeat is one pass; batches of a pass add up, and the median pass counts. How a
batch is timed: client.py.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from itertools import cycle, islice
from statistics import median

from sglang_ddtree_patch.errors import ConfigurationError
from sglang_ddtree_patch.launch.bench import run as bench_run
from sglang_ddtree_patch.launch.bench.client import BatchTiming, decode_batch, total
from sglang_ddtree_patch.launch.bench.models import (
    PROMPT_SETS,
    chat_prompts,
    is_random,
    random_tokens,
)
from sglang_ddtree_patch.launch.bench.progress import PointProgress
from sglang_ddtree_patch.launch.bench.record import Record, open_record
from sglang_ddtree_patch.launch.bench.run import Job, Row, Session
from sglang_ddtree_patch.launch.bench.servers import (
    DDTREE,
    DDTREE_AUTO,
    DFLASH,
    PLAIN,
    Contender,
    contender,
)
from sglang_ddtree_patch.launch.server_process import ServerProcess

ALGORITHMS = (PLAIN, DFLASH, DDTREE, DDTREE_AUTO)
KEY = ("model", "algorithm", "width", "temperature", "batch")
COLUMNS = (*KEY, "tokens_per_second", "accept_length", "step_milliseconds")
WARM_TOKENS = 32

_EXAMPLE = """\
example:
  ddtree bench serve --model tiny-gqa --batch 1 8 32 64 --temperature 0 1 --json serve.json
  ddtree bench serve --model Qwen/Qwen3-8B --draft z-lab/Qwen3-8B-DFlash-b16 --width 16 32 --json serve.json
  ddtree bench serve --model qwen3-8b-shapes --prompts 1 --batch 1 --json serve.json

SGLang flags that are not listed above go to every server.
"""


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="tokens a second and step time against the number of requests at once",
        description="Time decoding with plain SGLang, the DFLASH chain and DDTREE, each in its own server.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    bench_run.add_common_options(parser)
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=(PLAIN, DFLASH, DDTREE))
    parser.add_argument(
        "--width", nargs="+", type=int, default=[16], help="rows of ddtree's verify (default: 16)"
    )
    parser.add_argument(
        "--batch", nargs="+", type=int, default=[1, 8, 32], help="requests at once (default: 1 8 32)"
    )
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0], help="(default: 0)")
    parser.add_argument("--prompts", type=int, default=8, help="different prompts (default: %(default)s)")
    parser.add_argument(
        "--prompt-set",
        choices=tuple(PROMPT_SETS),
        default="short",
        help="short: 32 prompts; all: 68, some of them thousands of tokens long (default: %(default)s)",
    )
    parser.add_argument(
        "--prompt-tokens", type=int, default=512, help="length of random prompts (default: %(default)s)"
    )
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens a request (default: %(default)s)")
    parser.set_defaults(run=lambda arguments: bench_run.run("serve", arguments, measure))


def measure(session: Session, arguments: argparse.Namespace) -> int:
    bench_run.check_counts(
        arguments, "batch", "width", "prompts", "prompt_tokens", "new_tokens", "repeats", "page_size"
    )
    if not all(0 <= temperature < math.inf for temperature in arguments.temperature):
        raise ConfigurationError("--temperature must be 0 or more.")
    settings = {
        "prompts": arguments.prompts,
        "new_tokens": arguments.new_tokens,
        "repeats": arguments.repeats,
        "page_size": arguments.page_size,
    }
    is_without_text = is_random(session.subject, session.given)
    if is_without_text:
        settings["random_prompt_tokens"] = arguments.prompt_tokens
    else:
        settings["prompt_set"] = arguments.prompt_set
    record = Record(arguments.json, bench_run.header(session, settings), COLUMNS, KEY)
    open_record(record, arguments.resume)
    most = max(*arguments.batch, arguments.prompts)
    if is_without_text:
        prompts = [random_tokens(session.subject, arguments.prompt_tokens, seed) for seed in range(most)]
    else:
        prompts = chat_prompts(session.subject, most, arguments.prompt_set)

    def measure_row(server: ServerProcess, _: Contender, point: Row) -> Row:
        batches = make_batches(prompts, point["batch"], arguments.prompts)
        with session.progress(point, sum(map(len, batches))) as progress:
            return time_batches(session, server, batches, point["temperature"], arguments, progress)

    return bench_run.measure_jobs(
        session, record, plan_jobs(session, arguments), max(arguments.batch), measure_row
    )


def plan_jobs(session: Session, arguments: argparse.Namespace) -> list[Job]:
    """Servers in the order of `--algorithms`, one for each width of ddtree; ddtree-auto has the largest."""
    widths = {DDTREE: arguments.width, DDTREE_AUTO: [max(arguments.width)]}
    jobs = []
    for algorithm in arguments.algorithms:
        for width in widths.get(algorithm, [1]):
            server = contender(algorithm, width, session.subject, arguments.page_size, session.on_cpu)
            points = [
                {
                    "model": session.subject.name,
                    "algorithm": algorithm,
                    "width": server.width,
                    "temperature": temperature,
                    "batch": batch,
                }
                for temperature in arguments.temperature
                for batch in arguments.batch
            ]
            jobs.append(Job(server, points))
    return jobs


def make_batches(prompts: Sequence[list[int]], batch: int, count: int) -> list[list[list[int]]]:
    """At least `count` prompts in whole batches; they come round again where there are too few."""
    batches = -(-count // batch)
    in_order = islice(cycle(prompts), batches * batch)
    return [list(islice(in_order, batch)) for _ in range(batches)]


def time_batches(
    session: Session,
    server: ServerProcess,
    batches: Sequence[Sequence[list[int]]],
    temperature: float,
    arguments: argparse.Namespace,
    progress: PointProgress,
) -> Row:
    """The measured columns: a pass that warms, then the median of the repeats."""

    def one_pass(name: str, new_tokens: int) -> BatchTiming:
        progress.begin(name)
        timings = []
        for batch in batches:
            timings.append(
                decode_batch(
                    server, batch, new_tokens=new_tokens, temperature=temperature, budget=session.budget,
                    watch=progress.tokens,
                )
            )  # fmt: skip
            progress.batch_is_done(len(batch))
        return total(timings)

    one_pass("warming up", min(WARM_TOKENS, arguments.new_tokens))
    repeats = arguments.repeats
    passes = [one_pass(f"repeat {n} of {repeats}", arguments.new_tokens) for n in range(1, repeats + 1)]
    return {
        "tokens_per_second": round(median(timing.tokens_per_second for timing in passes), 2),
        "accept_length": round(median(timing.accept_length for timing in passes), 3),
        "step_milliseconds": round(median(timing.step_milliseconds for timing in passes), 4),
    }
