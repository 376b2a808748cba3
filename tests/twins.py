"""Cells of two bundles whose tests say the same on a CPU: those of the second need not run there.

On a CPU every bundle runs its reference, so bundles of two architectures differ in little: in their
name, in what they print for people, and in checks of their own.  A cell is a twin of another one
where every file that its tests read is the same but for these, and its checks are those of the
other one, or refuse nothing that the tests do not expect to be refused.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_HEADER = re.compile(r"\A(#.*\n)+")
SIZE_CHECK = "multiple"
STATED = {"DIGEST", "_PLAN", "ARCH"}
"""Constants that name the cell's sources, its plan as text, its architecture."""


def twins(bundle: Path, other: Path) -> set[str]:
    """Cells of a bundle that have a twin in another one."""
    cells = (path.stem.removeprefix("test_") for path in (bundle / "tests").glob("test_*__*.py"))
    return {cell for cell in cells if is_twin(cell, bundle, other)}


def is_twin(cell: str, bundle: Path, other: Path) -> bool:
    """Whether the tests of a cell say the same in both bundles, where there is no GPU."""
    if not (other / "tests" / f"test_{cell}.py").exists():
        return False
    if not all(_is_same(name, bundle, other) for name in files_of(cell, bundle)):
        return False
    return checks(cell, bundle) == checks(cell, other) or checks_let_pass(cell, bundle)


def files_of(cell: str, bundle: Path) -> Iterator[str]:
    """What the tests of a cell read: its own files, those of its bundle that all cells share.

    What the other bundle has beside these, the same code does not read.
    """
    yield from (f"reference/{cell}.py", f"tests/test_{cell}.py", f"{cell}.py")
    for folder in (bundle, bundle / "reference", bundle / "tests"):
        yield from (path.relative_to(bundle).as_posix() for path in sorted(folder.glob("_*.py")))


def checks(cell: str, bundle: Path) -> list[str]:
    """What the checks of sizes say, but for the architecture."""
    return [", ".join(map(ast.unparse, check.args[1:4])) for check in _size_checks(cell, bundle)]


def checks_let_pass(cell: str, bundle: Path) -> bool:
    """Whether no check of sizes refuses those of the tests, or larger ones that they try."""
    tests = _tree(bundle / "tests" / f"test_{cell}.py")
    sizes = _sizes(tests)
    added = [
        ast.literal_eval(call.args[0])
        for call in _calls(tests, "repeat_interleave")
        if ".narrow(" in ast.unparse(call.func)
    ]
    for check in _size_checks(cell, bundle):
        symbol, factor = ast.unparse(check.args[2]), check.args[3]
        if symbol not in sizes or not isinstance(factor, ast.Constant):
            return False  # or a factor that sizes say: what the tests make of it is not read here
        if any(size % int(str(factor.value)) for size in (sizes[symbol], *added)):
            return False
    return True


@cache
def _size_checks(cell: str, bundle: Path) -> list[ast.Call]:
    reference = bundle / "reference" / f"{cell}.py"
    return _calls(_tree(reference), SIZE_CHECK) if reference.exists() else []


def _sizes(tests: ast.Module) -> dict[str, int]:
    """The sizes that tests state, by symbol; none where they state them otherwise."""
    for node in tests.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SIZES":
            return dict(ast.literal_eval(node.value))
    return {}


def _calls(tree: ast.AST, name: str) -> list[ast.Call]:
    """Calls of a method, or of a module's function, of this name."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [c for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == name]


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def _is_same(name: str, bundle: Path, other: Path) -> bool:
    """Whether a file says the same in both, but for what `_Plain` leaves out."""
    there = [(each / name).exists() for each in (bundle, other)]
    if not all(there):
        return not any(there)
    as_text = _text(bundle, name) == _text(other, name)  # most are, and parsing takes long
    return as_text or _code(bundle, name) == _code(other, name)


@cache
def _code(bundle: Path, name: str) -> str:
    return ast.unparse(_Plain().visit(ast.parse(_text(bundle, name))))


@cache
def _text(bundle: Path, name: str) -> str:
    text = _HEADER.sub("", (bundle / name).read_text(encoding="utf-8"))
    return text.replace(f"fusegen_{bundle.name}", "fusegen_arch")


class _Plain(ast.NodeTransformer):
    """Leaves out docstrings, what the bundle states of itself, checks of sizes and their sizes."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        sizes = [_size_named(each) for each in node.body]
        if any(sizes):
            names = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
            read = {None} | {name.id for name in names if isinstance(name.ctx, ast.Load)}
            body = zip(node.body, sizes, strict=True)
            node.body = [each for each, size in body if size in read]
        node.body = node.body or [ast.Pass()]
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        said = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        checks = isinstance(node.value, ast.Call) and bool(_calls(node.value, SIZE_CHECK))
        return None if said or checks else node

    def visit_Assign(self, node: ast.Assign) -> ast.Assign | None:
        names = {target.id for target in node.targets if isinstance(target, ast.Name)}
        return None if names & STATED else node


def _size_named(node: ast.stmt) -> str | None:
    """The name a statement gives a size of a tensor, which means nothing where nobody reads it."""
    if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
        return None
    return node.targets[0].id if any(map(_is_size, ast.walk(node.value))) else None


def _is_size(node: ast.AST) -> bool:
    """Whether an expression is ``tensor.shape[...]``."""
    shape = node.value if isinstance(node, ast.Subscript) else None
    return isinstance(shape, ast.Attribute) and shape.attr == "shape"
