"""A line on a terminal that the next one overwrites; elsewhere, a line now and then."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

CLEAR_LINE = "\r\033[K"
PROGRESS_EVERY_SECONDS = 10.0  # between lines where they cannot overwrite each other


class LiveLine:
    """The last line of the output while something is going on.

    is_shy: where lines cannot overwrite each other, the first one waits for its time too.
    """

    def __init__(self, out: TextIO | None = None, is_shy: bool = False):
        self.out = out or sys.stdout
        self.is_terminal = self.out.isatty()
        self._is_shy = is_shy
        self._last_progress = time.monotonic() if is_shy else 0.0

    def progress(self, text: str) -> None:
        now = time.monotonic()
        if self.is_terminal:
            columns = shutil.get_terminal_size().columns
            self._write(f"{CLEAR_LINE}{text[: columns - 1]}")
        elif now - self._last_progress >= PROGRESS_EVERY_SECONDS:
            self._last_progress = now
            self.line(text)

    def end_progress(self) -> None:
        self._last_progress = time.monotonic() if self._is_shy else 0.0
        if self.is_terminal:
            self._write(CLEAR_LINE)

    def line(self, text: str = "") -> None:
        print(text, file=self.out, flush=True)

    def _write(self, text: str) -> None:
        self.out.write(text)
        self.out.flush()
