"""The two locks of a DDTREE port, found by the shape of the code: pages of one slot, and Triton alone.

A lock is one of these, in a place that speaks of DDTREE (in its test, its message, a branch, function or
class around it, or the file's name):

    if page_size != 1: raise ...                         also > 1, not (... == 1), not in (1,)
    if attention_backend != "triton": raise ...          also not in (...), not isinstance(..., Triton...)
    assert page_size == 1                                and the same for the backend
    server_args.page_size = 1                            the setting forced, with or without such an `if`
    server_args.attention_backend = "triton"

What resembles a lock and is more than one is not touched: `Unclear` says where and why.
"""

from __future__ import annotations

import ast
import enum
from collections.abc import Iterator
from dataclasses import dataclass

from sglang_ddtree_patch.patches.source_edits import Source


class Kind(enum.Enum):
    """What a lock demands."""

    PAGE_SIZE = "pages of one slot"
    BACKEND = "the Triton backend"


@dataclass(frozen=True)
class Lock:
    """One statement to delete."""

    kinds: frozenset[Kind]
    source: Source
    statement: ast.stmt
    body: list[ast.stmt]  # that holds it

    def __str__(self) -> str:
        demanded = " and ".join(sorted(kind.value for kind in self.kinds))
        return f"{self.source.where(self.statement)}, demands {demanded}"


@dataclass(frozen=True)
class Unclear:
    """A statement that looks like a lock and cannot be deleted as a whole."""

    source: Source
    statement: ast.stmt
    reason: str

    def __str__(self) -> str:
        return f"{self.source.where(self.statement)}: {self.reason}"


def find_locks(source: Source) -> list[Lock | Unclear]:
    """Every lock of a file, in its order."""
    return list(_locks_in(source, source.tree.body, speaks_of_ddtree(source.path)))


def speaks_of_ddtree(text: str) -> bool:
    return "ddtree" in text.lower()


def _locks_in(source: Source, body: list[ast.stmt], is_about_ddtree: bool) -> Iterator[Lock | Unclear]:
    for statement in body:
        if _is_default(statement):
            continue
        is_named = is_about_ddtree or (_is_small(statement) and speaks_of_ddtree(source.text(statement)))
        found = _judge(source, statement, body) if is_named else None
        if found is not None:
            yield found
            continue
        for inner, is_inner_about in _blocks(source, statement, is_about_ddtree):
            yield from _locks_in(source, inner, is_inner_about)


def _is_default(statement: ast.stmt) -> bool:
    """`if page_size is None: page_size = 1` chooses where nobody asked; it locks nothing."""
    return isinstance(statement, ast.If) and ast.unparse(statement.test).endswith(" is None")


def _is_small(statement: ast.stmt) -> bool:
    """Whether all words of a statement, its message above all, are those of one check."""
    if isinstance(statement, ast.If):
        return all(isinstance(part, ast.Expr | ast.Raise | ast.Assign) for part in statement.body)
    return isinstance(statement, ast.Assert | ast.Assign)


def _blocks(source: Source, statement: ast.stmt, about: bool) -> Iterator[tuple[list[ast.stmt], bool]]:
    """The blocks of a compound statement, and whether each is about DDTREE."""
    if isinstance(statement, ast.If):
        is_tested = speaks_of_ddtree(source.text(statement.test))
        is_negated = _is_negated(statement.test)
        yield statement.body, about or (is_tested and not is_negated)
        yield statement.orelse, about or (is_tested and is_negated)
        return
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        about = about or speaks_of_ddtree(statement.name)
    for _, value in ast.iter_fields(statement):
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            yield value, about
        elif isinstance(value, list):
            parts = (part for part in value if isinstance(part, ast.ExceptHandler | ast.match_case))
            yield from ((part.body, about) for part in parts)


def _is_negated(test: ast.expr) -> bool:
    if isinstance(test, ast.UnaryOp):
        return isinstance(test.op, ast.Not)
    return isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.NotEq | ast.NotIn | ast.IsNot)


def _judge(source: Source, statement: ast.stmt, body: list[ast.stmt]) -> Lock | Unclear | None:
    """Whether a statement in a place about DDTREE is a lock."""
    if isinstance(statement, ast.Assign):
        kinds = {_forced(statement)} - {None}
    elif isinstance(statement, ast.Assert):
        kinds = _kinds(statement.test, is_refusal=False)
    elif isinstance(statement, ast.If) and _refuses_or_forces(statement.body):
        kinds = _kinds(statement.test, is_refusal=True)
    else:
        return None
    demands = frozenset(kind for kind in kinds if kind is not None)
    if not demands:
        return None
    if None in kinds:
        return Unclear(source, statement, "a lock that tests something else too")
    if isinstance(statement, ast.If) and statement.orelse:
        return Unclear(source, statement, "a lock with another branch behind it")
    return Lock(demands, source, statement, body)


def _refuses_or_forces(body: list[ast.stmt]) -> bool:
    """Whether all that a branch does is say something and then raise, or force a setting."""
    *words, last = body
    ends = isinstance(last, ast.Raise) or (isinstance(last, ast.Assign) and _forced(last) is not None)
    return ends and all(isinstance(part, ast.Expr) for part in words)


def _forced(statement: ast.Assign) -> Kind | None:
    """The demand behind an attribute that is set to a constant."""
    (target, *others), value = statement.targets, statement.value
    if others or not isinstance(target, ast.Attribute) or not isinstance(value, ast.Constant):
        return None
    if target.attr == "page_size" and value.value == 1:
        return Kind.PAGE_SIZE
    if target.attr.endswith("attention_backend") and value.value == "triton":
        return Kind.BACKEND
    return None


def _kinds(test: ast.expr, is_refusal: bool) -> set[Kind | None]:
    """What a test demands; None stands for anything else that it demands besides.

    is_refusal: the test is true where a demand is not met, as before `raise`; in an assert it is the reverse.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _kinds(test.operand, not is_refusal)
    if isinstance(test, ast.BoolOp):
        kinds = set().union(*(_kinds(value, is_refusal) for value in test.values))
        # Where all parts must be true to refuse, a part that is no demand only narrows the refusal.
        only_narrows = isinstance(test.op, ast.And) == is_refusal
        return kinds - {None} if only_narrows and kinds != {None} else kinds
    return {_demand(test, is_refusal)}


def _demand(test: ast.expr, is_refusal: bool) -> Kind | None:
    """The demand of one comparison."""
    if isinstance(test, ast.Call) and not is_refusal:
        is_triton = ast.unparse(test.func) == "isinstance" and "Triton" in ast.unparse(test)
        return Kind.BACKEND if is_triton else None
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return None
    operators = (ast.NotEq, ast.NotIn, ast.Gt) if is_refusal else (ast.Eq, ast.In, ast.LtE)
    if not isinstance(test.ops[0], operators):
        return None
    subject, values = ast.unparse(test.left), _constants(test.comparators[0])
    if subject.split(".")[-1].endswith("page_size") and 1 in values and values <= {1, None}:
        return Kind.PAGE_SIZE
    if "backend" in subject and any("triton" in str(value).lower() for value in values):
        return Kind.BACKEND
    return None


def _constants(node: ast.expr) -> set[object]:
    """The constants of `1`, `(1, None)`, `{"triton"}`."""
    nodes = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    return {part.value for part in nodes if isinstance(part, ast.Constant)}
