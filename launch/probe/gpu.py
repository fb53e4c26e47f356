"""`ddtree probe gpu`: does the GPU work while a server prefills and decodes, or is a kernel merely resident?

At each context length one request prefills a prompt that is in no cache, then the same prompt is decoded
from its cached prefix for a few seconds. Meanwhile NVML is read, where the server's GPUs are this machine's.
A step's KV bytes over its time, against the device's copy rate, is the measure that needs no NVML. Beside it
stands the growth: bytes and time beyond those of the shortest context, which takes weights and launches out.
"""

from __future__ import annotations

import argparse
import socket
import time
import urllib.parse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sglang_ddtree_patch.errors import ConfigurationError
from sglang_ddtree_patch.launch.bench.ceilings import CeilingsUnknown, measure_copy_rate
from sglang_ddtree_patch.launch.bench.client import BatchTiming, steady_window, total
from sglang_ddtree_patch.launch.bench.record import Record
from sglang_ddtree_patch.launch.probe import gpu_verdict
from sglang_ddtree_patch.launch.probe import run as probe_run
from sglang_ddtree_patch.launch.probe.answer import Answer, ask
from sglang_ddtree_patch.launch.probe.gpu_sampler import FIELDS, Gpus, Load, Sampler, load_of, local_gpus
from sglang_ddtree_patch.launch.probe.gpu_view import GpuView
from sglang_ddtree_patch.launch.probe.kv import KvBytes, find_models
from sglang_ddtree_patch.launch.probe.server import ServerFacts
from sglang_ddtree_patch.launch.probe.text import PromptMaker, prompt_maker
from sglang_ddtree_patch.launch.sglang_client import NotMeasured, ServerLost, SGLangClient
from sglang_ddtree_patch.launch.sglang_install import has_accelerator
from sglang_ddtree_patch.launch.terminal import LiveLine

PREFILL, DECODE = "prefill", "decode"
COLUMNS = (
    "phase", "context", "prompt_tokens", "tokens", "seconds", "tokens_per_second", "step_milliseconds",
    "accept_length", "kv_bytes", "kv_gb_s", "limit_fraction", "growth_gb_s", "growth_fraction",
    "gpus", *FIELDS, "verdict", "because",
)  # fmt: skip
# A first answer says how fast the server is; those that are timed are then of a length that suits it.
WARM_TOKENS, FEWEST_TOKENS, MOST_TOKENS = 8, 16, 128
# A step that has not grown by this much has grown by noise, and says nothing of a rate.
GROWN = 1.05

_EXAMPLE = """\
example:
  ddtree probe gpu
  ddtree probe gpu --url http://gpu-box:30000 --copy-rate 4260 --model Qwen/Qwen3-8B --json gpu.json

DDTREE_API_KEY in the environment is sent as the server's API key.
"""


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "gpu",
        help="what the GPU does in prefill and decode, and at what share of the memory limit",
        description="Drive a running server's prefill and decode at growing context, read the GPU meanwhile, "
        "and say whether it works or a kernel is merely resident.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    probe_run.add_common_options(parser)
    parser.add_argument(
        "--seconds", type=float, default=5, help="of decode at each length (default: %(default)s)"
    )
    parser.add_argument(
        "--copy-rate",
        type=float,
        metavar="GB/S",
        help="the device's, bytes read and written (default: measured, where the server is on this machine)",
    )
    parser.add_argument(
        "--gpu", type=int, nargs="+", default=[], help="indexes as nvidia-smi has them (default: the busiest)"
    )
    parser.add_argument("--model", help="folder or Hugging Face name of the target's config, if not found")
    parser.add_argument("--draft", help="the same of the drafter's")
    parser.set_defaults(
        run=lambda arguments: probe_run.run("gpu", arguments, lambda *found: probe(arguments, *found))
    )


@dataclass
class Drive:
    """What a run of the probe holds on to."""

    client: SGLangClient
    facts: ServerFacts
    prompts: PromptMaker
    sampler: Sampler
    kv: KvBytes
    copy_rate: float | None  # GB/s
    seconds: float
    view: GpuView
    shortest: tuple[int, float] | None = None  # KV bytes and milliseconds of the shortest context's step


