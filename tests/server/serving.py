"""What the server tests share: servers to start, requests to send, answers to compare."""

from __future__ import annotations

import json
import textwrap
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from sglang_ddtree_patch import model_catalog
from sglang_ddtree_patch.launch.server_process import CPU_ENVIRONMENT, ServerProcess

CONTEXT_LENGTH = 512
CHUNK = 64
POOL_TOKENS = 8192

# A pool that does not add up ends the server, in a busy round as well as in an idle one.
ENVIRONMENT = {
    **CPU_ENVIRONMENT,
    "OMP_NUM_THREADS": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
}


@dataclass(frozen=True)
class Request:
    """One request to `/generate`, greedy unless `sampling` says otherwise."""

    name: str
    input_ids: tuple[int, ...]
    max_new_tokens: int | None = 24  # None: to the end of the context
    sampling: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def payload(self) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": self.max_new_tokens, **self.sampling}
        return {"input_ids": list(self.input_ids), "sampling_params": sampling, **self.extra}


@dataclass(frozen=True)
class Answer:
    """What a client sees of a finished request."""

    tokens: tuple[int, ...]
    text: str
    finish: dict[str, Any]
    meta: dict[str, Any] = field(compare=False)


def common_flags(model: str) -> list[str]:
    """Flags that both the oracle and ours are started with."""
    return [
        "--model-path", str(model_catalog.path(model) / "target"),
        "--device", "cpu", "--dtype", "float32",
        "--context-length", str(CONTEXT_LENGTH), "--chunked-prefill-size", str(CHUNK),
        "--max-total-tokens", str(POOL_TOKENS), "--max-running-requests", "16", "--sleep-on-idle",
    ]  # fmt: skip


def ddtree_flags(model: str, page_size: int, width: int, *more: str) -> list[str]:
    """A DDTREE server's flags; later ones win over the common ones."""
    return [
        *common_flags(model),
        "--attention-backend", "ddtree-verify", "--speculative-algorithm", "DDTREE",
        "--speculative-draft-model-path", str(model_catalog.path(model) / "draft"),
        "--page-size", str(page_size), "--speculative-num-draft-tokens", str(width),
        *more,
    ]  # fmt: skip


def text_tokens(model: str, count: int, start: int = 0) -> tuple[int, ...]:
    """`count` tokens of ordinary Python source, the kind of text the models were trained on."""
    tokenizer = Tokenizer.from_file(str(model_catalog.path(model) / "target" / "tokenizer.json"))
    ids = tokenizer.encode(Path(textwrap.__file__).read_text(), add_special_tokens=False).ids
    return tuple(ids[start : start + count])


def ask(server: ServerProcess, request: Request) -> Answer:
    reply = server.post_json("/generate", request.payload)
    return Answer(
        tokens=tuple(reply["output_ids"]),
        text=reply.get("text", ""),  # absent where the server runs without a tokenizer
        finish=reply["meta_info"]["finish_reason"],
        meta=reply["meta_info"],
    )


def ask_all(
    server: ServerProcess, requests: Iterable[Request], stagger: float = 0.05
) -> dict[str, Answer]:
    """Send all requests, each a moment after the one before, so that batches mix lengths and stages."""
    answers: dict[str, Answer] = {}
    errors: list[Exception] = []

    def send(request: Request) -> None:
        try:
            answers[request.name] = ask(server, request)
        except (OSError, urllib.error.URLError) as error:
            errors.append(error)

    threads = []
    for request in requests:
        threads.append(threading.Thread(target=send, args=(request,)))
        threads[-1].start()
        time.sleep(stagger)
    for thread in threads:
        thread.join()
    assert not errors, f"{errors[0]}\n{server.log_tail()}"
    return answers


def differences(expected: Mapping[str, Answer], found: Mapping[str, Answer]) -> list[str]:
    """One line for each request that was answered otherwise than expected; empty when all agree."""
    return [
        f"{name}: expected {expected[name].tokens} {expected[name].finish}, "
        f"got {answer.tokens} {answer.finish}"
        for name, answer in found.items()
        if answer != expected[name]
    ]


def used_tokens(server: ServerProcess) -> int:
    """KV slots in use once the prefix cache is flushed and every request is done."""
    deadline = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(f"{server.url}/flush_cache", timeout=60):
                pass
        except urllib.error.HTTPError:
            # The last answer may be out a moment before the scheduler drops its request from the batch.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
            continue
        used = server.get_json("/v1/loads?include=all")["loads"][0]["num_used_tokens"]
        if used == 0 or time.monotonic() > deadline:
            return used
        time.sleep(0.5)


class Oracle:
    """Stock SGLang without speculation, asked once for each request and remembered."""

    def __init__(self, server: ServerProcess):
        self.server = server
        self._answers: dict[str, Answer] = {}

    def answers(self, requests: Sequence[Request], one_by_one: bool = False) -> dict[str, Answer]:
        """Stock answers to `requests`, by request name.

        one_by_one: where stock answers a request otherwise in company, its answer alone.
        """
        if one_by_one:
            return {request.name: self.answers([request])[request.name] for request in requests}
        keys = {request.name: json.dumps(request.payload, sort_keys=True) for request in requests}
        missing = [request for request in requests if keys[request.name] not in self._answers]
        for name, answer in ask_all(self.server, missing, stagger=0.0).items():
            self._answers[keys[name]] = answer
        return {name: self._answers[key] for name, key in keys.items()}


def request_set(model: str, page: int, tokens: int = 24) -> list[Request]:
    """Prompts around the page and chunk boundaries, and every way a request ends.

    The same requests at every page size would cost less, but miss the boundaries of each.
    """
    lengths = sorted({1, max(page - 1, 2), page, page + 1, 3 * CHUNK + 5})
    requests = [
        Request(f"length {n}", text_tokens(model, n), tokens, {"ignore_eos": True}) for n in lengths
    ]
    prompt = text_tokens(model, 40, start=300)
    requests += [Request(f"max_new_tokens {n}", prompt, n, {"ignore_eos": True}) for n in (1, 2, 3)]
    requests += [
        Request("end of context", text_tokens(model, CONTEXT_LENGTH - 20), None, {"ignore_eos": True}),
        Request("shared prefix", text_tokens(model, 3 * CHUNK) + prompt, tokens, {"ignore_eos": True}),
        Request("eos allowed", text_tokens(model, 30, start=600), tokens),
    ]
    return requests


def stopped_requests(model: str, answer: Answer, prompt: Sequence[int]) -> list[Request]:
    """Requests that stop inside what `answer` (to `prompt`) generated: at a token, at a string."""
    middle = answer.tokens[len(answer.tokens) // 2]
    words = answer.text.split()
    return [
        Request("stop token", tuple(prompt), 24, {"stop_token_ids": [middle], "ignore_eos": True}),
        Request("stop string", tuple(prompt), 24, {"stop": words[len(words) // 2], "ignore_eos": True}),
    ]
