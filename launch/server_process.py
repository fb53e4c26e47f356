"""One SGLang server as a context manager: started on a free port, waited for, and gone afterwards.

    with ServerProcess(["--model-path", path, "--device", "cpu"], environment=CPU_ENVIRONMENT) as server:
        reply = server.post_json("/generate", {"text": "Once", "sampling_params": {"max_new_tokens": 8}})

A server is several processes. They share a process group of their own, so that leaving the block, by
whatever way, ends all of them, and a Ctrl-C at the terminal reaches only the program that holds the block.
"""

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sglang_ddtree_patch.launch.sglang_client import SGLangClient

# Tells SGLang to use this package's CPU platform; goes with `--device cpu`. The platform sets the other two
# itself, in time for the processes a server spawns but too late for one that is forked.
CPU_ENVIRONMENT = {"SGLANG_PLATFORM": "ddtree_cpu", "TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}

HOST = "127.0.0.1"
LOG_LINES_IN_ERROR = 30
POLL_SECONDS = 0.2


class ServerStartError(RuntimeError):
    """The server ended or did not answer in time; the message holds the end of its log."""


class ServerProcess(SGLangClient):
    """Runs `python -m sglang.launch_server` with the given flags for the length of a `with` block.

    arguments: SGLang flags, without --host and --port.
    environment: variables to set on top of this process's own.
    log_path: where the server's output goes, to stay there; if None, a temporary file that stays where the
        block ends in an error.
    ready_timeout: seconds until /health_generate has to answer.
    grace: seconds a server gets to end by itself before it is killed.
    progress: called now and then with a line saying how far the start is.
    launcher: starts the process; `server_template.ServerTemplate.launch` forks a warm one instead.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        log_path: Path | None = None,
        ready_timeout: float = 600.0,
        grace: float = 15.0,
        progress: Callable[[str], None] | None = None,
        launcher: "Launcher | None" = None,
    ):
        self.port = find_free_port()
        super().__init__(f"http://{HOST}:{self.port}")
        self.arguments = [*arguments, "--host", HOST, "--port", str(self.port)]
        self.environment = dict(environment or {})
        self.log_path = log_path or _new_log_path()
        self._has_own_log = log_path is None
        self.ready_seconds = math.nan  # from start to the first answer
        self._ready_timeout = ready_timeout
        self._grace = grace
        self._progress = progress or (lambda line: None)
        self._launcher = launcher or launch_python
        self._running: RunningServer | None = None

    def __enter__(self) -> "ServerProcess":
        try:
            self._running = self._launcher(self.arguments, self.environment, self.log_path)
            self._wait_until_ready()
        except BaseException as error:
            self.__exit__(type(error))
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.stop()
        # Ctrl-C is no error.
        if self._has_own_log and (kind is None or not issubclass(kind, Exception)):
            self.log_path.unlink(missing_ok=True)

    def stop(self) -> None:
        """End every process of the server; harmless when there is none."""
        running, self._running = self._running, None
        if running is not None:
            running.stop(self._grace)

    @property
    def is_alive(self) -> bool:
        return self._running is not None and self._running.is_alive()

    @property
    def pid(self) -> int:
        """The main process, whose children are the others."""
        if self._running is None:
            raise RuntimeError("the server has no process: it was not started, or has been stopped")
        return self._running.pid

    def log_tail(self, lines: int = LOG_LINES_IN_ERROR) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def last_words(self) -> str:
        return f". The end of its log:\n{self.log_tail()}"

    def _wait_until_ready(self) -> None:
        started = time.monotonic()
        while True:
            elapsed = time.monotonic() - started
            if not self.is_alive:
                raise ServerStartError(self._failure(f"ended after {elapsed:.0f} s, before it was ready"))
            if self._answers():
                self.ready_seconds = time.monotonic() - started
                return
            if elapsed > self._ready_timeout:
                raise ServerStartError(self._failure(f"was not ready after {elapsed:.0f} s"))
            self._progress(f"starting the server: {elapsed:.0f} s")
            time.sleep(POLL_SECONDS)

    def _answers(self) -> bool:
        """True once a token has come out of the scheduler, which is when requests may be sent."""
        try:
            with urllib.request.urlopen(self.url + "/health_generate", timeout=30) as response:
                return response.status == 200
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def _failure(self, what: str) -> str:
        return (
            f"The SGLang server {what}. The end of its log ({self.log_path}):\n"
            f"{self.log_tail()}\n"
            f"It was started with: {' '.join(self.arguments)}"
        )


class RunningServer:
    """A started server, known by its main process, which leads the server's process group."""

    def __init__(self, pid: int, process: subprocess.Popen | None = None):
        self.pid = pid
        self._process = process  # None for a process that is not our child

    def is_alive(self) -> bool:
        if self._process is not None:
            return self._process.poll() is None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def stop(self, grace: float) -> None:
        """SIGTERM to the main process, which drains and ends the rest; SIGKILL to all that is left."""
        if grace > 0 and self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
            deadline = time.monotonic() + grace
            while self.is_alive() and time.monotonic() < deadline:
                time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if self._process is not None:
            self._process.wait()


# (SGLang flags, variables to set, log path) -> the server
Launcher = Callable[[Sequence[str], Mapping[str, str], Path], RunningServer]


def launch_python(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    log_path: Path,
    program: Sequence[str] = ("-m", "sglang.launch_server"),
) -> RunningServer:
    """Start the server in a Python of its own."""
    with open(log_path, "wb") as log:
        process = subprocess.Popen(
            [sys.executable, *program, *arguments],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return RunningServer(process.pid, process)


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def _new_log_path() -> Path:
    handle, name = tempfile.mkstemp(prefix="ddtree-server-", suffix=".log")
    os.close(handle)
    return Path(name)