def probe(arguments: argparse.Namespace, client: SGLangClient, facts: ServerFacts, live: LiveLine) -> int:
    if arguments.seconds <= 0 or (arguments.copy_rate is not None and arguments.copy_rate <= 0):
        raise ConfigurationError("--seconds and --copy-rate must be above 0.")
    if is_on_cpu(facts) and arguments.copy_rate is None:
        raise ServerLost(
            f"{facts.url} runs on a CPU: there is no GPU to probe. "
            "With --copy-rate GB/S, its memory's, the rate at which it reads KV is judged all the same"
        )
    contexts = probe_run.choose_contexts(arguments.contexts, facts, client, MOST_TOKENS)
    kv = find_models(facts, arguments.model, arguments.draft)
    prompts = prompt_maker(facts, kv.target)
    settings = {"seconds": arguments.seconds, "contexts": contexts}
    record = probe_run.begin_record(arguments.json, "gpu", facts, settings, COLUMNS)
    live.line(facts.summary())
    gpus = reachable_gpus(facts, arguments.gpu)
    copy_rate, lacks = find_copy_rate(facts, arguments.copy_rate)
    record.header |= {"gpus": gpus.names, "copy_gb_s": copy_rate}
    for index, name in gpus.names.items():
        live.line(f"GPU {index}: {name}")
    if copy_rate is not None:
        live.line(f"copy rate: {copy_rate:.0f} GB/s")
    elif not gpus.names:
        live.line("Neither the GPU's load nor its copy rate is known: there will be times and no verdict.")

    view = GpuView(live, facts.gpus)
    with Sampler(gpus, view.show) as sampler:
        drive = Drive(client, facts, prompts, sampler, kv, copy_rate, arguments.seconds, view)

        def measure() -> None:
            view.line()
            view.headings()
            prompts.learn_length(client, contexts[0])
            for context in contexts:
                drive_context(drive, record, context, lambda: [*kv.lacks, *lacks, *gpus.lacks])

        return probe_run.finish("gpu", record, 2 * len(contexts), view.line, measure)


def is_on_cpu(facts: ServerFacts) -> bool:
    return facts.info.get("device") == "cpu"


def is_local(url: str) -> bool:
    """Whether the server is on this machine, as far as its URL tells."""
    host = urllib.parse.urlsplit(url).hostname or ""
    return host == "localhost" or host.startswith("127.") or host in ("::1", "0.0.0.0", socket.gethostname())


def reachable_gpus(facts: ServerFacts, chosen: Sequence[int]) -> Gpus:
    if is_on_cpu(facts):
        return Gpus(None, lack="GPU load: the server runs on a CPU")
    if not is_local(facts.url):
        return Gpus(None, lack="GPU load: the server is on another machine, so run this there")
    return local_gpus(chosen)


def find_copy_rate(facts: ServerFacts, given: float | None) -> tuple[float | None, list[str]]:
    """The rate, and what is lacking where there is none."""
    if given is not None:
        return given, []
    if not is_local(facts.url) or not has_accelerator():
        return None, ["copy rate: the server's GPU is not here to be measured, name it with --copy-rate"]
    try:
        return round(measure_copy_rate(), 1), []
    except CeilingsUnknown as error:
        return None, [f"copy rate: {error}; name it with --copy-rate"]


def drive_context(drive: Drive, record: Record, context: int, lacks) -> None:
    """Prefill, then decode, a row each."""
    prompt = drive.prompts.make(context)
    drive.view.phase(f"{PREFILL} of {context} tokens")
    try:
        warm = ask(drive.client, prompt, WARM_TOKENS)
        drive.prompts.learn(prompt, warm.meta["prompt_tokens"])
        add(drive, record, prefill_row(drive, context, warm), lacks())
        drive.view.phase(f"{DECODE} behind {context} tokens")
        answers = decode(drive, prompt, warm)
        add(drive, record, decode_row(drive, context, answers), lacks())
    except NotMeasured as error:
        drive.view.line(f"{context} tokens: not measured: {error}")
        return
    row = record.rows[-1]
    record.header["verdict"] = f"GPU {row['verdict']} at {row['prompt_tokens']} tokens: {row['because']}"
    record.write()


