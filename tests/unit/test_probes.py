"""`ddtree probe commit` and `gpu` from the command line to the file, against a stand-in for SGLang."""

import http.server
import io
import json
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_sglang import COMMIT, fake_server
from test_gpu_sampler import FakeNvml

from sglang_ddtree_patch import cli, model_catalog
from sglang_ddtree_patch.launch.bench.client import BatchTiming
from sglang_ddtree_patch.launch.probe import commit as probe_commit
from sglang_ddtree_patch.launch.probe import gpu as probe_gpu
from sglang_ddtree_patch.launch.probe import gpu_verdict
from sglang_ddtree_patch.launch.probe import run as probe_run
from sglang_ddtree_patch.launch.probe import server as probe_server
from sglang_ddtree_patch.launch.probe.gpu_sampler import Gpus
from sglang_ddtree_patch.launch.probe.gpu_view import GpuView
from sglang_ddtree_patch.launch.server_process import find_free_port
from sglang_ddtree_patch.launch.terminal import LiveLine

MODEL = model_catalog.path("tiny-gqa")
DDTREE = ("--speculative-algorithm", "DDTREE", "--model-path", str(MODEL / "target"),
          "--speculative-draft-model-path", str(MODEL / "draft"))  # fmt: skip
COMMIT_PROBE = ("commit", "--new-tokens", "33")
GPU_PROBE = ("gpu", "--seconds", "0.05", "--copy-rate", "100")


def probe(url: str, *arguments: str) -> int:
    return cli.main(["probe", *arguments, "--url", url])


def read(file: Path) -> dict:
    return json.loads(file.read_text())


def one_line(capsys) -> str:
    """What was said on stderr, which has to be one line."""
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ddtree probe ")
    return line


def test_commit_writes_a_row_for_each_text_and_length(tmp_path, capsys):
    file = tmp_path / "commit.json"
    with fake_server(DDTREE, "metrics") as server:
        assert probe(server.url, *COMMIT_PROBE, "--contexts", "2000", "16000", "--json", str(file)) == 0
    found = read(file)
    assert [tuple(row) for row in found["rows"]] == [probe_commit.COLUMNS] * 4
    assert [(row["text"], row["context"]) for row in found["rows"]] == [
        ("predictable", 2000), ("prose", 2000), ("predictable", 16000), ("prose", 16000),
    ]  # fmt: skip
    for row in found["rows"]:
        assert row["prompt_tokens"] == pytest.approx(row["context"], rel=0.03)
        assert (row["generated"], row["rounds"], row["drafted"]) == (33, 32 // COMMIT, 15 * 32 // COMMIT)
        assert (row["mean_commit_length"], row["mean_accepted_depth"]) == (COMMIT, COMMIT - 1)
        assert row["nodes"] == 7.5  # as the server's metrics have it
        assert 0 < row["first_token_seconds"] < row["wall_seconds"]
    assert [row["repeated"] for row in found["rows"]] == [1, None, 1, None]
    assert found["server"]["algorithm"] == "DDTREE"
    assert found["verdict"].startswith("healthy: the drafter holds up to")
    assert found["traffic"] is None  # of others, before the probe
    assert "healthy: 3.00 drafted tokens a round" in capsys.readouterr().out


def test_without_metrics_nodes_are_the_rows_of_the_verify(tmp_path, capsys):
    file = tmp_path / "commit.json"
    with fake_server(DDTREE) as server:
        assert probe(server.url, *COMMIT_PROBE, "--contexts", "1000", "--json", str(file)) == 0
    assert [row["nodes"] for row in read(file)["rows"]] == [16, 16]
    assert "no /metrics" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("hard", ["text is hard", "text is hard"]),
        ("long=9000 long-commit=1", ["healthy", "drafter broken at long context"]),
        ("long=500 long-commit=1", ["drafter broken", "drafter broken"]),
        ("long=9000 long-commit=1 stray", ["no verdict", "no verdict"]),
    ],
)
def test_commit_tells_hard_text_from_a_broken_drafter(tmp_path, mode, words):
    file = tmp_path / "commit.json"
    with fake_server(DDTREE, mode) as server:
        assert probe(server.url, *COMMIT_PROBE, "--contexts", "1000", "16000", "--json", str(file)) == 0
    assert [verdict["word"] for verdict in read(file)["verdicts"]] == words


