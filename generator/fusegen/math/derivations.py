"""Derived programs, kept between runs: importing sympy takes longer than everything it derives.

A program depends on its expression, on the names it is asked for, on the sources of this package
and on sympy. All of that is hashed into the name of the file that holds it, so no entry goes stale.
The file is JSON and opens with a hash of its name and program: what is cut short, damaged or
somebody else's is ignored, and derived anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from fractions import Fraction
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from .derive import Named, joint_backward, joint_forward
from .expression import Call, Expr, Name, Number, Op, Program

_SOURCES = Path(__file__).parent


class Derivations:
    """Gives programs; an instance reads each at most once. Any number of processes share a folder.

    Args:
        folder: of the programs that were derived before. Where it cannot be read or written, and
            where it is None, programs are derived anew, to the same result.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._known: dict[tuple[object, ...], Program] = {}

    def forward(self, expressions: Named) -> Program:
        """As `joint_forward`."""
        return self._answer(("forward", expressions), lambda: joint_forward(expressions))

    def backward(self, expressions: Named, wrt: tuple[str, ...], again: Named = ()) -> Program:
        """As `joint_backward`."""
        return self._answer(
            ("backward", expressions, wrt, *again),
            lambda: joint_backward(expressions, wrt, again),
        )

    def _answer(self, question: tuple[object, ...], derive: Callable[[], Program]) -> Program:
        if question not in self._known:
            self._known[question] = (
                _kept(self._folder, question, derive) if self._folder else derive()
            )
        return self._known[question]


def _kept(folder: Path, question: tuple[object, ...], derive: Callable[[], Program]) -> Program:
    key = _digest(f"{_origin()} {question!r}")
    path = folder / f"{key}.json"
    program = _read(path, key)
    if program is None:
        program = derive()
        _write(path, key, program)
    return program


@cache
def _origin() -> str:
    """What programs depend on besides the expression: our sources and sympy."""
    sources = hashlib.sha256()
    for path in sorted(_SOURCES.glob("*.py")):
        sources.update(hashlib.sha256(path.read_bytes()).digest())
    return f"{sources.hexdigest()} sympy {metadata.version('sympy')}"


def _read(path: Path, key: str) -> Program | None:
    """The program in a file; None where there is none that was written for this key."""
    try:
        entry = json.loads(path.read_bytes())
        program = entry["program"]
        return _decode(program) if entry["sha256"] == _seal(key, program) else None
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def _write(path: Path, key: str, program: Program) -> None:
    """Put a file in place whole; a folder that cannot be written costs time, no more."""
    with suppress(OSError, ValueError):  # Python prints no constant of more than 4300 digits.
        encoded = _encode(program)
        text = json.dumps({"sha256": _seal(key, encoded), "program": encoded}, indent=1)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="tmp-", dir=path.parent) as aside:
            staged = Path(aside) / path.name
            staged.write_text(text, encoding="utf-8")
            os.replace(staged, path)


def _encode(program: Program) -> dict[str, Any]:
    return {
        "operands": [*program.operands],
        "attributes": [*program.attributes],
        "lets": [[name, _encode_expr(expr)] for name, expr in program.lets],
        "results": [[name, _encode_expr(expr)] for name, expr in program.results],
    }


def _decode(program: Mapping[str, Any]) -> Program:
    return Program(
        operands=tuple(program["operands"]),
        attributes=tuple(program["attributes"]),
        lets=tuple((name, _decode_expr(expr)) for name, expr in program["lets"]),
        results=tuple((name, _decode_expr(expr)) for name, expr in program["results"]),
    )


def _encode_expr(expr: Expr) -> Any:
    """Names as text, constants as `{"number": "1/2"}`, calls as `["MUL", left, right]`."""
    match expr:
        case Name(name):
            return name
        case Number(value):
            return {"number": str(value)}
        case Call(op, args):
            return [op.name, *map(_encode_expr, args)]


def _decode_expr(encoded: Any) -> Expr:
    match encoded:
        case str(name):
            return Name(name)
        case {"number": str(value)}:
            return Number(Fraction(value))
        case [str(op), *args]:
            return Call(Op[op], tuple(map(_decode_expr, args)))
    raise ValueError(f"{encoded!r} is no expression")


def _seal(key: str, program: object) -> str:
    return _digest(f"{key} {json.dumps(program)}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
