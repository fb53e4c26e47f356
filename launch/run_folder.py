"""A temporary folder for one run of a command: its servers' logs, and what else they read.

It goes when the run ends, by Ctrl-C and SIGTERM too, unless a server failed and its log is to be read. What a
run that was killed outright leaves is told by the lock that it no longer holds, and removed by the next run.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "ddtree-"
LOCK = ".in-use"


class RunFolder:
    """The folder of a run that is going on. path: where it is."""

    def __init__(self, path: Path):
        self.path = path
        self.is_kept = False

    def keep(self) -> None:
        """Leave it there when the run ends."""
        self.is_kept = True


@contextlib.contextmanager
def run_folder(command: str) -> Iterator[RunFolder]:
    """A new folder for a run of `ddtree COMMAND`."""
    remove_abandoned(Path(tempfile.gettempdir()))
    folder = RunFolder(Path(tempfile.mkdtemp(prefix=f"{PREFIX}{command}-")))
    # Locked before it has the name that others look for.
    unlocked = folder.path / f"{LOCK}.new"
    with open(unlocked, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.replace(unlocked, folder.path / LOCK)
        try:
            yield folder
        finally:
            if folder.is_kept:
                (folder.path / LOCK).unlink(missing_ok=True)
            else:
                shutil.rmtree(folder.path, ignore_errors=True)


def exit_on_signals() -> None:
    """Let a kill and a closed terminal end this process as sys.exit does, so that servers and folders go."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores one
            signal.signal(number, lambda number, frame: sys.exit(128 + number))


def remove_abandoned(where: Path) -> None:
    """Remove the folders of runs that have ended without removing theirs."""
    for path in where.glob(f"{PREFIX}*/{LOCK}"):
        # Another user's, or one that is going at this moment.
        with contextlib.suppress(OSError), open(path) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)
