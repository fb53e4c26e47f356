"""`ddtree doctor`: every reason not to serve is found and named, and the exit code follows.

The two slow probes run here on stand-ins for what they report; tests/server/test_doctor_whole.py runs them
as they are.
"""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from patch_trees import ddtree_patch, every_tree_serves
from sglang_wheels import unpack

from sglang_ddtree_patch import cli, contract_check, model_catalog
from sglang_ddtree_patch.contract import CONTRACT, SUPPORTED_VERSION
from sglang_ddtree_patch.contract_check import ContractReport, Mismatch
from sglang_ddtree_patch.launch import patch
from sglang_ddtree_patch.launch.doctor import machine as doctor_machine
from sglang_ddtree_patch.launch.doctor import probe_kernels
from sglang_ddtree_patch.launch.doctor import sglang_checks as doctor_sglang
from sglang_ddtree_patch.launch.doctor.check import problem
from sglang_ddtree_patch.launch.doctor.command import as_text
from sglang_ddtree_patch.launch.doctor.probe import Probe, ProbeResult
from sglang_ddtree_patch.patches.tree import SglangTree
from sglang_ddtree_patch.releases import NEWEST

REPOSITORY = Path(__file__).resolve().parents[2]
GPU = {
    "type": "cuda", "name": "NVIDIA H200", "torch": "2.14.1", "cuda": "13.0", "rocm": None,
    "capability": [9, 0], "memory_gib": 139, "count": 1,
}  # fmt: skip
CPU = {"type": "cpu", "name": "cpu", "torch": "2.14.1", "cuda": "13.0", "rocm": None}
BF16 = {"dtype": "bfloat16", "tolerance": 1e-2}
RIGHT, WRONG = {"GQA": 2e-3, "MLA": 2e-3}, {"GQA": 2e-3, "MLA": float("nan")}


class Answered:
    """Stands for a probe that has ended."""

    def __init__(self, error: str | None = None, **reported):
        self.answer = ProbeResult(reported, error)

    def result(self) -> ProbeResult:
        return self.answer


HEALTHY_GPU = Answered(device=GPU, chosen="triton", precision=BF16, reference=RIGHT, triton=RIGHT)


