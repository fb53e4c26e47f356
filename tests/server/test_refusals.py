"""What is not served is refused in words: at start with one line and exit 1, in a request with HTTP 400."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import urllib.error

import pytest
from client_view import observe
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
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor
from workloads import GENERATE, Call

from sglang_ddtree_patch import model_catalog
from sglang_ddtree_patch.launch.server_process import ServerProcess
from sglang_ddtree_patch.launch.server_template import ServerTemplate

TARGET = str(model_catalog.path("tiny-gqa") / "target")
ASK = ["--speculative-algorithm", "DDTREE", "--attention-backend", "ddtree-verify"]

# Every other refusal is checked without a process of its own in tests/unit/test_arguments.py.
START_REFUSALS = {
    "no draft model": (ASK, "--speculative-draft-model-path PATH"),
    "a draft that is not DFlash": (
        [*ASK, "--speculative-draft-model-path", TARGET],
        "is not a plain DFlash drafter",
    ),
}


@pytest.mark.parametrize("case", sorted(START_REFUSALS))
def test_bad_settings_end_in_one_line_and_exit_1(case: str) -> None:
    flags, expected = START_REFUSALS[case]
    ended = subprocess.run(
        [sys.executable, "-m", "sglang.launch_server", *common_flags("tiny-gqa"), *flags],
        env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    lines = [line for line in ended.stderr.splitlines() if "sglang-ddtree-patch: error:" in line]
    assert ended.returncode == 1
    assert len(lines) == 1
    assert expected in lines[0]
    assert "Traceback" not in ended.stderr
    assert "Load weight begin" not in ended.stdout + ended.stderr


def test_a_request_that_is_not_served_gets_400_and_the_others_go_on(
    refusing_server: ServerProcess, stock_gqa: Oracle
) -> None:
    prompt = text_tokens("tiny-gqa", 20)
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(refusing_server, Request("refused", prompt, 8, {"sampling_seed": -(2**63)}))
    assert refused.value.code == 400
    message = json.loads(refused.value.read())["error"]["message"]
    assert "DDTREE speculative decoding does not support sampling_seed" in message
    served = Request("served", prompt, 8, {"ignore_eos": True})
    assert ask(refusing_server, served) == stock_gqa.answers([served])[served.name]


PROMPT = list(text_tokens("tiny-gqa", 20))
UNKNOWN_SESSION = {"session_params": {"id": "unknown"}}
PROCESSOR = DisallowedTokensLogitsProcessor.to_str()
# (what is asked for, words of the reason). Each ends a stock server; the empty list ended only ours.
DEADLY = [
    (
        {**UNKNOWN_SESSION, "stop_token_ids": [10**6], "min_new_tokens": 2},
        "session id unknown does not exist",
    ),
    ({**UNKNOWN_SESSION, "top_k": 2**31}, "session id unknown does not exist"),
    ({"top_k": 2**31}, "top_k 2147483648 is more than 2147483647"),
    ({"return_logprob": True, "logprob_start_len": -7}, "logprob_start_len -7 is no place in the prompt"),
    ({"top_logprobs_num": []}, "top_logprobs_num is a list"),
    ({"session_params": {"id": ["x"]}}, "the session's id is a list"),
    ({"custom_logit_processor": PROCESSOR, "custom_params": [1]}, "custom_params is a list"),
]
OF_SAMPLING = {"stop_token_ids", "min_new_tokens", "top_k", "custom_params"}


@pytest.mark.parametrize(("asked", "reason"), DEADLY, ids=[" and ".join(asked) for asked, _ in DEADLY])
def test_a_request_that_would_end_a_stock_server_gets_400_and_the_server_lives(
    refusing_server: ServerProcess, stock_gqa: Oracle, asked: dict, reason: str
) -> None:
    sampling = {name: asked[name] for name in asked.keys() & OF_SAMPLING}
    extra = {name: asked[name] for name in asked.keys() - OF_SAMPLING}
    company: dict[str, Answer] = {}
    served = [
        Request(f"served {n}", text_tokens("tiny-gqa", 9 + n), 24, {"ignore_eos": True}) for n in (0, 4)
    ]
    others = threading.Thread(target=lambda: company.update(ask_all(refusing_server, served)))
    others.start()
    payload = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 8, "temperature": 1, **sampling},
        **extra,
    }
    view = observe(refusing_server, Call(GENERATE, payload, delay=0), gives_up=False)
    others.join()
    assert view["status"] == 400
    assert reason in view["body"]["error"]["message"]
    assert not differences(stock_gqa.answers(served), company)
    assert company
    assert used_tokens(refusing_server) == 0


@pytest.fixture(scope="module")
def refusing_server(template: ServerTemplate):
    flags = ddtree_flags("tiny-gqa", 16, 8, "--enable-custom-logit-processor")
    with ServerProcess(flags, environment=ENVIRONMENT, launcher=template.launch, grace=0) as server:
        yield server


def test_the_backend_without_the_algorithm_serves_as_the_wrapped_one_and_says_so(
    template: ServerTemplate, stock_gqa: Oracle
) -> None:
    flags = [*common_flags("tiny-gqa"), "--attention-backend", "ddtree-verify"]
    request = Request("plain", text_tokens("tiny-gqa", 20), 8, {"temperature": 0.0})
    with ServerProcess(flags, environment=ENVIRONMENT, launcher=template.launch, grace=0) as server:
        assert ask(server, request) == stock_gqa.answers([request])[request.name]
        assert "serving with the attention backend SGLang chooses" in server.log_path.read_text()
