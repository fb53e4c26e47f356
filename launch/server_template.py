"""A warm Python that forks SGLang servers, for CPU machines that start many of them.

A server is three processes, and each spends ten seconds or more of a core importing the same modules:
most of the time from start to ready on a small machine. Here one process imports them once and forks; the
forked server then runs `sglang.launch_server` as usual, its own subprocesses forked as well. For CPU
servers only: a process that has touched CUDA cannot be forked.

    with ServerTemplate(CPU_ENVIRONMENT) as template:
        with ServerProcess(arguments, launcher=template.launch) as server: ...
"""

import contextlib
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from sglang_ddtree_patch.contract_check import check_installed_sglang
from sglang_ddtree_patch.launch.server_process import RunningServer, ServerStartError

MODULE = "sglang_ddtree_patch.launch.server_template"
# What a server imports on its way to ready, in whichever of its processes.
WARM_MODULES = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.registry",
)


class ServerTemplate:
    """The warm process, seen from the program that wants servers. It starts here; the `with` block ends it.

    environment: what SGLang reads while it is being imported, above all SGLANG_PLATFORM. A server's own
    environment may add to it, and takes effect for what is read later.
    """

    def __init__(self, environment: Mapping[str, str]):
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed at the end of the block)
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        # Asked for above, so they are there.
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._replies = self._process.stdin, self._process.stdout

    def __enter__(self) -> "ServerTemplate":
        return self

    def __exit__(self, *exception: object) -> None:
        """End the template and every server that is left: it does so when its input closes, once warm."""
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        self._process.terminate()  # heeded only while it is importing, when it has no servers
        self._process.wait()
        self._replies.close()
        self._log.close()

    def launch(
        self, arguments: Sequence[str], environment: Mapping[str, str], log_path: Path
    ) -> RunningServer:
        """Fork a server; a `Launcher` for `ServerProcess`. The first call waits for the imports."""
        request = {"arguments": list(arguments), "environment": dict(environment), "log": str(log_path)}
        try:
            self._requests.write(json.dumps(request) + "\n")
            self._requests.flush()
        except BrokenPipeError:
            raise ServerStartError(self._failure()) from None
        reply = self._replies.readline()
        if not reply:
            raise ServerStartError(self._failure())
        return RunningServer(json.loads(reply)["pid"])

    def _failure(self) -> str:
        self._log.seek(0)
        return f"The process that forks SGLang servers ended. Its output:\n{self._log.read()[-4000:]}"


def main() -> None:
    """Import SGLang, then turn each request line on stdin into a server. Children go on from here."""
    with contextlib.redirect_stdout(sys.stderr):
        warm_up()
    request = fork_on_request()
    if request is not None:
        become_server(request)


def warm_up() -> None:
    for module in WARM_MODULES:
        importlib.import_module(module)
    check_installed_sglang()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.entrypoints.engine._set_envs_and_config", fork_subprocesses, HookType.AFTER
    )


def fork_subprocesses(result: None, *arguments: object, **options: object) -> None:
    """SGLang has just asked for spawn, which would import everything anew."""
    multiprocessing.set_start_method("fork", force=True)


def fork_on_request() -> dict | None:
    """In the template: answer requests until the input closes, then return None. In a child: its request."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps servers that end
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # ending means ending the servers first
    servers = []
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            return json.loads(line)
        servers.append(pid)
        print(json.dumps({"pid": pid}), flush=True)
    for pid in servers:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    return None


def become_server(request: dict) -> None:
    """Run `python -m sglang.launch_server` in this process, detached from the template's pipes."""
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.update(request["environment"])
    sys.argv = ["sglang.launch_server", *request["arguments"]]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