@pytest.mark.parametrize("arguments", [COMMIT_PROBE, GPU_PROBE])
def test_lengths_go_to_the_servers_own_limit(tmp_path, arguments):
    file = tmp_path / "probe.json"
    with fake_server([*DDTREE, "--context-length", "8192"]) as server:
        assert probe(server.url, *arguments, "--json", str(file)) == 0
    assert sorted({row["context"] for row in read(file)["rows"]})[:2] == [1024, 4096]
    assert 0.9 * 8192 < read(file)["rows"][-1]["prompt_tokens"] < 8192


def test_a_short_context_is_one_length_and_said(tmp_path, capsys):
    file = tmp_path / "commit.json"
    with fake_server([*DDTREE, "--context-length", "512"]) as server:
        assert probe(server.url, *COMMIT_PROBE, "--json", str(file)) == 0
    assert len({row["context"] for row in read(file)["rows"]}) == 1
    said = capsys.readouterr().out
    assert "Its context is short" in said
    assert "the only length measured" in said


@pytest.mark.parametrize("arguments", [COMMIT_PROBE, GPU_PROBE])
def test_a_context_too_short_for_any_probe_is_one_line(capsys, arguments):
    with fake_server([*DDTREE, "--context-length", "100"]) as server:
        assert probe(server.url, *arguments) == 2
    assert "its context is too short" in one_line(capsys)


@pytest.mark.parametrize("arguments", [COMMIT_PROBE, GPU_PROBE])
def test_a_dead_server_is_one_line(capsys, arguments):
    url = f"http://127.0.0.1:{find_free_port()}"
    assert probe(url, *arguments) == 1
    assert one_line(capsys).endswith(f"no answer from {url} to /server_info: Connection refused")


@pytest.mark.parametrize(
    "url",
    [
        "http://[::1", "http://x..y", "http://a b:3", "http://a\nb", "localhost:abc", "localhost:70000",
        "localhost:0", "http://", "ftp://localhost", "file:///etc/hostname", "http://user:word@localhost",
        "http://localhost/caf\u00e9", "http://localhost/?x=1", "",
    ],
)  # fmt: skip
@pytest.mark.parametrize("arguments", [COMMIT_PROBE, GPU_PROBE])
def test_a_url_that_is_none_is_one_line(capsys, url, arguments):
    assert probe(url, *arguments) == 2
    assert one_line(capsys).endswith(f"--url {url!r} is no address of a server: type http://HOST:PORT.")


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("localhost:30000", "http://localhost:30000"),
        ("https://gpu-box/v1/", "https://gpu-box"),
        ("http://[::1]:8000/behind/a/proxy", "http://[::1]:8000/behind/a/proxy"),
        ("m\u00fchle:80", "http://m\u00fchle:80"),
    ],
)
def test_urls_are_taken_as_they_are_typed(given, asked):
    assert probe_run.server_url(given) == asked


@pytest.mark.parametrize("key", ["\u043a\u043b\u044e\u0447", "two\nlines", "\udcff"])
def test_a_key_that_no_header_takes_is_one_line(monkeypatch, capsys, key):
    monkeypatch.setattr(probe_run.os, "environ", {"DDTREE_API_KEY": key})
    assert probe("http://127.0.0.1:1", *COMMIT_PROBE) == 2
    assert "DDTREE_API_KEY holds characters that no HTTP header takes" in one_line(capsys)


@contextmanager
def other_server(status: int, body: bytes):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (404, b"not here", "is no SGLang server: it has no /server_info"),
        (200, b"<html>hello</html>", "is no SGLang server"),
        (200, b"[1, 2]", "is no SGLang server"),
        (200, b'{"status": "ok"}', "is no SGLang server"),
        (500, b"Internal Server Error", "answered HTTP 500 to /server_info: Internal Server Error"),
    ],
)
@pytest.mark.parametrize("arguments", [COMMIT_PROBE, GPU_PROBE])
def test_a_wrong_port_is_one_line(capsys, status, body, words, arguments):
    with other_server(status, body) as url:
        assert probe(url, *arguments) == 1
    assert words in one_line(capsys)


