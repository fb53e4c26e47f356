"""Patch a tree, take the patch out again, and say which of the two is the case.

A release's tree gets that release's diffs. A tree with a DDTREE port of its own gets changes made for it.
"""

from __future__ import annotations

import contextlib
import difflib
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_ddtree_patch.patches.in_tree import find_port, has_port, plan_changes
from sglang_ddtree_patch.patches.journal import Change, Journal, remove_leftovers
from sglang_ddtree_patch.patches.releases import Release
from sglang_ddtree_patch.patches.tree import PatchRefusedError, SglangTree, digest
from sglang_ddtree_patch.patches.unified_diff import FileDiff, lines_of


class State(enum.Enum):
    """How a tree stands."""

    ABSENT = "not applied"
    APPLIED = "applied"
    BY_HAND = "applied with another tool"  # patch or git: there is no record of the originals
    UNFINISHED = "half applied"  # a run was interrupted, or an installer put files back


@dataclass(frozen=True)
class Status:
    """How a tree stands, for the SGLang release `version`."""

    state: State
    version: str
    journal: Journal | None = None
    changes: tuple[Change, ...] = ()  # what apply would do, where that is ABSENT


def inspect(tree: SglangTree, releases: Sequence[Release]) -> Status:
    """Look without touching.

    Raises:
        PatchRefusedError: the tree is neither a release there are diffs for nor a patched one, or it has a
            DDTREE port of its own that is not understood.
    """
    journal = Journal.read(tree)
    if journal is not None:
        state = State.APPLIED if journal.is_complete() else State.UNFINISHED
        return Status(state, journal.version, journal)
    if has_port(tree):
        return _inspect_port(tree)
    candidates = _likeliest_first(tree, releases)
    for release in candidates:
        changes = _fit(tree, release)
        if changes is not None:
            return Status(State.ABSENT, tree.version() or release.version, changes=changes)
        if _is_patched(tree, release):
            return Status(State.BY_HAND, tree.version() or release.version)
    raise PatchRefusedError(_what_differs(tree, candidates[0]))


def _inspect_port(tree: SglangTree) -> Status:
    version = f"{tree.version() or 'of unknown version'} with a DDTREE of its own"
    port = find_port(tree)
    if port.is_patched:
        return Status(State.BY_HAND, version)
    return Status(State.ABSENT, version, changes=plan_changes(tree, port))


def apply(
    tree: SglangTree, releases: Sequence[Release], refuse: Callable[[Status], None] = lambda found: None
) -> Status:
    """Apply all diffs of the tree's release or none; returns how the tree stood before.

    Where that was `APPLIED` or `BY_HAND`, nothing is done. What an interrupted run left is undone first.
    Where it was `ABSENT`, `refuse` may object by a PatchRefusedError before anything is changed.
    """
    with tree.locked():
        before = found = inspect(tree, releases)
        if before.state in (State.APPLIED, State.BY_HAND):
            return before
        if before.journal is not None:
            before.journal.undo()
            found = inspect(tree, releases)
        else:
            refuse(found)
        journal = Journal.write(tree, found.version, found.changes)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(journal.undo)
            journal.put_in_place()
            on_failure.pop_all()
        return before


def revert(tree: SglangTree, releases: Sequence[Release]) -> Status:
    """Put back what `apply` found, byte for byte; returns how the tree stood before."""
    with tree.locked():
        before = inspect(tree, releases)
        if before.journal is None:
            remove_leftovers(tree)
        else:
            before.journal.undo()
        return before


def diff(changes: Sequence[Change]) -> bytes:
    """The changes as a unified diff."""
    lines: list[bytes] = []
    for change in changes:
        old, new = (lines_of(data) for data in (change.original, change.patched))
        names = (f"a/{change.path}".encode(), f"b/{change.path}".encode())
        lines += difflib.diff_bytes(difflib.unified_diff, old, new, *names)
    return b"".join(lines)


def changes_to_revert(journal: Journal) -> tuple[Change, ...]:
    """What `revert` would do to the files that are patched now."""
    found = (
        Change(entry.path, journal.tree.read(entry.path) or b"", journal.original(entry) or b"")
        for entry in journal.entries
    )
    return tuple(change for change in found if change.original != change.patched)


def _likeliest_first(tree: SglangTree, releases: Sequence[Release]) -> list[Release]:
    """The release the tree says it is comes first: two releases may ship the same file."""
    version = tree.version()
    return sorted(releases, key=lambda release: release.version != version)


def _fit(tree: SglangTree, release: Release) -> tuple[Change, ...] | None:
    """The changes, or None if a file is not the release's own."""
    changes = []
    for file in release.files:
        data = tree.read(file.path)
        text = None if data is None else _with_lf(data)
        if data is None or text is None or digest(text) != release.originals[file.path]:
            return None
        patched = file.apply(text)
        changes.append(Change(file.path, data, patched if text == data else patched.replace(b"\n", b"\r\n")))
    return tuple(changes)


def _is_patched(tree: SglangTree, release: Release) -> bool:
    """Whether taking the diffs out gives the release's own files."""
    return all(_is_file_patched(tree, file.reversed(), release) for file in release.files)


def _is_file_patched(tree: SglangTree, taking_out: FileDiff, release: Release) -> bool:
    data = tree.read(taking_out.path)
    if data is None:
        return False
    text = _with_lf(data)
    fits = all(hunk.lies_in(lines_of(text)) for hunk in taking_out.hunks)
    return fits and digest(taking_out.apply(text)) == release.originals[taking_out.path]


def _with_lf(data: bytes) -> bytes:
    """The file with LF line ends if all of them are CRLF; otherwise as it is, mixed ones included."""
    ends = data.count(b"\r\n")
    return data.replace(b"\r\n", b"\n") if ends and ends == data.count(b"\n") else data


def _what_differs(tree: SglangTree, release: Release) -> str:
    """Name the first file that is not the release's, and the first of its hunks that does not fit."""
    for file in release.files:
        data = tree.read(file.path)
        if data is None:
            return f"{tree.file(file.path)} is missing, and SGLang {release.version} has it"
        text = _with_lf(data)
        if digest(text) == release.originals[file.path]:
            continue
        what = f"{tree.file(file.path)} is not the file of SGLang {release.version}"
        lines = lines_of(text)
        for number, hunk in enumerate(file.hunks, start=1):
            if not hunk.lies_in(lines):
                line, expected, found = hunk.first_difference(lines)
                where = f"hunk {number} expects {_shown(expected)} in line {line}"
                return f"{what}: {where}, found {_shown(found)}"
        return f"{what}: every hunk fits, but other lines differ (sha256 {digest(text)[:12]}...)"
    raise ValueError("nothing differs")


def _shown(line: bytes) -> str:
    """With its indent and a stray carriage return, which may be all that differs."""
    return repr(line.removesuffix(b"\n").decode("utf-8", "replace")) if line else "the end of the file"
