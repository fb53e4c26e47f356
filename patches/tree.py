"""An SGLang source tree on disk: where it is, which release it says it is, who may change it now."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


class PatchRefusedError(RuntimeError):
    """A tree that is left as it is. The message is one line: what was found and what to do."""


@dataclass(frozen=True)
class SglangTree:
    """The package folder, the one that holds `srt/`, with every symbolic link on the way resolved.

    Resolved because the record of what was done must lie beside the files themselves: two environments
    may link to one tree.
    """

    package: Path

    @property
    def state_folder(self) -> Path:
        return self.package.parent / f".{self.package.name}-ddtree-patch"

    def file(self, path: str) -> Path:
        """The file that a diff calls `sglang/...`."""
        return self.package / path.removeprefix("sglang/")

    def read(self, path: str) -> bytes | None:
        """The file's bytes, or None where there is none."""
        try:
            return self.file(path).read_bytes()
        except FileNotFoundError:
            return None

    def version(self) -> str | None:
        """The release it says it is. A checkout says nothing: `_version.py` is made when a wheel is."""
        for path in (self.package / "_version.py", self.package / "version.py"):
            source = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
            if found := re.search(r"^__version__\b.*?[\"'](\d[^\"']*)[\"']", source, re.MULTILINE):
                return found[1]
        return None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second run out. The lock is on the folder itself, so that it leaves no file behind."""
        descriptor = os.open(self.package, os.O_RDONLY)
        try:
            _lock(descriptor, self.package)
            yield
        finally:
            os.close(descriptor)


def _lock(descriptor: int, package: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise PatchRefusedError(f"another ddtree patch is at work on {package}") from None
    except OSError:
        # NFS locks no folder. The journal still keeps an interrupted run repairable.
        return


def find_tree(root: Path | None) -> SglangTree:
    """The tree at `root` (a package, what holds one, or SGLang's repository), or the installed SGLang.

    Raises:
        PatchRefusedError: there is none.
    """
    if root is None:
        return SglangTree(_installed_package())
    for package in (root, root / "sglang", root / "python" / "sglang"):
        if (package / "srt").is_dir():
            return SglangTree(package.resolve())
    raise PatchRefusedError(f"no SGLang at {root}: expected srt/, sglang/srt/ or python/sglang/srt/ in it")


def _installed_package() -> Path:
    spec = importlib.util.find_spec("sglang")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(location) / "srt").is_dir():
            return Path(location).resolve()
    raise PatchRefusedError("SGLang is not installed in this Python: name a tree with --root DIR")


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