@pytest.mark.parametrize(
    ("flags", "mode", "words"),
    [
        ((), "", "decodes without speculation"),
        (DDTREE, "no-text", "has no tokenizer"),
        (DDTREE, "embeds", "serves embeddings"),
        (DDTREE, "key=secret", "wants an API key: set DDTREE_API_KEY"),
        (DDTREE, "loading", "is not ready yet (HTTP 503)"),
        (DDTREE, "fail-info", "answered HTTP 500 to /server_info: out of luck"),
    ],
)
def test_a_server_that_commit_cannot_probe_is_one_line_and_no_file(tmp_path, capsys, flags, mode, words):
    file = tmp_path / "commit.json"
    with fake_server(flags, mode) as server:
        assert probe(server.url, *COMMIT_PROBE, "--json", str(file)) == 1
    assert words in one_line(capsys)
    assert not file.exists()


@pytest.mark.parametrize(("mode", "key"), [("key=secret", "secret"), ("old", "")])
def test_keys_and_older_releases_are_served(monkeypatch, mode, key):
    monkeypatch.setenv("DDTREE_API_KEY", key)
    with fake_server(DDTREE, mode) as server:
        assert probe(server.url, *COMMIT_PROBE, "--contexts", "1000") == 0


@pytest.mark.parametrize(
    ("arguments", "mode", "kept", "words"),
    [
        # The first four requests of commit count tokens; gpu has two of those, and then one a row or more.
        (COMMIT_PROBE, "fail-at=7", 2, "answered HTTP 500 to /generate: out of luck; 2 of 4 rows"),
        (COMMIT_PROBE, "die-at=6", 1, "in the middle of an answer"),
        (COMMIT_PROBE, "uncounted", 0, "do not count what they drafted: no spec_num_correct_drafts"),
        (GPU_PROBE, "fail-at=4", 1, "answered HTTP 500 to /generate: out of luck; 1 of 4 rows"),
        (GPU_PROBE, "die-at=4", 1, "in the middle of an answer"),
    ],
)
def test_a_server_that_fails_half_way_is_one_line_and_its_rows_are_kept(
    tmp_path, capsys, arguments, mode, kept, words
):
    file = tmp_path / "probe.json"
    with fake_server(DDTREE, mode) as server:
        assert probe(server.url, *arguments, "--contexts", "1000", "2000", "--json", str(file)) == 1
        said = capsys.readouterr().err
    first = said.splitlines()[0]
    assert words in first
    assert "Traceback" not in said
    assert len(read(file)["rows"]) == kept


@pytest.mark.parametrize(("arguments", "module"), [(COMMIT_PROBE, probe_commit), (GPU_PROBE, probe_gpu)])
def test_ctrl_c_keeps_the_rows_and_says_so(tmp_path, capsys, monkeypatch, arguments, module):
    file = tmp_path / "probe.json"
    ask, asked = module.ask, []

    def interrupt(client, prompt, *more):
        asked.append(prompt)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return ask(client, prompt, *more)

    monkeypatch.setattr(module, "ask", interrupt)
    with fake_server(DDTREE) as server:
        assert probe(server.url, *arguments, "--contexts", "1000", "2000", "--json", str(file)) == 130
    assert f"stopped; 1 of 4 rows are measured in {file}" in one_line(capsys)
    assert len(read(file)["rows"]) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["commit", "--new-tokens", "4"], "--new-tokens must be at least 16"),
        (["commit", "--contexts", "10"], "--contexts must be at least 64"),
        (["gpu", "--seconds", "0"], "--seconds and --copy-rate must be above 0"),
        (["gpu", "--copy-rate", "9", "--model", "nowhere"], "nowhere is no folder"),
        (["commit", "--json", "/nowhere/commit.json"], "cannot be written: No such file or directory."),
        (["commit", "--json", "/tmp"], "/tmp is a folder"),
    ],
)
def test_wrong_options_are_one_line(capsys, arguments, words):
    with fake_server(DDTREE) as server:
        assert probe(server.url, *arguments) == 2
    assert words in one_line(capsys)


