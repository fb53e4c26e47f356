"""Numbers of tokens as they are typed and shown: 1k is 1024."""

from __future__ import annotations

import argparse
import re

K = 1024


def parse_tokens(text: str) -> int:
    """A type for argparse: `1024`, `1k`, `16K`.

    Raises:
        ArgumentTypeError: no whole number of tokens, or none at all.
    """
    found = re.fullmatch(r"([0-9]{1,9})(k?)", text.strip().lower())
    tokens = int(found[1]) * (K if found[2] else 1) if found else 0
    if tokens < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens: type 1024, or 1k for the same")
    return tokens


def shown_tokens(tokens: int) -> str:
    return f"{tokens / K:.3g}k" if tokens >= K else str(tokens)
