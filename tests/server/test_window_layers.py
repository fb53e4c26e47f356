"""Targets and drafters with sliding-window layers, attention sinks, and the pool SGLang keeps windows in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from serving import (
    ENVIRONMENT,
    Answer,
    Oracle,
    Request,
    ask,
    ask_all,
    common_flags,
    ddtree_flags,
    differences,
    text_tokens,
    used_tokens,
)
from window_targets import SOURCE, WINDOW, gpt_oss, laguna, windowed_drafter

from sglang_ddtree_patch.launch.server_process import ServerProcess
from sglang_ddtree_patch.launch.server_template import ServerTemplate

LOG_PROBS = {"return_logprob": True, "logprob_start_len": -1}
# Shorter and longer than the window, and long enough that most of it leaves the window.
REQUESTS = [
    Request(f"length {n}", text_tokens(SOURCE, n, start=n), 48, {"ignore_eos": True}, LOG_PROBS)
    for n in (3, WINDOW - 1, WINDOW, 50, 77, 130)
]
SHORT = [replace(request, max_new_tokens=16) for request in REQUESTS[1:4]]
HYBRID = ("--attention-backend", "triton")  # the stock CPU backend that reads the window layers' own pool
# Few enough slots that pages which left a window are soon another request's.
TIGHT = (*HYBRID, "--max-total-tokens", "1536", "--swa-full-tokens-ratio", "0.5")
ONE_POOL = ("--disable-hybrid-swa-memory",)
GPT_OSS_ENVIRONMENT = {**ENVIRONMENT, "DDTREE_TEST_GPT_OSS": "1"}


@pytest.fixture(scope="module")
def laguna_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return laguna(tmp_path_factory.mktemp("targets") / "laguna")


@pytest.fixture(scope="module")
def gpt_oss_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpt_oss(tmp_path_factory.mktemp("targets") / "gpt-oss")


@pytest.fixture(scope="module")
def stock_laguna(template: ServerTemplate, laguna_target: Path) -> Iterator[Oracle]:
    """torch_native, over one pool: it does not find the slots of a second."""
    flags = [*common_flags(SOURCE), "--attention-backend", "torch_native", *ONE_POOL]
    flags += ["--model-path", str(laguna_target)]
    with ServerProcess(flags, environment=ENVIRONMENT, launcher=template.launch, grace=0) as server:
        yield Oracle(server)


class PrefillOracle(Oracle):
    """Stock SGLang asked for one token at a time, each a prefill behind the last.

    Its Triton backend, the only one with sinks on a CPU, shows a decoded token one position less of a
    window than a prefilled one; models, its other backends and ours go by the prefill.
    """

    def answers(self, requests: list[Request]) -> dict[str, Answer]:
        return {request.name: self._grow(request) for request in requests}

    def _grow(self, request: Request) -> Answer:
        tokens, log_probs = [], []
        while len(tokens) < request.max_new_tokens:
            step = replace(request, input_ids=(*request.input_ids, *tokens), max_new_tokens=1)
            answer = ask(self.server, step)
            tokens += answer.tokens
            log_probs += answer.meta["output_token_logprobs"]
        finish = {"type": "length", "length": len(tokens)}
        return replace(answer, tokens=tuple(tokens), finish=finish, meta={"output_token_logprobs": log_probs})


@pytest.fixture(scope="module")
def stock_gpt_oss(template: ServerTemplate, gpt_oss_target: Path) -> Iterator[PrefillOracle]:
    flags = [*common_flags(SOURCE), "--attention-backend", "triton", *ONE_POOL]
    flags += ["--model-path", str(gpt_oss_target)]
    with ServerProcess(flags, environment=GPT_OSS_ENVIRONMENT, launcher=template.launch, grace=0) as server:
        yield PrefillOracle(server)


def planted(expected: dict[str, Answer], requests: list[Request], folder: Path) -> dict[str, str]:
    """The environment of a server whose drafts hold the true continuation behind decoys."""
    sequences = [[*request.input_ids, *expected[request.name].tokens] for request in requests]
    (folder / "sequences.json").write_text(json.dumps(sequences))
    return {**ENVIRONMENT, "DDTREE_TEST_PLANT": str(folder / "sequences.json")}


def assert_same(expected: dict[str, Answer], answers: dict[str, Answer]) -> None:
    """Tokens are equal; log-probs agree closely enough to tell whether one key more or less was seen."""
    tokens = {name: answer.tokens for name, answer in answers.items()}
    assert tokens == {name: expected[name].tokens for name in answers}
    for name, answer in answers.items():
        pairs = zip(
            expected[name].meta["output_token_logprobs"], answer.meta["output_token_logprobs"], strict=True
        )
        assert max(abs(stock[0] - ours[0]) for stock, ours in pairs) < 2e-4, name


@pytest.mark.parametrize(
    ("page", "width", "flags"),
    [
        (16, 33, ONE_POOL),
        (1, 20, TIGHT),
        (16, 33, TIGHT),
        (64, 17, (*HYBRID, "--disable-overlap-schedule")),
    ],
)
def test_window_layers_verify_and_commit_exactly(
    template: ServerTemplate, stock_laguna: Oracle, laguna_target: Path, tmp_path: Path,
    page: int, width: int, flags: tuple,
) -> None:  # fmt: skip
    """Winding paths, tokens that leave the window, and window layers with slots of their own."""
    expected = stock_laguna.answers(REQUESTS)
    environment = planted(expected, REQUESTS, tmp_path)
    arguments = ddtree_flags(SOURCE, page, width, "--model-path", str(laguna_target), *flags)
    with ServerProcess(arguments, environment=environment, launcher=template.launch, grace=0) as server:
        answers = ask_all(server, REQUESTS)
        assert_same(expected, answers)
        rounds = sum(answer.meta["spec_verify_ct"] for answer in answers.values())
        accepted = sum(answer.meta["spec_num_correct_drafts"] for answer in answers.values())
        assert accepted / rounds > 3.5
        # Prefix hits: what is left of the prompts' windows in the prefix cache.
        assert_same(expected, ask_all(server, REQUESTS[3:]))
        assert used_tokens(server) == 0


def test_the_triton_kernels_read_windows_and_the_window_pool(
    template: ServerTemplate, stock_laguna: Oracle, laguna_target: Path
) -> None:
    environment = {**ENVIRONMENT, "SGLANG_DDTREE_KERNEL": "triton"}
    arguments = ddtree_flags(
        SOURCE, 16, 9, "--model-path", str(laguna_target), *HYBRID, "--disable-cuda-graph"
    )
    with ServerProcess(arguments, environment=environment, launcher=template.launch, grace=0) as server:
        assert_same(stock_laguna.answers(SHORT), ask_all(server, SHORT))
        chosen = "with a window, blocks of 9 rows, pages of 16: the triton kernel"
        assert chosen in server.log_path.read_text()


def test_sinks_and_windows_of_gpt_oss(
    template: ServerTemplate, stock_gpt_oss: PrefillOracle, gpt_oss_target: Path, tmp_path: Path
) -> None:
    expected = stock_gpt_oss.answers(SHORT)
    environment = GPT_OSS_ENVIRONMENT | planted(expected, SHORT, tmp_path)
    arguments = ddtree_flags(SOURCE, 16, 17, "--model-path", str(gpt_oss_target), *HYBRID)
    with ServerProcess(arguments, environment=environment, launcher=template.launch, grace=0) as server:
        answers = ask_all(server, SHORT)
        assert_same(expected, answers)
        assert sum(answer.meta["spec_num_correct_drafts"] for answer in answers.values()) > len(SHORT) * 6
        assert used_tokens(server) == 0


@pytest.mark.parametrize(
    ("window", "settings"),
    [(16, {}), (5, {"is_causal": False})],
    ids=["causal window layers", "windows to both sides, shorter than the block"],
)
def test_a_drafter_with_windows_drafts_as_on_a_stock_backend(
    template: ServerTemplate, stock_gqa: Oracle, tmp_path: Path, window: int, settings: dict
) -> None:
    drafter = windowed_drafter(tmp_path / "drafter", window, **settings)
    requests = [replace(request, extra={}) for request in REQUESTS]
    counts = []
    for backend in ("ddtree-verify", "triton"):
        arguments = ddtree_flags(
            SOURCE, 16, 17, "--speculative-draft-model-path", str(drafter),
            "--speculative-draft-attention-backend", backend,
        )  # fmt: skip
        with ServerProcess(arguments, environment=ENVIRONMENT, launcher=template.launch, grace=0) as server:
            answers = {request.name: ask(server, request) for request in requests}
        assert not differences(stock_gqa.answers(requests), answers)
        counts.append([answer.meta["spec_correct_drafts_histogram"] for answer in answers.values()])
    assert counts[0] == counts[1]
    assert sum(sum(histogram[1:]) for histogram in counts[0]) > 10
