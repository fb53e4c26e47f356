"""Hold an SGLang source tree to the contract without importing it.

Sources are parsed, not imported: the check costs a second at most, pulls in no GPU library, runs on an
unpacked wheel as well as on the installed package, and sees what the files say before any other plugin
has wrapped it.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

from sglang_ddtree_patch.contract import SUPPORTED_VERSION, Attribute
from sglang_ddtree_patch.releases import NEWEST, RELEASES, Release


@dataclass(frozen=True)
class Mismatch:
    """One attribute that is not as the contract says."""

    attribute: Attribute
    found: str

    def __str__(self) -> str:
        return f"{self.attribute.path}: expected {self.attribute.expectation}, found {self.found}"


@dataclass(frozen=True)
class ContractReport:
    """The outcome of one check."""

    version: str
    mismatches: tuple[Mismatch, ...]
    release: Release = NEWEST  # whose contract the sources were held to

    @property
    def entries(self) -> int:
        return len(self.release.contract)

    def summary(self) -> str:
        """One line: what does not match, in which SGLang, and what to type."""
        count = len(self.mismatches)
        shown = "; ".join(str(mismatch) for mismatch in self.mismatches[:3])
        more = f"; and {count - 3} more" if count > 3 else ""
        return (
            f"SGLang {self.version} does not match what sglang-ddtree-patch relies on ({count} of "
            f"{self.entries}: {shown}{more}). SGLang serves without DDTREE; for DDTREE type: "
            f"pip install sglang=={SUPPORTED_VERSION}"
        )


@cache
def check_installed_sglang() -> ContractReport:
    """Check the SGLang that this Python would import, once a process.

    Raises:
        ModuleNotFoundError: SGLang is not installed.
    """
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError("SGLang is not installed: pip install 'sglang-ddtree-patch[sglang]'")
    return check_releases(Path(next(iter(spec.submodule_search_locations))), _installed_version())


def installed_release() -> Release:
    """The release that this Python's SGLang fulfils, which is how the package is to behave.

    Asked only where the plugin has loaded, so the contract holds.
    """
    return check_installed_sglang().release


def _installed_version() -> str:
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:  # a source tree on PYTHONPATH
        return "of unknown version"


def check_releases(root: Path, version: str, releases: Sequence[Release] = RELEASES) -> ContractReport:
    """Find the release whose contract the package folder `root` (the one that holds `srt/`) fulfils.

    The release that `version` names is tried first, else the newest: it is the one reported where none fits.
    """
    likeliest_first = sorted(releases, key=lambda release: release.version != version)
    reports = (check(root, version, release) for release in likeliest_first)
    first = next(reports)
    if not first.mismatches:
        return first
    return next((report for report in reports if not report.mismatches), first)


def check(root: Path, version: str, release: Release = NEWEST) -> ContractReport:
    """Hold the package folder `root`, said to be `version`, to one release's contract."""
    return ContractReport(version, find_mismatches(root, release.contract), release)


def find_mismatches(root: Path, contract: Iterable[Attribute]) -> tuple[Mismatch, ...]:
    """The entries that the package folder `root` does not fulfil."""
    modules: dict[str, Module | None] = {}
    mismatches = []
    for attribute in contract:
        if attribute.module not in modules:
            modules[attribute.module] = Module.read(root, attribute.module)
        found = _difference(attribute, modules[attribute.module])
        if found is not None:
            mismatches.append(Mismatch(attribute, found))
    return tuple(mismatches)


def _difference(attribute: Attribute, module: Module | None) -> str | None:
    if module is None:
        return "no such module"
    node = module.find(attribute.name)
    if node is None:
        return "nothing of that name"
    if attribute.parameters is not None:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return "something that is not a function"
        parameters = parameter_names(node)
        if parameters != attribute.parameters:
            return f"({', '.join(parameters)})"
    if attribute.members:
        strings = {child.value for child in ast.walk(node) if isinstance(child, ast.Constant)}
        missing = [member for member in attribute.members if member not in strings]
        if missing:
            return f"no {', '.join(missing)}"
    return None


def parameter_names(function: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, ...]:
    """A function's parameter names in order, without `self` and `cls`; `*args` and `**kwargs` starred."""
    spec = function.args
    names = [argument.arg for argument in (*spec.posonlyargs, *spec.args)]
    if spec.vararg is not None:
        names.append(f"*{spec.vararg.arg}")
    names += [argument.arg for argument in spec.kwonlyargs]
    if spec.kwarg is not None:
        names.append(f"**{spec.kwarg.arg}")
    return tuple(name for name in names if name not in ("self", "cls"))


@dataclass(frozen=True)
class Module:
    """A parsed source file."""

    tree: ast.Module
    members: dict[str, dict[str, ast.AST]] = field(default_factory=dict)  # of the classes asked about

    @classmethod
    def read(cls, root: Path, name: str) -> Module | None:
        """Parse module `name` ("sglang.srt.x") below the package folder `root`, or None if it is absent.

        Raises:
            SyntaxError: it is no Python.
        """
        base = root.joinpath(*name.split(".")[1:])
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return cls(_parse(path))
        return None

    @cached_property
    def names(self) -> dict[str, ast.AST]:
        return _names_in(self.tree.body)

    def find(self, dotted: str) -> ast.AST | None:
        """The definition of `name` or `Class.name`; for a class also what its methods set on `self`."""
        owner, _, member = dotted.partition(".")
        node = self.names.get(owner)
        if not member or node is None:
            return node
        if not isinstance(node, ast.ClassDef):
            return None
        if owner not in self.members:
            self.members[owner] = _set_on_self(node) | _names_in(node.body)
        return self.members[owner].get(member)


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:  # ValueError: bytes that no source may hold
        raise SyntaxError(f"{path} is no Python: {error}") from error


def _names_in(body: list[ast.stmt]) -> dict[str, ast.AST]:
    """Names that a module or class body defines, assigns or imports, branches included."""
    names: dict[str, ast.AST] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[node.name] = node
        elif isinstance(node, ast.Assign):
            names |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names[node.target.id] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name: node for alias in node.names}
        elif isinstance(node, ast.If | ast.Try):
            names |= _names_in(node.body)
    return names


def _set_on_self(owner: ast.ClassDef) -> dict[str, ast.AST]:
    targets = (
        target
        for node in ast.walk(owner)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    )
    attributes = (target for target in targets if isinstance(target, ast.Attribute))
    return {
        target.attr: target
        for target in attributes
        if isinstance(target.value, ast.Name) and target.value.id == "self"
    }
