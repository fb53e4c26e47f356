"""`ddtree serve` on a GPU, in bf16, at page size 64: committed models, 8B shapes, windows, sinks, float8.

Stock SGLang's own DFLASH chain is judged beside it by the same rule: what it does not hold to either is the
rounding of verify kernels, not the tree. Servers share all GPUs that there are.

    DDTREE_RESULTS=FILE   where each case's outcome is written as JSON, for the record in launch/results/
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median

import pytest
import torch
from bf16_rule import OracleAnswer, Verdict, ask_oracle
from quantized_targets import int4
from serving import Answer, Request, ask_all, text_tokens, used_tokens
from window_targets import SOURCE, gpt_oss, laguna

from sglang_ddtree_patch import model_catalog
from sglang_ddtree_patch.launch.bench.servers import STOCK_ENVIRONMENT
from sglang_ddtree_patch.launch.model_shapes import DUMMY_FLAGS, write_shape
from sglang_ddtree_patch.launch.server_process import ServerProcess, ServerStartError, launch_python

pytestmark = pytest.mark.gpu

PAGE_SIZE, WIDTH = 64, 17
# Several servers share the GPU, and each counts what the others use.
COMMON = [
    "--dtype", "bfloat16", "--page-size", str(PAGE_SIZE), "--max-running-requests", "16",
    "--mem-fraction-static", "0.75", "--max-total-tokens", "32768",
]  # fmt: skip
PLANTING = Path(__file__).parent / "planting"


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


def quantized(name: str, folder: Path) -> Case:
    """Weights in float8, which SGLang makes while it loads, or packed in four bits."""
    case = committed("tiny-gqa")
    if name.endswith("int4"):
        return replace(case, name=name, target=int4(case.target, folder / "target"))
    return replace(case, name=name, flags=(*case.flags, "--quantization", "fp8"))


CASES: dict[str, Callable[[Path], Case]] = {
    "tiny-gqa": lambda folder: committed("tiny-gqa"),
    "tiny-mla": lambda folder: committed("tiny-mla"),
    "qwen3-8b-shapes": qwen3_8b,
    "laguna": lambda folder: windowed("laguna", folder),
    "gpt-oss": lambda folder: windowed("gpt-oss", folder),
    "tiny-gqa-float8": lambda folder: float8("tiny-gqa"),
    "tiny-mla-float8": lambda folder: float8("tiny-mla"),
    "tiny-gqa-weights-float8": lambda folder: quantized("weights-float8", folder),
    "tiny-gqa-weights-int4": lambda folder: quantized("weights-int4", folder),
}


@pytest.mark.parametrize("name", CASES)
def test_bf16_tokens_equal_stock_by_the_bf16_rule(name: str, tmp_path: Path) -> None:
    case = CASES[name](tmp_path)
    stock = ["--model-path", str(case.target), *COMMON, *case.flags]
    ours = [*stock, "--draft", str(case.draft), "--width", str(WIDTH)]
    with started(ours, stock, chain=case.draft) as (server, oracle, other_kernels, *chain):
        answers = ask_all(server, case.requests)
        again = ask_all(server, case.requests)
        assert used_tokens(server) == 0
        chained = [ask_all(one, case.requests) for one in chain]
        said = [ask_oracle(oracle, other_kernels, request) for request in case.requests]
        log = server.log_path.read_text()
    verdicts = judged(said, answers, again)
    outcome = {
        "totals": {**totals(verdicts), "mean_accept_length": accept_length(answers)},
        "stock_dflash": totals(judged(said, *chained))
        if chained
        else "stock does not start it on this target",
        "rule": blunt(said),
        "server": [line.split("] ", 1)[-1] for line in log.splitlines() if "DDTREE: " in line],
        "requests": [verdict.as_row() for verdict in verdicts],
    }
    write_case(name, outcome)
    print(json.dumps({name: {part: outcome[part] for part in ("totals", "stock_dflash", "rule")}}))
    assert not any(one.judge(one.wrong()).is_lossless for one in said), "the rule lets a wrong token through"
    assert all(verdict.is_lossless for verdict in verdicts), verdicts


def test_a_server_that_does_not_move_accepted_rows_is_lossy_by_the_bf16_rule(tmp_path: Path) -> None:
    case = committed("tiny-gqa")
    stock = ["--model-path", str(case.target), *COMMON, *case.flags]
    ours = [*stock, "--draft", str(case.draft), "--width", "33"]
    planted = tmp_path / "planted.json"
    planted.write_text("[]")
    environment = planting(DDTREE_TEST_PLANT=str(planted), DDTREE_TEST_NO_COMMIT="1")
    requests = [request for request in case.requests if request.max_new_tokens > 1]
    with started(ours, stock, environment) as (server, oracle, other_kernels):
        said = [ask_oracle(oracle, other_kernels, request) for request in requests]
        written = planted.with_suffix(".new")
        whole = [[*request.input_ids, *one.tokens] for request, one in zip(requests, said, strict=True)]
        written.write_text(json.dumps(whole))
        written.replace(planted)
        verdicts = judged(said, ask_all(server, requests))
    write_case("tiny-gqa without the commit", {"totals": totals(verdicts), "rule": blunt(said)})
    assert sum(not verdict.is_lossless for verdict in verdicts) >= len(requests) - 1, verdicts


def planting(**variables: str) -> dict[str, str]:
    """The environment of a server that loads the test plugins in planting/."""
    path = os.pathsep.join([str(PLANTING), os.environ.get("PYTHONPATH", "")])
    return {**variables, "PYTHONPATH": path}


@contextlib.contextmanager
def started(
    ours: list[str],
    stock: list[str],
    environment: Mapping[str, str] | None = None,
    chain: Path | None = None,
) -> Iterator[list[ServerProcess]]:
    """Ours, stock, and stock on other kernels, side by side: a start is mostly imports and compilation.

    chain: the drafter of stock's own DFLASH chain, which comes as a fourth where stock starts it.
    """
    serve = partial(launch_python, program=("-m", "sglang_ddtree_patch.cli", "serve"))
    environments = [{**STOCK_ENVIRONMENT, **gpu} for gpu in gpus(4)]
    servers = [
        ServerProcess(
            ours, environment={**(environment or {}), **gpus(4)[0]}, ready_timeout=900, launcher=serve
        ),
        ServerProcess(stock, environment=environments[1], ready_timeout=900),
        ServerProcess(
            [*stock, "--attention-backend", "triton"], environment=environments[2], ready_timeout=900
        ),
    ]
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
        chained = None
        if chain is not None:
            flags = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(chain)]
            server = ServerProcess([*stock, *flags], environment=environments[3], ready_timeout=900)
            chained = pool.submit(stack.enter_context, server)
        running = list(pool.map(stack.enter_context, servers))
        if chained is not None:
            try:
                running.append(chained.result())
            except ServerStartError as error:
                print(f"stock DFLASH: {error}")
        yield running


def gpus(count: int) -> list[dict[str, str]]:
    """The environments of servers that take turns on the GPUs that this process sees."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = given.split(",") if given else [str(gpu) for gpu in range(torch.cuda.device_count())]
    return [{"CUDA_VISIBLE_DEVICES": visible[index % len(visible)]} for index in range(count)]


