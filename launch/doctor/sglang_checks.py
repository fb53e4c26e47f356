"""`ddtree doctor`: which SGLang is here, patched or not, whether the contract holds, and whether it loads
the plugin."""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import dataclass
from pathlib import Path

from sglang_ddtree_patch.contract_check import ContractReport, check_installed_sglang, check_releases
from sglang_ddtree_patch.launch.doctor.check import Check, Status, ok, problem, untried, warning
from sglang_ddtree_patch.launch.doctor.probe import Probe
from sglang_ddtree_patch.launch.server_process import CPU_ENVIRONMENT
from sglang_ddtree_patch.launch.sglang_install import INSTALL_HINT, installed_sglang
from sglang_ddtree_patch.patches import patcher
from sglang_ddtree_patch.patches.in_tree import has_port
from sglang_ddtree_patch.patches.patcher import State
from sglang_ddtree_patch.patches.releases import known_releases
from sglang_ddtree_patch.patches.tree import PatchRefusedError, SglangTree, find_tree
from sglang_ddtree_patch.releases import SUPPORTED_VERSIONS

GROUP = "sglang.srt.plugins"
ENTRY_POINT = "ddtree"
PLATFORM = CPU_ENVIRONMENT["SGLANG_PLATFORM"]
PLUGIN_PROBE = "sglang_ddtree_patch.launch.doctor.probe_plugin"


def check_installed() -> list[Check]:
    """The SGLang that this Python would import."""
    if installed_sglang() is None:
        return [problem("SGLang", "not installed", f"Run: {INSTALL_HINT}")]
    return checks_of_report(check_installed_sglang())


def check_tree(root: Path) -> list[Check]:
    """An SGLang that is not installed: an unpacked wheel or a checkout."""
    try:
        tree = find_tree(root)
    except PatchRefusedError as error:
        return [problem("SGLang", str(error), "Give the folder of an unpacked wheel or of a checkout.")]
    report = inspect_patches(tree)
    patches, version = check_patches(report), tree.version() or "of unknown version"
    if report.is_port:
        return [*check_port(version), patches]
    try:
        return [*checks_of_report(check_releases(tree.package, version)), patches]
    except SyntaxError as error:
        return [problem("SGLang", f"{tree.package} cannot be parsed: {error}", "Unpack it again.")]


def check_port(version: str | None = None) -> list[Check]:
    """A tree, or the installed SGLang, that serves DDTREE by itself, so that the contract does not matter."""
    return [ok("SGLang", f"{version or installed_sglang()}, with a DDTREE of its own")]


@dataclass(frozen=True)
class PatchReport:
    """How a tree stands, or why that cannot be said."""

    is_port: bool
    has_record: bool  # the patch tool was here
    found: patcher.Status | None
    refusal: str = ""

    @property
    def loads_plugin(self) -> bool:
        """Whether the tree loads the plugin by itself, discovered or not."""
        is_in_place = self.found is not None and self.found.state in (State.APPLIED, State.BY_HAND)
        return is_in_place and not self.is_port


def inspect_patches(tree: SglangTree) -> PatchReport:
    is_port, has_record = has_port(tree), tree.state_folder.is_dir()
    try:
        return PatchReport(is_port, has_record, patcher.inspect(tree, known_releases()))
    except PatchRefusedError as error:
        return PatchReport(is_port, has_record, None, str(error))


def inspect_installed() -> PatchReport | None:
    """The same of the installed SGLang; None where there is none."""
    try:
        return inspect_patches(find_tree(None))
    except PatchRefusedError:
        return None


def check_patches(report: PatchReport) -> Check:
    """Which patches are applied to a tree."""
    name = "patches"
    if report.found is None:
        if report.has_record or report.is_port:
            return problem(name, report.refusal, "Until then: ddtree patch revert, or --page-size 1.")
        return ok(name, "none applied, and there are no diffs for this SGLang")
    found = report.found
    if found.state is State.UNFINISHED:
        advice = "Complete it with: ddtree patch apply, undo it with: ddtree patch revert"
        return problem(name, f"{found.state.value}: SGLang {found.version}", advice)
    if found.state is State.ABSENT and report.is_port:
        locked = "not applied: the DDTREE of this tree serves pages of one slot alone"
        return problem(name, locked, "Run: ddtree patch apply")
    if found.state is State.ABSENT:
        return ok(name, "none applied")
    files = [entry.path for entry in found.journal.entries] if found.journal is not None else []
    changed = f", changes {', '.join(files)}" if files else ""
    return ok(name, f"{found.state.value}: SGLang {found.version}{changed}")


def checks_of_report(report: ContractReport) -> list[Check]:
    """The version, the contract as a whole, and a line for each mismatch."""
    holds = f"{report.entries - len(report.mismatches)} of {report.entries} entries hold"
    advice = f"Run: {INSTALL_HINT}"
    if report.mismatches:
        version = problem("SGLang", report.version, advice)
        return [
            version,
            problem("contract", holds, "SGLang serves here, without DDTREE: see docs/versions.md."),
            *(problem("contract", str(mismatch), "") for mismatch in report.mismatches),
        ]
    if report.version not in SUPPORTED_VERSIONS:
        tested = " and ".join(SUPPORTED_VERSIONS)
        advice = f"Only {tested} have been tested, and `ddtree serve` asks for one of them. {advice}"
        return [warning("SGLang", report.version, advice), ok("contract", holds)]
    return [ok("SGLang", report.version), ok("contract", holds)]


def start_plugin_probe(sglang: list[Check]) -> Probe | None:
    """Start loading the plugin into SGLang; None where that cannot end well."""
    return None if any(check.status is Status.PROBLEM for check in sglang) else Probe(PLUGIN_PROBE)


def check_plugin(probe: Probe | None, is_patched: bool) -> list[Check]:
    """Whether SGLang discovers the plugin, which a patched tree need not, and registers what it brings."""
    discovered = check_discovered()
    if is_patched and discovered.status is Status.PROBLEM:
        discovered = ok(discovered.name, f"{discovered.found}; the patch loads it")
    if probe is None:
        return [discovered, untried("plugin loads", "SGLang is missing or does not match")]
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
    assert entry_point.dist is not None  # entry_points() says of each whose it is
    return ok(name, f"{entry_point.value}, sglang-ddtree-patch {entry_point.dist.version}")