@pytest.fixture
def healthy(monkeypatch):
    """A machine with a GPU where all is well, whatever this one is."""
    for variable in ("SGLANG_PLUGINS", "SGLANG_PLATFORM", "SGLANG_DDTREE_TOPK"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(doctor_machine, "start_kernels_probe", lambda: HEALTHY_GPU)
    monkeypatch.setattr(doctor_sglang, "Probe", lambda module: Answered(registered=True))
    monkeypatch.setattr(
        doctor_sglang, "check_installed_sglang", lambda: ContractReport(SUPPORTED_VERSION, ())
    )
    return monkeypatch


def doctor(capsys, *arguments: str) -> tuple[int, dict[str, dict], str]:
    """Exit code, checks by name, and stderr of `ddtree doctor --json`."""
    code = cli.main(["doctor", "--json", *map(str, arguments)])
    output = capsys.readouterr()
    report = json.loads(output.out)
    assert report["serves"] is (code == 0)
    return code, {check["name"]: check for check in report["checks"]}, output.err


# The report.


def test_all_is_well_ends_with_zero_and_every_check_ok(healthy, capsys):
    code, checks, _ = doctor(capsys)
    assert code == 0
    assert {check["status"] for check in checks.values()} == {"ok"}
    assert list(checks) == [
        "Python", "torch", "Triton", "CUDA", "GPU", "kernel reference", "kernel triton", "SGLang", "contract",
        "patches", "plugin found", "plugin loads", "settings",
    ]  # fmt: skip
    assert checks["GPU"]["found"] == "NVIDIA H200, sm_90, 139 GiB"
    assert checks["contract"]["found"] == f"{len(CONTRACT)} of {len(CONTRACT)} entries hold"


def test_json_holds_what_the_screen_says(healthy, capsys):
    healthy.setenv("SGLANG_PLUGINS", "other")
    assert cli.main(["doctor"]) == 1
    screen = " ".join(capsys.readouterr().out.split())
    _, checks, _ = doctor(capsys)
    for name, check in checks.items():
        assert set(check) == {"name", "status", "found", "advice"}
        assert f"{check['status']} {name} {check['found']}" in screen
        assert check["advice"] in screen
    assert screen.endswith("Serving would not work: 1 problem, 0 warnings.")


def test_long_lines_are_wrapped_and_paths_kept_whole():
    path = "sglang.srt." + "x" * 90
    lines = as_text([problem("contract", f"a b c {path}", "do this " * 20)], columns=80).splitlines()
    assert any(line.strip() == path for line in lines)
    assert all(len(line) <= 80 for line in lines if path not in line)


def test_two_models_are_given_together_or_not_at_all(capsys):
    assert cli.main(["doctor", "--model-path", "T"]) == 2
    assert "together" in capsys.readouterr().err


# This machine.


@pytest.mark.parametrize(
    ("version", "status"), [((3, 10), "problem"), ((3, 11), "ok"), ((3, 13), "ok"), ((3, 14), "warning")]
)
def test_python_releases_are_told_apart(version, status):
    assert doctor_machine.check_python(version).status == status


KERNEL_REPORTS = {
    "the kernel that serves does not run": (
        Answered("RuntimeError: needs 8.0", device=GPU, chosen="triton", precision=BF16, reference=RIGHT),
        "kernel triton", "problem", "does not run: RuntimeError: needs 8.0",
    ),
    "the kernel that serves is wrong": (
        Answered(device=GPU, chosen="triton", precision=BF16, reference=RIGHT, triton=WRONG),
        "kernel triton", "problem", "wrong results",
    ),
    "a kernel that does not serve is wrong": (
        Answered(device=CPU, chosen="reference", precision=BF16, reference=RIGHT, triton=WRONG),
        "kernel triton", "warning", "wrong results",
    ),
    "the first kernel takes the probe down": (
        Answered("Killed", device=GPU, chosen="triton", precision=BF16),
        "kernel reference", "problem", "does not run: Killed",
    ),
    "no kernel of that name": (
        Answered("ConfigurationError: SGLANG_DDTREE_KERNEL='x'", device=GPU), "kernels", "problem", "='x'",
    ),
    "torch cannot be imported": (Answered("OSError: libcudart"), "torch", "problem", "OSError: libcudart"),
    "no torch": (None, "torch", "problem", "not installed"),
    "no GPU": (
        Answered(device=CPU, chosen="reference", precision=BF16, reference=RIGHT, triton=RIGHT),
        "GPU", "warning", "none",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("probe", "name", "status", "found"), KERNEL_REPORTS.values(), ids=KERNEL_REPORTS)
def test_what_the_kernels_probe_reports_is_judged(healthy, probe, name, status, found, capsys):
    healthy.setattr(doctor_machine, "NVIDIA_DRIVER", Path("/nonexistent"))
    healthy.setattr(doctor_machine, "start_kernels_probe", lambda: probe)
    code, checks, _ = doctor(capsys)
    assert (checks[name]["status"], code) == (status, 1 if status == "problem" else 0)
    assert found in checks[name]["found"]
    assert checks[name]["advice"]


@pytest.mark.parametrize(
    ("probe", "untried", "problems"),
    [
        (None, {"kernel reference", "kernel triton"}, 1),
        (Answered("Killed", device=GPU, chosen="triton", precision=BF16), {"kernel triton"}, 1),
    ],
    ids=["no torch", "the first kernel takes the probe down"],
)
def test_what_was_not_tried_is_no_problem_of_its_own(healthy, probe, untried, problems, capsys):
    healthy.setattr(doctor_machine, "start_kernels_probe", lambda: probe)
    code, checks, _ = doctor(capsys)
    assert {name for name, check in checks.items() if check["status"] == "untried"} == untried
    assert cli.main(["doctor"]) == code == 1
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == f"Serving would not work: {problems} problem, 0 warnings, {len(untried)} not tried."


def test_a_driver_without_a_gpu_that_torch_sees_is_pointed_out(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor_machine, "NVIDIA_DRIVER", tmp_path)
    assert "older than CUDA 13.0" in doctor_machine.check_gpu(CPU).advice


def test_both_kernels_are_compared_with_float64(capsys, monkeypatch):
    monkeypatch.delitem(probe_kernels.HEAD_KINDS, "MLA")  # which the interpreter takes longest for
    probe_kernels.main()
    reported = {}
    for line in capsys.readouterr().out.splitlines():
        reported |= json.loads(line.removeprefix("ddtree-probe: "))
    for kernel in doctor_machine.KERNELS:
        assert 0 < max(reported[kernel].values()) < reported["precision"]["tolerance"]


def test_the_comparison_sees_a_row_that_looks_past_its_ancestors():
    inputs = probe_kernels.make_inputs(probe_kernels.HEAD_KINDS["GQA"], "cpu", probe_kernels.torch.float32)
    everything = probe_kernels.tree_attention_reference(**{**inputs, "tree_mask": None})
    assert probe_kernels.relative_error(everything, inputs) > 1e-2


PROBES = {
    "report('a', 1); print('noise'); report('b', [2])": ProbeResult({"a": 1, "b": [2]}, None),
    "report('a', 1); raise ValueError('boom')": ProbeResult({"a": 1}, "ValueError: boom"),
    "report('a', 1); import os; os._exit(7)": ProbeResult({"a": 1}, "ended with exit code 7"),
}


@pytest.mark.parametrize(("code", "expected"), PROBES.items(), ids=["ends", "raises", "dies"])
def test_a_probe_passes_on_what_it_came_to_report(code, expected, tmp_path, monkeypatch):
    source = f"from sglang_ddtree_patch.launch.doctor.probe import report\n{code}\n"
    (tmp_path / "a_probe.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{REPOSITORY}")
    assert Probe("a_probe").result() == expected


# SGLang and the plugin.


@pytest.mark.parametrize("variable", ["SGLANG_PLUGINS", "SGLANG_PLATFORM"])
def test_a_variable_that_keeps_sglang_from_the_plugin_is_named(healthy, variable, capsys):
    healthy.setenv(variable, "other")
    code, checks, _ = doctor(capsys)
    assert (code, checks["plugin found"]["status"]) == (1, "problem")
    assert f"{variable}=other" in checks["plugin found"]["found"]


def test_a_plugin_that_is_not_installed_is_said_with_what_to_type(healthy, capsys):
    healthy.setattr(doctor_sglang, "ENTRY_POINT", "absent")
    code, checks, _ = doctor(capsys)
    assert code == 1
    assert "pip install ." in checks["plugin found"]["advice"]


@pytest.mark.parametrize("probe", [Answered(registered=False), Answered("ImportError: no x")])
def test_a_plugin_that_sglang_does_not_take_is_a_problem(healthy, probe, capsys):
    healthy.setattr(doctor_sglang, "Probe", lambda module: probe)
    code, checks, _ = doctor(capsys)
    assert (code, checks["plugin loads"]["status"]) == (1, "problem")


def test_each_mismatch_of_the_contract_is_a_line_and_sglang_is_not_loaded(healthy, capsys):
    mismatches = tuple(Mismatch(attribute, "nothing of that name") for attribute in CONTRACT[:2])
    healthy.setattr(doctor_sglang, "check_installed_sglang", lambda: ContractReport("9.9.9", mismatches))
    healthy.delattr(doctor_sglang, "Probe")
    assert cli.main(["doctor", "--json"]) == 1
    checks = json.loads(capsys.readouterr().out)["checks"]
    found = [check["found"] for check in checks if check["name"] == "contract"]
    assert found == [f"{len(CONTRACT) - 2} of {len(CONTRACT)} entries hold", *map(str, mismatches)]
    assert [check["status"] for check in checks if check["name"] == "plugin loads"] == ["untried"]


def test_an_untested_release_that_matches_is_a_warning(healthy, capsys):
    healthy.setattr(doctor_sglang, "check_installed_sglang", lambda: ContractReport("0.5.99", ()))
    code, checks, _ = doctor(capsys)
    assert (code, checks["SGLang"]["status"]) == (0, "warning")


def test_a_setting_out_of_range_is_a_problem(healthy, capsys):
    healthy.setenv("SGLANG_DDTREE_TOPK", "many")
    code, checks, _ = doctor(capsys)
    assert code == 1
    assert "'many'" in checks["settings"]["found"]


def test_without_sglang_and_torch_the_doctor_says_so():
    """-S leaves out every installed package."""
    command = [sys.executable, "-S", "-m", "sglang_ddtree_patch.cli", "doctor", "--json"]
    environment = {"PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (1, "")
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    for name in ("torch", "Triton", "SGLang"):
        assert (checks[name]["status"], checks[name]["found"]) == ("problem", "not installed")
        assert f"pip install sglang=={SUPPORTED_VERSION}" in checks[name]["advice"]


def test_a_release_is_checked_without_sglang_or_torch_installed(tmp_path):
    """The whole contract, on the sources as the wheel ships them."""
    root = unpack("0.5.22", tmp_path, ".py")
    command = [sys.executable, "-S", "-m", "sglang_ddtree_patch.cli", "doctor", "--json", "--root", root]
    environment = {"PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert (checks["SGLang"]["found"], checks["contract"]["status"]) == ("0.5.22", "ok")


# Another tree (--root).


@pytest.fixture
def unpacked(tmp_path, monkeypatch) -> Path:
    """One file of the installed SGLang as in an unpacked wheel, held to its part of the contract."""
    installed, package = Path(find_spec("sglang").origin).parent, tmp_path / "wheel" / "sglang"
    (package / "srt" / "models").mkdir(parents=True)
    for file in ("_version.py", "srt/models/dflash.py"):
        shutil.copy(installed / file, package / file)
    part = tuple(attribute for attribute in CONTRACT if attribute.module == "sglang.srt.models.dflash")
    release = replace(NEWEST, contract=part)
    monkeypatch.setattr(
        doctor_sglang, "check_releases", lambda *tree: contract_check.check_releases(*tree, [release])
    )
    return tmp_path / "wheel"


@pytest.mark.parametrize("inside", [".", "sglang"])
def test_an_unpacked_tree_is_checked_and_nothing_of_this_machine(unpacked, inside, capsys):
    code, checks, _ = doctor(capsys, "--root", unpacked / inside)
    assert (code, list(checks)) == (0, ["SGLang", "contract", "patches"])
    assert checks["SGLang"]["found"] == SUPPORTED_VERSION


def test_a_changed_tree_is_refused_by_name(unpacked, capsys):
    (unpacked / "sglang" / "_version.py").write_text("__version__ = version = '0.4.2'\n")
    model = unpacked / "sglang" / "srt" / "models" / "dflash.py"
    model.write_text(model.read_text().replace("def candidate_topk(", "def topk("))
    code, checks, _ = doctor(capsys, "--root", unpacked)
    assert (code, checks["SGLang"]["found"]) == (1, "0.4.2")
    assert "sglang.srt.models.dflash.candidate_topk" in checks["contract"]["found"]


def test_a_tree_that_cannot_be_parsed_is_said_in_words(unpacked, capsys):
    (unpacked / "sglang" / "srt" / "models" / "dflash.py").write_text("def (:\n")
    code, checks, _ = doctor(capsys, "--root", unpacked)
    assert (code, "cannot be parsed" in checks["SGLang"]["found"]) == (1, True)


def test_a_folder_without_sglang_is_said_in_words(tmp_path, capsys):
    code, checks, _ = doctor(capsys, "--root", tmp_path)
    assert (code, checks["SGLang"]["found"].startswith(f"no SGLang at {tmp_path}")) == (1, True)


# Patches.


@pytest.fixture
def tree(unpacked, monkeypatch) -> Path:
    """The unpacked tree with the file that the release's diff changes."""
    plugins = "srt/plugins/__init__.py"
    (unpacked / "sglang" / plugins).parent.mkdir()
    shutil.copy(Path(find_spec("sglang").origin).parent / plugins, unpacked / "sglang" / plugins)
    monkeypatch.setattr(patch, "check_releases", every_tree_serves)
    return unpacked


def test_the_patches_of_a_tree_are_named(tree, capsys):
    assert doctor(capsys, "--root", tree)[1]["patches"]["found"] == "none applied"
    ddtree_patch("apply", "--root", tree)
    capsys.readouterr()
    code, checks, _ = doctor(capsys, "--root", tree)
    expected = f"applied: SGLang {SUPPORTED_VERSION}, changes sglang/srt/plugins/__init__.py"
    assert (code, checks["patches"]["found"]) == (0, expected)


def test_a_half_applied_patch_is_a_problem(tree, capsys):
    original = (tree / "sglang/srt/plugins/__init__.py").read_bytes()
    ddtree_patch("apply", "--root", tree)
    (tree / "sglang/srt/plugins/__init__.py").write_bytes(original)  # as an installer would
    capsys.readouterr()
    code, checks, _ = doctor(capsys, "--root", tree)
    assert (code, checks["patches"]["status"]) == (1, "problem")
    assert "ddtree patch apply" in checks["patches"]["advice"]


def test_a_file_edited_behind_the_patch_is_a_problem(tree, capsys):
    ddtree_patch("apply", "--root", tree)
    (tree / "sglang/srt/plugins/__init__.py").write_text("mine\n")
    capsys.readouterr()
    code, checks, _ = doctor(capsys, "--root", tree)
    assert (code, "was changed since it was patched" in checks["patches"]["found"]) == (1, True)


def test_a_patched_sglang_serves_though_it_discovers_no_plugin(healthy, tree, capsys):
    healthy.setenv("SGLANG_PLUGINS", "other")
    healthy.setattr(doctor_sglang, "find_tree", lambda root: SglangTree(tree / "sglang"))
    assert doctor(capsys)[0] == 1
    ddtree_patch("apply", "--root", tree)
    capsys.readouterr()
    code, checks, _ = doctor(capsys)
    assert (code, checks["plugin found"]["status"]) == (0, "ok")
    assert checks["plugin found"]["found"] == "SGLANG_PLUGINS=other leaves it out; the patch loads it"


def test_a_tree_with_a_ddtree_of_its_own_serves_once_it_is_patched(tmp_path, capsys):
    root = shutil.copytree(REPOSITORY / "tests" / "unit" / "in_tree_port", tmp_path / "port")
    code, checks, _ = doctor(capsys, "--root", root)
    assert (code, list(checks)) == (1, ["SGLang", "patches"])
    assert checks["patches"]["advice"] == "Run: ddtree patch apply"
    ddtree_patch("apply", "--root", root)
    capsys.readouterr()
    code, checks, _ = doctor(capsys, "--root", root)
    assert (code, checks["patches"]["status"]) == (0, "ok")
    assert checks["SGLang"]["found"] == "0.5.12, with a DDTREE of its own"


def test_an_installed_port_needs_neither_contract_nor_plugin(healthy, tmp_path, capsys):
    root = shutil.copytree(REPOSITORY / "tests" / "unit" / "in_tree_port", tmp_path / "port")
    healthy.setattr(doctor_sglang, "find_tree", lambda _: SglangTree(root / "sglang"))
    healthy.delattr(doctor_sglang, "Probe")
    ddtree_patch("apply", "--root", root)
    capsys.readouterr()
    code, checks, _ = doctor(capsys)
    assert (code, checks["patches"]["status"]) == (0, "ok")
    assert not {"contract", "plugin found", "plugin loads"} & checks.keys()


# Two models.


@pytest.mark.parametrize("name", model_catalog.names())
def test_the_models_that_come_with_the_package_fit(healthy, name, capsys):
    model = model_catalog.entry(name)
    code, checks, _ = doctor(
        capsys, "--model-path", model.target, "--speculative-draft-model-path", model.draft
    )
    assert code == 0
    assert {check["status"] for check in checks.values()} == {"ok"}
    assert checks["target layers"]["found"] == "reads [0, 1, 2] of 4"
