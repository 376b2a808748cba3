"""Rules of the architecture that a reader may rely on, read from the imports and the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
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


NAMES = {name_of(path) for path in MODULES}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> frozenset[str]:
    """Full names of everything a file imports, wherever in the file."""
    return frozenset(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    package = name_of(path).split(".")
    package = package if path.name == "__init__.py" else package[:-1]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from _modules_of(module, node)


def _modules_of(module: str, node: ast.ImportFrom) -> Iterator[str]:
    """What `from module import names` loads: a name may be a module itself."""
    for alias in node.names:
        full = f"{module}.{alias.name}"
        yield full if full in NAMES else module


def importers(top: str) -> set[str]:
    """Files that import a distribution."""
    return {
        path.relative_to(PACKAGE).as_posix()
        for path in MODULES
        if top in {name.split(".")[0] for name in imports(path)}
    }


STOREYS = (
    ("ir", "math", "options"),
    ("extensions",),  # registries take what they bring
    ("steps",),  # specs name kinds of steps
    ("families",),  # and configurations of families
    ("spec",),
    ("checks", "passes"),
    ("emit",),
    ("build",),
    ("publish",),
    ("tuning",),
    ("commands",),
    ("api",),
    ("cli",),
    ("demo", "__main__"),
)
ROOMS: Mapping[str, int] = {room: level for level, own in enumerate(STOREYS) for room in own}
"""Rooms from the ground up: each imports from those below it alone."""


def room(name: str) -> str:
    """The first part of a module's name behind ``fusegen``; empty for the package itself."""
    return name.split(".")[1] if "." in name else ""


def test_arrows_run_down() -> None:
    for path in MODULES:
        own = room(name_of(path))
        for name in imports(path):
            if name.split(".")[0] != "fusegen" or room(name) in ("", own):
                continue
            assert ROOMS[room(name)] < ROOMS[own], f"{name_of(path)} -> {name}"


@pytest.mark.parametrize("top", sorted(HEAVY))
def test_the_generator_needs_no_gpu_stack(top: str) -> None:
    assert importers(top) <= {"demo/model.py"}


def test_the_command_line_is_the_only_user_of_click() -> None:
    users = importers("click")
    assert "cli/program.py" in users
    assert all(path.startswith("cli/") or path == "demo/command.py" for path in users)


def test_nothing_imports_the_demo() -> None:
    """The command line finds its verb by name."""
    for path in MODULES:
        demo = {name for name in imports(path) if name.startswith("fusegen.demo")}
        assert not demo or path.is_relative_to(PACKAGE / "demo"), (path, demo)


def test_sympy_stays_in_the_math_package() -> None:
    users = importers("sympy")
    assert users
    assert all(path.startswith("math/") for path in users)


def test_jinja_and_yaml_have_one_user_each() -> None:
    assert importers("jinja2") == {"emit/render.py"}
    assert "spec/load.py" in importers("yaml")


def called(path: Path) -> set[str]:
    """Last names of everything a file calls."""
    functions = (node.func for node in ast.walk(tree(path)) if isinstance(node, ast.Call))
    return {getattr(f, "id", getattr(f, "attr", "")) for f in functions}


def test_nothing_that_people_write_is_executed() -> None:
    executing = {"eval", "exec", "sympify", "lambdify", "parse_expr_sympy"}
    for path in MODULES:
        loading = set() if path.name == "load.py" else {"unsafe_load", "full_load", "load_all"}
        assert not called(path) & (executing | loading), path
        assert "sympify" not in path.read_text(encoding="utf-8"), path


def test_no_import_circle() -> None:
    """No imports go round, those inside functions included, which would only hide it."""
    graph = {name_of(path): {*imports(path)} & NAMES - {name_of(path)} for path in MODULES}
    done: set[str] = set()
    while graph:
        ready = {name for name, needs in graph.items() if needs <= done}
        assert ready, f"circle among {sorted(graph)}"
        done |= ready
        graph = {name: needs for name, needs in graph.items() if name not in ready}


LATE = {
    "cli": "help and the list of verbs load no verb",
    "demo": "the same; torch is looked for before it is imported",
    "math": "sympy",
}
"""Rooms whose functions may import what is ours, and what that keeps out of start-up."""


def test_late_imports_are_of_what_is_slow_to_load() -> None:
    for path in MODULES:
        if room(name_of(path)) in LATE:
            continue
        functions = (n for n in ast.walk(tree(path)) if isinstance(n, ast.FunctionDef))
        inside = (node for function in functions for node in ast.walk(function))
        late = [ast.unparse(n) for n in inside if isinstance(n, ast.ImportFrom) and n.level]
        assert not late, (path, late)


def test_late_imports_and_modules_among_the_names_are_read() -> None:
    assert "fusegen.commands.plans" in {*imports(PACKAGE / "cli" / "plan.py")}
    assert "fusegen.publish.changes" in {*imports(PACKAGE / "cli" / "differences.py")}
