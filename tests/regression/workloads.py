"""Random requests: what a seed makes of everything a client may ask for.

Stock is the judge, so that nothing is asked for in which stock is not definite:

- sampled requests carry a seed, and no min-p, which stock lacks with seeds;
- top-k 1 goes with temperature 1: stock's log-probs heed another temperature only in company;
- `max_new_tokens` 0 goes without log-probs: only in company stock shows some, of a token it does not say;
- stop strings have two letters at most, as stock overlooks longer ones that are spelled in many tokens, which
  tests/unit/test_finish.py looks at;
- grammar goes without `ignore_eos`, which ends otherwise on purpose (docs/limits.md).
"""

from __future__ import annotations

import json
import random
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving import CONTEXT_LENGTH, text_tokens

VOCABULARY = 768
EOS = 2
SOURCE = Path(textwrap.__file__).read_text()
STOPS = ["\n", " =", "(", "):", "if", ".", "1", "e", "  ", "\n\n", "se"]
GRAMMARS = [
    {"regex": "[a-z ]{5,40}"},
    {"regex": "(self\\.[a-z]{1,6} = [0-9]{1,3}\n){1,4}"},
    {"ebnf": 'root ::= item (", " item){0,5}\nitem ::= [a-z]+ "(" [a-z]* ")"'},
    {"json_schema": json.dumps({
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "count": {"type": "integer"}},
        "required": ["name", "count"],
    })},
]  # fmt: skip

GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True)
class Call:
    """One HTTP request, when it is sent, and when the client gives up on it."""

    path: str
    payload: Mapping[str, Any]
    delay: float  # seconds after the call before it
    is_streamed: bool = False
    leaves_after: int | None = None  # events of the stream after which the client disconnects
    aborted_after: float | None = None  # seconds after which the client asks for the abort


def workload(seed: int, page: int, chunk: int, calls: int) -> list[Call]:
    """`calls` calls whose prompts gather around the boundaries of the server's pages and chunks."""
    draw = random.Random(f"workload {seed}")
    prompts = Prompts(draw, page, chunk)
    pace = draw.choice([0.0, 0.02, 0.1])
    return [_call(draw, prompts, draw.uniform(0, 2 * pace)) for _ in range(calls)]


def _call(draw: random.Random, prompts: Prompts, delay: float) -> Call:
    path = draw.choices([GENERATE, COMPLETIONS, CHAT], [7, 1.5, 1.5])[0]
    payload = {GENERATE: _generate, COMPLETIONS: _completions, CHAT: _chat}[path](draw, prompts)
    is_streamed = draw.random() < 0.4
    leaves_after = aborted_after = None
    if is_streamed and draw.random() < 0.2:
        leaves_after = draw.randrange(1, 6)
    elif path == GENERATE and isinstance(payload["input_ids"][0], int) and draw.random() < 0.08:
        aborted_after = draw.uniform(0, 0.4)
    if is_streamed and path != GENERATE:
        payload["stream_options"] = {"include_usage": True}
    return Call(path, payload, delay, is_streamed, leaves_after, aborted_after)


class Prompts:
    """Prompts of one workload, many of which begin alike."""

    def __init__(self, draw: random.Random, page: int, chunk: int):
        self._draw = draw
        edges = {1, 2, page - 1, page, page + 1, 2 * page, chunk - 1, chunk, chunk + 1, 2 * chunk + 1}
        self._edges = sorted(n for n in edges if 0 < n <= 300)
        self._said: list[list[int]] = []

    def tokens(self) -> list[int]:
        draw = self._draw
        length = draw.choice(self._edges) if draw.random() < 0.4 else draw.randrange(1, 220)
        kind = draw.random()
        if self._said and kind < 0.35:
            shared = draw.choice(self._said)
            tokens = shared[: draw.randrange(1, len(shared) + 1)] + self._text(draw.randrange(0, 20))
        elif kind < 0.9:
            tokens = self._text(length)
        elif kind < 0.95:
            tokens = [draw.randrange(4, VOCABULARY) for _ in range(length)]
        else:
            # At the end of the context, or past it.
            tokens = self._text(CONTEXT_LENGTH - draw.choice([0, 1, 2, 3, 10, 30, -1]))
        self._said.append(tokens)
        return tokens

    def _text(self, length: int) -> list[int]:
        return list(text_tokens("tiny-gqa", length, start=self._draw.randrange(0, 3000)))

    def text(self) -> str:
        start = self._draw.randrange(0, len(SOURCE) - 400)
        return SOURCE[start : start + self._draw.randrange(1, 300)]


