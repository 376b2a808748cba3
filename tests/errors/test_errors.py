"""A folder per wrong spec and the exact messages of its run; every message of the code is in one.

``FUSEGEN_ACCEPT=1 pytest tests/errors`` writes the messages that come out; review the diff.
"""

from __future__ import annotations

import ast
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import ParamSpec, TypeVar

import pytest

from fusegen import checks, steps
from fusegen.checks import load as loading
from fusegen.ir.words import AttributeType
from fusegen.publish.paths import builtin_specs
from fusegen.spec import diagnostics as source
from fusegen.spec import fields, load, op
from fusegen.steps.definition import AttributeDef, Reference, StepDef

CASES = tuple(sorted(path.parent for path in Path(__file__).parent.glob("*/expected.txt")))
BUILTIN = builtin_specs()
SIZE_LIMIT = 1 << 20
SOURCES = (
    *sorted(Path(inspect.getfile(checks)).parent.rglob("*.py")),
    *(Path(inspect.getfile(module)) for module in (load, fields, op)),
)
RESCALE = StepDef(
    "rescale",
    operands=("a",),
    attributes=(AttributeDef("factor", AttributeType.FLOAT),),
    shapes={None: {"a": "T... K", "out": "T... K"}},
    reference=Reference("steps.rescale", frozenset(("a",))),
)
KINDS = {"step_attributes": RESCALE}
"""Kinds of steps that a case has beside the shipped ones."""
FINDERS = ("unknown", "require_known")
"""Functions that find a problem for others: what counts is the place they are called from."""
MAKERS = ("problem", "problem_within", "Problem", "problem_at")

P = ParamSpec("P")
R = TypeVar("R")
Line = tuple[str, int]


def messages(*folders: Path) -> str:
    """The messages of a run, one a line; empty where the specs are right."""
    kind = KINDS.get(folders[-1].name)
    with pytest.MonkeyPatch.context() as patch:
        if kind:
            patch.setitem(steps.BY_NAME, kind.name, kind)
        try:
            loading.load(folders)
        except source.SpecError as error:
            return f"{error}\n"
    return ""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_messages(case: Path) -> None:
    got = messages(BUILTIN, case)
    expected = case / "expected.txt"
    if os.environ.get("FUSEGEN_ACCEPT"):
        expected.write_text(got, encoding="utf-8")
    assert got
    assert got == expected.read_text(encoding="utf-8")


def test_every_folder_has_its_messages() -> None:
    folders = {path for path in Path(__file__).parent.iterdir() if path.is_dir()}
    assert {path.name for path in folders if path.name != "__pycache__"} == {c.name for c in CASES}


def test_messages_are_sorted_and_each_stands_once() -> None:
    for case in CASES:
        lines = (case / "expected.txt").read_text(encoding="utf-8").splitlines()
        assert len(lines) == len(set(lines)), case.name


def test_oversized_file(tmp_path: Path) -> None:
    write(tmp_path / "big" / "ops" / "toy.yaml", f"# {'x' * SIZE_LIMIT}\n")
    assert messages(BUILTIN, tmp_path / "big") == (
        f"big/ops/toy.yaml:1:1: not a spec: the file is larger than {SIZE_LIMIT} bytes; split it\n"
    )


def test_missing_folder(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    assert messages(BUILTIN, missing) == f"{missing}:1:1: there is no such spec folder\n"


def test_hidden_files_are_no_specs(tmp_path: Path) -> None:
    write(tmp_path / "mine" / "ops" / ".toy.yaml.swp", "not a spec")
    assert messages(BUILTIN, tmp_path / "mine") == ""


@pytest.mark.slow
def test_every_problem_of_the_code_has_a_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Record from which lines problems come: every statement that makes one must be among them."""
    lines: set[Line] = set()
    monkeypatch.setattr(load.Source, "problem", _recorded(load.Source.problem, lines))
    monkeypatch.setattr(load.Source, "problem_within", _recorded(load.Source.problem_within, lines))
    monkeypatch.setattr(load, "Problem", _recorded(source.Problem, lines))
    for module in (fields, op):  # each has it under a name of its own
        monkeypatch.setattr(module, "problem_at", _recorded(fields.problem_at, lines))
    for case in (*CASES, tmp_path / "nowhere"):
        messages(BUILTIN, case)
    statements = [(path, each) for path in SOURCES for each in _problem_statements(path)]
    missed = [
        f"{path.parent.name}/{path.name}:{statement.lineno}"
        for path, statement in statements
        if not any((str(path), line) in lines for line in _lines_of(statement))
    ]
    assert not missed, f"no case reaches {', '.join(missed)}"
    assert len(statements) > 90


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _recorded(function: Callable[P, R], lines: set[Line]) -> Callable[P, R]:
    """The function, noting the line of every frame that led to a call of it."""

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            lines.add((frame.f_code.co_filename, frame.f_lineno))
            frame = frame.f_back
        return function(*args, **kwargs)

    return call


def _problem_statements(path: Path) -> Iterator[ast.stmt]:
    """Simple statements that make a problem, or ask a finder to, outside the makers themselves."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    makers = [
        _lines_of(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name in (*MAKERS, *FINDERS)
    ]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Expr | ast.Raise | ast.Assign | ast.Return):
            continue
        inside = any(node.lineno in lines for lines in makers)
        if not inside and any(_makes_problem(part) for part in ast.walk(node)):
            yield node


def _lines_of(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _makes_problem(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    return getattr(node.func, "id", getattr(node.func, "attr", "")) in (*MAKERS, *FINDERS)
