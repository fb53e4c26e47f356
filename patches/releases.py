"""The diffs that come with the package: one folder an SGLang release, found by looking.

A folder holds `*.patch` and `SHA256SUMS`, the hashes of the files that the diffs touch, as the release
ships them. Both are for other tools too: `sha256sum -c`, `git apply` and `patch -p1` take them as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sglang_ddtree_patch.patches.unified_diff import FileDiff, parse

FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Release:
    """The diffs for one SGLang release."""

    version: str
    diffs: tuple[Path, ...]
    files: tuple[FileDiff, ...]
    originals: Mapping[str, str]  # path as in the diffs: sha256 of the file, with LF line ends


def known_releases(folder: Path = FOLDER) -> tuple[Release, ...]:
    """Every release that there are diffs for, the newest first."""
    found = [_read(sums.parent) for sums in folder.glob("*/SHA256SUMS")]
    return tuple(sorted(found, key=lambda release: _sort_key(release.version), reverse=True))


def _read(folder: Path) -> Release:
    diffs = tuple(sorted(folder.glob("*.patch")))
    lines = (folder / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    originals = {path: digest for digest, path in (line.split("  ", 1) for line in lines)}
    files = tuple(file for diff in diffs for file in parse(diff.read_bytes()))
    return Release(folder.name, diffs, files, originals)


def _sort_key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
