"""Read unified diffs and apply them to exact lines.

Smaller than `patch` on purpose: no fuzz, no offsets, no new or deleted files. A file is only patched after
its hash was found to be the expected one, so a hunk that does not lie exactly where it says is an error.
Bytes throughout, because a source file need not be UTF-8 for its lines to be compared.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

_HUNK_HEADER = re.compile(rb"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@")


def lines_of(data: bytes) -> list[bytes]:
    """Lines as diffs count them: they end in b"\\n" alone, and keep it."""
    return io.BytesIO(data).readlines()


class DiffSyntaxError(ValueError):
    """A diff that this module cannot read."""


@dataclass(frozen=True)
class Hunk:
    """One block of a diff, as the lines it expects and the lines it leaves."""

    old_start: int  # counted from 1, as in the diff
    new_start: int
    old: tuple[bytes, ...]  # each ends in b"\n"
    new: tuple[bytes, ...]

    def reversed(self) -> Hunk:
        return Hunk(self.new_start, self.old_start, self.new, self.old)

    @property
    def old_lines(self) -> slice:
        """Where the expected lines lie; a hunk that expects none names the line before its place."""
        start = self.old_start - 1 if self.old else self.old_start
        return slice(start, start + len(self.old))

    def lies_in(self, lines: Sequence[bytes]) -> bool:
        place = self.old_lines
        return place.stop <= len(lines) and tuple(lines[place]) == self.old

    def first_difference(self, lines: Sequence[bytes]) -> tuple[int, bytes, bytes]:
        """Line number, the line expected there and the line found (empty past the end of the file)."""
        for number, expected in enumerate(self.old, start=self.old_start):
            found = lines[number - 1] if number <= len(lines) else b""
            if found != expected:
                return number, expected, found
        if not self.lies_in(lines):  # expects nothing, past the end
            return self.old_start, b"", b""
        raise ValueError("the hunk lies in these lines")


@dataclass(frozen=True)
class FileDiff:
    """What a diff does to one file."""

    path: str  # below the folder that holds sglang/, with forward slashes
    hunks: tuple[Hunk, ...]

    def reversed(self) -> FileDiff:
        return FileDiff(self.path, tuple(hunk.reversed() for hunk in self.hunks))

    def apply(self, data: bytes) -> bytes:
        """The file after the diff.

        Raises:
            ValueError: a hunk does not lie where it says.
        """
        lines = lines_of(data)
        for hunk in reversed(self.hunks):  # from the end, so that earlier line numbers stay right
            if not hunk.lies_in(lines):
                raise ValueError(f"{self.path}: the hunk at line {hunk.old_start} does not fit")
            lines[hunk.old_lines] = hunk.new
        return b"".join(lines)


def parse(text: bytes) -> tuple[FileDiff, ...]:
    """The files of a unified diff, in order; prose before a file's `---` line is skipped."""
    lines = lines_of(text)
    files: list[FileDiff] = []
    position = 0
    while position < len(lines):
        is_header = lines[position].startswith(b"--- ") and position + 1 < len(lines)
        if not (is_header and lines[position + 1].startswith(b"+++ ")):
            position += 1
            continue
        path = _path(lines[position], lines[position + 1])
        position += 2
        hunks = []
        while position < len(lines) and (header := _HUNK_HEADER.match(lines[position])):
            hunk, position = _hunk(header, lines, position + 1)
            hunks.append(hunk)
        if not hunks:
            raise DiffSyntaxError(f"{path} has no hunk")
        _check_order(path, hunks)
        files.append(FileDiff(path, tuple(hunks)))
    if not files:
        raise DiffSyntaxError("no file in this diff")
    return tuple(files)


def _check_order(path: str, hunks: Sequence[Hunk]) -> None:
    """Both line numbers of a hunk must agree with the hunks before it."""
    end = longer_by = 0
    for hunk in hunks:
        old, new = hunk.old_lines, hunk.reversed().old_lines
        if old.start < end or new.start != old.start + longer_by:
            raise DiffSyntaxError(f"{path}: the hunk at line {hunk.old_start} contradicts those before it")
        end, longer_by = old.stop, longer_by + len(hunk.new) - len(hunk.old)


def _path(old: bytes, new: bytes) -> str:
    try:
        before, after = (line[4:].split(b"\t")[0].strip().decode() for line in (old, new))
    except UnicodeDecodeError as error:
        raise DiffSyntaxError(f"{old!r} names no file in UTF-8") from error
    if not before.startswith("a/") or after != f"b/{before[2:]}":
        raise DiffSyntaxError(f"{before} to {after}: only changes to one file a/PATH, b/PATH are known")
    return before[2:]


def _hunk(header: re.Match[bytes], lines: Sequence[bytes], position: int) -> tuple[Hunk, int]:
    old_start, new_start = int(header[1]), int(header[3])
    old_count, new_count = (1 if count is None else int(count) for count in (header[2], header[4]))
    old: list[bytes] = []
    new: list[bytes] = []
    while (len(old), len(new)) != (old_count, new_count):
        line = lines[position] if position < len(lines) else b""
        mark, rest = line[:1], line[1:]
        if mark not in (b" ", b"-", b"+") or len(old) > old_count or len(new) > new_count:
            raise DiffSyntaxError(f"line {position + 1} does not belong to its hunk: {line!r}")
        if mark != b"+":
            old.append(rest)
        if mark != b"-":
            new.append(rest)
        position += 1
    return Hunk(old_start, new_start, tuple(old), tuple(new)), position