def test_results_are_not_written_over(tmp_path, capsys):
    file = tmp_path / "commit.json"
    file.write_text("mine")
    with fake_server(DDTREE) as server:
        assert probe(server.url, *COMMIT_PROBE, "--json", str(file)) == 2
    assert "is there: name another --json" in one_line(capsys)
    assert file.read_text() == "mine"


def test_gpu_measures_rates_of_any_server_without_a_gpu_in_sight(tmp_path, capsys):
    file = tmp_path / "gpu.json"
    with fake_server(DDTREE) as server:
        more = ["--contexts", "1000", "16000", "--copy-rate", "100", "--json", str(file)]
        assert probe(server.url, *GPU_PROBE, *more) == 0
    found = read(file)
    assert [tuple(row) for row in found["rows"]] == [probe_gpu.COLUMNS] * 4
    assert [row["phase"] for row in found["rows"]] == ["prefill", "decode"] * 2
    decode = found["rows"][-1]
    assert decode["accept_length"] == COMMIT - 1
    rate = decode["kv_bytes"] / decode["step_milliseconds"] / 1e6
    assert decode["kv_gb_s"] == pytest.approx(rate, rel=1e-3)
    assert decode["limit_fraction"] == pytest.approx(rate / 100, rel=1e-2)
    assert decode["sm_percent"] is None
    assert found["lacks"] == ["GPU load: the server runs on a CPU"]
    assert "Not seen: GPU load: the server runs on a CPU." in capsys.readouterr().out


