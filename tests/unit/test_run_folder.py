"""A run's temporary folder goes with it, however it ends, and never with another."""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sglang_ddtree_patch.launch import run_folder
from sglang_ddtree_patch.launch.server_process import ServerProcess

# A run that says where its folder is, holds a log there, and waits. Ctrl-C and a closed terminal count,
# though the tests themselves may run in the background of a shell or under nohup, where they do not.
RUN = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from sglang_ddtree_patch.launch.run_folder import exit_on_signals, run_folder
exit_on_signals()
with run_folder("demo") as folder:
    (folder.path / "server.log").write_text("words")
    print(folder.path, flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch) -> Path:
    """Where temporary folders are made, here and in the runs."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def running() -> tuple[subprocess.Popen, Path]:
    run = subprocess.Popen(
        [sys.executable, "-c", RUN], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    return run, Path(run.stdout.readline().strip())


def test_a_folder_goes_with_its_run_and_stays_where_it_is_to_be_read(temporary):
    with run_folder.run_folder("bench") as folder:
        assert folder.path.parent == temporary
        assert folder.path.name.startswith("ddtree-bench-")
    assert not folder.path.exists()
    with run_folder.run_folder("bench") as kept:
        (kept.path / "server.log").write_text("words")
        kept.keep()
    with run_folder.run_folder("bench"):
        pass
    assert [path.name for path in kept.path.iterdir()] == ["server.log"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_ended_takes_its_folder_along(temporary, number):
    run, folder = running()
    assert (folder / "server.log").is_file()
    run.send_signal(number)
    assert run.wait(10) != 0
    assert list(temporary.iterdir()) == []


def test_the_next_run_removes_what_a_killed_one_left_and_no_other(temporary):
    killed, left = running()
    going, alive = running()
    killed.kill()
    killed.wait()
    assert left.is_dir()
    (temporary / "ddtree-demo-of-somebody").mkdir()
    with run_folder.run_folder("bench"):
        assert not left.exists()
        assert alive.is_dir()
        assert (temporary / "ddtree-demo-of-somebody").is_dir()
    going.terminate()
    going.wait()
    assert [path.name for path in temporary.iterdir()] == ["ddtree-demo-of-somebody"]


@pytest.mark.parametrize(
    ("error", "stays"),
    [(None, False), (KeyboardInterrupt, False), (SystemExit, False), (AssertionError, True)],
)
def test_a_servers_own_log_stays_where_something_failed(temporary, error, stays):
    server = ServerProcess([])
    server.log_path.write_text("words")
    server.__exit__(error)
    assert server.log_path.exists() is stays
    named = ServerProcess([], log_path=temporary / "mine.log")
    named.log_path.write_text("words")
    named.__exit__(error)
    assert named.log_path.exists()
