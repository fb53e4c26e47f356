"""Change a Python file at nodes of its syntax tree and leave every other byte as it is."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import cached_property


class SourceError(ValueError):
    """A change that this module cannot make without touching more than it should."""


@dataclass
class Source:
    """A Python file, its syntax tree, and the changes to make in it."""

    path: str
    data: bytes
    _edits: list[tuple[int, int, bytes]] = field(default_factory=list)  # start, end, what stands there then

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.data)

    @cached_property
    def _lines(self) -> list[bytes]:
        # As Python counts them: a lone carriage return would end a line too, and source files hold none.
        return self.data.split(b"\n")

    @cached_property
    def _line_starts(self) -> list[int]:
        starts = [0]
        for line in self._lines:
            starts.append(starts[-1] + len(line) + 1)
        return starts

    @property
    def _line_end(self) -> bytes:
        return b"\r\n" if b"\r\n" in self.data else b"\n"

    def where(self, node: ast.stmt | ast.expr) -> str:
        return f"{self.path}, line {node.lineno}"

    def text(self, node: ast.stmt | ast.expr) -> str:
        start, end = self._span(node)
        return self.data[start:end].decode()

    def replace(self, node: ast.stmt | ast.expr, text: str) -> None:
        self._edits.append((*self._span(node), text.encode()))

    def insert_before(self, statement: ast.stmt, lines: list[str]) -> None:
        """Put lines in front of a statement, at its indent."""
        start, _ = self._whole_lines(statement)
        self._edits.append((start, start, self._indented(statement, lines)))

    def delete(self, statement: ast.stmt, *, leave_pass: bool) -> None:
        """Delete a statement; `pass` stays where the block would have no other left."""
        start, end = self._whole_lines(statement)
        self._edits.append((start, end, self._indented(statement, ["pass"] if leave_pass else [])))

    def result(self) -> bytes:
        """The file with all changes made."""
        data, last = self.data, len(self.data)
        for start, end, text in sorted(self._edits, reverse=True):
            if end > last:
                raise SourceError(f"{self.path}: two changes overlap")
            data, last = data[:start] + text + data[end:], start
        ast.parse(data)
        return data

    def _span(self, node: ast.stmt | ast.expr) -> tuple[int, int]:
        last, column = _end(node)
        return self._line_starts[node.lineno - 1] + node.col_offset, self._line_starts[last - 1] + column

    def _whole_lines(self, statement: ast.stmt) -> tuple[int, int]:
        """The lines of a statement, which must be alone on them."""
        last, column = _end(statement)
        before = self._lines[statement.lineno - 1][: statement.col_offset]
        after = self._lines[last - 1][column:].strip()
        if before.strip() or (after and not after.startswith(b"#")):
            raise SourceError(f"{self.where(statement)}: another statement shares the line")
        return self._line_starts[statement.lineno - 1], self._line_starts[last]

    def _indented(self, statement: ast.stmt, lines: list[str]) -> bytes:
        indent = self._lines[statement.lineno - 1][: statement.col_offset]
        return b"".join((indent + line.encode()).rstrip() + self._line_end for line in lines)


def _end(node: ast.stmt | ast.expr) -> tuple[int, int]:
    """Line and column behind a node; the parser knows them of every node that it makes."""
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return node.end_lineno, node.end_col_offset
