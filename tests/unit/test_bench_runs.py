"""`ddtree bench serve` and `context` from the command line to the file, against a stand-in for SGLang."""

import io
import json
import re
import tempfile
import time
from pathlib import Path

import pytest
from fake_sglang import COMMIT, FakeTemplate

from sglang_ddtree_patch import cli
from sglang_ddtree_patch.launch import terminal
from sglang_ddtree_patch.launch.bench import context as bench_context
from sglang_ddtree_patch.launch.bench import progress as bench_progress
from sglang_ddtree_patch.launch.bench import run as bench_run
from sglang_ddtree_patch.launch.bench import serve as bench_serve
from sglang_ddtree_patch.launch.bench.ceilings import CeilingsUnknown
from sglang_ddtree_patch.launch.bench.models import Subject
from sglang_ddtree_patch.launch.bench.servers import contender

SERVE = [
    "bench", "serve", "--model", "qwen3-8b-shapes", "--width", "8", "--batch", "1", "2", "--prompts", "2",
    "--prompt-tokens", "8", "--new-tokens", "33", "--repeats", "1",
]  # fmt: skip
CONTEXT = [
    "bench", "context", "--model", "qwen3-8b-shapes", "--contexts", "64", "128", "--new-tokens", "9",
    "--algorithms", "plain", "ddtree", "--repeats", "2",
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_sglang(monkeypatch, tmp_path):
    FakeTemplate.started = []
    monkeypatch.setattr(bench_run, "ServerTemplate", FakeTemplate)
    monkeypatch.setattr(bench_run, "has_accelerator", lambda: False)
    monkeypatch.setattr(bench_run, "require_sglang", lambda command: True)
    monkeypatch.setattr(bench_run, "device_name", lambda on_cpu: "a machine")
    monkeypatch.setattr(bench_run, "VERSIONED", ())
    monkeypatch.setattr(bench_run, "exit_on_signals", lambda: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def read(file: Path) -> dict:
    return json.loads(file.read_text())


def names(file: Path, *columns: str) -> list[tuple]:
    return [tuple(row[column] for column in columns) for row in read(file)["rows"]]


def test_a_file_that_an_interrupt_left_without_rows_is_written_anew(tmp_path):
    file = tmp_path / "serve.json"
    file.write_text('{"device": "a machine", "rows": []}')
    assert cli.main([*SERVE, "--json", str(file)]) == 0
    assert names(file, "algorithm")


def test_serve_writes_a_row_for_each_server_and_batch_size(tmp_path):
    file = tmp_path / "serve.json"
    assert cli.main([*SERVE, "--json", str(file)]) == 0
    found = read(file)
    assert list(found) == ["device", "versions", "command", "date", "settings", "rows"]
    assert all(tuple(row) == bench_serve.COLUMNS for row in found["rows"])
    assert names(file, "model", "algorithm", "width", "temperature", "batch") == [
        ("qwen3-8b-shapes", algorithm, width, 0.0, batch)
        for algorithm, width in (("plain", 1), ("dflash", 16), ("ddtree", 8))
        for batch in (1, 2)
    ]
    assert names(file, "accept_length") == [(0.0,)] * 2 + [(COMMIT - 1,)] * 4
    for row in found["rows"]:
        rounds = row["tokens_per_second"] * row["step_milliseconds"] / 1e3
        assert rounds == pytest.approx(row["batch"] * (row["accept_length"] + 1), rel=0.01)


def test_settings_of_this_package_stand_in_the_file_and_are_not_mixed(tmp_path, monkeypatch, capsys):
    file = tmp_path / "serve.json"
    monkeypatch.setenv("SGLANG_DDTREE_TOPK", "1")
    assert cli.main([*SERVE, "--json", str(file)]) == 0
    assert read(file)["settings"]["environment"] == {"SGLANG_DDTREE_TOPK": "1"}
    monkeypatch.delenv("SGLANG_DDTREE_TOPK")
    assert cli.main([*SERVE, "--json", str(file), "--resume"]) == 2
    assert "other settings" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (SERVE, ("1 of 2 prompts done", "repeat 1 of 1: algorithm plain, temperature 0.0, batch 1")),
        (SERVE, ("0 of 2 prompts done", "warming up: algorithm plain, temperature 0.0, batch 2")),
        (CONTEXT, ("0 of 1 prompts done", "repeat 1 of 2: algorithm plain, context 128")),
    ],
)
def test_how_far_a_point_is_is_said_while_it_is_measured(capsys, monkeypatch, command, said):
    monkeypatch.setattr(bench_progress, "TICK_SECONDS", 0.003)
    monkeypatch.setattr(terminal, "PROGRESS_EVERY_SECONDS", 0.0)
    assert cli.main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    done, point = map(re.escape, said)
    said = rf"  \d+ s, {done}, (\d+) tokens, {point}"
    counts = [int(found[1]) for line in lines if (found := re.fullmatch(said, line))]
    assert counts == sorted(counts)
    assert len({*counts}) > 1


