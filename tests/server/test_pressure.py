"""Retraction, aborts and disconnects: later answers stay exact and every slot comes back."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import urllib.request
from dataclasses import replace

import pytest
from serving import (
    ENVIRONMENT,
    Oracle,
    Request,
    ask_all,
    ddtree_flags,
    differences,
    text_tokens,
    used_tokens,
)

from sglang_ddtree_patch.launch.server_process import ServerProcess
from sglang_ddtree_patch.launch.server_template import ServerTemplate

EOS = "2"
# Biased away from ending, not `ignore_eos`: SGLang admits those requests only with room to finish, so
# they are never retracted.
# Some draw by a seed and some are penalized: what they have said must survive as well.
KINDS = [{}, {"frequency_penalty": 0.3, "repetition_penalty": 1.1}, {"temperature": 0.9, "sampling_seed": 3}]
REQUESTS = [
    Request(
        f"request {n}", text_tokens("tiny-gqa", 30 + n, start=20 * n), 200,
        {"logit_bias": {EOS: -100}, **KINDS[n % len(KINDS)]},
    )
    for n in range(8)
]  # fmt: skip


@pytest.mark.parametrize(("page", "pool"), [(1, 800), (16, 800), (64, 1280)])
def test_requests_that_were_retracted_are_answered_exactly(
    template: ServerTemplate, stock_gqa: Oracle, page: int, pool: int
) -> None:
    expected = stock_gqa.answers(REQUESTS, one_by_one=True)
    flags = ddtree_flags(
        "tiny-gqa", page, 17, "--max-total-tokens", str(pool), "--schedule-conservativeness", "0.05"
    )
    with ServerProcess(flags, environment=ENVIRONMENT, launcher=template.launch, grace=0) as server:
        assert not differences(expected, ask_all(server, REQUESTS, stagger=0.0))
        assert "KV cache pool is full. Retract requests" in server.log_path.read_text()
        assert used_tokens(server) == 0


@pytest.mark.parametrize("page", [1, 16])
def test_aborted_and_disconnected_requests_give_every_slot_back(
    template: ServerTemplate, stock_gqa: Oracle, page: int
) -> None:
    expected = stock_gqa.answers(REQUESTS, one_by_one=True)
    flags = ddtree_flags("tiny-gqa", page, 17)
    with ServerProcess(flags, environment=ENVIRONMENT, launcher=template.launch, grace=0) as server:
        for count in range(3):
            threads = [
                threading.Thread(target=leave_after_first_event, args=(server, request))
                for request in REQUESTS[:4]
            ]
            for thread in threads:
                thread.start()
            time.sleep(0.1 * count)
            abort_all(server)
            for thread in threads:
                thread.join()
        assert not differences(expected, ask_all(server, REQUESTS))
        assert used_tokens(server) == 0


def leave_after_first_event(server: ServerProcess, request: Request) -> None:
    """Start a long streamed answer and close the connection after its first piece."""
    long = replace(request, max_new_tokens=300).payload
    with contextlib.suppress(OSError), contextlib.closing(server.stream_json("/generate", long)) as events:
        next(events, None)


def abort_all(server: ServerProcess) -> None:
    request = urllib.request.Request(
        f"{server.url}/abort_request",
        data=json.dumps({"abort_all": True}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60):
        pass