def test_gpu_says_when_sm_percent_hides_an_idle_one(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(probe_gpu, "local_gpus", lambda chosen: Gpus(FakeNvml(), chosen))
    monkeypatch.setattr(probe_gpu, "has_accelerator", lambda: True)
    monkeypatch.setattr(probe_gpu, "measure_copy_rate", lambda: 4000.0)
    file = tmp_path / "gpu.json"
    with fake_server(DDTREE, "cuda") as server:
        assert probe(server.url, "gpu", "--seconds", "0.3", "--contexts", "1000", "--json", str(file)) == 0
    found = read(file)
    decode = found["rows"][-1]
    assert (decode["gpus"], decode["sm_percent"], decode["power_watts"]) == ([1], 99, 200)
    assert decode["verdict"] == gpu_verdict.HIDES_IDLE
    assert found["copy_gb_s"] == 4000
    assert found["lacks"] == []
    assert "GPU idle behind its SM % at" in capsys.readouterr().out


def test_a_server_on_a_cpu_is_said_at_once_and_asked_for_nothing(tmp_path, capsys):
    file = tmp_path / "gpu.json"
    with fake_server(DDTREE, "fail-at=1") as server:
        assert probe(server.url, "gpu", "--json", str(file)) == 1
    assert "runs on a CPU: there is no GPU to probe. With --copy-rate GB/S" in one_line(capsys)
    assert not file.exists()


def test_that_there_will_be_no_verdict_is_said_before_the_first_row(monkeypatch, capsys):
    monkeypatch.setattr(probe_gpu, "is_local", lambda url: False)
    with fake_server(DDTREE, "cuda") as server:
        assert probe(server.url, "gpu", "--seconds", "0.05", "--contexts", "1000") == 0
    said = capsys.readouterr().out
    assert said.index("there will be times and no verdict") < said.index("prefill ")


def test_a_server_without_text_is_driven_with_tokens_of_its_vocabulary(capsys):
    with fake_server(DDTREE, "no-text") as server:
        assert probe(server.url, *GPU_PROBE, "--contexts", "1000") == 0
    with fake_server((), "no-text") as server:
        assert probe(server.url, *GPU_PROBE, "--contexts", "1000") == 2
        assert "name the target's config with --model" in one_line(capsys)
        named = ["--model", str(MODEL / "target")]
        assert probe(server.url, *GPU_PROBE, "--contexts", "1000", *named) == 0


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("http://localhost:30000", True), ("http://127.0.0.1:30000", True), ("http://[::1]:30000", True),
        ("http://gpu-box:30000", False), ("https://10.1.2.3", False),
    ],
)  # fmt: skip
def test_gpus_and_copy_rates_are_read_where_the_server_is(url, local):
    assert probe_gpu.is_local(url) is local
    if not local:
        facts = probe_server.ServerFacts(url, {"device": "cuda"})
        assert "on another machine" in probe_gpu.reachable_gpus(facts, []).lacks[0]
        assert probe_gpu.find_copy_rate(facts, None)[0] is None


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_the_gpu_on_a_line_that_overwrites_itself(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    out = Terminal()
    view = GpuView(LiveLine(out), most_gpus=1)
    readings = Gpus(FakeNvml()).read()
    view.show(readings)
    assert out.getvalue() == ""  # between phases
    view.phase("decode behind 65536 tokens: 7")
    view.show(readings)
    view.phase("decode behind 65536 tokens: 8")
    last = out.getvalue().split("\r\033[K")[-1]
    assert last.startswith(
        "decode behind 65536 tokens: 8 | GPU 1 SM ##########  99% mem #.........  12% power ##"
    )
    assert "GPU 0" not in out.getvalue()
    assert "\n" not in out.getvalue()
    assert all(len(line) < 100 for line in out.getvalue().split("\r\033[K"))
    view.line("done")
    assert out.getvalue().endswith("\r\033[Kdone\n")


def test_a_probe_that_is_not_watched_prints_rows_alone(capsys):
    with fake_server(DDTREE) as server:
        assert probe(server.url, *GPU_PROBE, "--contexts", "1000") == 0
    said = capsys.readouterr().out
    assert "\033" not in said
    assert len([line for line in said.splitlines() if line.startswith(("prefill ", "decode "))]) == 2


def test_traffic_is_named_once_there_is_some(capsys):
    with fake_server(DDTREE, "metrics") as server:
        for _ in range(2):
            assert probe(server.url, "commit", "--new-tokens", "401", "--contexts", "1000") == 0
    first, second = capsys.readouterr().out.split("SGLang 0.0")[1:]
    assert "Its own traffic" not in first
    assert f"Its own traffic so far: {COMMIT:.2f} tokens committed a round, over 200 rounds." in second


def timing(milliseconds: float) -> BatchTiming:
    return BatchTiming(seconds=milliseconds / 1e3, tokens=1, rounds=1, accepted=0, request_rounds=1)


def test_growth_is_the_rate_at_which_more_context_is_read():
    drive = SimpleNamespace(
        kv=SimpleNamespace(of_a_step=lambda context: 1_000_000 * context), copy_rate=4000.0, shortest=None
    )
    first = probe_gpu.kv_rates(drive, 1000, timing(6.0))
    assert "growth_gb_s" not in first
    assert probe_gpu.telling_fraction(first) is None  # a whole step reads weights too
    longer = probe_gpu.kv_rates(drive, 11_000, timing(11.0))
    assert longer["growth_gb_s"] == pytest.approx(2000)  # 10 GB more in 5 ms more
    assert probe_gpu.telling_fraction(longer) == pytest.approx(0.5)
    assert "growth_gb_s" not in probe_gpu.kv_rates(drive, 11_000, timing(6.1))  # noise


def test_metrics_are_added_up_over_labels_and_traffic_leaves_the_prefills_tokens_out():
    text = """# HELP sglang:spec_verify_calls_total calls
sglang:spec_verify_calls_total{model_name="a {b} c"} 100.0
sglang:generation_tokens_total{is_streaming="true"} 300.0
sglang:generation_tokens_total{is_streaming="false"} 110.0
sglang:num_requests_total{is_streaming="true"} 10.0
python_info{version="3"} 1.0
"""
    assert probe_server.traffic(probe_server.parse_metrics(text)) == {
        "rounds": 100, "mean_commit_length": 4.0,
    }  # fmt: skip
    assert probe_server.parse_metrics("<html>no metrics</html>") is None
    assert probe_server.traffic(None) is None
