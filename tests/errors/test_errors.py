"""A folder per wrong spec and the exact messages of its run; every message of the code is in one.

``FUSEGEN_ACCEPT=1 pytest tests/errors`` writes the messages that come out; review the diff.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from fusegen import check, load
from fusegen.load import SpecError
from fusegen.model import specs
from fusegen.paths import builtin_specs

CASES = tuple(sorted(path.parent for path in Path(__file__).parent.glob("*/expected.txt")))
BUILTIN = builtin_specs()
SIZE_LIMIT = 1 << 20
FINDERS = ("_unknown", "_known")
"""Functions that find a problem for others: what counts is the place they are called from."""


def messages(*folders: Path) -> str:
    """The messages of a run, one a line; empty where the specs are right."""
    try:
        load.load(folders)
    except SpecError as error:
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


def test_every_problem_of_the_code_has_a_case(tmp_path: Path) -> None:
    """Trace the lines that make a problem: each must run for at least one case."""
    expected = {
        (Path(module.__file__ or "").name, line)
        for module in (check, load, specs)
        for line in _problem_lines(Path(module.__file__ or ""))
    }
    write(tmp_path / "big" / "ops" / "toy.yaml", "#" * (SIZE_LIMIT + 1))
    found = _Lines({Path(module.__file__ or ""): module for module in (check, load, specs)})
    before = sys.gettrace()
    sys.settrace(found.trace)
    try:
        for case in (*CASES, tmp_path / "big", tmp_path / "nowhere"):
            messages(BUILTIN, case)
    finally:
        sys.settrace(before)
    missed = sorted(expected - found.statements)
    assert not missed, "no case reaches " + ", ".join(f"{file}:{line}" for file, line in missed)
    assert len(expected) > 90


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr | ast.Raise | ast.Assign | ast.Return):
            yield node


def _problem_lines(path: Path) -> Iterator[int]:
    """First lines of the statements that make a problem, but not of those inside a finder."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    finders = [
        range(node.lineno, (node.end_lineno or 0) + 1)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name in (*FINDERS, "problem", "_error")
    ]
    for statement in _statements(tree):
        inside = any(statement.lineno in lines for lines in finders)
        if not inside and any(_makes_problem(node) for node in ast.walk(statement)):
            yield statement.lineno


def _makes_problem(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = getattr(node.func, "id", getattr(node.func, "attr", ""))
    return name in (*FINDERS, "problem", "Problem", "_error", "ValueError")


class _Lines:
    """Statements that ran; a call of a finder counts where the finder found something."""

    def __init__(self, modules: dict[Path, Any]) -> None:
        self.statements: set[tuple[str, int]] = set()
        self._starts = {str(path): _starts(path) for path in modules}

    def trace(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        return self._line if frame.f_code.co_filename in self._starts else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        caller = frame.f_back
        finder = frame.f_code.co_name in FINDERS
        if event == "line" and not finder:
            self._add(frame)
        if finder and caller and event == "line" and self._finds(frame):
            self._add(caller, finder=True)
        return self._line

    def _finds(self, frame: FrameType) -> bool:
        """Whether the finder is at its last statement, which makes the problem."""
        return frame.f_lineno in _last_lines(frame.f_code.co_filename, frame.f_code.co_name)

    def _add(self, frame: FrameType, *, finder: bool = False) -> None:
        start, calls_finder = self._starts.get(frame.f_code.co_filename, {}).get(
            frame.f_lineno, (0, False)
        )
        if calls_finder == finder:
            self.statements.add((Path(frame.f_code.co_filename).name, start))


def _starts(path: Path) -> dict[int, tuple[int, bool]]:
    """Line -> first line of its statement, and whether the statement calls a finder."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    lines = {}
    for statement in _statements(tree):
        calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
        finder = any(getattr(call.func, "id", "") in FINDERS for call in calls)
        for line in range(statement.lineno, (statement.end_lineno or 0) + 1):
            lines[line] = (statement.lineno, finder)
    return lines


@cache
def _last_lines(file: str, function: str) -> range:
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            last = node.body[-1].body[-1] if isinstance(node.body[-1], ast.If) else node.body[-1]
            return range(last.lineno, (last.end_lineno or 0) + 1)
    raise AssertionError(f"{file} has no {function}")
