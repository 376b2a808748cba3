"""Types of what people write in specs, and what is said where they are not met."""

from __future__ import annotations

from enum import Enum
from math import isfinite
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, StringConstraints, WithJsonSchema
from pydantic_core import PydanticCustomError

from ..ir.names import MARK
from ..ir.predicate import Comparison, Predicate, SizeVariable, parse_predicate
from ..ir.shapes import Binary, Const, Expr, Shape, Sym, parse_expr
from ..options import OPTIONS
from ..steps import BY_NAME, SHIPPED
from .diagnostics import did_you_mean

NAME = r"^[a-z][a-z0-9]*(_[a-z0-9]+)*$"


CAPITAL = r"^[A-Z][A-Za-z0-9]*$"


ARCH = r"^(cpu|sm_[0-9]+a?(_[a-z][a-z0-9]*)?)$"


_CODE = r"sm_[0-9]+[af]?"


GENCODE = rf"^arch=compute_[0-9]+[af]?,code=({_CODE}|\[{_CODE},compute_[0-9]+[af]?\])$"


VERSION = r"^[0-9]{1,3}\.[0-9]{1,2}$"


PATTERNS = {
    NAME: "a name in snake_case with single underscores",
    CAPITAL: "a capital letter, then letters and digits",
    ARCH: "cpu or sm_<number>, with an a behind it for its own instructions, and a word for a"
    " part with rules of its own, such as sm_90a_h20",
    GENCODE: "what nvcc is told, such as arch=compute_90a,code=sm_90a or, with PTX for later GPUs,"
    " arch=compute_80,code=[sm_80,compute_80]",
    VERSION: 'a version in quotes, such as "12.3"',
}


"""Every pattern, in words for error messages."""


Name = Annotated[str, StringConstraints(pattern=NAME, max_length=40)]


"""snake_case without double underscores, which separate the parts of a cell's name."""


Symbol = Annotated[str, StringConstraints(pattern=CAPITAL, max_length=8)]


"""A dimension: starts with a capital."""


ClassName = Annotated[str, StringConstraints(pattern=CAPITAL, max_length=40)]


Edition = Literal[2]


def problem_at(kind: str, text: str, *path: str) -> PydanticCustomError:
    """A problem at a key below the value that is being read."""
    return PydanticCustomError(kind, "{text}", {"text": text, "path": path})


def _shape(value: object) -> object:
    if isinstance(value, Shape):
        return value
    if not isinstance(value, list) or not all(isinstance(item, str | int) for item in value):
        raise problem_at(
            "shape", f"expected a list of dimensions such as [T, 2 * D], got {value!r}"
        )
    try:
        return Shape.parse(value)
    except ValueError as error:
        raise problem_at("shape", str(error)) from None


def _expr(value: object) -> object:
    if isinstance(value, Const | Sym | Binary):
        return value
    if not isinstance(value, str | int):
        raise problem_at("expression", f"expected a size such as 2 * F, got {value!r}")
    try:
        return parse_expr(value)
    except ValueError as error:
        raise problem_at("expression", str(error)) from None


def _predicate(value: object) -> object:
    if isinstance(value, Predicate):
        return value
    if not isinstance(value, dict):
        raise problem_at(
            "predicate", f"expected conditions such as {{groups: {{lt: 64}}}}, got {value!r}"
        )
    for variable, comparisons in value.items():
        require_known("size", variable, SizeVariable, variable)
        if not isinstance(comparisons, dict) or not comparisons:
            raise problem_at(
                "predicate",
                f"expected comparisons such as {{lt: 64}}, got {comparisons!r}",
                variable,
            )
        for comparison, number in comparisons.items():
            require_known("comparison", comparison, Comparison, variable, comparison)
            least = 1 if comparison == Comparison.MULTIPLE_OF.value else 0
            if type(number) is not int or number < least:
                raise problem_at(
                    "predicate",
                    f"expected an integer of at least {least}, got {number!r}",
                    variable,
                    comparison,
                )
    return parse_predicate(value)


def require_known(what: str, word: object, choices: type[Enum], *path: str) -> None:
    known = [choice.value for choice in choices]
    if word not in known:
        raise problem_at(
            "unknown", f"unknown {what} {word!r}{did_you_mean(str(word), known)}", *path
        )


def _option_name(word: str) -> str:
    known = [option.name for option in OPTIONS]
    if word not in known:
        raise problem_at("unknown", f"unknown option {word!r}{did_you_mean(word, known)}")
    return word


_FROM_PACKAGES = (
    "a kind of an extension comes with its package: pip install it (fusegen list extensions shows"
    " what is installed)"
)


def step_name(word: object, *path: str) -> str:
    """The name of a kind of step, read from a spec."""
    if not isinstance(word, str) or word not in BY_NAME:
        hint = did_you_mean(str(word), BY_NAME)
        listed = f" Known: {', '.join(sorted(BY_NAME))}" if hint.endswith("?") else ""
        others = "" if listed else f"; {_FROM_PACKAGES}"
        raise problem_at("unknown", f"unknown step {word!r}{hint}{listed}{others}", *path)
    return word


def one_line(text: str) -> str:
    """Text without control characters, line breaks, bidirectional marks and the like."""
    odd = next((c for c in text if not c.isprintable() or c == MARK), "")
    if odd:
        raise problem_at("text", f"expected one line of printable text, got character {odd!a}")
    return text


def scalar(value: object) -> object:
    """What every language can print as a constant."""
    if isinstance(value, str):
        return one_line(value)
    if isinstance(value, float) and not isfinite(value):
        raise problem_at("scalar", f"expected a finite number, got {value}")
    return value


Line = Annotated[str, StringConstraints(min_length=1, max_length=200), AfterValidator(one_line)]


"""What people read in comments, docstrings and tables: one line of printable text."""


StepName = Annotated[
    str, BeforeValidator(step_name), WithJsonSchema({"enum": [each.name for each in SHIPPED]})
]


"""A kind of step."""


Scalar = Annotated[float | int | bool | str, BeforeValidator(scalar)]


"""The value of an attribute."""


ShapeField = Annotated[
    Shape,
    BeforeValidator(_shape),
    WithJsonSchema({"type": "array", "items": {"type": ["string", "integer"]}}),
]


ExprField = Annotated[Expr, BeforeValidator(_expr), WithJsonSchema({"type": ["string", "integer"]})]


PredicateField = Annotated[
    Predicate, BeforeValidator(_predicate), WithJsonSchema({"type": "object"})
]


OptionName = Annotated[
    str,
    AfterValidator(_option_name),
    WithJsonSchema({"enum": [option.name for option in OPTIONS], "type": "string"}),
]
"""An option of the registry."""