def test_a_point_on_a_terminal_leaves_its_row_alone(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    view = terminal.LiveLine(out)
    monkeypatch.setattr(bench_progress, "TICK_SECONDS", 0.001)
    with bench_progress.PointProgress(view, "batch 8", prompts=16) as progress:
        progress.begin("repeat 1 of 3")
        progress.tokens(120)
        progress.batch_is_done(8)
        progress.tokens(7)
        while "127 tokens" not in out.getvalue():
            time.sleep(0.001)
        view.line("said meanwhile")
    view.line("the row")
    drawn = out.getvalue().split("\r\033[K")
    said = re.compile(r"  \d+ s, 8 of 16 prompts done, 127 tokens, repeat 1 of 3: batch 8")
    assert any(map(said.fullmatch, drawn))
    # Lines that stay begin where a live one was, or a line ended.
    stayed = [line for part in drawn for line in part.splitlines(keepends=True) if line.endswith("\n")]
    assert stayed == ["said meanwhile\n", "the row\n"]


def test_each_algorithm_is_the_server_its_name_says(tmp_path):
    cli.main([*SERVE, "--json", str(tmp_path / "serve.json"), "--mem-fraction-static", "0.5"])
    plain, dflash, ddtree = FakeTemplate.started
    assert "--speculative-algorithm" not in plain
    assert "DFLASH" in dflash
    assert dflash[(at := dflash.index("--page-size")) : at + 2] == ["--page-size", "64"]
    assert {"DDTREE", "ddtree-verify", "--speculative-num-draft-tokens", "8"} <= set(ddtree)
    for flags in (plain, dflash, ddtree):
        assert "--skip-tokenizer-init" in flags
        assert flags[-6:-4] == ["--mem-fraction-static", "0.5"]  # host and port follow


def test_resume_measures_what_the_file_lacks_and_keeps_the_rest(tmp_path):
    file = tmp_path / "serve.json"
    cli.main([*SERVE, "--json", str(file)])
    whole = read(file)
    kept = [row for row in whole["rows"] if (row["algorithm"], row["batch"]) != ("ddtree", 2)]
    file.write_text(json.dumps({**whole, "rows": kept}))
    assert cli.main([*SERVE, "--json", str(file), "--resume"]) == 0
    (resumed,) = FakeTemplate.started[3:]
    assert "DDTREE" in resumed
    assert read(file)["rows"][:-1] == kept
    assert names(file, "algorithm", "batch")[-1] == ("ddtree", 2)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ([], "add --resume"),
        (["--resume", "--new-tokens", "17"], "other settings"),
        (["--resume", "--dtype", "float16"], "other settings"),
    ],
)
def test_results_are_neither_written_over_nor_mixed(tmp_path, capsys, more, words):
    file = tmp_path / "serve.json"
    cli.main([*SERVE, "--algorithms", "plain", "--json", str(file)])
    before = file.read_text()
    assert cli.main([*SERVE, "--json", str(file), *more]) == 2
    assert words in capsys.readouterr().err
    assert file.read_text() == before


def test_a_refused_point_is_said_and_the_others_are_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FAKE_SGLANG", "refuse-sampling")
    file = tmp_path / "serve.json"
    assert cli.main([*SERVE, "--temperature", "1", "0", "--json", str(file)]) == 0
    assert "not measured: sampling is not served" in capsys.readouterr().out
    ddtree = [row for row in names(file, "algorithm", "temperature") if row[0] == "ddtree"]
    assert ddtree == [("ddtree", 0.0)] * 2


