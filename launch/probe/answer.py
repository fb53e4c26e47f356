"""One streamed request of a probe, and what came back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sglang_ddtree_patch.launch.bench.client import RequestProgress
from sglang_ddtree_patch.launch.sglang_client import Budget, ServerLost, SGLangClient, stream_answer

Prompt = str | list[int]


@dataclass
class Answer:
    """A finished answer."""

    started: float  # seconds, on the clock of its progress
    progress: RequestProgress = field(default_factory=RequestProgress)
    meta: dict[str, Any] = field(default_factory=dict)  # the last event's
    text: str = ""

    @property
    def wall_seconds(self) -> float:
        return self.progress.times[-1] - self.started

    @property
    def first_token_seconds(self) -> float:
        return self.progress.times[0] - self.started


def ask(
    client: SGLangClient, prompt: Prompt, new_tokens: int, watch: Callable[[Answer], None] | None = None
) -> Answer:
    """Have the prompt answered greedily with exactly `new_tokens` tokens.

    watch: called at each event with the answer so far.

    Raises:
        NotMeasured: the server refuses this prompt.
        ServerLost: it does not answer to the end.
    """
    payload = {
        "text" if isinstance(prompt, str) else "input_ids": prompt if isinstance(prompt, str) else [prompt],
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
    }
    answer = Answer(time.monotonic())
    for event in stream_answer(client, payload, Budget()):
        answer.meta = event["meta_info"]
        answer.text = event.get("text", "")
        answer.progress.add(time.monotonic(), answer.meta)
        if watch is not None:
            watch(answer)
    if not answer.progress.is_finished:
        raise ServerLost(f"{client.url} ended an answer early{client.last_words()}")
    return answer