def decode(drive: Drive, prompt: str | list[int], warm: Answer) -> list[Answer]:
    """Answers one after another for as long as was asked, each behind the cached prompt."""
    spent = warm.progress.times[-1] - warm.progress.times[0]
    wanted = drive.seconds * (WARM_TOKENS - 1) / spent if spent > 0 else MOST_TOKENS
    new_tokens = int(min(max(wanted, FEWEST_TOKENS), MOST_TOKENS))
    answers: list[Answer] = []
    started = time.monotonic()

    def watch(now: Answer) -> None:
        tokens = len(answers) * new_tokens + now.progress.tokens[-1]
        drive.view.phase(f"{DECODE} behind {now.meta['prompt_tokens']} tokens: {tokens} tokens")

    while not answers or time.monotonic() - started < drive.seconds:
        answers.append(ask(drive.client, prompt, new_tokens, watch))
    return answers


def prefill_row(drive: Drive, context: int, answer: Answer) -> dict[str, Any]:
    seconds = answer.first_token_seconds
    tokens = answer.meta["prompt_tokens"] - (answer.meta.get("cached_tokens") or 0)
    load = load_of(drive.sampler.between(answer.started, answer.started + seconds), drive.facts.gpus)
    return {
        "phase": PREFILL,
        "context": context,
        "prompt_tokens": answer.meta["prompt_tokens"],
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 1),
        **loaded(load, None),
    }


def decode_row(drive: Drive, context: int, answers: Sequence[Answer]) -> dict[str, Any]:
    timing = total([steady_window([answer.progress]) for answer in answers])
    readings = [
        reading
        for answer in answers
        for reading in drive.sampler.between(answer.progress.times[0], answer.progress.times[-1])
    ]
    prompt = answers[0].meta["prompt_tokens"]
    rates = kv_rates(drive, prompt + answers[0].meta["completion_tokens"] // 2, timing)
    return {
        "phase": DECODE,
        "context": context,
        "prompt_tokens": prompt,
        "tokens": int(timing.tokens),
        "seconds": round(timing.seconds, 3),
        "tokens_per_second": round(timing.tokens_per_second, 2),
        "step_milliseconds": round(timing.step_milliseconds, 4),
        "accept_length": round(timing.accept_length, 3),
        **rates,
        **loaded(load_of(readings, drive.facts.gpus), telling_fraction(rates)),
    }


def kv_rates(drive: Drive, context: int, timing: BatchTiming) -> dict[str, float]:
    """KV bytes of a step, and the rates of all of them and of those beyond the shortest context's."""
    read, milliseconds = drive.kv.of_a_step(context), timing.step_milliseconds
    if read is None:
        return {}
    rates = {"kv_bytes": read, "kv_gb_s": round(read / milliseconds / 1e6, 3)}
    if drive.shortest is None:
        drive.shortest = (read, milliseconds)
    elif milliseconds > GROWN * drive.shortest[1]:
        more_bytes, more_milliseconds = read - drive.shortest[0], milliseconds - drive.shortest[1]
        rates["growth_gb_s"] = round(more_bytes / more_milliseconds / 1e6, 3)
    if drive.copy_rate is not None:
        rates["limit_fraction"] = round(rates["kv_gb_s"] / drive.copy_rate, 4)
        if "growth_gb_s" in rates:
            rates["growth_fraction"] = round(rates["growth_gb_s"] / drive.copy_rate, 4)
    return rates


def telling_fraction(rates: dict[str, float]) -> float | None:
    """The share of the copy rate to judge by: the growth's; a whole step's only where it is high.

    A whole step reads weights too, so that a low share of KV says nothing against it.
    """
    whole = rates.get("limit_fraction")
    if whole is not None and whole >= gpu_verdict.BUSY_FRACTION:
        return whole
    return rates.get("growth_fraction")


def loaded(load: Load | None, fraction: float | None) -> dict[str, Any]:
    """The columns of the GPU, and the verdict."""
    verdict, because = gpu_verdict.judge(load, fraction)
    return {**(asdict(load) if load is not None else {}), "verdict": verdict, "because": because}


def add(drive: Drive, record: Record, row: dict[str, Any], lacks: list[str]) -> None:
    row = dict.fromkeys(COLUMNS) | row
    record.header["lacks"] = lacks
    record.add(row)
    drive.view.row(row)
    if row["verdict"] != gpu_verdict.UNKNOWN:
        drive.view.line(f"  GPU {row['verdict']}: {row['because']}")