def test_a_server_that_dies_is_reported_and_the_next_one_started(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FAKE_SGLANG", "die")
    file = tmp_path / "serve.json"
    assert cli.main([*SERVE, "--json", str(file)]) == 1
    assert names(file, "algorithm", "batch") == [("plain", 1), ("dflash", 1), ("ddtree", 1)]
    said = capsys.readouterr().err
    assert "out of memory" in said
    logs = [
        Path(line.split()[-1]) for line in said.splitlines() if line.startswith("All of its log stays in ")
    ]
    assert ["out of memory" in log.read_text() for log in logs] == [True] * 3


def test_a_spent_budget_keeps_the_rows_and_says_how_to_go_on(tmp_path, capsys, monkeypatch):
    file = tmp_path / "serve.json"
    cli.main([*SERVE, "--algorithms", "plain", "--json", str(file)])
    monkeypatch.setenv("FAKE_SGLANG", "slow")
    arguments = [*SERVE, "--json", str(file), "--resume", "--budget", "4"]
    assert cli.main(arguments) == 0
    assert "The budget is spent. 2 of 6 points are measured" in capsys.readouterr().out
    assert names(file, "algorithm") == [("plain",)] * 2


def test_ctrl_c_keeps_the_rows_and_ends_the_server(tmp_path, capsys, monkeypatch):
    file = tmp_path / "serve.json"
    decode_batch = bench_serve.decode_batch

    def interrupt(server, prompts, **options):
        if len(prompts) == 2:
            server_was.append(server)
            raise KeyboardInterrupt
        return decode_batch(server, prompts, **options)

    server_was = []
    monkeypatch.setattr(bench_serve, "decode_batch", interrupt)
    assert cli.main([*SERVE, "--json", str(file)]) == 130
    assert names(file, "algorithm", "batch") == [("plain", 1)]
    assert "Stopped. 1 of 6 points are measured" in capsys.readouterr().out
    assert not server_was[0].is_alive
    assert list(tmp_path.iterdir()) == [file]  # no logs


@pytest.mark.parametrize(
    ("mode", "rows", "words"),
    [
        # Each server is asked four times: prefix and timing, at two contexts; two timings a point.
        ("die-at=5", [64], "broke off in the middle of an answer"),
        ("fail-at=4", [64], "answered HTTP 500 to /generate: out of luck"),
        ("fail-info", [], "answered HTTP 500 to /server_info: out of luck"),
    ],
)
def test_context_keeps_what_it_has_of_a_server_that_fails(tmp_path, capsys, monkeypatch, mode, rows, words):
    monkeypatch.setenv("FAKE_SGLANG", mode)
    file = tmp_path / "context.json"
    assert cli.main([*CONTEXT, "--json", str(file)]) == 1
    said = capsys.readouterr().err
    first = next(line for line in said.splitlines() if words in line)
    assert first.startswith("ddtree bench context: plain: ")
    assert "Traceback" not in said
    assert names(file, "algorithm", "context") == [
        (algorithm, context) for algorithm in ("plain", "ddtree") for context in rows
    ]


def test_ctrl_c_keeps_contexts_and_the_table_and_resume_measures_the_rest(tmp_path, capsys, monkeypatch):
    file = tmp_path / "context.json"
    decode_batch = bench_context.decode_batch

    def interrupt(server, prompts, **options):
        if len(prompts[0]) == 128:
            raise KeyboardInterrupt
        return decode_batch(server, prompts, **options)

    with monkeypatch.context() as patch:
        patch.setattr(bench_context, "decode_batch", interrupt)
        assert cli.main([*CONTEXT, "--json", str(file)]) == 130
    assert "Stopped. 1 of 4 points are measured" in capsys.readouterr().out
    assert "| 64 |" in file.with_suffix(".md").read_text()
    assert cli.main([*CONTEXT, "--json", str(file), "--resume"]) == 0
    assert len(names(file, "algorithm", "context")) == 4


def test_a_device_that_cannot_be_measured_is_said_before_any_server(capsys, monkeypatch):
    def full():
        raise CeilingsUnknown("the device's copy rate could not be measured: out of memory")

    monkeypatch.setattr(bench_context, "measure_ceilings", full)
    monkeypatch.setattr(bench_run, "has_accelerator", lambda: True)
    assert cli.main(CONTEXT) == 1
    assert capsys.readouterr().err.strip().endswith("could not be measured: out of memory")
    assert FakeTemplate.started == []


def test_a_cache_type_without_a_known_size_is_refused_before_any_server(capsys):
    assert cli.main([*CONTEXT, "--kv-cache-dtype", "fp4_e2m1"]) == 2
    assert "fp4_e2m1" in capsys.readouterr().err
    assert FakeTemplate.started == []


def test_a_model_without_a_tokenizer_is_refused_before_any_server(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"num_attention_heads": 2}')
    named = ["--model", str(tmp_path), "--draft", str(tmp_path)]
    assert cli.main(["bench", "serve", *named]) == 2
    assert f"{tmp_path}: no tokenizer can be read there (" in capsys.readouterr().err
    assert FakeTemplate.started == []


def test_batches_hold_the_same_prompts_in_the_same_order_at_every_size():
    prompts = [[number] for number in range(5)]
    assert bench_serve.make_batches(prompts, 1, 3) == [[[0]], [[1]], [[2]]]
    assert bench_serve.make_batches(prompts, 2, 3) == [[[0], [1]], [[2], [3]]]
    assert bench_serve.make_batches(prompts, 8, 3) == [[[0], [1], [2], [3], [4], [0], [1], [2]]]


def test_context_writes_rows_and_a_table(tmp_path):
    file = tmp_path / "context.json"
    assert cli.main([*CONTEXT, "--json", str(file)]) == 0
    assert all(tuple(row) == bench_context.COLUMNS for row in read(file)["rows"])
    assert names(file, "algorithm", "backend", "page_size", "context", "limit_fraction") == [
        ("plain", "stock", 1, 64, None),
        ("plain", "stock", 1, 128, None),
        ("ddtree", "ddtree-verify", 64, 64, None),
        ("ddtree", "ddtree-verify", 64, 128, None),
    ]
    target, drafter = 36 * 8 * 128 * 2, 5 * 8 * 128 * 2  # numbers a position
    assert names(file, "kv_bytes")[0] == (64 * 4 * target,)  # float32 on a CPU
    assert names(file, "kv_bytes")[2] == (64 * 4 * (target + drafter),)
    table = file.with_suffix(".md").read_text().splitlines()
    assert len([line for line in table if line.startswith(("| 64 |", "| 128 |"))]) == 4


def test_the_limit_is_the_bytes_at_the_copy_rate_over_the_step(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_context, "measure_ceilings", lambda: {"copy_gb_s": 1000.0, "bf16_tflop_s": 1.0})
    monkeypatch.setattr(bench_run, "has_accelerator", lambda: True)
    monkeypatch.setattr(bench_run, "launch_python", FakeTemplate().launch)
    file = tmp_path / "context.json"
    assert cli.main([*CONTEXT, "--json", str(file)]) == 0
    assert read(file)["ceilings"]["copy_gb_s"] == 1000.0
    for row in read(file)["rows"]:
        spent = row["step_milliseconds"] / 1e3
        assert row["limit_fraction"] == pytest.approx(row["kv_bytes"] / 1e12 / spent, abs=1e-4)


def test_contexts_are_clipped_to_the_model_once():
    assert bench_context.clip([65536, 1024, 131072, 4096], 40000) == [1024, 4096, 40000]
    assert bench_context.clip([1024], 40000) == [1024]
    with pytest.raises(bench_context.ConfigurationError, match="--new-tokens"):
        bench_context.clip([1024], 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "nowhere"], "needs its DFlash drafter"),
        (["--model", "nowhere", "--draft", "nowhere"], "nowhere is no folder"),
        (["--model", "tiny-gqa", "--draft", "x"], "brings its own drafter"),
        (["--model", "tiny-gqa", "--batch", "1", "0"], "--batch must be at least 1"),
        (["--model", "tiny-gqa", "--resume"], "--resume needs --json"),
        (["--model", "tiny-gqa", "--temperature", "0", "-1"], "--temperature must be 0 or more"),
        (["--model", "tiny-gqa", "--temperature", "nan"], "--temperature must be 0 or more"),
        (["--model", "tiny-gqa", "--budget", "0"], "--budget must be above 0"),
        (["--model", "tiny-gqa", "--width", "16", "257"], "--width must be at most 256"),
        (["--model", "tiny-gqa", "--json", "/tmp"], "/tmp is a folder"),
        (["--model", "tiny-gqa", "--json", "/nowhere/x"], "/nowhere/x cannot be written: No such file"),
    ],
)
def test_wrong_options_end_with_two_before_any_server(capsys, arguments, words):
    assert cli.main(["bench", "serve", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert FakeTemplate.started == []


def test_chosen_widths_are_one_server_of_the_largest_width(tmp_path):
    file = tmp_path / "rows.json"
    chosen = ["--algorithms", "ddtree-auto", "--width", "4", "16", "--json", str(file)]
    assert cli.main([*SERVE, *chosen]) == 0
    assert set(names(file, "algorithm", "width")) == {("ddtree-auto", 16)}
    servers = (contender(name, 16, Subject("", "T", "D"), 64, False) for name in ("ddtree", "ddtree-auto"))
    assert [server.environment["SGLANG_DDTREE_WIDTHS"] for server in servers] == ["fixed", "auto"]
