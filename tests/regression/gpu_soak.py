"""Ten thousand requests and more to `ddtree serve` on a GPU, judged by stock SGLang; about five minutes.

    python tests/regression/gpu_soak.py --json launch/results/soak-h200.json

Slices of a thousand requests of every kind (soak_mix.py), 64 at once, each slice the same mix about other
text; then 2,000 short requests at the same moment. Between slices the pool must be empty, and memory is read.
Stock servers are asked the same afterwards (soak_judge.py), so that they take nothing from what is timed.

It holds if every request is answered, none differs beyond the bf16 rule, which refuses most answers made
wrong on purpose, drafts are accepted, no KV slot is lost, memory does not grow, and the last slices run
within 3% of the first ones behind the warm-up.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tokenizers import Tokenizer

TESTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TESTS / "server"))

from serving import used_tokens  # noqa: E402
from soak_client import SoakAnswer, send_all  # noqa: E402
from soak_judge import Judge, Judged  # noqa: E402
from soak_memory import Memory, MemoryMeter  # noqa: E402
from soak_mix import LONGEST_ANSWER, LONGEST_PROMPT, SoakRequest, burst_of, requests_of, shapes  # noqa: E402

from sglang_ddtree_patch import model_catalog  # noqa: E402
from sglang_ddtree_patch.launch.server_process import ServerProcess, launch_python  # noqa: E402

MODEL = "tiny-gqa"
AT_ONCE = 64
ENDS = 3  # slices at either end whose median speed is compared
SLOWEST = 0.97  # of the speed at the start
LEAST_ACCEPTED = 0.5  # drafted tokens a round: a server that drafts nothing of use says the right text too
LEAST_REFUSED = 0.5  # of the answers that are made wrong, by the noise of all
# From the middle of the soak to its end, when allocators have seen every shape.
MOST_GROWTH = {"gpu": 1.01, "resident": 1.01}
SOURCES = ["argparse", "textwrap", "inspect", "json.decoder", "logging", "tempfile", "shutil", "ast"]


@dataclass(frozen=True)
class Slice:
    """What one slice was like."""

    requests: int
    answered: int
    tokens: int
    seconds: float
    accept_length: float
    leaked_tokens: int
    memory: Memory

    @property
    def row(self) -> dict[str, Any]:
        return {
            **{name: value for name, value in asdict(self).items() if name != "memory"},
            "requests_per_second": round(self.requests / self.seconds, 1),
            "tokens_per_second": round(self.tokens / self.seconds, 1),
            "gpu_mib": self.memory.gpu,
            "resident_mib": self.memory.resident,
        }


def corpus() -> list[int]:
    """Tokens of Python's own library, which is the kind of text that the model was trained on."""
    tokenizer = Tokenizer.from_file(str(model_catalog.path(MODEL) / "target" / "tokenizer.json"))
    library = Path(os.__file__).parent
    text = "\n".join(
        (library / f"{name.replace('.', '/')}.py").read_text() for name in SOURCES if is_file(name)
    )
    return tokenizer.encode(text, add_special_tokens=False).ids


def is_file(name: str) -> bool:
    return (Path(os.__file__).parent / f"{name.replace('.', '/')}.py").is_file()


def run_slice(server: ServerProcess, meter: MemoryMeter, requests: Sequence[SoakRequest], at_once: int
) -> tuple[list[SoakAnswer], Slice]:  # fmt: skip
    answers, seconds = send_all(server.url, requests, at_once)
    metas = [reply["meta_info"] for answer in answers for reply in answer.replies]
    rounds = sum(meta.get("spec_verify_ct", 0) for meta in metas)
    accepted = sum(meta.get("spec_num_correct_drafts", 0) for meta in metas)
    leaked = used_tokens(server)
    return answers, Slice(
        requests=len(requests),
        answered=sum(bool(answer.replies) or request.is_given_up
                     for request, answer in zip(requests, answers, strict=True)),
        tokens=sum(answer.completion_tokens for answer in answers),
        seconds=round(seconds, 3),
        accept_length=round(accepted / max(rounds, 1), 3),
        leaked_tokens=leaked,
        memory=meter.read(),
    )  # fmt: skip


@contextlib.contextmanager
def servers() -> Iterator[tuple[ServerProcess, ServerProcess, ServerProcess, str]]:
    """Ours, stock, stock on other kernels, and the number of the GPU that ours is on."""
    target, draft = (str(model_catalog.path(MODEL) / part) for part in ("target", "draft"))
    common = [
        "--model-path", target, "--dtype", "bfloat16",
        "--context-length", str(LONGEST_PROMPT + LONGEST_ANSWER + 64), "--max-total-tokens", "262144",
        "--max-running-requests", str(AT_ONCE), "--mem-fraction-static", "0.7",
    ]  # fmt: skip
    stock = [*common, "--page-size", "64", "--disable-overlap-schedule", "--sampling-backend", "pytorch"]
    # Draws by seeds, and takes penalties in a definite order: see tests/server/planting/definite_stock.py.
    definite = {
        "SGLANG_PLUGINS": "ddtree_definite_stock",
        "DDTREE_TEST_ORACLE": "1",
        "PYTHONPATH": os.pathsep.join([str(TESTS / "server" / "planting"), os.environ.get("PYTHONPATH", "")]),
    }
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = given.split(",") if given else [str(gpu) for gpu in range(torch.cuda.device_count())]
    ours_on, stock_on = ({"CUDA_VISIBLE_DEVICES": gpu} for gpu in (visible[0], visible[-1]))
    serve = partial(launch_python, program=("-m", "sglang_ddtree_patch.cli", "serve"))
    started = [
        ServerProcess([*common, "--draft", draft], environment=ours_on, ready_timeout=600, launcher=serve),
        *(
            ServerProcess([*stock, *kernels], environment={**definite, **stock_on}, ready_timeout=600)
            for kernels in ([], ["--attention-backend", "triton"])
        ),
    ]
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
        ours, oracle, other_kernels = pool.map(stack.enter_context, started)
        yield ours, oracle, other_kernels, visible[0]


