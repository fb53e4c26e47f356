"""The `ddtree` command: what it fills in, what it refuses, and that it needs no SGLang to say so."""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile

import pytest

from sglang_ddtree_patch import cli
from sglang_ddtree_patch.launch import demo, serve, sglang_install
from sglang_ddtree_patch.launch.bench import command as bench
from sglang_ddtree_patch.launch.bench.kernel_options import KERNELS, SHAPES, parse_options
from sglang_ddtree_patch.launch.demo_view import Comparison
from sglang_ddtree_patch.launch.server_process import ServerStartError
from sglang_ddtree_patch.launch.sglang_client import NotMeasured, ServerLost
from sglang_ddtree_patch.launch.token_counts import parse_tokens

MODELS = ["--model-path", "T", "--speculative-draft-model-path", "D"]

# Runs the command in a Python where neither SGLang nor torch can be imported or found.
WITHOUT_SGLANG = """
import importlib.metadata, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("sglang", "torch", "triton", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
find = importlib.metadata.version

def version(name):
    if name == "sglang":
        raise importlib.metadata.PackageNotFoundError(name)
    return find(name)

importlib.metadata.version = version
from sglang_ddtree_patch.cli import main
sys.exit(main(sys.argv[1:]))
"""


def ddtree_without_sglang(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", WITHOUT_SGLANG, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


COMMANDS = [
    "",
    "serve",
    "demo",
    "doctor",
    *("probe", "probe commit", "probe gpu"),
    *("bench", "bench kernel", "bench serve", "bench context", "bench plot"),
    *("models", "models path", "models smollm2"),
    *("patch", *(f"patch {action}" for action in ("list", "check", "apply", "revert", "status"))),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_with_an_example_without_sglang(command):
    result = ddtree_without_sglang(*command.split(), "--help")
    assert result.returncode == 0, result.stderr
    assert f"example:\n  ddtree {command}" in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", *MODELS, "--device", "cpu"],
        ["demo"],
        ["bench", "serve", "--model", "tiny-gqa"],
        ["bench", "kernel"],
    ],
)
def test_a_command_that_needs_sglang_says_what_to_type(arguments):
    result = ddtree_without_sglang(*arguments)
    assert result.returncode == 1
    assert result.stderr.strip().endswith("Run: pip install sglang==0.5.23")
    assert "Traceback" not in result.stderr


