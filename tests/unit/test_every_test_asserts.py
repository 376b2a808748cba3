"""A test that asserts nothing passes whatever the code does: there is none, in any tier."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("tests", "generated")
FAILING = {"raises", "warns", "fail", "assert_close", "check_call", "check_output", "opcheck"}
"""Functions of others that raise where what they are given is wrong."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def files() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("test_*.py"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def functions(path: Path) -> dict[str, Function]:
    """Functions and methods of a file by name."""
    return {node.name: node for node in ast.walk(tree(path)) if isinstance(node, Function)}


@cache
def imported(path: Path) -> dict[str, Path]:
    """Names that a file imports from others of the tests' own: modules, and what is in them."""
    found = {}
    for node in ast.walk(tree(path)):
        if not isinstance(node, ast.ImportFrom | ast.Import):
            continue
        module = getattr(node, "module", None)
        for alias in node.names:
            for name in (module, alias.name, f"{module}.{alias.name}"):
                file = _file(path, name)
                if file:
                    found[alias.asname or alias.name] = file
    return found


def _file(path: Path, module: str | None) -> Path | None:
    relative = Path(*module.split(".")).with_suffix(".py") if module else None
    places = [place / relative for place in (path.parent, ROOT / "tests") if relative]
    return next((place for place in places if place.exists()), None)


def asserts(path: Path, function: ast.AST, seen: frozenset[tuple[Path, str]] = frozenset()) -> bool:
    """Whether a function has a statement that can fail, or calls one of the tests' own that has."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assert) and not isinstance(node.test, ast.Constant | ast.Tuple):
            return True
        if isinstance(node, ast.Call) and _fails(path, node, seen):
            return True
    return False


def _fails(path: Path, call: ast.Call, seen: frozenset[tuple[Path, str]]) -> bool:
    *owner, name = ast.unparse(call.func).split(".")
    checked = any(
        word.arg == "check" and ast.unparse(word.value) == "True" for word in call.keywords
    )
    if name in FAILING or checked:
        return True
    used = [name, *(ast.unparse(each) for each in call.args if isinstance(each, ast.Name))]
    return any(
        asserts(file, found, seen | {(file, each)})
        for each in used
        for file in _homes(path, owner, each)
        if (file, each) not in seen and (found := functions(file).get(each))
    )


def _homes(path: Path, owner: list[str], name: str) -> Iterator[Path]:
    """Files whose function a name may be."""
    yield path
    yield from (imported(path)[each] for each in (*owner[:1], name) if each in imported(path))


def silent(path: Path) -> list[str]:
    """Tests of a file that assert nothing."""
    tests = (f for name, f in functions(path).items() if name.startswith("test_"))
    return [f"{path.name}:{test.lineno}: {test.name}" for test in tests if not asserts(path, test)]


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS)
def test_every_test_asserts_something(folder: str) -> None:
    own = [path for path in files() if path.is_relative_to(ROOT / folder)]
    assert len(own) > 70
    assert [line for path in own for line in silent(path)] == []


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("    assert make() == 1\n", False),
        ("    make()\n", True),
        ("    assert True\n", True),
        ("    assert (make(), 'is a tuple')\n", True),
        ("    compare(make())\n", False),
        ("    with pytest.raises(ValueError):\n        make()\n", False),
        ("    subprocess.run(['x'], check=True)\n", False),
        ("    subprocess.run(['x'], check=False)\n", True),
    ],
)
def test_what_asserts_nothing_is_found(tmp_path: Path, body: str, found: bool) -> None:
    helpers = "def make():\n    return 1\ndef compare(got):\n    assert got == 1\n"
    file = tmp_path / "test_it.py"
    file.write_text(f"{helpers}def test_it():\n{body}", "utf-8")
    assert bool(silent(file)) == found
