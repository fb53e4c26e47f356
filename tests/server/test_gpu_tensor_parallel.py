"""`ddtree serve --tp-size 2` on two GPUs, in bf16: stock's tokens on the same two, by the bf16 rule.

Every rank has random numbers of its own and its drafter's log-probs are rounded, so that most of a tree is a
matter of ties; trees that differ between the ranks end the server (planting/uneven_ranks.py).

    DDTREE_RESULTS_TP=FILE   where the outcome is written as JSON, for the record in launch/results/
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shlex
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from serving import text_tokens, used_tokens
from soak_client import send_all
from soak_judge import Judge
from soak_mix import SoakRequest

from sglang_ddtree_patch import model_catalog
from sglang_ddtree_patch.launch.model_shapes import DUMMY_FLAGS, write_shape
from sglang_ddtree_patch.launch.server_process import ServerProcess, launch_python

RANKS = 2
LAST_LINES = 150  # of each server's log, where the test fails
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < RANKS,
        reason=f"needs {RANKS} NVIDIA GPUs, and this machine has {torch.cuda.device_count()}",
    ),
]

# The ranks' sums go through NCCL: SGLang's own all-reduce and FlashInfer's put theirs into multicast memory.
FLAGS = [
    "--tp-size", str(RANKS), "--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion",
    "--dtype", "bfloat16", "--page-size", "64", "--max-running-requests", "16",
    "--mem-fraction-static", "0.75", "--max-total-tokens", "32768",
]  # fmt: skip
WITHOUT_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
PLANTING = os.pathsep.join([str(Path(__file__).parent / "planting"), os.environ.get("PYTHONPATH", "")])
ENVIRONMENT = {
    **WITHOUT_MULTICAST,
    "PYTHONPATH": PLANTING,
    # Other servers of this test fill one GPU a moment before the other.
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
}
UNEVEN = {**ENVIRONMENT, "DDTREE_TEST_UNEVEN_RANKS": "1"}
DEFINITE = {**ENVIRONMENT, "SGLANG_PLUGINS": "ddtree_definite_stock", "DDTREE_TEST_ORACLE": "1"}


@dataclass(frozen=True)
class Case:
    target: Path
    draft: Path
    prompts: list[list[int]]
    flags: tuple[str, ...]
    tokens: int  # of each answer
    most_seeded: float  # temperature of those that draw by a seed

    def requests(self) -> list[SoakRequest]:
        """Each prompt greedily, and drawn by a seed."""
        found = []
        for index, prompt in enumerate(self.prompts):
            common = {"max_new_tokens": self.tokens, "ignore_eos": True}
            seeded = {"temperature": self.most_seeded, "sampling_seed": 7 + index}
            for kind, rule in (("greedy", {"temperature": 0}), ("seeded", seeded)):
                payload = {"input_ids": prompt, "sampling_params": {**common, **rule}}
                found.append(SoakRequest(f"{kind} {index}", kind, payload))
        return found


def committed(name: str) -> Case:
    folder = model_catalog.path(name)
    prompts = [list(text_tokens(name, n, start=3 * n)) for n in (1, 17, 63, 64, 65, 130, 200, 400, 700)]
    return Case(folder / "target", folder / "draft", prompts, ("--context-length", "2048"), 64, 0.9)


def qwen3_8b(folder: Path) -> Case:
    """Random weights: no draft is accepted, but every shape is the real one."""
    write_shape("qwen3-8b-shapes", folder)
    draw = random.Random(0)
    prompts = [[draw.randrange(10, 150000) for _ in range(n)] for n in (1, 64, 500, 3000)]
    return Case(folder / "target", folder / "draft", prompts, DUMMY_FLAGS, 24, 0.9)


CASES: dict[str, Callable[[Path], Case]] = {
    "tiny-gqa": lambda folder: committed("tiny-gqa"),
    "tiny-mla": lambda folder: committed("tiny-mla"),
    "qwen3-8b-shapes": qwen3_8b,
}


@pytest.fixture(scope="module")
def record() -> Iterator[dict]:
    outcome: dict = {
        "device": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}",
        "versions": {name: version(name) for name in ("sglang", "torch", "triton")},
        "command": "pytest -m gpu tests/server/test_gpu_tensor_parallel.py",
        "ours": f"ddtree serve {' '.join(FLAGS)}",
        "date": date.today().isoformat(),
        "cases": {},
    }
    yield outcome
    if path := os.environ.get("DDTREE_RESULTS_TP"):
        Path(path).write_text(json.dumps(outcome, indent=1) + "\n")


@pytest.mark.parametrize("name", CASES)
def test_two_gpus_say_stocks_tokens_and_build_the_same_trees(name: str, tmp_path: Path, record: dict) -> None:
    case = CASES[name](tmp_path)
    requests = case.requests()
    with started(case) as (ours, oracle, other_kernels):
        answers, _ = send_all(ours.url, requests, at_once=8)
        again, _ = send_all(ours.url, requests, at_once=len(requests))
        left = used_tokens(ours)
        judged = Judge(oracle, other_kernels).judge([*requests, *requests], [*answers, *again])
        log = ours.log_path.read_text(errors="replace")
    metas = [reply["meta_info"] for answer in answers for reply in answer.replies]
    accepted = sum(meta.get("spec_num_correct_drafts", 0) for meta in metas)
    rounds = sum(meta.get("spec_verify_ct", 0) for meta in metas)
    record["cases"][name] = outcome = {
        "requests": len(requests) * 2,
        "tokens": sum(answer.completion_tokens for answer in (*answers, *again)),
        "differing_answers": judged.differing,
        "allowed_by_the_noise_of_the_request": judged.allowed_by_own_noise,
        "allowed_by_the_noise_of_all": judged.allowed_by_noise_of_all,
        "mismatches": judged.mismatches,
        "median_noise_of_the_gap": judged.median_noise,
        "noise_of_the_gap_in_all": judged.noise_of_all,
        "leaked_tokens": left,
        "rounds_with_equal_trees": rounds,
        "mean_accept_length": round(accepted / max(rounds, 1), 2),
        "server": [line.split("] ", 1)[-1] for line in log.splitlines() if "DDTREE: " in line],
    }
    print(json.dumps({name: outcome}))
    assert not judged.mismatches
    assert left == 0
    assert rounds > 0
    if name != "qwen3-8b-shapes":
        assert accepted > rounds / 2


@contextlib.contextmanager
def started(case: Case) -> Iterator[list[ServerProcess]]:
    """Ours, stock, and stock on other kernels, each on both GPUs."""
    common = ["--model-path", str(case.target), *FLAGS, *case.flags]
    stock = [*common, "--disable-overlap-schedule", "--sampling-backend", "pytorch"]
    ours = [*common, "--draft", str(case.draft), "--width", "17"]
    serve = partial(launch_python, program=("-m", "sglang_ddtree_patch.cli", "serve"))
    servers = [
        ServerProcess(ours, environment=UNEVEN, ready_timeout=600, launcher=serve),
        ServerProcess(stock, environment=DEFINITE, ready_timeout=600),
        ServerProcess([*stock, "--attention-backend", "triton"], environment=DEFINITE, ready_timeout=600),
    ]
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
        try:
            yield list(pool.map(stack.enter_context, servers))
        except Exception as error:
            # Of a server that has ended, clients say only that it does not answer; and each rank has last
            # words of its own.
            for server in servers:
                state = "runs" if server.is_alive else "has ended"
                error.add_note(f"{shlex.join(server.arguments)} {state}:\n{server.log_tail(LAST_LINES)}")
            raise
