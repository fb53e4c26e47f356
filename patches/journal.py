"""The record of an applied patch, beside the tree: enough to put back the very files that were there.

    .sglang-ddtree-patch/
        manifest.json     which files, and the hash of each before and after
        original/...      the files as they were
        patched/...       new files that wait for their turn

The manifest is written last, on disk before the first file of the tree changes, and never again: what a
killed run left undone is read from the files' own hashes. A folder without a manifest is a run that ended
before it touched the tree.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sglang_ddtree_patch.patches.tree import PatchRefusedError, SglangTree, digest

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Change:
    """One file of the tree, before and after."""

    path: str
    original: bytes
    patched: bytes


@dataclass(frozen=True)
class Entry:
    """What the manifest says of one file."""

    path: str
    original_sha256: str
    patched_sha256: str


@dataclass(frozen=True)
class Journal:
    """A manifest that has been written."""

    tree: SglangTree
    version: str  # of the SGLang that the diffs are for
    entries: tuple[Entry, ...]

    @classmethod
    def read(cls, tree: SglangTree) -> Journal | None:
        """The journal beside the tree, or None where no run got as far as touching it."""
        path = tree.state_folder / MANIFEST
        try:
            manifest = json.loads(path.read_bytes())
            entries = tuple(Entry(**entry) for entry in manifest["files"])
            return cls(tree, manifest["sglang"], entries)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError) as error:
            raise PatchRefusedError(f"{path} is not a record of this tool ({error})") from error

    @classmethod
    def write(cls, tree: SglangTree, version: str, changes: Sequence[Change]) -> Journal:
        """Put originals and new files on disk, then the manifest. The tree itself stays as it is."""
        folder = tree.state_folder
        remove_leftovers(tree)
        entries = tuple(
            Entry(change.path, digest(change.original), digest(change.patched)) for change in changes
        )
        journal = cls(tree, version, entries)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(shutil.rmtree, folder, ignore_errors=True)
            folder.mkdir()
            for change in changes:
                journal._keep_original(change)
                journal._stage(change)
            manifest = {"sglang": version, "files": [asdict(entry) for entry in entries]}
            _write(folder / "manifest.new", json.dumps(manifest, indent=1).encode() + b"\n")
            os.replace(folder / "manifest.new", folder / MANIFEST)
            _sync(folder)
            _sync(folder.parent)
            on_failure.pop_all()
        return journal

    def put_in_place(self) -> None:
        """Exchange the tree's files for the new ones, each in one step that a crash cannot split."""
        for entry in self.entries:
            target = self.tree.file(entry.path)
            os.replace(self._inside("patched", entry.path), target)
            _sync(target.parent)

    def undo(self) -> None:
        """Put the originals back and remove the record, from any point where a run may have ended.

        Raises:
            PatchRefusedError: a file is neither as it was nor as it was left. Nothing is changed then.
        """
        to_restore = [entry for entry in self.entries if not self._is_original(entry)]
        for entry in to_restore:
            original = self.original(entry)
            if original is None or digest(original) != entry.original_sha256:
                backup = self._inside("original", entry.path)
                raise PatchRefusedError(f"the original {entry.path} is no longer whole in {backup}")
        for entry in to_restore:
            target = self.tree.file(entry.path)
            os.replace(self._inside("original", entry.path), target)
            _sync(target.parent)
        (self.tree.state_folder / MANIFEST).unlink()
        shutil.rmtree(self.tree.state_folder)
        _sync(self.tree.state_folder.parent)

    def is_complete(self) -> bool:
        """Whether every file is the patched one. False: some are still, or again, the originals."""
        originals = [entry for entry in self.entries if self._is_original(entry)]
        return not originals

    def original(self, entry: Entry) -> bytes | None:
        """The kept original's bytes, or None if it is gone."""
        backup = self._inside("original", entry.path)
        if backup.is_symlink():  # relative to where it was taken from
            backup = self.tree.file(entry.path).parent / os.readlink(backup)
        return backup.read_bytes() if backup.is_file() else None

    def _is_original(self, entry: Entry) -> bool:
        current = self.tree.read(entry.path)
        found = None if current is None else digest(current)
        if found not in (entry.original_sha256, entry.patched_sha256):
            raise PatchRefusedError(
                f"{self.tree.file(entry.path)} was {'removed' if found is None else 'changed'} since it was "
                f"patched. Put it back, or delete {self.tree.state_folder} if SGLang was reinstalled"
            )
        return found == entry.original_sha256

    def _keep_original(self, change: Change) -> None:
        source, backup = self.tree.file(change.path), self._inside("original", change.path)
        backup.parent.mkdir(parents=True, exist_ok=True)
        try:
            # The file itself and no copy: what comes back has its inode, owner, times and links too.
            os.link(source, backup, follow_symlinks=False)
        except OSError:  # no hard links on this file system, or not for this user
            shutil.copy2(source, backup, follow_symlinks=False)
        if not backup.is_symlink():
            _sync(backup)
        _sync(backup.parent)

    def _stage(self, change: Change) -> None:
        staged, like = self._inside("patched", change.path), self.tree.file(change.path).stat()
        staged.parent.mkdir(parents=True, exist_ok=True)
        _write(staged, change.patched)
        if os.geteuid() == 0:
            os.chown(staged, like.st_uid, like.st_gid)
        staged.chmod(like.st_mode & 0o7777)
        _sync(staged.parent)

    def _inside(self, part: str, path: str) -> Path:
        return self.tree.state_folder / part / path


def remove_leftovers(tree: SglangTree) -> None:
    """Remove the folder of a run that ended before it wrote its manifest, or after it removed it."""
    if tree.state_folder.exists():
        shutil.rmtree(tree.state_folder)


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """Make a file's content, or a folder's list of names, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
