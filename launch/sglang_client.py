"""Ask a running SGLang server over HTTP, this machine's or another's, and say in words what went wrong.

Whatever is no answer becomes one of two errors: `NotMeasured` where the server refused this one request,
`ServerLost` where there is no point in asking it again.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

# A prefill of the longest contexts on the slowest backend fits in this.
REQUEST_SECONDS = 600.0
LONGEST_MESSAGE = 300


class BudgetSpent(Exception):
    """The time the user gave is over."""


class NotMeasured(RuntimeError):
    """This point cannot be timed, for example because its requests are refused; others still can."""


class ServerLost(RuntimeError):
    """The server ended, stopped answering, or is none.

    code: the HTTP status, where there was one.
    """

    def __init__(self, message: str, code: int | None = None):
        super().__init__(message)
        self.code = code


class Budget:
    """Seconds of wall clock from now on; without a number, all the time there is."""

    def __init__(self, seconds: float | None = None):
        self._end = float("inf") if seconds is None else time.monotonic() + seconds

    def left(self) -> float:
        return self._end - time.monotonic()

    def check(self) -> None:
        if self.left() <= 0:
            raise BudgetSpent

    def timeout(self, most: float = REQUEST_SECONDS) -> float:
        """Seconds that one call may take; raises BudgetSpent if there are none."""
        self.check()
        return min(most, self.left())


class SGLangClient:
    """The HTTP API of the server at a URL.

    api_key: what its --api-key asks for.
    """

    def __init__(self, url: str, api_key: str | None = None):
        self.url = url
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def get_text(self, path: str, timeout: float = 60.0) -> str:
        request = urllib.request.Request(self.url + path, headers=self._headers)
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return response.read().decode(errors="replace")

    def get_json(self, path: str, timeout: float = 60.0) -> dict:
        return json.loads(self.get_text(path, timeout))

    def post_json(self, path: str, payload: Mapping, timeout: float = 600.0) -> dict | list:
        with urllib.request.urlopen(self._request(path, payload), timeout=timeout) as response:
            body = response.read()
        return json.loads(body)

    def stream_json(self, path: str, payload: Mapping, timeout: float = 600.0) -> Iterator[dict]:
        """Post with `"stream": true` and yield each server-sent event's JSON."""
        request = self._request(path, {**payload, "stream": True})
        with urllib.request.urlopen(request, timeout=timeout) as response:
            for line in response:
                event = line.decode().strip()
                if event.startswith("data:") and event != "data: [DONE]":
                    yield json.loads(event.removeprefix("data:"))

    def last_words(self) -> str:
        """What else is known of a server that does not answer, to stand behind an error."""
        return ""

    def _request(self, path: str, payload: Mapping) -> urllib.request.Request:
        headers = {"Content-Type": "application/json", **self._headers}
        return urllib.request.Request(self.url + path, data=json.dumps(payload).encode(), headers=headers)


def read_text(client: SGLangClient, path: str) -> str:
    """GET, with this module's errors."""
    try:
        return client.get_text(path)
    except urllib.error.HTTPError as error:
        raise _http_error(client, path, error) from error
    except (OSError, http.client.HTTPException) as error:
        raise ServerLost(_no_answer(client, path, error)) from error


def read_json(client: SGLangClient, path: str) -> dict[str, Any]:
    """GET an object, with this module's errors."""
    text = read_text(client, path)
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ServerLost(f"what answers at {client.url} is no SGLang server: {path} gives no JSON object")
    return found


def stream_answer(client: SGLangClient, payload: Mapping, budget: Budget) -> Iterator[dict]:
    """Events of a streamed request to `/generate`, with this module's errors.

    Raises:
        NotMeasured: the server refused it (HTTP 400, or an abort).
        ServerLost: any other answer, or none, or one that ends early.
        BudgetSpent: in the middle of it.
    """
    try:
        for event in client.stream_json("/generate", payload, timeout=budget.timeout()):
            budget.check()
            _raise_if_refused(event)
            yield event
    except urllib.error.HTTPError as error:
        if error.code == 400:
            raise NotMeasured(_message(error)) from error
        raise _http_error(client, "/generate", error) from error
    except (OSError, http.client.HTTPException) as error:
        budget.check()  # a call is given no longer than the budget
        raise ServerLost(_no_answer(client, "/generate", error)) from error
    except ValueError as error:
        raise ServerLost(
            f"{client.url} broke off in the middle of an answer to /generate{client.last_words()}"
        ) from error


def _raise_if_refused(event: dict) -> None:
    if "error" in event:
        raise NotMeasured(event["error"]["message"])
    reason = event["meta_info"]["finish_reason"]
    if reason is not None and reason["type"] == "abort":
        raise NotMeasured(reason["message"])


def _http_error(client: SGLangClient, path: str, error: urllib.error.HTTPError) -> ServerLost:
    message = _message(error)
    said = f"{client.url} answered HTTP {error.code} to {path}{f': {message}' if message else ''}"
    return ServerLost(said + client.last_words(), error.code)


def _no_answer(client: SGLangClient, path: str, error: Exception) -> str:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    what = (isinstance(reason, OSError) and reason.strerror) or str(reason) or type(reason).__name__
    return f"no answer from {client.url} to {path}: {what}{client.last_words()}"


def _message(error: urllib.error.HTTPError) -> str:
    """What the body says, on one line."""
    text = error.read().decode(errors="replace")
    with contextlib.suppress(ValueError, LookupError, TypeError):
        text = json.loads(text)["error"]["message"]
    flat = " ".join(str(text).split())
    return flat if len(flat) <= LONGEST_MESSAGE else flat[:LONGEST_MESSAGE] + "..."
