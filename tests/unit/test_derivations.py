"""Kept programs: equal to derived ones, never believed without cause, never needed."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from fractions import Fraction
from pathlib import Path

import pytest

from fusegen.math import (
    Derivations,
    Expression,
    ExpressionError,
    Program,
    backward_program,
    derivations,
    forward_program,
    parse,
)

TEXT = "alpha * gate * sigmoid(1.702 * clamp(gate, -7, 7)) * (up + 1) / 3"
OPERANDS = ("gate", "up")


def expression(text: str = TEXT, alpha: float | None = None) -> Expression:
    return parse(text, OPERANDS, {"alpha": alpha})


@pytest.fixture
def forbid(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Once it is called, whatever derives a program fails the test."""

    def derived(*_: object) -> Program:
        raise AssertionError("derived again")

    def forbid() -> None:
        monkeypatch.setattr(derivations, "joint_forward", derived)
        monkeypatch.setattr(derivations, "joint_backward", derived)

    return forbid


def named(name: str, source: Expression) -> tuple[tuple[str, Expression], ...]:
    return ((name, source),)


def both(folder: Path | None, source: Expression) -> tuple[Program, Program]:
    kept = Derivations(folder)
    return kept.forward(named("y", source)), kept.backward(named("dy", source), OPERANDS)


def entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


@pytest.mark.parametrize("alpha", [None, 0.1])
def test_a_kept_program_is_the_derived_one(
    tmp_path: Path, forbid: Callable[[], None], alpha: float | None
) -> None:
    source = expression(alpha=alpha)
    derived = both(tmp_path, source)
    assert derived == (forward_program(source), backward_program(source, OPERANDS))
    forbid()
    assert both(tmp_path, source) == derived
    assert [path.suffix for path in entries(tmp_path)] == [".json", ".json"]


def test_every_constant_is_kept_exactly(tmp_path: Path) -> None:
    source = parse("x / 3 - 1e-37 * x", ("x",), {"k": Fraction(1, 7)})
    for _ in range(2):
        assert Derivations(tmp_path).forward(named("y", source)) == forward_program(source)


def test_whatever_is_asked_differently_is_another_program(tmp_path: Path) -> None:
    kept = Derivations(tmp_path)
    answers = [
        kept.forward(named("y", expression())),
        kept.forward(named("z", expression())),
        kept.forward(named("y", expression(alpha=0.5))),
        kept.forward(named("y", parse(TEXT, OPERANDS[::-1], {"alpha": None}))),
        kept.forward(named("y", expression("gate * up"))),
        kept.forward((*named("y", expression()), *named("z", expression("gate * up")))),
        kept.backward(named("dy", expression()), OPERANDS),
        kept.backward(named("dy", expression()), OPERANDS[:1]),
        kept.backward(named("dz", expression()), OPERANDS),
        kept.backward(
            (*named("dy", expression()), *named("dz", expression("gate * up"))), OPERANDS
        ),
    ]
    assert len(entries(tmp_path)) == len(answers) == len(set(answers))


@pytest.mark.parametrize(
    "origin", ["other sources sympy 1.14.0", "sources sympy 0.1"], ids=["ours", "sympy"]
)
def test_other_sources_or_another_sympy_derive_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: str
) -> None:
    both(tmp_path, expression())
    monkeypatch.setattr(derivations, "_origin", lambda: origin)
    both(tmp_path, expression())
    assert len(entries(tmp_path)) == 4


def _swapped(path: Path) -> str:
    return next(other for other in entries(path.parent) if other != path).read_text()


def _other_value(path: Path) -> str:
    return path.read_text().replace("SIGMOID", "TANH")


def _sealed_anew(path: Path) -> str:
    """What other code with another idea of a program might have left."""
    program = {"operands": ["gate"], "lets": [["t0", ["NO_SUCH_OP", "gate"]]]}
    return json.dumps({"sha256": derivations._seal(path.stem, program), "program": program})


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: "",
        lambda path: path.read_text()[:-20],
        lambda path: "\0" * 100,
        lambda path: "[" * 100_000,
        lambda path: "[]",
        lambda path: "{}",
        lambda path: '"text"',
        _swapped,
        _other_value,
        _sealed_anew,
    ],
    ids=["empty", "cut", "zeros", "deep", "list", "object", "text", "swapped", "value", "foreign"],
)
def test_a_damaged_entry_is_derived_anew_and_mended(
    tmp_path: Path, forbid: Callable[[], None], damage: Callable[[Path], str]
) -> None:
    derived = both(tmp_path, expression())
    damaged = [(path, damage(path)) for path in entries(tmp_path)]
    for path, text in damaged:
        path.write_text(text, encoding="utf-8")
    assert both(tmp_path, expression()) == derived
    forbid()
    assert both(tmp_path, expression()) == derived


def test_a_folder_in_place_of_an_entry_is_left_alone(tmp_path: Path) -> None:
    derived = both(tmp_path, expression())
    for path in entries(tmp_path):
        path.unlink()
        path.mkdir()
    assert both(tmp_path, expression()) == derived
    assert all(path.is_dir() and path.suffix == ".json" for path in entries(tmp_path))


def test_a_folder_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("mine")
    for folder in (occupied, occupied / "below", None):
        assert both(folder, expression()) == both(tmp_path / "good", expression())
    assert occupied.read_text() == "mine"


def test_a_full_disk_changes_nothing_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert both(tmp_path, expression()) == both(None, expression())
    assert entries(tmp_path) == []


def test_a_refused_expression_is_refused_every_time(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(ExpressionError, match="whatever the operands are"):
            Derivations(tmp_path).forward(named("y", expression("gate - gate")))
        with pytest.raises(ValueError, match="cannot differentiate by 'z'"):
            Derivations(tmp_path).backward(named("dy", expression()), ("z",))
    assert entries(tmp_path) == []


def _derive_all(folder: Path) -> list[Program]:
    texts = [f"gate * up * {n}" for n in range(1, 21)]
    return [Derivations(folder).forward(named("y", expression(text))) for text in texts]


@pytest.mark.slow
def test_concurrent_writers_leave_whole_entries(tmp_path: Path, forbid: Callable[[], None]) -> None:
    with ProcessPoolExecutor(4, mp_context=multiprocessing.get_context("spawn")) as writers:
        found = list(writers.map(_derive_all, [tmp_path] * 4, timeout=300))
    forbid()
    assert found == [_derive_all(tmp_path)] * 4
    assert len(entries(tmp_path)) == 20


_PLAN = """
import atexit, sys
atexit.register(lambda: print("sympy" in sys.modules, file=sys.stderr))
from fusegen.cli import main
main()
"""


@pytest.mark.slow
def test_sympy_is_imported_for_new_programs_only(tmp_path: Path) -> None:
    def run() -> tuple[str, str]:
        done = subprocess.run(
            [sys.executable, "-c", _PLAN, "plan", "--target", "cpu"],
            env={
                **os.environ,
                "FUSEGEN_CACHE_DIR": str(tmp_path),
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout, done.stderr.split()[-1]

    cold, warm = run(), run()
    assert (cold[1], warm[1]) == ("True", "False")
    assert cold[0] == warm[0] != ""
