"""`ddtree serve`: every flag of SGLang arrives, ours are translated, defaults have reasons, one process."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from fake_sglang import FakeTemplate

from sglang_ddtree_patch import cli, model_catalog
from sglang_ddtree_patch.contract import SUPPORTED_VERSION
from sglang_ddtree_patch.launch import demo, serve
from sglang_ddtree_patch.launch.doctor.models import ModelConfig
from sglang_ddtree_patch.launch.serve_defaults import choose_width, trained_window
from sglang_ddtree_patch.launch.server_process import ServerStartError

REPOSITORY = Path(__file__).resolve().parents[2]
SGLANG = Path(find_spec("sglang").origin).parent
GPU = ["--device", "cuda"]  # so that torch is not asked


def sglang_flags() -> list[str]:
    """Every string in SGLang's argument definitions that is a flag."""
    files = [SGLANG / "srt" / "server_args.py", *(SGLANG / "srt" / "arg_groups").rglob("*.py")]
    strings = (
        node.value
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    order = ast.parse((SGLANG / "srt" / "arg_groups" / "field_order.py").read_text())
    fields = (node.value for node in ast.walk(order) if isinstance(node, ast.Constant))
    named = {f"--{field.replace('_', '-')}" for field in fields if re.fullmatch(r"[a-z]\w*", str(field))}
    return sorted({text for text in strings if re.fullmatch(r"--[a-z][a-z0-9-]+", text)} | named)


@pytest.fixture
def became(monkeypatch) -> list[serve.ServerPlan]:
    """What the process became, instead of becoming it."""
    plans: list[serve.ServerPlan] = []
    monkeypatch.setattr(serve, "become_server", lambda plan: plans.append(plan) or 0)
    return plans


def test_every_flag_of_sglang_arrives_unchanged_and_in_order(became):
    flags = sglang_flags()
    assert len(flags) > 400
    assert {"--model-path", "--tp-size", "--json-model-override-args", "--nnodes"} <= set(flags)
    words = [word for number, flag in enumerate(flags) for word in (flag, f"{{'a b': -{number}}}")]
    words += ["--page-size=16", "--enable-metrics", "--lora-paths", "a=b", "c=d"]
    assert cli.main(["serve", *words]) == 0
    assert list(became[0].arguments) == words


def test_no_flag_of_ours_is_one_of_sglangs_or_the_start_of_one():
    ours = tuple(f"--{name}" for name in {**serve.SHORT_FLAGS, **serve.SHORT_VARIABLES})
    assert [flag for flag in sglang_flags() if flag.startswith((*ours, "--print-command"))] == []
    assert {long for _, long, _ in serve.SHORT_FLAGS.values()} <= set(sglang_flags())


def test_short_flags_become_sglangs_own_and_variables(became):
    words = ["--model-path", "T", "--draft", "D", "--width=33", "--block", "8", "--candidates", "4"]
    assert cli.main(["serve", *words, "--kernel", "triton", "--widths", "auto", *GPU]) == 0
    (plan,) = became
    given = serve.named_flags(plan.arguments)
    assert given["--speculative-draft-model-path"] == "D"
    assert (given["--speculative-num-draft-tokens"], given["--speculative-dflash-block-size"]) == ("33", "8")
    assert plan.environment == {
        "SGLANG_DDTREE_TOPK": "4", "SGLANG_DDTREE_KERNEL": "triton", "SGLANG_DDTREE_WIDTHS": "auto",
    }  # fmt: skip
    assert not {"--draft", "--width", "--block", "--candidates", "--kernel", "--widths"} & given.keys()


def test_several_nodes_are_passed_through(became):
    several = ["--tp-size", "16", "--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "10.0.0.1:5000"]
    for words in (several, [*several[:-2], "--dist-init-addr=10.0.0.1:5000"]):
        assert cli.main(["serve", "--model-path", "T", "--draft", "D", *GPU, *words]) == 0
        assert list(became.pop().arguments[-len(words) :]) == words


# Defaults.


def model(folder: Path, **config: object) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


WIDTHS = {
    "4 heads a KV head": ({"num_attention_heads": 32, "num_key_value_heads": 8}, 1, 32, "4 query heads"),
    "8 heads a KV head": ({"num_attention_heads": 64, "num_key_value_heads": 8}, 1, 16, "8 query heads"),
    "5 heads a KV head": ({"num_attention_heads": 40, "num_key_value_heads": 8}, 2, 25, "5 query heads"),
    "a head each": ({"num_attention_heads": 16, "num_key_value_heads": 16}, 1, 32, "1 query heads"),
    "MLA on 8 ranks": ({"num_attention_heads": 64, "kv_lora_rank": 512}, 8, 16, "8 query heads"),
    "MLA on one": ({"num_attention_heads": 64, "kv_lora_rank": 512}, 1, 16, "own default"),
    "no heads named": ({}, 1, 16, "own default"),
    "below text_config": (
        {"text_config": {"num_attention_heads": 32, "num_key_value_heads": 8}}, 1, 32, "4 query heads",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "tp_size", "width", "reason"), WIDTHS.values(), ids=WIDTHS)
def test_the_tree_is_as_wide_as_one_tile_of_queries_but_16_to_32(config, tp_size, width, reason):
    default = choose_width(ModelConfig("T", config), tp_size)
    assert (default.flag, default.value) == ("--speculative-num-draft-tokens", str(width))
    assert reason in default.reason


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({"layer_types": [SLIDING] * 3, "sliding_window": 2048}, 2048),
        ({"layer_types": [SLIDING, FULL], "sliding_window": 2048}, None),
        ({"layer_types": [SLIDING], "sliding_window": None}, None),
        ({"layer_types": [], "sliding_window": 2048}, None),
        ({"sliding_window": 2048}, None),
    ],
)
def test_a_window_is_taken_from_a_drafter_all_of_whose_layers_have_it(config, window):
    assert trained_window(ModelConfig("D", config)) == window


