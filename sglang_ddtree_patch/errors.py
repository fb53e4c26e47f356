"""Errors meant for the person who typed the command."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


class ConfigurationError(ValueError):
    """A setting that cannot be served. The message says what was asked, what is possible, what to type."""


def report_configuration_errors_in_one_line() -> None:
    """Print an uncaught ``ConfigurationError`` as one line; everything else keeps its traceback.

    ``sglang.launch_server`` resolves its arguments outside any error handling, so a refused setting
    would otherwise end in twenty lines of SGLang's own frames. The exit code stays 1.
    """
    if not isinstance(sys.excepthook, _InOneLine):
        sys.excepthook = _InOneLine(sys.excepthook)


class _InOneLine:
    """An exception hook in front of the one that was there."""

    def __init__(self, previous: Hook):
        self._previous = previous

    def __call__(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if issubclass(kind, ConfigurationError):
            print(f"sglang-ddtree-patch: error: {error}", file=sys.stderr, flush=True)
        else:
            self._previous(kind, error, traceback)
