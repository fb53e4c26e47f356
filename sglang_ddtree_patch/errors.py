"""Errors meant for the person who typed the command."""

from __future__ import annotations

import sys
from types import TracebackType


class ConfigurationError(ValueError):
    """A setting that cannot be served. The message says what was asked, what is possible, what to type."""


def report_configuration_errors_in_one_line() -> None:
    """Print an uncaught ``ConfigurationError`` as one line; everything else keeps its traceback.

    ``sglang.launch_server`` resolves its arguments outside any error handling, so a refused setting
    would otherwise end in twenty lines of SGLang's own frames. The exit code stays 1.
    """
    previous = sys.excepthook
    if getattr(previous, "reports_configuration_errors", False):
        return

    def report(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if issubclass(kind, ConfigurationError):
            print(f"sglang-ddtree-patch: error: {error}", file=sys.stderr, flush=True)
        else:
            previous(kind, error, traceback)

    report.reports_configuration_errors = True
    sys.excepthook = report