def _generate(draw: random.Random, prompts: Prompts) -> dict[str, Any]:
    count = draw.choice([1] * 8 + [2, 3])
    many = [prompts.tokens() for _ in range(count)]
    sampling = _sampling(draw, "max_new_tokens")
    _stops(draw, sampling, "stop_token_ids")
    if draw.random() < 0.15:
        sampling["stop_regex"] = draw.choice(["self\\.[a-z]+", "[0-9]{2}", "\n +r"])
    if draw.random() < 0.12:
        sampling["n"] = 2
    if draw.random() < 0.15:
        sampling.update(draw.choice(GRAMMARS), ignore_eos=False, min_new_tokens=0)
    for name in ("no_stop_trim", "skip_special_tokens", "spaces_between_special_tokens"):
        if draw.random() < 0.15:
            sampling[name] = draw.random() < 0.5
    payload = {"input_ids": many if count > 1 else many[0], "sampling_params": sampling}
    if draw.random() < 0.35 and sampling["max_new_tokens"] != 0:
        payload |= {"return_logprob": True, "top_logprobs_num": draw.choice([0, 1, 3])}
        if draw.random() < 0.4:
            payload["logprob_start_len"] = draw.choice([0, 1, 20])
        if draw.random() < 0.4:
            payload["token_ids_logprob"] = [EOS, draw.randrange(VOCABULARY)]
    return payload


def _completions(draw: random.Random, prompts: Prompts) -> dict[str, Any]:
    prompt = draw.choice([prompts.text, prompts.tokens, lambda: [prompts.text(), prompts.text()]])()
    payload = {"model": "default", "prompt": prompt, **_sampling(draw, "max_tokens")}
    _stops(draw, payload, "stop_token_ids")
    if draw.random() < 0.3:
        payload["logprobs"] = draw.choice([1, 2])
    if draw.random() < 0.2:
        payload["echo"] = True
    if draw.random() < 0.2:
        payload["n"] = 2
    return payload


def _chat(draw: random.Random, prompts: Prompts) -> dict[str, Any]:
    roles = draw.choice([["user"], ["system", "user"], ["user", "assistant", "user"]])
    messages = [{"role": role, "content": prompts.text()[:120]} for role in roles]
    payload = {"model": "default", "messages": messages, **_sampling(draw, "max_tokens")}
    _stops(draw, payload, "stop_token_ids")
    if draw.random() < 0.3:
        payload |= {"logprobs": True, "top_logprobs": draw.choice([0, 1, 3])}
    if draw.random() < 0.15:
        schema = json.loads(GRAMMARS[3]["json_schema"])
        form = {"type": "json_schema", "json_schema": {"name": "item", "schema": schema}}
        payload |= {"response_format": form, "ignore_eos": False, "min_tokens": 0}
    if draw.random() < 0.2:
        payload["n"] = 2
    return payload


def _sampling(draw: random.Random, limit: str) -> dict[str, Any]:
    """Sampling parameters, named as the endpoint names them: `limit` tells which."""
    is_native = limit == "max_new_tokens"
    sampling: dict[str, Any] = {
        limit: draw.choice([1, 2, 3, 8, 16, 17, 24, 33, 48, 90]),
        "ignore_eos": draw.random() < 0.6,
        "temperature": 0,
    }
    if is_native and draw.random() < 0.06:
        sampling[limit] = draw.choice([0, None])
    if draw.random() < 0.45:
        sampling["temperature"] = draw.choice([0.2, 0.7, 1.0, 1.6])
        seed = draw.choice([0, 1, -1, 2**40, draw.randrange(999)])
        sampling["sampling_seed" if is_native else "seed"] = seed
        if draw.random() < 0.4:
            sampling["top_k"] = draw.choice([2, 20, 700])
        elif draw.random() < 0.1:
            sampling |= {"top_k": 1, "temperature": 1.0}
        if draw.random() < 0.4:
            sampling["top_p"] = draw.choice([0.1, 0.8, 0.95])
    for name, values in (
        ("frequency_penalty", [-0.5, 0.3, 1.0]),
        ("presence_penalty", [-0.5, 0.4, 1.5]),
        ("repetition_penalty", [0.8, 1.1, 1.5]),
        ("min_new_tokens" if is_native else "min_tokens", [1, 3, 7, 20]),
        ("logit_bias", [{"17": 4.0}, {str(EOS): 3.0, "20": -100.0}, {str(draw.randrange(VOCABULARY)): 50.0}]),
    ):
        if draw.random() < 0.12:
            sampling[name] = draw.choice(values)
    return sampling


def _stops(draw: random.Random, sampling: dict[str, Any], token_ids: str) -> None:
    if draw.random() < 0.25:
        sampling["stop"] = draw.choice([draw.choice(STOPS), draw.sample(STOPS, 2)])
    if draw.random() < 0.2:
        sampling[token_ids] = [draw.choice(text_tokens("tiny-gqa", 2000)), draw.randrange(VOCABULARY)]
