"""A line on a terminal that the next one overwrites; elsewhere, a line now and then."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from typing import TextIO

CLEAR_LINE = "\r\033[K"
PROGRESS_EVERY_SECONDS = 10.0  # between lines where they cannot overwrite each other


class LiveLine:
    """The last line of the output while something is going on. Threads may share it.

    is_shy: where lines cannot overwrite each other, the first one waits for its time too.
    """

    def __init__(self, out: TextIO | None = None, is_shy: bool = False):
        self.out = out or sys.stdout
        self.is_terminal = self.out.isatty()
        self._is_shy = is_shy
        self._last_progress = time.monotonic() if is_shy else 0.0
        self._is_shown = False
        self._lock = threading.RLock()

    def progress(self, text: str) -> None:
        with self._lock:
            now = time.monotonic()
            if self.is_terminal:
                columns = shutil.get_terminal_size().columns
                self._write(f"{CLEAR_LINE}{text[: columns - 1]}")
                self._is_shown = True
            elif now - self._last_progress >= PROGRESS_EVERY_SECONDS:
                self._last_progress = now
                self.line(text)

    def end_progress(self) -> None:
        with self._lock:
            self._last_progress = time.monotonic() if self._is_shy else 0.0
            self._clear()

    def line(self, text: str = "") -> None:
        """A line that stays, in place of the live one."""
        with self._lock:
            self._clear()
            print(text, file=self.out, flush=True)

    def _clear(self) -> None:
        if self._is_shown:
            self._write(CLEAR_LINE)
            self._is_shown = False

    def _write(self, text: str) -> None:
        self.out.write(text)
        self.out.flush()
