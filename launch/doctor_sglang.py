"""`ddtree doctor`: which SGLang is here, whether the contract holds, and whether it loads the plugin."""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path

from sglang_ddtree_patch.contract import CONTRACT, SUPPORTED_VERSION
from sglang_ddtree_patch.contract_check import ContractReport, check, check_installed_sglang
from sglang_ddtree_patch.launch.doctor_check import Check, Status, ok, problem, warning
from sglang_ddtree_patch.launch.doctor_probe import Probe
from sglang_ddtree_patch.launch.server_process import CPU_ENVIRONMENT
from sglang_ddtree_patch.launch.sglang_install import INSTALL_HINT, installed_sglang

GROUP = "sglang.srt.plugins"
ENTRY_POINT = "ddtree"
PLATFORM = CPU_ENVIRONMENT["SGLANG_PLATFORM"]
PLUGIN_PROBE = "sglang_ddtree_patch.launch.probe_plugin"
# Where `sglang/` lies in an unpacked wheel, in a checkout, and where the folder is the package itself.
PACKAGE_FOLDERS = ("sglang", "python/sglang", ".")


def check_installed() -> list[Check]:
    """The SGLang that this Python would import."""
    if installed_sglang() is None:
        return [problem("SGLang", "not installed", f"Run: {INSTALL_HINT}")]
    return checks_of_report(check_installed_sglang())


def check_tree(root: Path) -> list[Check]:
    """An SGLang that is not installed: an unpacked wheel or a checkout."""
    package = next((root / folder for folder in PACKAGE_FOLDERS if (root / folder / "srt").is_dir()), None)
    if package is None:
        advice = "Give the folder of an unpacked wheel or a checkout of SGLang."
        return [problem("SGLang", f"none in {root}: no sglang/srt there", advice)]
    try:
        return checks_of_report(check(package, version_of_tree(package)))
    except SyntaxError as error:
        return [problem("SGLang", f"{package} cannot be parsed: {error}", "Unpack it again.")]


def version_of_tree(package: Path) -> str:
    """The version that wheel or sources name, or "of unknown version"."""
    for file in (package / "_version.py", package / "version.py"):
        source = file.read_text() if file.is_file() else ""
        if named := re.search(r"^__version__\b.*?[\"'](\d[^\"']*)[\"']", source, re.MULTILINE):
            return named[1]
    return "of unknown version"


def checks_of_report(report: ContractReport) -> list[Check]:
    """The version, the contract as a whole, and a line for each mismatch."""
    holds = f"{len(CONTRACT) - len(report.mismatches)} of {len(CONTRACT)} entries hold"
    advice = f"Run: {INSTALL_HINT}"
    if report.mismatches:
        version = problem("SGLang", report.version, advice)
        return [
            version,
            problem("contract", holds, "SGLang serves here, without DDTREE: see docs/versions.md."),
            *(problem("contract", str(mismatch), "") for mismatch in report.mismatches),
        ]
    if report.version != SUPPORTED_VERSION:
        advice = f"Only {SUPPORTED_VERSION} has been tested, and `ddtree serve` asks for it. {advice}"
        return [warning("SGLang", report.version, advice), ok("contract", holds)]
    return [ok("SGLang", report.version), ok("contract", holds)]


def start_plugin_probe(sglang: list[Check]) -> Probe | None:
    """Start loading the plugin into SGLang; None where that cannot end well."""
    return None if any(check.status is Status.PROBLEM for check in sglang) else Probe(PLUGIN_PROBE)


def check_plugin(probe: Probe | None) -> list[Check]:
    discovered = check_discovered()
    if probe is None:
        return [discovered, problem("plugin loads", "not tried: SGLang is missing or does not match", "")]
    result = probe.result()
    if result.reported.get("registered"):
        return [discovered, ok("plugin loads", "DDTREE and ddtree-verify are registered")]
    if result.error is None:
        found = "SGLang loaded its plugins and DDTREE is not among them"
        advice = "Mend what is said of the plugin above, or see SGLang's log when a server starts."
        return [discovered, problem("plugin loads", found, advice)]
    return [discovered, problem("plugin loads", result.error, f"SGLang itself may not start: {INSTALL_HINT}")]


def check_discovered() -> Check:
    """Whether SGLang would find the entry point, and would not pass it over."""
    name = "plugin found"
    found = importlib.metadata.entry_points(group=GROUP, name=ENTRY_POINT)
    if not found:
        return problem(name, "not installed in this Python", "In this package's folder: pip install .")
    allowed = [part.strip() for part in os.environ.get("SGLANG_PLUGINS", "").split(",") if part.strip()]
    if allowed and ENTRY_POINT not in allowed:
        left_out = f"SGLANG_PLUGINS={','.join(allowed)} leaves it out"
        return problem(name, left_out, f"Add {ENTRY_POINT}, or unset SGLANG_PLUGINS.")
    # SGLang passes over every package that brings a platform other than the one asked for.
    platform = os.environ.get("SGLANG_PLATFORM", PLATFORM)
    if platform not in ("", PLATFORM):
        passed_over = f"SGLANG_PLATFORM={platform} makes SGLang pass it over"
        return problem(name, passed_over, "Unset SGLANG_PLATFORM.")
    (entry_point, *_) = found
    return ok(name, f"{entry_point.value}, sglang-ddtree-patch {entry_point.dist.version}")
