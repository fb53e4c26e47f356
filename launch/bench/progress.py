"""How far a point of a benchmark is, said while it is measured: a point may take minutes."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace

from sglang_ddtree_patch.launch.terminal import LiveLine

TICK_SECONDS = 1.0


@dataclass(frozen=True)
class _Now:
    """How far a part is; exchanged as a whole, since another thread reads it."""

    part: str = ""
    done: int = 0  # prompts
    decoded: int = 0  # tokens of those
    in_batch: int = 0  # tokens of the batch that is being decoded


class PointProgress:
    """Shows one point on a live line, from a thread of its own that leaves the timing alone.

        with PointProgress(view, "ddtree, batch 8", prompts=16) as progress:
            progress.begin("repeat 1 of 3")
            progress.tokens(120)       # of the batch that is being decoded
            progress.batch_is_done(8)

    prompts: of each part, as the warm-up and every repeat are called here.
    """

    def __init__(self, view: LiveLine, point: str, prompts: int):
        self._view, self._point, self._prompts = view, point, prompts
        self._now = _Now()
        self._started = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> PointProgress:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()
        self._view.end_progress()

    def begin(self, part: str) -> None:
        self._now = _Now(part)

    def tokens(self, count: int) -> None:
        """Generated so far in the batch that is being decoded."""
        self._now = replace(self._now, in_batch=count)

    def batch_is_done(self, prompts: int) -> None:
        now = self._now
        self._now = _Now(now.part, now.done + prompts, now.decoded + now.in_batch)

    def text(self) -> str:
        now, seconds = self._now, time.monotonic() - self._started
        # What changes comes first: a narrow terminal cuts the end.
        return (
            f"  {seconds:.0f} s, {now.done} of {self._prompts} prompts done, "
            f"{now.decoded + now.in_batch} tokens, {now.part}: {self._point}"
        )

    def _tick(self) -> None:
        while not self._ended.wait(TICK_SECONDS):
            self._view.progress(self.text())
