"""The sections of the tests: every folder of tests is one, a failure is named, and the others still run."""

import os
import re
import subprocess
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
MAKEFILE = (TESTS.parent / "Makefile").read_text()


def run_sections(folder: Path, *sections: str, failing: str = "none") -> subprocess.CompletedProcess:
    """The script with a make that fails at one section."""
    make = folder / "make"
    make.write_text(f'#!/bin/sh\necho "made $*"\n[ "$2" != "test-{failing}" ]\n')
    make.chmod(0o755)
    return subprocess.run(
        [TESTS / "run_sections.sh", *sections],
        env={**os.environ, "MAKE": str(make)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_section_that_fails_is_named_and_the_others_run(tmp_path):
    result = run_sections(tmp_path, "lint", "unit", "server", failing="unit")
    assert result.returncode == 1
    for section, verdict in (("lint", "passed"), ("unit", "FAILED"), ("server", "passed")):
        assert f"made --no-print-directory test-{section}\n== {section}: {verdict} in" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("== failed: unit (of 3,")


def test_without_a_failure_the_exit_code_is_zero(tmp_path):
    result = run_sections(tmp_path, "lint", "unit")
    assert result.returncode == 0
    assert result.stdout.splitlines()[-1].startswith("== all passed: lint unit (in")


def test_every_test_file_lies_in_the_folder_of_a_section():
    variables = dict(re.findall(r"^(\w+) := (.*)$", MAKEFILE, re.MULTILINE))
    sections = variables["SECTIONS"].replace("$(FAST)", variables["FAST"]).split()
    folders = {path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")}
    assert folders == {section for section in sections if (TESTS / section).is_dir()}
    assert {"lint", "types", *folders} == set(sections)
