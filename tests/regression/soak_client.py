"""Many requests to one server at once, from one thread: what is answered, and how long it all took."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from soak_mix import SoakRequest

TIMEOUT = aiohttp.ClientTimeout(total=240)
LONGEST_LINE = 2**22  # bytes of one event


@dataclass(frozen=True)
class SoakAnswer:
    """The replies to one request, as many as its `n`; without any, `error` says why."""

    replies: tuple[dict[str, Any], ...]
    error: str | None = None

    @property
    def completion_tokens(self) -> int:
        return sum(reply["meta_info"]["completion_tokens"] for reply in self.replies)


def send_all(
    url: str, requests: Sequence[SoakRequest], at_once: int, gives_up: bool = True
) -> tuple[list[SoakAnswer], float]:
    """The answers in the order of the requests, and the seconds from the first to the last.

    at_once: requests that wait for their answers at any moment.
    gives_up: whether clients hang up and abort where a request says so.
    """
    return asyncio.run(_send_all(url, requests, at_once, gives_up))


async def _send_all(
    url: str, requests: Sequence[SoakRequest], at_once: int, gives_up: bool
) -> tuple[list[SoakAnswer], float]:
    answers: list[SoakAnswer | None] = [None] * len(requests)
    numbers = iter(range(len(requests)))
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        url, connector=connector, timeout=TIMEOUT, read_bufsize=LONGEST_LINE
    ) as session:

        async def client() -> None:
            for number in numbers:
                answers[number] = await _answer(session, requests[number], gives_up)

        started = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(min(at_once, len(requests)))))
        seconds = time.perf_counter() - started
    return [answer for answer in answers if answer is not None], seconds


async def _answer(session: aiohttp.ClientSession, request: SoakRequest, gives_up: bool) -> SoakAnswer:
    payload = dict(request.payload)
    aborter = None
    if gives_up and request.aborted_after is not None:
        aborter = asyncio.create_task(_abort(session, payload["rid"], request.aborted_after))
    try:
        if request.is_streamed:
            return await _stream(session, payload, request.leaves_after if gives_up else None)
        async with session.post("/generate", json=payload) as response:
            body = await response.read()
            if response.status != 200:
                return SoakAnswer((), f"HTTP {response.status}: {body[:300]!r}")
        reply = json.loads(body)
        return SoakAnswer(tuple(reply) if isinstance(reply, list) else (reply,))
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        return SoakAnswer((), repr(error))
    finally:
        if aborter is not None:
            await aborter


async def _stream(
    session: aiohttp.ClientSession, payload: dict[str, Any], leaves_after: int | None
) -> SoakAnswer:
    """The last event that the client waits for: each repeats the answer so far."""
    last, events = None, 0
    async with session.post("/generate", json={**payload, "stream": True}) as response:
        if response.status != 200:
            return SoakAnswer((), f"HTTP {response.status}: {(await response.read())[:300]!r}")
        async for line in response.content:
            if line.startswith(b"data:") and not line.startswith(b"data: [DONE]"):
                last, events = line, events + 1
                if events == leaves_after:
                    response.close()
                    break
    return SoakAnswer(
        (json.loads(last.removeprefix(b"data:")),) if last else (), None if last else "no event"
    )


async def _abort(session: aiohttp.ClientSession, rid: str, after: float) -> None:
    await asyncio.sleep(after)
    async with session.post("/abort_request", json={"rid": rid}):
        pass