def judged(said: Sequence[OracleAnswer], *rounds: Mapping[str, Answer]) -> list[Verdict]:
    """The verdicts on what a server answered, each time that it was asked."""
    return [one.judge(answers[one.name].tokens) for answers in rounds for one in said]


def totals(verdicts: Sequence[Verdict]) -> dict:
    """The counts that a reader wants first. The rule is `lossy`; the two beside it are narrower and wider."""
    pooled = max(verdict.noise.largest for verdict in verdicts)
    return {
        "requests": len(verdicts),
        "tokens": sum(verdict.tokens for verdict in verdicts),
        "identical": sum(verdict.first_difference is None for verdict in verdicts),
        "allowed_by_the_bf16_rule": sum(
            verdict.first_difference is not None and verdict.is_lossless for verdict in verdicts
        ),
        "lossy": sum(not verdict.is_lossless for verdict in verdicts),
        "lossy_strictly": sum(not verdict.is_strictly_lossless for verdict in verdicts),
        "lossy_by_the_noise_of_all_requests": sum(not verdict.is_within(pooled) for verdict in verdicts),
        "another_stock_forward_says_so_too": sum(bool(verdict.others_say_so_too) for verdict in verdicts),
    }


def blunt(said: Sequence[OracleAnswer]) -> dict:
    """The noise that the rule goes by, and what it lets through."""
    return {
        "median_noise_of_the_chosen": median(one.noise.chosen for one in said),
        "median_noise_of_the_gap": median(one.noise.gap for one in said),
        "median_noise_of_the_gap_between_kernels": median(one.noise.gap_between_kernels for one in said),
        "noise_of_all_requests": max(one.noise.largest for one in said),
        "mean_share_of_places_where_the_second_token_would_pass": round(
            mean(one.near_share for one in said), 3
        ),
    }


def accept_length(answers: Mapping[str, Answer]) -> float:
    # A request that ends with its first token sees no round, and has no speculative counts.
    rounds = sum(answer.meta.get("spec_verify_ct", 0) for answer in answers.values())
    accepted = sum(answer.meta.get("spec_num_correct_drafts", 0) for answer in answers.values())
    return round(accepted / rounds, 2)


def write_case(name: str, outcome: dict) -> None:
    """Add a case to the record. Cases may be run by several processes, each on GPUs of its own."""
    path = os.environ.get("DDTREE_RESULTS")
    if not path:
        return
    with open(path, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        before = file.read()
        record = {
            "device": torch.cuda.get_device_name(),
            "versions": {package: version(package) for package in ("sglang", "torch", "triton")},
            "command": "pytest -m gpu tests/server/test_gpu_serving.py",
            "ours": "ddtree serve",
            "date": date.today().isoformat(),
            "page_size": PAGE_SIZE, "width": WIDTH, "dtype": "bfloat16",
            "cases": (json.loads(before)["cases"] if before else {}) | {name: outcome},
        }  # fmt: skip
        file.truncate(0)
        file.write(json.dumps(record, indent=1) + "\n")
