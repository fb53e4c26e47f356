"""What an installation holds: one importable name, the repository's folders below it, the models' files."""

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
CARRIED = (".py", ".patch", "SHA256SUMS", "_prompts.json", "_prompts_more.json")


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
        "ddtree_cpu = sglang_ddtree_patch.cpu_platform:activate",
        "",
        "[sglang.srt.plugins]",
        "ddtree = sglang_ddtree_patch.plugin:load",
        "",
    ]


def test_an_unpacked_wheel_imports_its_folders_from_itself(built, tmp_path):
    zipfile.ZipFile(built["wheel"]).extractall(tmp_path)
    code = "import sglang_ddtree_patch.launch.serve as m; print(m.__file__)"
    assert run_python(code, cwd=Path("/"), path=tmp_path).startswith(str(tmp_path))


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
