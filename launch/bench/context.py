"""`ddtree bench context`: how a step grows with context, and how much of the memory limit it reaches.

One request at a time. Contexts are prefixes of one text, shortest first, so that each server prefills the
longest one once: a request of a few tokens caches the prefix and warms the decode, then the same prompt
again finds all but its last page in the radix cache, and what is timed is decoding (client.py says
how). Contexts beyond what the model can hold are clipped to its longest.

kv_bytes is what a step has to read of target and drafter (kv_bytes.py). limit_fraction is the time that
takes at the device's copy rate, measured before the first server starts, over the step's time; it is null
where there is no NVIDIA GPU. Weights are not in it: it says how near a step is to costing only its context.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from sglang_ddtree_patch.errors import ConfigurationError
from sglang_ddtree_patch.launch.bench import run as bench_run
from sglang_ddtree_patch.launch.bench.ceilings import measure_ceilings
from sglang_ddtree_patch.launch.bench.client import BatchTiming, cache_prompt, decode_batch
from sglang_ddtree_patch.launch.bench.models import is_random, long_text, random_tokens
from sglang_ddtree_patch.launch.bench.progress import PointProgress
from sglang_ddtree_patch.launch.bench.record import Record, open_record, write_whole
from sglang_ddtree_patch.launch.bench.run import Job, Row, Session
from sglang_ddtree_patch.launch.bench.servers import (
    DDTREE,
    DFLASH,
    DFLASH_TRITON_PAGE1,
    PLAIN,
    Contender,
    contender,
    server_flags,
)
from sglang_ddtree_patch.launch.kv_bytes import element_bytes, kv_bytes_a_step, tensor_parallel_size
from sglang_ddtree_patch.launch.serve import named_flags
from sglang_ddtree_patch.launch.server_process import ServerProcess
from sglang_ddtree_patch.launch.sglang_client import read_json
from sglang_ddtree_patch.launch.token_counts import parse_tokens, shown_tokens

ALGORITHMS = (PLAIN, DFLASH, DDTREE, DFLASH_TRITON_PAGE1)
CONTEXTS = [1024, 4096, 16384, 65536, 131072, 189440]
KEY = ("model", "algorithm", "context")
COLUMNS = (
    "model", "algorithm", "backend", "page_size", "context", "step_milliseconds", "tokens_per_second",
    "accept_length", "kv_bytes", "limit_fraction",
)  # fmt: skip
HEADINGS = (
    "context", "algorithm", "backend", "page", "step ms", "tok/s", "accepted", "KV MB a step", "GB/s",
    "of the limit",
)  # fmt: skip
SEED = 0
# Positions that SGLang wants free behind the last token.
SPARE_POSITIONS = 16

_EXAMPLE = """\
example:
  ddtree bench context --model qwen3-8b-shapes --json context.json
  ddtree bench context --model tiny-gqa --contexts 512 1k 2k

