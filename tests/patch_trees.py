"""Small trees and a made-up release for the tests of `ddtree patch`, and how to tell two trees apart."""

import hashlib
import os
import stat
from pathlib import Path

from sglang_ddtree_patch import cli
from sglang_ddtree_patch.contract_check import ContractReport

FILES = {
    "one": b"import os\n\n\ndef first():\n    return os\n\n\ndef last():\n    return 1\n",
    "two": b"# caf\xc3\xa9\nx = 1\ny = 2\n",
}
PATCHED = {
    "one": b"import os\nimport sys\n\n\ndef first():\n    return os\n\n\ndef last():\n    return sys\n",
    "two": b"# caf\xc3\xa9\nx = 1\ny = 3\nz = 4\n",
}
DIFFS = {
    "one": b"""\
Prose before a file belongs to no hunk.

--- a/sglang/srt/one.py
+++ b/sglang/srt/one.py
@@ -1 +1,2 @@
 import os
+import sys
@@ -8,2 +9,2 @@
 def last():
-    return 1
+    return sys
""",
    "two": b"""\
--- a/sglang/srt/two.py
+++ b/sglang/srt/two.py
@@ -2,2 +2,3 @@
 x = 1
-y = 2
+y = 3
+z = 4
""",
}


def write_releases(folder: Path) -> Path:
    """A release 9.9.9 with one diff a file; returns the folder of all releases."""
    release = folder / "diffs" / "9.9.9"
    release.mkdir(parents=True)
    for name, diff in DIFFS.items():
        (release / f"{name}.patch").write_bytes(diff)
    sums = [f"{hashlib.sha256(data).hexdigest()}  sglang/srt/{name}.py\n" for name, data in FILES.items()]
    (release / "SHA256SUMS").write_text("".join(sums))
    return release.parent


def write_tree(folder: Path) -> Path:
    """The two files in a folder whose path has a space."""
    srt = folder / "site packages" / "sglang" / "srt"
    srt.mkdir(parents=True)
    for name, data in FILES.items():
        (srt / f"{name}.py").write_bytes(data)
    return srt.parent.parent


def every_tree_serves(root: Path, version: str) -> ContractReport:
    """In place of the contract, of which small trees hold nothing."""
    return ContractReport(version, ())


def ddtree_patch(*words: object) -> int:
    return cli.main(["patch", *map(str, words)])


def contents(root: Path) -> dict[str, tuple]:
    """Names, kinds, modes and bytes of a tree."""
    found = {}
    for path in sorted(root.rglob("*")):
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(root))] = (stat.filemode(path.lstat().st_mode), content)
    return found


def snapshot(root: Path) -> tuple:
    """Contents, and for files also times and inodes: whether these are the very same files."""
    files = [path.lstat() for path in sorted(root.rglob("*")) if path.is_file()]
    return contents(root), [(info.st_mtime_ns, info.st_ino) for info in files]
