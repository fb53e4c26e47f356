"""An SGLang tree that carries a DDTREE port of its own: open its two locks and route verify and commit to us.

No two ports are alike, so nothing is expected at a line. The locks are found by what they say
(in_tree_locks.py), and two seams by what they must do in any port:

    verify   `attn_backend_wrapper(runner, backend)`, which SGLang calls on every attention backend it builds
    commit   the call `X.verify(batch=..., page_size=...)` of the speculative worker

All of it is found, or nothing is changed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from sglang_ddtree_patch.contract_check import find_mismatches
from sglang_ddtree_patch.patches.in_tree_contract import IN_TREE_CONTRACT
from sglang_ddtree_patch.patches.in_tree_locks import Kind, Lock, Unclear, find_locks, speaks_of_ddtree
from sglang_ddtree_patch.patches.journal import Change
from sglang_ddtree_patch.patches.source_edits import Source, SourceError
from sglang_ddtree_patch.patches.tree import PatchRefusedError, SglangTree

VERIFY_SEAM = "attn_backend_wrapper"
SPECULATIVE = "sglang/srt/speculative/"
OUR_MODULES = b"sglang_ddtree_patch.in_tree."
_VERIFY_TAKES = ("batch", "page_size")
RECIPE = "docs/patches.md says how to do it by hand"


@dataclass
class Port:
    """What was found of a port, in the files that have to do with it."""

    sources: list[Source] = field(default_factory=list)
    locks: list[Lock] = field(default_factory=list)
    unclear: list[Unclear] = field(default_factory=list)
    verify_seams: list[tuple[Source, ast.FunctionDef]] = field(default_factory=list)
    commit_seams: list[tuple[Source, ast.stmt, ast.Call]] = field(default_factory=list)
    is_patched: bool = False

    def demands(self, kind: Kind) -> bool:
        return any(kind in lock.kinds for lock in self.locks)

    def describe(self) -> str:
        """One line for each thing found."""
        lines = [f"lock: {lock}" for lock in self.locks]
        if not self.demands(Kind.BACKEND):
            lines.append("no lock on the Triton backend was found, which is well: none is needed any more")
        lines += [f"verify: {source.where(function)}" for source, function in self.verify_seams]
        lines += [f"commit: {source.where(call)}" for source, _, call in self.commit_seams]
        return "\n".join(lines)


def has_port(tree: SglangTree) -> bool:
    """Whether the tree knows DDTREE by itself."""
    folder = tree.package / "srt" / "speculative"
    return any(_mentions_ddtree(path.read_bytes()) for path in folder.glob("*.py"))


def find_port(tree: SglangTree) -> Port:
    """Read every file that may belong to the port.

    Raises:
        PatchRefusedError: a file that cannot be parsed.
    """
    port = Port()
    for path in sorted((tree.package / "srt").rglob("*.py")):
        data = path.read_bytes()
        has_seam = b"def " + VERIFY_SEAM.encode() in data
        port.is_patched |= OUR_MODULES in data
        if not has_seam and not _mentions_ddtree(data):
            continue
        source = Source(f"sglang/{path.relative_to(tree.package).as_posix()}", data)
        try:
            _look(port, source)
        except (SyntaxError, UnicodeDecodeError) as error:
            raise PatchRefusedError(f"{path} cannot be parsed: {error}") from error
        port.sources.append(source)
    return port


def plan_changes(tree: SglangTree, port: Port) -> tuple[Change, ...]:
    """The files of the port with both locks opened and both steps routed.

    Raises:
        PatchRefusedError: a part that was not found, or is not as simple as it has to be.
    """
    missing = [f"{lock}" for lock in port.unclear]
    if not port.demands(Kind.PAGE_SIZE):
        missing.append("no refusal of page sizes other than 1 that speaks of DDTREE")
    if len(port.verify_seams) != 1:
        missing.append(f"{len(port.verify_seams)} functions {VERIFY_SEAM}(runner, backend), not one")
    if not port.commit_seams:
        missing.append(f"no call X.verify(batch=..., page_size=...) in {SPECULATIVE}")
    missing += [str(mismatch) for mismatch in find_mismatches(tree.package, IN_TREE_CONTRACT)]
    if missing:
        shown = "; ".join(missing[:4]) + (f"; and {len(missing) - 4} more" if len(missing) > 4 else "")
        raise PatchRefusedError(
            f"{tree.package} has a DDTREE of its own that is not understood: {shown}. {RECIPE}"
        )
    try:
        return _changes(port)
    except SourceError as error:
        raise PatchRefusedError(f"{tree.package} has a DDTREE of its own: {error}. {RECIPE}") from error


def _changes(port: Port) -> tuple[Change, ...]:
    _open_locks(port.locks)
    for source, function in port.verify_seams:
        _route_verify(source, function)
    for source, statement, call in port.commit_seams:
        _route_commit(source, statement, call)
    results = ((source, source.result()) for source in port.sources)
    return tuple(
        Change(source.path, source.data, result) for source, result in results if result != source.data
    )


def _mentions_ddtree(data: bytes) -> bool:
    return speaks_of_ddtree(data.decode("utf-8", "replace"))


def _look(port: Port, source: Source) -> None:
    for found in find_locks(source):
        if isinstance(found, Lock):
            port.locks.append(found)
        else:
            port.unclear.append(found)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef) and node.name == VERIFY_SEAM and len(node.args.args) == 2:
            port.verify_seams.append((source, node))
    if source.path.startswith(SPECULATIVE):
        port.commit_seams += [(source, *seam) for seam in _commit_calls(source.tree)]


def _commit_calls(tree: ast.Module) -> Iterator[tuple[ast.stmt, ast.Call]]:
    """Each call `X.verify(...)` that is given a batch and a page size, with its statement."""
    for statement in ast.walk(tree):
        if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr | ast.Return):
            continue
        for node in ast.walk(statement):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr == "verify" and all(_argument(node, name) for name in _VERIFY_TAKES):
                yield statement, node


def _argument(call: ast.Call, name: str) -> ast.expr | None:
    """What a call passes under a name, or by a variable of that name."""
    named = [keyword.value for keyword in call.keywords if keyword.arg == name]
    by_place = [value for value in call.args if ast.unparse(value).rpartition(".")[2] == name]
    return next(iter(named + by_place), None)


def _open_locks(locks: list[Lock]) -> None:
    for lock in locks:
        in_body = [other.statement for other in locks if other.body is lock.body]
        is_last = lock.statement is in_body[-1] and len(in_body) == len(lock.body)
        is_elif = lock.source.text(lock.statement).startswith("elif")
        lock.source.delete(lock.statement, leave_pass=is_last and not is_elif)


def _route_verify(source: Source, function: ast.FunctionDef) -> None:
    runner, backend = (argument.arg for argument in function.args.args)
    is_docstring = ast.get_docstring(function) is not None and len(function.body) > 1
    source.insert_before(
        function.body[1 if is_docstring else 0],
        [
            "# sglang-ddtree-patch: trees are verified by its kernels, in front of any backend.",
            "from sglang_ddtree_patch.in_tree.backend import in_front_of",
            "",
            f"{backend} = in_front_of({runner}, {backend})",
        ],
    )


def _route_commit(source: Source, statement: ast.stmt, call: ast.Call) -> None:
    function, batch, page_size = call.func, _argument(call, "batch"), _argument(call, "page_size")
    assert isinstance(function, ast.Attribute)  # `_commit_calls` has seen to all three
    assert batch is not None
    assert page_size is not None
    source.insert_before(
        statement,
        [
            "# sglang-ddtree-patch: accepted rows move to the front of the block, at any page size.",
            "from sglang_ddtree_patch.in_tree.commit import committing",
            "",
        ],
    )
    owner, arguments = source.text(function.value), f"{source.text(batch)}, {source.text(page_size)}"
    source.replace(function, f"committing({owner}, {arguments})")
    source.replace(page_size, "1")