def test_the_wrong_sglang_release_is_named(monkeypatch, capsys):
    monkeypatch.setattr(sglang_install, "installed_sglang", lambda: "0.4.0")
    assert not sglang_install.require_sglang("serve")
    assert "SGLang 0.4.0 is installed, and this needs 0.5.23" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [[], ["nonsense"], ["demo", "--nonsense"], ["models", "--nonsense"], ["patch"]]
)
def test_wrong_usage_ends_with_two(arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2


def filled(flags: list[str], on_cpu: bool = False) -> dict[str, str]:
    """What `ddtree serve` adds to the flags."""
    return {default.flag: default.value for default in serve.plan_server(flags, on_cpu=on_cpu).filled}


def test_serve_fills_in_ddtree_before_the_flags_it_was_given():
    plan = serve.plan_server(MODELS, on_cpu=False)
    added = [
        "--speculative-algorithm", "DDTREE", "--attention-backend", "ddtree-verify", "--page-size", "64",
    ]  # fmt: skip
    assert list(plan.arguments) == [*added, *MODELS]
    assert plan.environment == {}


def test_serve_on_a_cpu_names_the_device_and_the_platform():
    plan = serve.plan_server(MODELS, on_cpu=True)
    assert plan.arguments[:4] == ("--device", "cpu", "--dtype", "float32")
    assert "float32" not in serve.plan_server([*MODELS, "--dtype", "bfloat16"], on_cpu=True).arguments
    assert plan.environment["SGLANG_PLATFORM"] == "ddtree_cpu"
    assert "SGLANG_PLATFORM=ddtree_cpu" in plan.command()


@pytest.mark.parametrize(
    ("given", "absent"),
    [
        (["--page-size", "1"], "--page-size"),
        (["--page-size=1"], "--page-size"),
        (["--attention-backend", "fa3"], "--attention-backend"),
        (["--speculative-algorithm", "ddtree"], "--speculative-algorithm"),
    ],
)
def test_serve_never_fills_in_a_flag_that_was_given(given, absent):
    plan = serve.plan_server([*MODELS, *given], on_cpu=False)
    assert absent not in filled([*MODELS, *given])
    assert len(plan.filled) == 2
    assert plan.arguments[-len(given) :] == tuple(given)


def test_serve_adds_nothing_to_another_algorithm():
    assert filled([*MODELS, "--speculative-algorithm", "EAGLE"]) == {}


def test_serve_counts_a_config_file_as_given(tmp_path):
    config = tmp_path / "server.yaml"
    config.write_text('model-path: T\nspeculative_draft_model_path: "D"  # comment\npage-size: 16\n')
    flags = ["--config", str(config)]
    assert serve.missing_flag(flags) is None
    assert "--page-size" not in filled(flags)


@pytest.mark.parametrize(("data", "words"), [(None, "is no file"), (b"\xff", "is no text")])
def test_serve_says_what_is_wrong_with_a_config_file(tmp_path, capsys, data, words):
    config = tmp_path / "server.yaml"
    if data is not None:
        config.write_bytes(data)
    assert cli.main(["serve", "--config", str(config)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"ddtree serve: --config {config} {words}")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "--model-path"),
        (["--model-path", "", "--draft", "D"], "--model-path"),
        (["--model-path", "T"], "--speculative-draft-model-path"),
        ([*MODELS, "--width", "8", "--speculative-num-draft-tokens", "9"], "give one of them"),
        (["--model", "T", "--page-size", "16"], "--speculative-draft-model-path"),
        (["--model-path", "/nowhere", "--draft", "D"], "--model-path /nowhere: nothing is there"),
        (["--model", "T", "--draft", "./no/where"], "--speculative-draft-model-path ./no/where: nothing"),
    ],
)
def test_serve_refuses_a_missing_model_before_it_starts_anything(flags, words, capsys):
    assert cli.main(["serve", *flags]) == 2
    assert words in capsys.readouterr().err


def test_serve_needs_no_drafter_for_plain_decoding():
    assert serve.missing_flag(["--model-path", "T", "--speculative-algorithm", "NONE"]) is None


def test_print_command_prints_what_a_shell_would_run(capsys, monkeypatch):
    monkeypatch.setattr(serve, "has_accelerator", lambda: False)
    assert cli.main(["serve", "--print-command", *MODELS, "--json-model-override-args", '{"a": 1}']) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[0] == "SGLANG_PLATFORM=ddtree_cpu"
    assert f"{sys.executable} -m sglang.launch_server --device cpu" in " ".join(words)
    assert words[-2:] == ["--json-model-override-args", '{"a": 1}']


def test_serve_becomes_the_server_in_the_same_process(monkeypatch, capsys):
    became = []
    monkeypatch.setattr(os, "execve", lambda *call: became.append(call))
    cli.main(["serve", *MODELS, "--device", "cuda"])
    ((program, command, environment),) = became
    assert (program, command[:3]) == (sys.executable, [sys.executable, "-m", "sglang.launch_server"])
    assert environment == dict(os.environ)
    assert re.search(r"filled in\n  --speculative-algorithm DDTREE +what this", capsys.readouterr().out)


def test_the_kernel_benchmark_gets_its_flags_as_they_were_typed(monkeypatch):
    from sglang_ddtree_patch.launch.bench import kernel as bench_kernel

    got = []
    monkeypatch.setattr(bench_kernel, "main", got.append)
    monkeypatch.setattr(bench, "has_nvidia_gpu", lambda: True)
    flags = ["--rows", "1", "17", "--json", "kernel.json"]
    assert cli.main(["bench", "kernel", *flags]) == 0
    assert got == [flags]
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "kernel", "--rows", "many"])
    assert ended.value.code == 2


