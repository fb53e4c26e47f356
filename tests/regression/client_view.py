"""What a client sees of a call, in one shape for every endpoint, and how two servers' views differ."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
import urllib.error
import urllib.request
import uuid
from typing import Any

from workloads import GENERATE, Call

from sglang_ddtree_patch.launch.server_process import ServerProcess

# Names, times, and what depends on the company a request has.
NOT_COMPARED = frozenset({
    "id", "created", "e2e_latency", "response_sent_to_client_ts", "cached_tokens", "cached_tokens_details",
    "num_retractions",
})  # fmt: skip
# Log-probs of float32 forwards of other shapes.
ABSOLUTE, RELATIVE = 3e-4, 1e-5
# Below, stock takes the logarithm of a probability that float32 no longer holds.
SMALLEST = -80.0
CLOCK = re.compile(r"\[\d\d:\d\d:\d\d\] ")  # in what xgrammar says of a grammar it cannot read
TIMEOUT = 240.0
# SGLang leaves out the log-probs of tokens that add no text to their chunk of a chat, so which ones are seen
# depends on how many tokens a chunk has.
STREAMED_LOG_PROBS = ".streamed_logprobs"


def observe(server: ServerProcess, call: Call, gives_up: bool) -> dict[str, Any]:
    """Make the call and return all of the answer that is compared, parts of a stream put together.

    gives_up: leave or abort where the call says so; the oracle never does.
    """
    payload = dict(call.payload)
    aborter = None
    if gives_up and call.aborted_after is not None:
        payload["rid"] = uuid.uuid4().hex
        aborter = threading.Timer(call.aborted_after, abort, (server, payload["rid"]))
        aborter.start()
    try:
        if call.is_streamed:
            leaves_after = call.leaves_after if gives_up else None
            return _joined(call.path, _events(server, call.path, payload, leaves_after))
        return _whole(server.post_json(call.path, payload, timeout=TIMEOUT))
    except urllib.error.HTTPError as error:
        return {"status": error.code, "body": _compared(json.loads(error.read()))}
    finally:
        if aborter is not None:
            aborter.join()


def abort(server: ServerProcess, rid: str) -> None:
    server_request = urllib.request.Request(
        f"{server.url}/abort_request", json.dumps({"rid": rid}).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(server_request, timeout=60):
        pass


def _events(server: ServerProcess, path: str, payload: dict, leaves_after: int | None) -> list[dict]:
    events: list[dict] = []
    deadline = time.monotonic() + TIMEOUT
    with contextlib.closing(server.stream_json(path, payload, timeout=TIMEOUT)) as stream:
        for event in stream:
            events.append(event)
            if leaves_after is not None and len(events) >= leaves_after:
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"a stream of {path} went on for {TIMEOUT:.0f} s")
    return events


def _whole(reply: dict | list) -> dict[str, Any]:
    if isinstance(reply, list):
        return {"status": 200, "choices": [_compared(one) for one in reply]}
    if "choices" in reply:
        return {"status": 200, **_compared(reply)}
    return {"status": 200, "choices": [_compared(reply)]}


def _joined(path: str, events: list[dict]) -> dict[str, Any]:
    """One answer of a stream's events: /generate repeats the text so far, the OpenAI endpoints add to it."""
    if path == GENERATE:
        latest: dict[int, dict] = {}
        grows = True
        for event in events:
            if "error" in event:
                return {"status": 200, "error": _compared(event["error"])}
            index = event.pop("index", 0)
            before = latest.get(index, {"text": "", "output_ids": []})
            said = before["output_ids"]
            grows &= event["text"].startswith(before["text"]) and event["output_ids"][: len(said)] == said
            latest[index] = event
        choices = [_compared(latest[index]) for index in sorted(latest)]
        return {"status": 200, "choices": choices, "grows": grows}
    joined: dict[str, Any] = {"status": 200, "choices": [], "usage": None}
    for event in events:
        if "error" in event:
            return {"status": 200, "error": _compared(event["error"])}
        joined["usage"] = event.get("usage") or joined["usage"]
        for choice in event["choices"]:
            while len(joined["choices"]) <= choice["index"]:
                joined["choices"].append({"text": "", "streamed_logprobs": []})
            one = joined["choices"][choice["index"]]
            one["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            one["streamed_logprobs"] += _log_probs(choice.get("logprobs"))
            for name in ("finish_reason", "matched_stop"):
                one[name] = choice.get(name) if choice.get(name) is not None else one.get(name)
    return joined


def _log_probs(log_probs: dict | None) -> list:
    """A chunk's log-probs as a list of tokens, so that chunks can be joined."""
    if not log_probs:
        return []
    if "content" in log_probs:
        return log_probs["content"]
    columns = [log_probs[name] or [] for name in ("tokens", "token_logprobs", "top_logprobs")]
    return [list(token) for token in zip(*columns, strict=False)]


def _compared(reply: Any) -> Any:
    """A reply without what differs from call to call."""
    if isinstance(reply, dict):
        return {
            name: _compared(value)
            for name, value in reply.items()
            if name not in NOT_COMPARED and not name.startswith("spec_")
        }
    if isinstance(reply, str):
        return CLOCK.sub("", reply)
    return [_compared(value) for value in reply] if isinstance(reply, list) else reply


def view_differences(call: Call, expected: dict, found: dict) -> list[str]:
    """One line for each place where the views differ; for a call given up, where it is no beginning."""
    if call.leaves_after is None and not any(map(ends_in_abort, found.get("choices", ()))):
        return differences("", expected, found)
    for name in ("status", "error"):
        if expected.get(name) != found.get(name):
            return differences(f".{name}", expected.get(name), found.get(name))
    lines = []
    for index, choice in enumerate(found.get("choices", ())):
        lines += given_up(f".choices[{index}]", expected["choices"][index], choice)
    return lines


def ends_in_abort(choice: dict) -> bool:
    finish = choice.get("meta_info", {}).get("finish_reason") or {}
    return finish.get("type") == "abort"


def given_up(place: str, expected: dict, found: dict) -> list[str]:
    if ends_in_abort(expected):
        # Refused by the scheduler. The token that comes with it was sampled from nothing.
        finish = (choice["meta_info"]["finish_reason"] for choice in (expected, found))
        return differences(f"{place}.finish_reason", *finish)
    lines = []
    for name in ("text", "output_ids"):
        part, whole = found.get(name), expected.get(name)
        if part and whole[: len(part)] != part:
            lines.append(f"{place}.{name}: {part!r} does not begin {whole!r}")
    return lines


def is_part(some: list, of: list) -> bool:
    """Whether `some` is left of a longer list when entries are taken out."""
    rest = iter(of)
    return all(any(not differences("", entry, one) for entry in rest) for one in some)


def is_impossible(entry: Any) -> bool:
    """A token of the top log-probs that cannot be said. Which of many stands there is chance."""
    if isinstance(entry, dict):
        entry = entry.get("logprob")
    elif isinstance(entry, list) and len(entry) == 3:
        entry = entry[0]
    return isinstance(entry, float) and entry <= SMALLEST


def differences(place: str, expected: Any, found: Any) -> list[str]:
    if is_impossible(expected) and is_impossible(found):
        return []
    if isinstance(expected, dict) and isinstance(found, dict):
        alone = [
            name
            for name in sorted(expected.keys() ^ found.keys())
            if not is_impossible(expected.get(name, found.get(name)))
        ]
        lines = [f"{place}.{name}: only one has it" for name in alone]
        for name in expected.keys() & found.keys():
            lines += differences(f"{place}.{name}", expected[name], found[name])
        return lines
    if isinstance(expected, list) and isinstance(found, list):
        if all(isinstance(value, int) for value in [*expected, *found]):
            return [] if expected == found else [f"{place}: expected {expected}, got {found}"]
        if place.endswith(STREAMED_LOG_PROBS) and len(expected) != len(found):
            some, whole = sorted((expected, found), key=len)
            return [] if is_part(some, whole) else [f"{place}: the shorter is no part of the longer"]
        if len(expected) != len(found):
            return [f"{place}: expected {len(expected)} entries, got {len(found)}"]
        pairs = enumerate(zip(expected, found, strict=True))
        return [line for i, (one, other) in pairs for line in differences(f"{place}[{i}]", one, other)]
    if isinstance(expected, float) and isinstance(found, float):
        one, other = max(expected, SMALLEST), max(found, SMALLEST)
        is_near = abs(one - other) <= ABSOLUTE + RELATIVE * abs(one)
        return [] if is_near else [f"{place}: expected {expected}, got {found}"]
    return [] if expected == found else [f"{place}: expected {expected!r}, got {found!r}"]
