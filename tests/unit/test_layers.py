"""Rules of the architecture that a reader may rely on, read from the imports and the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import fusegen

PACKAGE = Path(fusegen.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
HEAVY = {"torch", "triton", "cupy", "numpy", "pycuda"}


def name_of(path: Path) -> str:
    return ".".join(("fusegen", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    )


def imports(path: Path) -> Iterator[str]:
    """Full names of everything a file imports, wherever in the file."""
    package = name_of(path).split(".")
    package = package if path.name == "__init__.py" else package[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            yield ".".join([*base, *([node.module] if node.module else [])])


def importers(top: str) -> set[str]:
    """Files that import a distribution."""
    return {
        path.relative_to(PACKAGE).as_posix()
        for path in MODULES
        if top in {name.split(".")[0] for name in imports(path)}
    }


STOREYS = (
    ("files", "columns", "ir", "math"),
    ("steps",),
    ("paths", "spec"),
    ("families", "options"),
    ("passes",),
    ("emit",),
    ("publish", "build"),
    ("tuning",),
)
"""Rooms from the ground up; all others stand on top.  Specs name kinds of steps, so that these are
below."""
ROOMS: Mapping[str, int] = {room: level for level, own in enumerate(STOREYS) for room in own}
TOP = len(STOREYS)


def room(name: str) -> str:
    """The first part of a module's name behind ``fusegen``; empty for the package itself."""
    return name.split(".")[1] if "." in name else ""


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_arrows_run_down(path: Path) -> None:
    own = room(name_of(path))
    level = ROOMS.get(own, TOP)
    for name in imports(path):
        if name.split(".")[0] != "fusegen" or room(name) in ("", own):
            continue
        assert level == TOP or ROOMS.get(room(name), TOP) < level, f"{name_of(path)} -> {name}"


@pytest.mark.parametrize("top", sorted(HEAVY))
def test_the_generator_needs_no_gpu_stack(top: str) -> None:
    assert importers(top) <= {"demo/model.py"}


def test_the_command_line_is_the_only_user_of_click() -> None:
    assert importers("click") == {"cli.py"}


def test_sympy_stays_in_the_math_package() -> None:
    users = importers("sympy")
    assert users
    assert all(path.startswith("math/") for path in users)


def test_jinja_and_yaml_have_one_user_each() -> None:
    assert importers("jinja2") == {"emit/render.py"}
    assert "spec/load.py" in importers("yaml")


def called(path: Path) -> set[str]:
    """Last names of everything a file calls."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    functions = (node.func for node in nodes if isinstance(node, ast.Call))
    return {getattr(f, "id", getattr(f, "attr", "")) for f in functions}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_nothing_that_people_write_is_executed(path: Path) -> None:
    assert not called(path) & {"eval", "exec", "sympify", "lambdify", "parse_expr_sympy"}
    assert "sympify" not in path.read_text(encoding="utf-8")
    if path.name != "load.py":
        assert not called(path) & {"unsafe_load", "full_load", "load_all"}


def test_no_import_cycle() -> None:
    """Module-level imports form no cycle; a function may import late."""
    graph = {
        name_of(path): set(_top_level(path)) & {name_of(p) for p in MODULES} for path in MODULES
    }
    done: set[str] = set()
    while graph:
        ready = {name for name, needs in graph.items() if needs <= done | {name}}
        assert ready, f"cycle among {sorted(graph)}"
        done |= ready
        graph = {name: needs for name, needs in graph.items() if name not in ready}


def _top_level(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = name_of(path).split(".")
    package = package if path.name == "__init__.py" else package[:-1]
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            known = {name_of(p) for p in MODULES}
            yield from (
                f"{module}.{alias.name}" if f"{module}.{alias.name}" in known else module
                for alias in node.names
            )