SGLang flags that are not listed above go to every server.
"""


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "context",
        help="step time and the share of the memory limit against context length",
        description="Time a step at growing context of plain SGLang, the DFLASH chain, DDTREE, and the chain "
        "on the stock Triton backend at page 1, each in a server of its own.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    bench_run.add_common_options(parser)
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=ALGORITHMS)
    parser.add_argument(
        "--width", type=int, default=16, help="rows of ddtree's verify (default: %(default)s)"
    )
    parser.add_argument(
        "--contexts",
        nargs="+",
        type=parse_tokens,
        default=CONTEXTS,
        metavar="TOKENS",
        help="prompt lengths, such as 1k 16k or 1024 16384 (default: "
        f"{' '.join(map(shown_tokens, CONTEXTS))})",
    )
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens a timing (default: %(default)s)")
    parser.add_argument(
        "--point-seconds",
        type=float,
        default=20,
        help="start no further repeat of a point after this long (default: %(default)s)",
    )
    parser.set_defaults(run=lambda arguments: bench_run.run("context", arguments, measure))


def measure(session: Session, arguments: argparse.Namespace) -> int:
    bench_run.check_counts(arguments, "width", "new_tokens", "repeats", "page_size")
    settings = {
        "width": arguments.width,
        "new_tokens": arguments.new_tokens,
        "repeats": arguments.repeats,
        "page_size": arguments.page_size,
    }
    record = Record(arguments.json, bench_run.header(session, settings), COLUMNS, KEY)
    open_record(record, arguments.resume)
    contexts = clip(arguments.contexts, longest_prompt(session, arguments.new_tokens))
    if is_random(session.subject, session.given):
        text = random_tokens(session.subject, contexts[-1], SEED)
    else:
        text = long_text(session.subject, contexts[-1])
    jobs = plan_jobs(session, arguments, contexts)
    if not session.on_cpu and "ceilings" not in record.header:
        record.header["ceilings"] = measure_ceilings()

    def measure_row(server: ServerProcess, served: Contender, point: Row) -> Row:
        with session.progress(point, 1) as progress:
            timed = time_context(session, server, text[: point["context"]], arguments, progress)
        return timed | cost(session, served, server, point["context"], timed["step_milliseconds"], record)

    code = bench_run.measure_jobs(session, record, jobs, 1, measure_row)
    table = markdown(record)
    session.say("\n" + table)
    if record.path is not None:
        write_whole(record.path.with_suffix(".md"), table)
    return code


def plan_jobs(session: Session, arguments: argparse.Namespace, contexts: Sequence[int]) -> list[Job]:
    jobs = []
    for algorithm in arguments.algorithms:
        server = contender(algorithm, arguments.width, session.subject, arguments.page_size, session.on_cpu)
        read_bytes(session, server, contexts[0])  # refused here rather than after the first timing
        name = {"model": session.subject.name, "algorithm": algorithm}
        jobs.append(Job(server, [{**name, "context": context} for context in contexts]))
    return jobs


def longest_prompt(session: Session, new_tokens: int) -> int:
    """The most tokens a prompt may have if `new_tokens` are to follow."""
    positions = session.subject.target_config().context_length
    asked = named_flags(session.given).get("--context-length")
    return min(positions, int(asked or positions)) - new_tokens - SPARE_POSITIONS


def clip(contexts: Sequence[int], longest: int) -> list[int]:
    """The contexts in order, those beyond the longest replaced by it once.

    Raises:
        ConfigurationError: the model holds no prompt at all.
    """
    if longest < 1:
        raise ConfigurationError("the model's context holds no prompt beside --new-tokens: lower them.")
    return sorted({min(context, longest) for context in contexts})


def time_context(
    session: Session,
    server: ServerProcess,
    prompt: list[int],
    arguments: argparse.Namespace,
    progress: PointProgress,
) -> dict[str, float]:
    progress.begin("caching the prefix")
    spent = cache_prompt(server, prompt, session.budget)
    session.say(f"  context {len(prompt)}: prefix cached in {spent:.1f} s")
    started = time.monotonic()
    timings: list[BatchTiming] = []
    while len(timings) < arguments.repeats:
        if timings and time.monotonic() - started > arguments.point_seconds:
            break
        progress.begin(f"repeat {len(timings) + 1} of {arguments.repeats}")
        timings.append(
            decode_batch(
                server, [prompt], new_tokens=arguments.new_tokens, temperature=0, budget=session.budget,
                watch=progress.tokens,
            )
        )  # fmt: skip
    return {
        "step_milliseconds": round(median(timing.step_milliseconds for timing in timings), 4),
        "tokens_per_second": round(median(timing.tokens_per_second for timing in timings), 2),
        "accept_length": round(median(timing.accept_length for timing in timings), 3),
    }


def cost(
    session: Session,
    served: Contender,
    server: ServerProcess,
    context: int,
    milliseconds: float,
    record: Record,
) -> dict[str, Any]:
    """The columns that say which server it was and what its step had to read."""
    info = read_json(server, "/server_info")
    read = read_bytes(session, served, context)
    fraction = None
    if "ceilings" in record.header:
        fraction = round(read / record.header["ceilings"]["copy_gb_s"] / 1e6 / milliseconds, 4)
    return {
        "backend": info["decode_attention_backend"] or info["attention_backend"],
        "page_size": info["page_size"],
        "kv_bytes": read,
        "limit_fraction": fraction,
    }


def read_bytes(session: Session, served: Contender, context: int) -> int:
    """KV that one step of this server reads on one GPU, the drafter's included."""
    subject = session.subject
    flags = named_flags(server_flags(served, subject, session.given, 1, session.on_cpu))
    tp_size = tensor_parallel_size(flags)
    models = [subject.target_config()]
    if served.width > 1:
        models.append(subject.draft_config())
    return sum(kv_bytes_a_step(model, context, element_bytes(model, flags), tp_size) for model in models)


def markdown(record: Record) -> str:
    """The rows as a table, by context and then in the order measured."""
    lines = [
        f"{record.header['device']}, {record.header['date']}",
        "",
        f"| {' | '.join(HEADINGS)} |",
        "|---:|---|---|" + "---:|" * 7,
    ]
    for row in sorted(record.rows, key=lambda row: row["context"]):
        rate = row["kv_bytes"] / row["step_milliseconds"] / 1e6
        share = "" if row["limit_fraction"] is None else f"{row['limit_fraction']:.1%}"
        lines.append(
            f"| {row['context']} | {row['algorithm']} | {row['backend']} | {row['page_size']} "
            f"| {row['step_milliseconds']:.2f} | {row['tokens_per_second']:.1f} | {row['accept_length']:.2f} "
            f"| {row['kv_bytes'] / 1e6:.1f} | {rate:.1f} | {share} |"
        )
    return "\n".join(lines) + "\n"
