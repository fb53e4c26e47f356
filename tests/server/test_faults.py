"""What goes wrong in production: broken requests, a broken target, hundreds at once, a killed scheduler.

One server takes all of it. After each fault later requests are exact and every KV slot is free again. All the
while NaN fills whatever a request must not read, so that an answer that depended on it would not be stock's.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
from burst import burst_differences
from client_view import differences as view_differences
from client_view import observe
from serving import (
    CONTEXT_LENGTH,
    ENVIRONMENT,
    Answer,
    Oracle,
    Request,
    ask,
    ask_all,
    ddtree_flags,
    differences,
    text_tokens,
    used_tokens,
)
from workloads import CHAT, COMPLETIONS, GENERATE, VOCABULARY, Call

from sglang_ddtree_patch.launch.server_process import HOST, ServerProcess
from sglang_ddtree_patch.launch.server_template import ServerTemplate

NAN_TOKEN = 101  # in none of the prompts and answers, but those that ask for it
SEEDED = {"temperature": 0.9, "sampling_seed": 3}
KINDS = {1: {}, 15: SEEDED, 16: {}, 40: {"frequency_penalty": 0.4}, 70: {}, 140: SEEDED}
REQUESTS = [
    Request(f"length {n}", text_tokens("tiny-gqa", n, start=3 * n), 24, {"ignore_eos": True, **rule})
    for n, rule in KINDS.items()
]
PROMPT = list(text_tokens("tiny-gqa", 20))
FLAGS = ddtree_flags("tiny-gqa", 16, 17)


@pytest.fixture(scope="module")
def expected(stock_gqa: Oracle) -> dict[str, Answer]:
    answers = stock_gqa.answers(REQUESTS, one_by_one=True)
    assert not any(NAN_TOKEN in (*request.input_ids, *answers[request.name].tokens) for request in REQUESTS)
    return answers


@pytest.fixture(scope="module")
def server(template: ServerTemplate) -> Iterator[ServerProcess]:
    environment = {
        **ENVIRONMENT,
        "DDTREE_TEST_POISON": "1",
        "DDTREE_TEST_NAN_TOKEN": str(NAN_TOKEN),
        "SGLANG_SANITIZE_NAN_LOGITS": "1",  # without it torch refuses to draw from NaN, which ends SGLang
    }
    with ServerProcess(FLAGS, environment=environment, launcher=template.launch, grace=0) as started:
        yield started


@pytest.fixture(autouse=True)
def _later_requests_are_exact(server: ServerProcess, expected: dict[str, Answer]) -> Iterator[None]:
    yield
    if server.is_alive:
        assert used_tokens(server) == 0
        assert not differences(expected, ask_all(server, REQUESTS[:2]))


def test_answers_never_depend_on_what_free_slots_hold(server: ServerProcess, expected: dict) -> None:
    for _ in range(2):
        answers = ask_all(server, REQUESTS)
        assert not differences(expected, answers)
        assert used_tokens(server) == 0
        # The drafter reads no NaN either, or its guesses would be none.
        meta = [answer.meta for answer in answers.values()]
        assert sum(m["spec_num_correct_drafts"] for m in meta) > sum(m["spec_verify_ct"] for m in meta)


def generate(**changes: object) -> Call:
    payload = {"input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
    return Call(GENERATE, {**payload, **changes}, delay=0)


def sampled(**sampling: object) -> Call:
    return generate(sampling_params={"max_new_tokens": 4, "temperature": 0, **sampling})


# Stock does not answer these: they end it.
DEADLY = [
    generate(input_ids=[5, VOCABULARY]), generate(input_ids=[-1]), generate(input_ids=[5, 2**40, 6]),
    generate(return_logprob=True, top_logprobs_num=VOCABULARY + 1),
    sampled(stop_token_ids=[10**6], min_new_tokens=2),
]  # fmt: skip
MALFORMED = [
    generate(input_ids=[]), generate(input_ids="text"), generate(input_ids=[[5], "x"]),
    generate(input_ids=None, text=None), generate(return_logprob=True, logprob_start_len=10**6),
    generate(return_logprob=True, token_ids_logprob=[VOCABULARY]),
    sampled(max_new_tokens=-1), sampled(temperature=-1), sampled(top_p=0), sampled(top_k=-5),
    sampled(min_new_tokens=9), sampled(frequency_penalty=9), sampled(unknown=1), sampled(stop=[7]),
    sampled(logit_bias={"x": 1}), sampled(logit_bias={str(VOCABULARY): 1.0}), sampled(regex="(("),
    sampled(json_schema="{"), sampled(stop_token_ids=[10**6]), sampled(sampling_seed=2**70),
    Call(COMPLETIONS, {"model": "default"}, delay=0),
    Call(COMPLETIONS, {"model": "default", "prompt": "x", "max_tokens": "many"}, delay=0),
    Call(CHAT, {"model": "default", "messages": [{"role": "user"}]}, delay=0),
]  # fmt: skip


def test_malformed_requests_get_stocks_answer_and_harm_nobody(
    server: ServerProcess, stock_gqa: Oracle, expected: dict
) -> None:
    answers: dict[str, Answer] = {}
    company = threading.Thread(target=lambda: answers.update(ask_all(server, REQUESTS)))
    company.start()
    hang_up(server, b'{"input_ids": [5, 6')
    hang_up(server, json.dumps(REQUESTS[0].payload).encode())
    lines = []
    for call in MALFORMED:
        stock, ours = (observe(each, call, gives_up=False) for each in (stock_gqa.server, server))
        lines += [f"{call.payload}{line}" for line in view_differences("", stock, ours)]
    for call in DEADLY:
        view = observe(server, call, gives_up=False)
        assert view["status"] == 400, call
        assert "tokens" in view["body"]["error"]["message"]
    company.join()
    assert not lines
    assert not differences(expected, answers)


def hang_up(server: ServerProcess, body: bytes) -> None:
    """Send a request, or a part of one, and be gone before its answer."""
    lines = [
        "POST /generate HTTP/1.1", "Host: here", "Content-Type: application/json",
        f"Content-Length: {max(len(body), 30)}", "", "",
    ]  # fmt: skip
    with socket.create_connection((HOST, server.port)) as connection:
        connection.sendall("\r\n".join(lines).encode() + body)


def test_prompts_at_the_end_of_the_context_are_answered_or_refused_as_by_stock(
    server: ServerProcess, stock_gqa: Oracle
) -> None:
    answered = set()
    for length in range(CONTEXT_LENGTH - 9, CONTEXT_LENGTH + 3):
        tokens = list(text_tokens("tiny-gqa", length))
        call = generate(input_ids=tokens, sampling_params={"temperature": 0, "max_new_tokens": None})
        stock, ours = (observe(each, call, gives_up=False) for each in (stock_gqa.server, server))
        assert not view_differences("", stock, ours), length
        answered.add(stock["status"])
    assert answered == {200, 400}


def test_nan_logits_harm_no_other_request(server: ServerProcess, expected: dict) -> None:
    broken = [
        Request(f"broken {n}", (*PROMPT[:n], NAN_TOKEN, *PROMPT), 30, {"ignore_eos": True, **rule})
        for n, rule in [(1, {}), (9, SEEDED), (12, {"repetition_penalty": 1.2})]
    ]
    answers = ask_all(server, [*broken, *REQUESTS, *broken[:1]], stagger=0.02)
    assert not differences(expected, {request.name: answers[request.name] for request in REQUESTS})
    for request in broken:
        answer = answers[request.name]
        assert answer.finish == {"type": "length", "length": 30}
        assert all(0 <= token < VOCABULARY and token != NAN_TOKEN for token in answer.tokens)


def test_hundreds_of_short_requests_at_once_are_each_answered(
    server: ServerProcess, stock_gqa: Oracle
) -> None:
    assert not burst_differences(stock_gqa, server, 300)


def test_a_killed_scheduler_ends_the_server_and_a_new_one_serves(
    server: ServerProcess, template: ServerTemplate, expected: dict
) -> None:
    """The last of the file, as it takes the server away."""
    children = psutil.Process(server.pid).children()
    # Not by title, which not every machine lets a process change: of its processes SGLang starts it first.
    started = [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]
    scheduler = min(started, key=psutil.Process.create_time)
    scheduler.kill()
    deadline = time.monotonic() + 60
    while server.is_alive and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not server.is_alive
    with ServerProcess(FLAGS, environment=ENVIRONMENT, launcher=template.launch, grace=0) as again:
        assert ask(again, REQUESTS[3]) == expected[REQUESTS[3].name]
        assert used_tokens(again) == 0
