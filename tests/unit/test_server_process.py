"""ServerProcess: ready inside the block, gone after it, and plain words when it does not start."""

import time
from functools import partial
from pathlib import Path

import pytest

from sglang_ddtree_patch.launch.server_process import ServerProcess, ServerStartError, launch_python

# A server with one subprocess, which is what SGLang looks like from outside.
FAKE_SERVER = '''
import http.server, json, os, subprocess, sys
child = subprocess.Popen(["sleep", "600"])
print("child", child.pid, flush=True)
print("variable", os.environ.get("FAKE_VARIABLE"), flush=True)

class Handler(http.server.BaseHTTPRequestHandler):
    def reply(self, body):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.reply(b"{}")

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if request.get("stream"):
            self.reply(b'data: {"n": 1}\\n\\ndata: {"n": 2}\\n\\ndata: [DONE]\\n\\n')
        else:
            self.reply(json.dumps({"got": request}).encode())

http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
'''


def server(tmp_path: Path, script: str = FAKE_SERVER, **options) -> ServerProcess:
    launcher = partial(launch_python, program=("-c", script))
    return ServerProcess([], launcher=launcher, log_path=tmp_path / "log", **options)


def is_running(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_requests_and_streams_are_json_both_ways(tmp_path):
    with server(tmp_path, environment={"FAKE_VARIABLE": "set"}) as running:
        assert running.get_json("/anything") == {}
        assert running.post_json("/generate", {"a": 1}) == {"got": {"a": 1}}
        assert list(running.stream_json("/generate", {})) == [{"n": 1}, {"n": 2}]
        assert running.ready_seconds > 0
        assert "variable set" in running.log_tail()


def test_leaving_the_block_by_an_exception_ends_every_process(tmp_path):
    children = []

    def be_interrupted(running: ServerProcess) -> None:
        with running:
            children.append(int(running.log_path.read_text().split()[1]))
            assert is_running(children[0])
            raise KeyboardInterrupt

    running = server(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        be_interrupted(running)
    (child,) = children
    deadline = time.monotonic() + 5
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)
    assert not running.is_alive
    with pytest.raises(RuntimeError, match="the server has no process"):
        _ = running.pid


def test_a_server_that_dies_early_is_reported_with_the_end_of_its_log(tmp_path):
    script = "print('unknown flag --nonsense'); raise SystemExit(2)"
    with pytest.raises(ServerStartError) as failure, server(tmp_path, script):
        pass
    assert "before it was ready" in str(failure.value)
    assert "unknown flag --nonsense" in str(failure.value)
    assert str(tmp_path / "log") in str(failure.value)


def test_a_server_that_never_answers_is_ended_after_the_timeout(tmp_path):
    progress = []
    started = time.monotonic()
    hanging = server(tmp_path, "import time; time.sleep(600)", ready_timeout=1, progress=progress.append)
    with pytest.raises(ServerStartError, match="was not ready after"), hanging:
        pass
    assert time.monotonic() - started < 20
    assert progress[0].startswith("starting the server")
    assert not hanging.is_alive


def test_a_server_that_ignores_sigterm_is_killed(tmp_path):
    script = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FAKE_SERVER
    with server(tmp_path, script, grace=0.5) as running:
        started = time.monotonic()
    assert time.monotonic() - started < 10
    assert not running.is_alive
