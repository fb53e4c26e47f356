"""What an installation holds: one importable name, the repository's folders below it, the models' files."""

import json
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from sglang_ddtree_patch.contract import SUPPORTED_VERSION

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDERS_BELOW_PACKAGE = ("kernels", "patches", "launch")
CARRIED = (".py", ".patch", "SHA256SUMS", "prompts.json", "prompts_more.json")


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Path]:
    """An sdist made from the files that belong to the repository, and a wheel made from that sdist alone."""
    work = tmp_path_factory.mktemp("build")
    source = work / "source"
    for name in tracked_or_new_files():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((REPOSITORY / name).read_bytes())
    sdist = build("build_sdist", source, work)
    with tarfile.open(sdist) as archive:
        archive.extractall(work / "unpacked", filter="data")
    (unpacked,) = (work / "unpacked").iterdir()
    return {"sdist": sdist, "wheel": build("build_wheel", unpacked, work)}


def tracked_or_new_files() -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    return [name for name in listed.split("\0") if name and (REPOSITORY / name).is_file()]


def build(what: str, source: Path, target: Path) -> Path:
    code = f"from setuptools import build_meta; print(build_meta.{what}({str(target)!r}))"
    result = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return target / result.stdout.splitlines()[-1]


def run_python(code: str, cwd: Path, path: Path | None = None) -> str:
    environment = {"PATH": "/usr/bin:/bin", **({"PYTHONPATH": str(path)} if path else {})}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_a_wheel_installs_one_top_level_name(built):
    names = zipfile.ZipFile(built["wheel"]).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"sglang_ddtree_patch"}


@pytest.mark.parametrize("folder", FOLDERS_BELOW_PACKAGE)
def test_no_repository_folder_can_shadow_a_package_of_its_name(folder):
    assert not (REPOSITORY / folder / "__init__.py").exists()


def test_a_wheel_holds_every_module_and_model_file_of_the_repository(built):
    names = set(zipfile.ZipFile(built["wheel"]).namelist())
    expected = set()
    for name in tracked_or_new_files():
        top = name.split("/")[0]
        if top == "sglang_ddtree_patch":
            expected.add(name)
        elif top in FOLDERS_BELOW_PACKAGE and name.endswith(CARRIED):
            expected.add(f"sglang_ddtree_patch/{name}")
    assert expected <= names, sorted(expected - names)


def test_entry_points_name_the_plugin_the_platform_and_the_command(built):
    wheel = zipfile.ZipFile(built["wheel"])
    (name,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert wheel.read(name).decode().split("\n") == [
        "[console_scripts]",
        "ddtree = sglang_ddtree_patch.cli:main",
        "",
        "[sglang.srt.platforms]",
        "ddtree_cpu = sglang_ddtree_patch.cpu.platform:activate",
        "",
        "[sglang.srt.plugins]",
        "ddtree = sglang_ddtree_patch.plugin:load",
        "",
    ]


def test_an_unpacked_wheel_imports_its_folders_from_itself(built, tmp_path):
    zipfile.ZipFile(built["wheel"]).extractall(tmp_path)
    code = "import sglang_ddtree_patch.launch.serve as m; print(m.__file__)"
    assert run_python(code, cwd=Path("/"), path=tmp_path).startswith(str(tmp_path))


@pytest.fixture(scope="module")
def clean(built, tmp_path_factory) -> Path:
    """The programs of an environment that holds Python and the wheel alone: neither SGLang nor torch."""
    environment = tmp_path_factory.mktemp("clean")
    programs = environment / "bin"
    succeed(sys.executable, "-m", "venv", "--without-pip", environment)
    pip = [sys.executable, "-m", "pip", "--python", programs / "python"]
    succeed(*pip, "install", "--no-index", built["wheel"])
    return programs


def run(*command: str | Path) -> subprocess.CompletedProcess:
    """A command outside the checkout, of which it has no variable either."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
    return subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True)


def succeed(*command: str | Path) -> str:
    result = run(*command)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_an_installed_wheel_is_found_by_its_entry_points_and_shadows_nothing(clean):
    code = """
import importlib.metadata, importlib.util, json
groups = ("sglang.srt.plugins", "sglang.srt.platforms", "console_scripts")
points = {group: importlib.metadata.entry_points(group=group) for group in groups}
every = [point for found in points.values() for point in found]
print(json.dumps({
    **{group: [point.name for point in found] for group, found in points.items()},
    "without a module": [point.value for point in every if not importlib.util.find_spec(point.module)],
    "command loads": callable(next(iter(points["console_scripts"])).load()),
    "shadowed": [top for top in ("kernels", "patches", "launch", "tests") if importlib.util.find_spec(top)],
}))
"""
    assert json.loads(succeed(clean / "python", "-c", code)) == {
        "sglang.srt.plugins": ["ddtree"],
        "sglang.srt.platforms": ["ddtree_cpu"],
        "console_scripts": ["ddtree"],
        "without a module": [],
        "command loads": True,
        "shadowed": [],
    }


def test_the_command_of_an_installed_wheel_finds_its_models_and_says_what_is_missing(clean):
    folder = Path(succeed(clean / "ddtree", "models", "path", "tiny-gqa").strip())
    assert folder.is_relative_to(clean.parent)
    assert (folder / "target" / "model.safetensors").exists()
    served = run(clean / "ddtree", "serve", "--model-path", folder / "target", "--draft", folder / "draft")
    assert served.returncode != 0
    assert "Traceback" not in served.stderr
    assert "sglang" in served.stderr.lower()


@pytest.mark.parametrize("cwd", [REPOSITORY, Path("/")], ids=["from the checkout", "from elsewhere"])
def test_a_checkout_imports_its_folders_below_the_package_only(cwd):
    code = (
        "import importlib.util, sglang_ddtree_patch.launch.serve as m; "
        "spec = importlib.util.find_spec('kernels'); print(m.__file__, spec and spec.origin)"
    )
    module, kernels = run_python(code, cwd=cwd).split()
    assert module == str(REPOSITORY / "launch" / "serve.py")
    assert str(REPOSITORY / "kernels") not in kernels


def test_the_extra_pins_the_sglang_release_of_the_contract():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["sglang"] == [f"sglang=={SUPPORTED_VERSION}"]
