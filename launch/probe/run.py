"""What the probes share: options, a server that answers, lengths, a file, and ends of every kind."""

from __future__ import annotations

import argparse
import os
import re
import sys
import urllib.parse
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sglang_ddtree_patch.errors import ConfigurationError
from sglang_ddtree_patch.launch.bench.record import Record
from sglang_ddtree_patch.launch.probe.server import ServerFacts, read_facts, read_model_length
from sglang_ddtree_patch.launch.sglang_client import NotMeasured, ServerLost, SGLangClient
from sglang_ddtree_patch.launch.terminal import LiveLine
from sglang_ddtree_patch.launch.token_counts import parse_tokens

DEFAULT_URL = "http://127.0.0.1:30000"
KEY_VARIABLE = "DDTREE_API_KEY"
CONTEXTS = (1024, 4096, 16384, 65536, 131072)  # and the longest that the server takes
SHORTEST = 64  # tokens of a prompt that still holds something of each text
# Lengths are made in characters, so the longest prompt keeps a little away from the limit.
LIMIT_SHARE = 0.96


def add_common_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=DEFAULT_URL, help="the server (default: %(default)s)")
    parser.add_argument(
        "--contexts",
        nargs="+",
        type=parse_tokens,
        metavar="TOKENS",
        help="prompt lengths, such as 1k 4k or 1024 4096 (default: 1k, 4k, 16k, 64k, 128k, and the longest "
        "there is room for)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here, after each point")


def run(
    name: str, arguments: argparse.Namespace, probe: Callable[[SGLangClient, ServerFacts, LiveLine], int]
) -> int:
    """Find the server and hand it to the probe; returns the exit code, 1 for a server that fails."""
    view = LiveLine(is_shy=True)
    try:
        client = SGLangClient(server_url(arguments.url), api_key())
        return probe(client, read_facts(client), view)
    except (ServerLost, NotMeasured) as error:
        view.end_progress()
        print(f"ddtree probe {name}: {error}", file=sys.stderr)
        return 1
    except ConfigurationError as error:
        view.end_progress()
        print(f"ddtree probe {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        view.end_progress()
        raise


def server_url(given: str) -> str:
    """Takes host:port as well, and the base URL of the OpenAI API.

    Raises:
        ConfigurationError: no URL that HTTP can ask.
    """
    url = given if "://" in given else f"http://{given}"
    if not is_base_url(url):
        raise ConfigurationError(f"--url {given!r} is no address of a server: type http://HOST:PORT.")
    return url.rstrip("/").removesuffix("/v1")


def is_base_url(url: str) -> bool:
    """Whether urllib can ask the paths below it; it would also read files, and fail on some hosts."""
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
        (parts.hostname or "").encode("idna")
    except ValueError:  # of brackets, ports and names
        return False
    named = parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0
    is_plain = parts.path.isascii() and "@" not in parts.netloc and not re.search(r"[\s\0-\x1f\x7f?#]", url)
    return named and is_plain


def api_key() -> str | None:
    """What the environment has for the server's --api-key.

    Raises:
        ConfigurationError: it cannot stand in a header of HTTP.
    """
    key = os.environ.get(KEY_VARIABLE)
    if key is not None and not re.fullmatch(r"[ -~\xa0-\xff]*", key):
        raise ConfigurationError(
            f"{KEY_VARIABLE} holds characters that no HTTP header takes: set it to the server's --api-key."
        )
    return key


def begin_record(
    path: Path | None, name: str, facts: ServerFacts, settings: dict[str, Any], columns: Sequence[str]
) -> Record:
    """A file of its own for each run: what is measured at one time of one server."""
    header = {
        "probe": name,
        "server": facts.header(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "settings": settings,
    }
    record = Record(path, header, columns, ())
    record.begin()
    return record


def choose_contexts(
    asked: Sequence[int] | None, facts: ServerFacts, client: SGLangClient, new_tokens: int
) -> list[int]:
    """Prompt lengths in order, clipped to what the server takes.

    Raises:
        ConfigurationError: the server takes no prompt beside the answer, or lengths are too short to probe.
    """
    if asked and min(asked) < SHORTEST:
        raise ConfigurationError(f"--contexts must be at least {SHORTEST} tokens.")
    longest = facts.longest_prompt(read_model_length(client), new_tokens)
    if longest is None:
        return sorted(set(asked or CONTEXTS))
    if longest < SHORTEST:
        raise ConfigurationError(
            f"{facts.url} takes {max(longest, 0)} tokens beside an answer of {new_tokens}, "
            f"and a probe needs {SHORTEST}: its context is too short, or the answer too long."
        )
    longest = max(SHORTEST, int(longest * LIMIT_SHARE))
    return sorted({min(context, longest) for context in asked or (*CONTEXTS, sys.maxsize)})


def finish(
    name: str, record: Record, points: int, say: Callable[[str], None], measure: Callable[[], None]
) -> int:
    """Measure, and whatever ends that, say the verdict so far and where the rows are.

    Returns the exit code.
    """
    code, end = 0, ""
    try:
        measure()
    except KeyboardInterrupt:
        code, end = 130, "stopped"
    except (ServerLost, NotMeasured) as error:
        code, end = 1, str(error)
    if "verdict" in record.header:
        say(f"\n{record.header['verdict']}.")
    for lack in record.header.get("lacks", ()):
        say(f"Not seen: {lack}.")
    if code == 0 and not record.rows:
        code, end = 1, "nothing could be measured"
    if end:
        kept = f" in {record.path}" if record.path else ""
        text = f"ddtree probe {name}: {end}; {len(record.rows)} of {points} rows are measured{kept}"
        print(text, file=sys.stderr, flush=True)
    return code
