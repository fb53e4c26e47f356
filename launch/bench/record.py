"""The results file of a benchmark: a header, and one row a measured point.

    {"device", "versions", "command", "date", "settings", "ceilings", "rows": [...]}

It is written anew after each row, in one rename, so that whatever ends a run leaves every row measured so
far; `--resume` takes them up again and measures the rest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_ddtree_patch.errors import ConfigurationError

# What has to be the same in both for rows of two runs to stand in one table.
COMPARED = ("device", "versions", "settings")


class Record:
    """Rows by key, kept in memory and in a file if there is one.

    header: everything above the rows.
    columns: what each row holds, in this order.
    key: those that name a point; no two rows have them all alike.
    """

    def __init__(
        self, path: Path | None, header: Mapping[str, Any], columns: Sequence[str], key: Sequence[str]
    ):
        self.path = path
        self.header = dict(header)
        self.rows: list[dict[str, Any]] = []
        self._columns, self._key = tuple(columns), tuple(key)

    def begin(self) -> None:
        """Make the file, if there is to be one.

        Raises:
            ConfigurationError: it is there, or cannot be written.
        """
        if self.path is not None and holds_something(self.path):
            raise ConfigurationError(f"{self.path} is there: name another --json, or remove it.")
        self.write_first()

    def resume(self) -> None:
        """Take up the rows in the file.

        Raises:
            ConfigurationError: there is no file, it cannot be read, or holds rows of other settings.
        """
        if self.path is None:
            raise ConfigurationError("--resume needs --json FILE: the file to go on with.")
        try:
            found = json.loads(self.path.read_text())
            rows = found["rows"]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ConfigurationError(f"{self.path} holds no results: {error}.") from error
        for name in COMPARED:
            if found.get(name) != self.header[name]:
                raise ConfigurationError(
                    f"{self.path} was measured with other {name}: {json.dumps(found.get(name))} there, "
                    f"{json.dumps(self.header[name])} now. Name another --json."
                )
        if "ceilings" in found:
            self.header["ceilings"] = found["ceilings"]
        self.rows = rows

    def holds(self, point: Mapping[str, Any]) -> bool:
        return any(self._name(row) == self._name(point) for row in self.rows)

    def add(self, row: Mapping[str, Any]) -> None:
        self.rows.append({name: row[name] for name in self._columns})
        self.write()

    def write(self) -> None:
        if self.path is not None:
            write_whole(self.path, json.dumps({**self.header, "rows": self.rows}, indent=1) + "\n")

    def write_first(self) -> None:
        """Raises ConfigurationError where the file cannot be written."""
        try:
            self.write()
        except OSError as error:
            raise ConfigurationError(f"{self.path} cannot be written: {error.strerror}.") from error

    def _name(self, row: Mapping[str, Any]) -> tuple:
        return tuple(row[column] for column in self._key)


def open_record(record: Record, resume: bool) -> None:
    """Begin the record's file, or go on with it; refuses to write over results.

    Raises:
        ConfigurationError: the file is there and was not meant to be, or cannot be gone on with, or
            cannot be written.
    """
    path = record.path
    is_there = path is not None and holds_something(path)
    if is_there and not resume:
        raise ConfigurationError(f"{path} is there: add --resume to go on with it, or remove it.")
    if resume and (is_there or path is None):
        record.resume()
    record.write_first()


def holds_something(path: Path) -> bool:
    """Whether a file is there, but for a record without rows, as an interrupt may leave one.

    Raises:
        ConfigurationError: it is a folder.
    """
    if path.is_dir():
        raise ConfigurationError(f"{path} is a folder: name a file for --json.")
    if not path.exists():
        return False
    try:
        return json.loads(path.read_text())["rows"] != []
    except (OSError, ValueError, LookupError, TypeError):
        return True


def write_whole(path: Path, text: str) -> None:
    """Write the file so that it is never seen half written."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(text)
    os.replace(beside, path)