def test_the_kernel_benchmark_says_at_once_that_there_is_no_gpu(monkeypatch, capsys):
    monkeypatch.setattr(bench, "has_nvidia_gpu", lambda: False)
    assert cli.main(["bench", "kernel"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("ddtree bench kernel: torch sees no NVIDIA GPU")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rows", "0"], "--rows must be at least 1"),
        (["--rows", "257"], "--rows must be at most 256"),
        (["--batches", "1", "0"], "--batches must be at least 1"),
        (["--contexts", "1x"], "'1x' is no number of tokens: type 1024, or 1k"),
        (["--json", "/nowhere/kernel.json"], "there is no folder /nowhere"),
    ],
)
def test_the_kernel_benchmark_refuses_what_it_cannot_time(capsys, flags, words):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "kernel", *flags])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_the_kernel_benchmarks_help_says_what_each_name_means(capsys):
    with pytest.raises(SystemExit):
        parse_options(["--help"])
    said = capsys.readouterr().out
    for name, meaning in (KERNELS | SHAPES).items():
        assert re.search(rf"^  {name} +{re.escape(meaning)}$", said, re.MULTILINE)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("1k", 1024), ("16K", 16384), ("1024", 1024), (" 185k", 189440), ("0", None), ("0k", None), ("-1", None),
     ("1.5k", None), ("1kk", None), ("k", None), ("", None), ("\u0661", None), ("1" * 5000, None)],
)  # fmt: skip
def test_lengths_are_tokens_and_1k_is_1024(text, tokens):
    if tokens is None:
        with pytest.raises(argparse.ArgumentTypeError, match="type 1024, or 1k"):
            parse_tokens(text)
    else:
        assert parse_tokens(text) == tokens


def test_every_command_takes_1k_for_1024():
    parser = cli.build_parser()
    for command in ("bench context --model m", "probe commit", "probe gpu"):
        assert parser.parse_args([*command.split(), "--contexts", "1k", "64"]).contexts == [1024, 64]
    assert parse_options(["--contexts", "1k", "64"]).contexts == [1024, 64]


def test_the_kernel_benchmarks_flags_name_what_there_is():
    from sglang_ddtree_patch.launch.bench import kernel as bench_kernel
    from sglang_ddtree_patch.launch.bench import kernel_options as bench_kernel_options
    from sglang_ddtree_patch.launch.bench import kernel_workload

    assert tuple(kernel_workload.SHAPES) == bench_kernel_options.SHAPE_NAMES
    assert tuple(bench_kernel.CONTENDERS) == bench_kernel_options.KERNEL_NAMES


def comparison(is_equal: bool) -> Comparison:
    return Comparison("prompt", tokens=8, plain_forwards=8, tree_forwards=4, is_equal=is_equal)


@pytest.mark.parametrize(("is_equal", "code"), [(True, 0), (False, 1)])
def test_the_demo_fails_and_keeps_its_logs_when_any_text_differs(
    monkeypatch, tmp_path, capsys, is_equal, code
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(demo, "compare", lambda *_: [comparison(True), comparison(is_equal)])
    assert cli.main(["demo"]) == code
    said = capsys.readouterr().out
    assert ("1 of 2 texts differ" in said) is not is_equal
    logs = list(tmp_path.iterdir())
    assert len(logs) == code
    assert all(f"Logs: {folder}" in said for folder in logs)


@pytest.mark.parametrize("kind", [ServerStartError, ServerLost, NotMeasured])
def test_the_demo_shows_why_a_server_failed_and_keeps_its_log(monkeypatch, tmp_path, capsys, kind):
    def compare(model, prompts, tokens, view, logs):
        raise kind(f"The SGLang server ended after 3 s. The end of its log ({logs}/x.log): boom")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(demo, "compare", compare)
    assert cli.main(["demo"]) == 1
    (folder,) = tmp_path.iterdir()
    assert f"{folder}/x.log" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_traceback():
    """As in `ddtree models | head`."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "sglang_ddtree_patch.cli", "models"]
    result = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert (result.returncode, result.stderr) == (141, "")


def test_ctrl_c_ends_with_130_and_no_traceback(monkeypatch, capsys):
    def compare(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "compare", compare)
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == "stopped\n"
