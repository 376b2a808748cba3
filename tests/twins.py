"""Cells of two bundles whose tests say the same on a CPU: those of the second need not run there.

On a CPU every bundle runs its reference, so bundles of two architectures differ in little: in their
name, in what they print for people, and in checks of their own.  A cell is a twin of another one
where every file that its tests read is the same but for these, and its checks are those of the
other one, or refuse nothing that the tests do not expect to be refused.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

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
    same = checks(cell, bundle) == checks(cell, other)
    return digest(cell, bundle) == digest(cell, other) and (same or checks_let_pass(cell, bundle))


def files_of(cell: str, bundle: Path) -> Iterator[Path]:
    """The files that the tests of a cell read: its own, and those that all cells share."""
    own = (f"{cell}.py", f"reference/{cell}.py", f"tests/test_{cell}.py")
    yield from (bundle / name for name in own if (bundle / name).exists())
    for folder in (bundle, bundle / "reference", bundle / "tests"):
        yield from sorted(folder.glob("_*.py"))


def digest(cell: str, bundle: Path) -> str:
    """Of the code of those files, less what is printed for people and checks of sizes."""
    parts = hashlib.sha256()
    for path in files_of(cell, bundle):
        parts.update(f"{path.relative_to(bundle)}\0{_code_of(path, bundle.name)}\0".encode())
    return parts.hexdigest()


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
    """Calls of a function, or of a method, of this name."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [call for call in calls if ast.unparse(call.func).endswith(f".{name}")]


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def _code_of(path: Path, arch: str) -> str:
    code = ast.unparse(_Plain().visit(ast.parse(path.read_text(encoding="utf-8"))))
    return code.replace(f"fusegen_{arch}", "fusegen_arch")


class _Plain(ast.NodeTransformer):
    """Leaves out docstrings, what the bundle states of itself, checks of sizes and their sizes."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        names = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
        read = {name.id for name in names if isinstance(name.ctx, ast.Load)}
        kept = [each for each in node.body if _size_named(each) in {None, *read}]
        node.body = kept or [ast.Pass()]
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        said = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        checks = isinstance(node.value, ast.Call) and bool(_calls(node.value, SIZE_CHECK))
        return None if said or checks else node

    def visit_Assign(self, node: ast.Assign) -> ast.Assign | None:
        names = {ast.unparse(target) for target in node.targets}
        return None if names & STATED else node


def _size_named(node: ast.stmt) -> str | None:
    """The name a statement gives a size of a tensor, which means nothing where nobody reads it."""
    if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
        return None
    return node.targets[0].id if ".shape[" in ast.unparse(node.value) else None