def soak(options: argparse.Namespace) -> dict[str, Any]:
    started = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - started:6.1f} s  {line}", flush=True)

    text, asked = corpus(), shapes(options.requests)
    slices: list[Slice] = []
    requests: list[SoakRequest] = []
    answers: list[SoakAnswer] = []
    say("starting the servers")
    with servers() as (ours, oracle, other_kernels, gpu):
        meter = MemoryMeter(ours.pid, gpu)
        for number in range(options.slices + 1):
            now = requests_of(number, asked, text)
            found, one = run_slice(ours, meter, now, AT_ONCE)
            requests, answers, slices = [*requests, *now], [*answers, *found], [*slices, one]
            say(f"slice {number}: {json.dumps(one.row)}")
        now = burst_of(options.burst, text)
        found, burst = run_slice(ours, meter, now, options.burst)
        requests, answers = [*requests, *now], [*answers, *found]
        say(f"burst: {json.dumps(burst.row)}")
        judged = Judge(oracle, other_kernels, say).judge(requests, answers)
        say("judged")
        log = ours.log_path.read_text(errors="replace")
    return record(slices, burst, judged, log)


def record(slices: list[Slice], burst: Slice, judged: Judged, log: str) -> dict[str, Any]:
    measured = slices[1:]  # the first warms up
    speeds = [one.tokens / one.seconds for one in measured]
    speed_start, speed_end = median(speeds[:ENDS]), median(speeds[-ENDS:])
    middle, end = (asdict(measured[at].memory) for at in (len(measured) // 2, -1))
    growth = {name: end[name] / middle[name] for name in MOST_GROWTH}
    everything = [*slices, burst]
    total = sum(one.requests for one in everything)
    counts = {
        kind: {name: count[name] for name in ("requests", "judged", "differing")}
        for kind, count in sorted(judged.by_kind.items())
    }
    refused = judged.controls["refused_by"]["all noise"]
    is_judged = sum(count["judged"] for count in counts.values())
    return {
        "device": torch.cuda.get_device_name(),
        "versions": {name: version(name) for name in ("sglang", "torch", "triton")},
        "command": f"python tests/regression/gpu_soak.py {' '.join(sys.argv[1:])}",
        "date": date.today().isoformat(),
        "model": MODEL,
        "server": [line.split("] ", 1)[-1] for line in log.splitlines() if "DDTREE: " in line],
        "holds": {
            "every request is answered": all(one.answered == one.requests for one in everything),
            "at least half are judged": 2 * is_judged >= total,
            "no mismatch by the bf16 rule": not judged.mismatches,
            "which refuses most wrong answers": refused >= LEAST_REFUSED * judged.controls["wrong_answers"],
            "drafts are accepted": min(one.accept_length for one in slices) >= LEAST_ACCEPTED,
            "no leaked token": not any(one.leaked_tokens for one in everything),
            "flat memory": all(growth[name] <= MOST_GROWTH[name] for name in growth),
            "speed within 3% of its start": speed_end >= SLOWEST * speed_start,
        },
        "requests": total,
        "judged": is_judged,
        "tokens": sum(one.tokens for one in everything),
        "by_kind": counts,
        "differing_answers": judged.differing,
        "allowed_by_the_noise_of_the_request": judged.allowed_by_own_noise,
        "allowed_by_the_noise_of_all": len(judged.allowed_by_noise_of_all),
        "another_stock_forward_says_so_too": judged.another_stock_forward_says_so_too,
        "mismatches": len(judged.mismatches),
        "median_noise_of_the_gap": judged.median_noise,
        "noise_of_the_gap_in_all": judged.noise_of_all,
        "control": judged.controls,
        "leaked_tokens": sum(one.leaked_tokens for one in everything),
        "tokens_per_second": {
            "start": round(speed_start, 1), "end": round(speed_end, 1),
            "end_over_start": round(speed_end / speed_start, 4),
        },
        "memory_end_over_middle": {name: round(value, 4) for name, value in growth.items()},
        "warm_up": slices[0].row,
        "slices": [one.row for one in measured],
        "burst": burst.row,
        "mismatching": judged.mismatches[:200],
        "beyond_the_noise_of_the_request": judged.allowed_by_noise_of_all,
    }  # fmt: skip


def let_open(files: int) -> None:
    """Each request of the burst has a connection of its own."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < files:
        most = files if hard == resource.RLIM_INFINITY else min(files, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slices", type=int, default=12, help="behind the one that warms up (12)")
    parser.add_argument("--requests", type=int, default=1000, help="of a slice (1000)")
    parser.add_argument("--burst", type=int, default=2000, help="short requests at the same moment (2000)")
    parser.add_argument("--json", type=Path, help="where the record is written")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this soak needs an NVIDIA GPU; `make soak` is the one for any machine")
    let_open(2 * options.burst + 1000)
    found = soak(options)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    shown = ("slices", "mismatching", "beyond_the_noise_of_the_request")
    print(json.dumps({name: value for name, value in found.items() if name not in shown}, indent=1))
    for one in found["mismatching"][:10]:
        print(f"  mismatch: {json.dumps(one)}")
    return 0 if all(found["holds"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