def test_what_is_filled_in_for_two_models_is_printed_with_reasons(became, tmp_path, capsys):
    target = model(tmp_path / "target", num_attention_heads=32, num_key_value_heads=8)
    draft = model(tmp_path / "draft", layer_types=[SLIDING], sliding_window=4096)
    assert cli.main(["serve", "--model-path", target, "--draft", draft, *GPU]) == 0
    printed = capsys.readouterr().out
    assert [default.flag for default in became[0].filled] == [
        "--speculative-algorithm", "--attention-backend", "--page-size", "--speculative-num-draft-tokens",
        "--speculative-draft-window-size",
    ]  # fmt: skip
    for default in became[0].filled:
        assert default.reason
        (line,) = [line for line in printed.splitlines() if line.startswith(f"  {default.flag} ")]
        assert line.split(maxsplit=2)[1:] == [default.value, default.reason]
    assert printed.endswith(f"ddtree serve: {became[0].command()}\n")
    assert len(printed.splitlines()) < 10


@pytest.mark.parametrize("name", model_catalog.names())
def test_the_demo_serves_with_the_pages_and_the_tree_that_serve_would_choose(name, monkeypatch):
    started = []

    def start(arguments, **_):
        started.append(serve.named_flags(arguments))
        raise ServerStartError("seen enough")

    monkeypatch.setattr(demo, "ServerProcess", start)
    monkeypatch.setattr(demo, "ServerTemplate", FakeTemplate)
    monkeypatch.setattr(demo, "has_accelerator", lambda: False)
    assert cli.main(["demo", "--model", name]) == 1
    folder = model_catalog.path(name)
    flags = ["--model-path", str(folder / "target"), "--speculative-draft-model-path", str(folder / "draft")]
    for on_cpu in (True, False):
        filled = {default.flag: default.value for default in serve.plan_server(flags, on_cpu=on_cpu).filled}
        for flag in ("--page-size", "--speculative-num-draft-tokens"):
            assert started[0][flag] == filled[flag]
    assert int(filled["--page-size"]) >= 16


def test_what_was_given_is_not_filled_in(became, tmp_path):
    target = model(tmp_path / "target", num_attention_heads=32, num_key_value_heads=8)
    draft = model(tmp_path / "draft", layer_types=[SLIDING], sliding_window=4096)
    words = ["--model-path", target, "--draft", draft, *GPU, "--width", "5"]
    words += ["--speculative-draft-window-size", "128", "--page-size", "1"]
    assert cli.main(["serve", *words]) == 0
    filled = [default.flag for default in became[0].filled]
    assert filled == ["--speculative-algorithm", "--attention-backend"]


# The process.

FAKE_SERVER = """
import json, os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(37))
print(json.dumps({"pid": os.getpid(), "argv": sys.argv[1:], "candidates": os.environ["SGLANG_DDTREE_TOPK"]}))
sys.stdout.flush()
if "--fail" in sys.argv:
    sys.exit(3)
time.sleep(60)
"""


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    """Where SGLang is a program that says who it is and waits."""
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text("")
    (tmp_path / "sglang" / "launch_server.py").write_text(FAKE_SERVER)
    metadata = tmp_path / f"sglang-{SUPPORTED_VERSION}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {SUPPORTED_VERSION}\n")
    return {**os.environ, "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}


COMMAND = ["--model-path", "T", "--draft", "D", "--candidates", "4", *GPU]


def start(environment: dict[str, str], *words: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "sglang_ddtree_patch.cli", "serve", *COMMAND, *words]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def server_of(process: subprocess.Popen) -> dict:
    lines = iter(process.stdout.readline, "")
    return next(json.loads(line) for line in lines if line.startswith("{"))


def test_the_server_is_the_same_process_and_gets_its_signals(environment):
    process = start(environment)
    server = server_of(process)
    assert server["pid"] == process.pid
    assert server["candidates"] == "4"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 37


def test_the_servers_exit_code_is_the_commands(environment):
    process = start(environment, "--fail")
    server_of(process)
    assert process.wait(timeout=30) == 3


def test_the_printed_command_starts_the_same_server(environment):
    printed = start(environment, "--print-command", "--fail").communicate(timeout=30)[0]
    assert "--draft " not in printed
    process = subprocess.Popen(
        ["env", *shlex.split(printed)], env=environment, stdout=subprocess.PIPE, text=True
    )
    direct = start(environment, "--fail")
    assert server_of(process)["argv"] == server_of(direct)["argv"]
    assert {process.wait(timeout=30), direct.wait(timeout=30)} == {3}
