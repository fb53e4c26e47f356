"""launch/setup_env.sh: one clear line where a machine will not do, and no work where all is there."""

import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path) -> Path:
    """The few files the script reads, in a folder of its own."""
    (tmp_path / "launch").mkdir()
    for name in ("pyproject.toml", "setup.py", "launch/setup_env.sh"):
        shutil.copy(REPOSITORY / name, tmp_path / name)
    return tmp_path


def fake_command(folder: Path, name: str, body: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{body}\n")
    (folder / name).chmod(0o755)


def set_up(checkout: Path, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [checkout / "launch" / "setup_env.sh"],
        env={"PATH": f"{checkout / 'bin'}:/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_an_old_python_is_refused_in_one_line_with_its_version(checkout):
    fake_command(
        checkout / "bin", "python3.9", 'if [[ $1 == --version ]]; then echo "Python 3.9.1"; else exit 1; fi'
    )
    result = set_up(checkout, PYTHON="python3.9")
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert "Python 3.11 to 3.13" in result.stderr
    assert "Python 3.9.1" in result.stderr


def test_a_full_disk_is_refused_in_one_line(checkout):
    fake_command(checkout / "bin", "python3.11", "exit 0")
    fake_command(checkout / "bin", "df", "echo header; echo /dev/x 1 1 5242880 99% /")
    result = set_up(checkout)
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert "15 GB" in result.stderr
    assert "5 GB are there" in result.stderr


# Makes an environment when asked for one, and notes each installation, of uv and by uv as well.
FAKE_PYTHON = r"""
here=$(dirname "$0")
case "$*" in
    "-m venv"*) mkdir -p "${@: -1}/bin"; cp "$0" "${@: -1}/bin/python"; cp "$0" "${@: -1}/bin/pip" ;;
    "-m pip"*" config list") cat "$here/../../pip.conf" 2>/dev/null; exit 0 ;;
    "-m pip"*" install "*" uv") [[ -z ${NO_UV:-} ]] && cp "$0" "$here/uv" ;;
    "-m pip"*" install "*) echo "pip $*" >> installed; cp "$0" "$here/ddtree"; exit ${PIP_RESULT:-0} ;;
    "pip install"*)
        echo "uv $* ${SSL_CERT_FILE:-}" >> installed; cp "$0" "$here/ddtree"; exit ${UV_RESULT:-0} ;;
esac
"""


def installations(checkout: Path) -> list[str]:
    return (checkout / "installed").read_text().splitlines()


def test_uv_installs_from_where_pip_would(checkout):
    fake_command(checkout / "bin", "python3.11", FAKE_PYTHON)
    fake_command(checkout / "bin", "df", "echo header; echo /dev/x 1 1 99999999 1% /")
    (checkout / "pip.conf").write_text(
        ":env:.cert='/certificates'\n:env:.find-links='/wheels'\n:env:.no-input='1'\n"
        "global.extra-index-url='file:///one\\nfile:///two'\nglobal.find-links='/elsewhere'\n"
        "global.index-url='file:///main'\ninstall.constraint='/constraints'\ninstall.trusted-host='here'\n"
    )
    assert set_up(checkout).returncode == 0
    (line,) = installations(checkout)
    for option in (
        "--index-url file:///main", "--extra-index-url file:///one --extra-index-url file:///two",
        "--find-links /wheels", "--constraint /constraints", "--allow-insecure-host here", "/certificates",
    ):  # fmt: skip
        assert f" {option}" in line
    assert "elsewhere" not in line


@pytest.mark.parametrize("broken", [{"NO_UV": "1"}, {"UV_RESULT": "2"}], ids=["not there", "fails"])
def test_pip_installs_where_uv_cannot(checkout, broken):
    fake_command(checkout / "bin", "python3.11", FAKE_PYTHON)
    fake_command(checkout / "bin", "df", "echo header; echo /dev/x 1 1 99999999 1% /")
    assert set_up(checkout, **broken).returncode == 0
    assert installations(checkout)[-1].startswith("pip ")
    assert set_up(checkout, **broken).stdout == ""


def test_a_finished_environment_is_reused_until_what_it_is_made_from_changes(checkout):
    fake_command(checkout / "bin", "python3.11", FAKE_PYTHON)
    fake_command(checkout / "bin", "df", "echo header; echo /dev/x 1 1 99999999 1% /")
    assert set_up(checkout).returncode == 0
    assert set_up(checkout).stdout == ""
    assert len(installations(checkout)) == 1
    with open(checkout / "pyproject.toml", "a") as file:
        file.write("\n# changed\n")
    assert set_up(checkout).returncode == 0
    assert len(installations(checkout)) == 2


def test_an_environment_whose_package_was_uninstalled_is_completed(checkout):
    fake_command(checkout / "bin", "python3.11", FAKE_PYTHON)
    fake_command(checkout / "bin", "df", "echo header; echo /dev/x 1 1 99999999 1% /")
    assert set_up(checkout).returncode == 0
    (checkout / ".venv" / "bin" / "ddtree").unlink()
    assert set_up(checkout).returncode == 0
    assert len(installations(checkout)) == 2


def test_a_failed_installation_fails_and_is_taken_up_again(checkout):
    fake_command(checkout / "bin", "python3.11", FAKE_PYTHON)
    fake_command(checkout / "bin", "df", "echo header; echo /dev/x 1 1 99999999 1% /")
    failed = set_up(checkout, UV_RESULT="2", PIP_RESULT="7")
    assert failed.returncode == 1
    assert "Run the same command again" in failed.stderr
    assert set_up(checkout).returncode == 0
    assert [line.split()[0] for line in installations(checkout)] == ["uv", "pip", "uv"]
