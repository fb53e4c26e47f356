"""`ddtree serve` on a GPU, in bf16, at page size 64: committed models, 8B shapes, windows, sinks, float8.

    DDTREE_RESULTS=FILE   where the outcome is written as JSON, for the record in launch/results/
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median

import pytest
import torch
from bf16_rule import Verdict, compare
from serving import Request, ask_all, text_tokens, used_tokens
from window_targets import SOURCE, gpt_oss, laguna

from sglang_ddtree_patch import model_catalog
from sglang_ddtree_patch.launch.model_shapes import DUMMY_FLAGS, write_shape
from sglang_ddtree_patch.launch.server_process import ServerProcess, launch_python

pytestmark = pytest.mark.gpu

PAGE_SIZE, WIDTH = 64, 17
# Several servers share the GPU, and each counts what the others use.
COMMON = [
    "--dtype", "bfloat16", "--page-size", str(PAGE_SIZE), "--max-running-requests", "16",
    "--mem-fraction-static", "0.75", "--max-total-tokens", "65536",
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A target, its drafter, and requests of that vocabulary."""

    name: str
    target: Path
    draft: Path
    requests: list[Request]
    flags: tuple[str, ...] = ()


def committed(name: str) -> Case:
    folder = model_catalog.path(name)
    requests = [
        Request(f"length {n}", text_tokens(name, n, start=n), 96, {"ignore_eos": True})
        for n in (1, 63, 64, 65, 200, 700)
    ]
    requests += [
        Request("eos allowed", text_tokens(name, 40, start=500), 200),
        Request("one token", text_tokens(name, 40, start=500), 1),
    ]
    return Case(name, folder / "target", folder / "draft", requests, ("--context-length", "2048"))


def qwen3_8b(folder: Path) -> Case:
    """Qwen3-8B shapes from config files alone: random weights, so no draft is ever accepted."""
    write_shape("qwen3-8b-shapes", folder)
    generator = torch.Generator().manual_seed(0)
    requests = [
        Request(f"length {n}", tuple(torch.randint(10, 150000, (n,), generator=generator).tolist()), 24,
                {"ignore_eos": True})
        for n in (1, 64, 1000, 8000)
    ]  # fmt: skip
    return Case("qwen3-8b-shapes", folder / "target", folder / "draft", requests, DUMMY_FLAGS)


def windowed(name: str, folder: Path) -> Case:
    """A target with window layers in a pool of their own; gpt-oss with sinks and random weights besides."""
    target = laguna(folder / "target") if name == "laguna" else gpt_oss(folder / "target", "bfloat16")
    return replace(committed(SOURCE), name=name, target=target)


def float8(name: str) -> Case:
    """A committed model on a float8 KV cache, as is the oracle."""
    case = committed(name)
    return replace(case, flags=(*case.flags, "--kv-cache-dtype", "fp8_e4m3"))


CASES: dict[str, Callable[[Path], Case]] = {
    "tiny-gqa": lambda folder: committed("tiny-gqa"),
    "tiny-mla": lambda folder: committed("tiny-mla"),
    "qwen3-8b-shapes": qwen3_8b,
    "laguna": lambda folder: windowed("laguna", folder),
    "gpt-oss": lambda folder: windowed("gpt-oss", folder),
    "tiny-gqa-float8": lambda folder: float8("tiny-gqa"),
    "tiny-mla-float8": lambda folder: float8("tiny-mla"),
}


@pytest.fixture(scope="module")
def record() -> Iterator[dict]:
    outcome: dict = {
        "device": torch.cuda.get_device_name(),
        "versions": {name: version(name) for name in ("sglang", "torch", "triton")},
        "command": "pytest -m gpu tests/server/test_gpu_serving.py",
        "ours": "ddtree serve",
        "date": date.today().isoformat(),
        "page_size": PAGE_SIZE, "width": WIDTH, "dtype": "bfloat16", "cases": {},
    }  # fmt: skip
    yield outcome
    if path := os.environ.get("DDTREE_RESULTS"):
        Path(path).write_text(json.dumps(outcome, indent=1) + "\n")


@pytest.mark.parametrize("name", CASES)
def test_bf16_tokens_equal_stock_by_the_bf16_rule(name: str, tmp_path: Path, record: dict) -> None:
    case = CASES[name](tmp_path)
    stock = ["--model-path", str(case.target), *COMMON, *case.flags]
    ours = [*stock, "--draft", str(case.draft), "--width", str(WIDTH)]
    with started(ours, stock) as (server, oracle, other_kernels):
        answers = ask_all(server, case.requests)
        again = ask_all(server, case.requests)
        assert used_tokens(server) == 0
        verdicts = [
            compare(oracle, other_kernels, request, answer[request.name].tokens)
            for answer in (answers, again)
            for request in case.requests
        ]
        record["cases"][name] = summary(verdicts, answers, server.log_path.read_text())
    print(json.dumps(record["cases"][name]["totals"]))
    assert all(verdict.is_lossless for verdict in verdicts), verdicts


@contextlib.contextmanager
def started(
    ours: list[str], stock: list[str], environment: Mapping[str, str] | None = None
) -> Iterator[list[ServerProcess]]:
    """Ours, stock, and stock on other kernels, side by side: a start is mostly imports and compilation."""
    serve = partial(launch_python, program=("-m", "sglang_ddtree_patch.cli", "serve"))
    servers = [
        ServerProcess(ours, environment=environment, ready_timeout=900, launcher=serve),
        ServerProcess(stock, ready_timeout=900),
        ServerProcess([*stock, "--attention-backend", "triton"], ready_timeout=900),
    ]
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
        yield list(pool.map(stack.enter_context, servers))


def summary(verdicts: list[Verdict], answers: dict, log: str) -> dict:
    """What goes into the record: every verdict, and the counts a reader wants first."""
    # A request that ends with its first token sees no round, and has no speculative counts.
    rounds = sum(answer.meta.get("spec_verify_ct", 0) for answer in answers.values())
    accepted = sum(answer.meta.get("spec_num_correct_drafts", 0) for answer in answers.values())
    return {
        "totals": {
            "requests": len(verdicts),
            "tokens": sum(verdict.tokens for verdict in verdicts),
            "identical": sum(verdict.first_difference is None for verdict in verdicts),
            "allowed_by_the_bf16_rule": sum(
                verdict.first_difference is not None and verdict.is_lossless for verdict in verdicts
            ),
            "lossy": sum(not verdict.is_lossless for verdict in verdicts),
            "median_noise": median(verdict.noise for verdict in verdicts),
            "mean_accept_length": round(accepted / rounds, 2),
        },
        "server": [line.split("] ", 1)[-1] for line in log.splitlines() if "DDTREE: " in line],
        "requests": [verdict.as_row() for verdict in verdicts],
    }
