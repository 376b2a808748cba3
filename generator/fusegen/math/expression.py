"""The small language that parser, derivation and printers share."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from fractions import Fraction

# From here on a value rounds to infinity in float32.
_FLOAT32_OVERFLOW = Fraction(2**128 - 2**103)
_FLOAT32_SMALLEST_NORMAL = Fraction(1, 2**126)


class ExpressionError(ValueError):
    """A pointwise expression that cannot be accepted; `column` counts from 1 in its text."""

    def __init__(self, message: str, column: int) -> None:
        super().__init__(f"column {column}: {message}")
        self.message = message
        self.column = column


class Op(Enum):
    """Every operation, as (name, number of arguments, cost).

    Cost is counted in float32 instructions of a GPU, roughly: a division or a root is a short
    subroutine there, an accurate exponential a longer one. A slope of a sigmoid is what it takes
    where the sigmoid is computed, too: the exponential and the reciprocal are shared.
    """

    ADD = ("+", 2, 1)
    SUB = ("-", 2, 1)
    MUL = ("*", 2, 1)
    DIV = ("/", 2, 10)
    NEG = ("neg", 1, 1)
    POW = ("**", 2, 1)
    SIGMOID = ("sigmoid", 1, 22)
    SIGMOID_SLOPE = ("sigmoid_slope", 1, 2)
    TANH = ("tanh", 1, 24)
    RELU = ("relu", 1, 1)
    CLAMP = ("clamp", 3, 2)
    MINIMUM = ("minimum", 2, 1)
    MAXIMUM = ("maximum", 2, 1)
    SOFTPLUS = ("softplus", 1, 32)
    ERF = ("erf", 1, 24)
    ERFC = ("erfc", 1, 30)
    EXP = ("exp", 1, 10)
    EXP2 = ("exp2", 1, 5)
    SQRT = ("sqrt", 1, 10)
    RSQRT = ("rsqrt", 1, 20)
    SQUARE = ("square", 1, 1)
    ABS = ("abs", 1, 1)
    SIGN = ("sign", 1, 2)
    LESS = ("<", 2, 1)
    LESS_EQUAL = ("<=", 2, 1)
    GREATER_EQUAL = (">=", 2, 1)
    EQUAL = ("==", 2, 1)
    AND = ("and", 2, 1)
    SELECT = ("select", 3, 1)

    @property
    def text(self) -> str:
        return self.value[0]

    @property
    def arity(self) -> int:
        return self.value[1]

    @property
    def cost(self) -> int:
        return self.value[2]


# What a spec may call, with the arguments as an error message shows them. `erfc`, `exp2`, `sign`,
# `select`, `sigmoid_slope` and the comparisons appear only in derived programs.
CALLABLE: dict[str, tuple[Op, str]] = {
    "sigmoid": (Op.SIGMOID, "x"),
    "tanh": (Op.TANH, "x"),
    "relu": (Op.RELU, "x"),
    "clamp": (Op.CLAMP, "x, lo, hi"),
    "minimum": (Op.MINIMUM, "a, b"),
    "maximum": (Op.MAXIMUM, "a, b"),
    "softplus": (Op.SOFTPLUS, "x"),
    "erf": (Op.ERF, "x"),
    "exp": (Op.EXP, "x"),
    "sqrt": (Op.SQRT, "x"),
    "rsqrt": (Op.RSQRT, "x"),
    "square": (Op.SQUARE, "x"),
    "abs": (Op.ABS, "x"),
}

COMPARISONS = frozenset({Op.LESS, Op.LESS_EQUAL, Op.GREATER_EQUAL, Op.EQUAL, Op.AND})


@dataclass(frozen=True, slots=True)
class Number:
    """An exact constant; printing rounds it once."""

    value: Fraction


@dataclass(frozen=True, slots=True)
class Name:
    """An operand, an attribute kept symbolic, or a `let`."""

    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """An operation applied to its arguments."""

    op: Op
    args: tuple[Expr, ...]


Expr = Number | Name | Call

ZERO = Number(Fraction(0))
ONE = Number(Fraction(1))


def walk(expr: Expr) -> Iterator[Expr]:
    """Every node, parents first."""
    yield expr
    if isinstance(expr, Call):
        for arg in expr.args:
            yield from walk(arg)


def names_in(expr: Expr) -> frozenset[str]:
    return frozenset(node.name for node in walk(expr) if isinstance(node, Name))


def size(expr: Expr) -> int:
    return sum(1 for _ in walk(expr))


def fits_float32(value: Fraction) -> bool:
    """Whether a constant rounds to 0 or to a normal finite float32."""
    return value == 0 or _FLOAT32_SMALLEST_NORMAL <= abs(value) < _FLOAT32_OVERFLOW


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed expression.

    `operands` are the declared tensors in their declared order, `attributes` the declared scalars
    with their value, or None where the value stays a run-time argument.
    """

    text: str
    tree: Expr
    operands: tuple[str, ...]
    attributes: tuple[tuple[str, Fraction | None], ...]


@dataclass(frozen=True, slots=True)
class Program:
    """Straight-line code over one element.

    `operands` and `attributes` are what the program reads, and no more: the operands of a backward
    program are what its caller has to keep. Lets come in an order in which each uses only earlier
    ones.
    """

    operands: tuple[str, ...]
    attributes: tuple[str, ...]
    lets: tuple[tuple[str, Expr], ...]
    results: tuple[tuple[str, Expr], ...]

    def without(self, names: Collection[str]) -> Program:
        """The program without some results, and what only these read."""
        results = tuple(result for result in self.results if result[0] not in names)
        read = {name for _, expr in (*self.lets, *results) for name in names_in(expr)}
        operands = tuple(name for name in self.operands if name in read)
        return replace(self, operands=operands, results=results)

    @property
    def cost(self) -> int:
        """Float32 instructions per element, roughly (see `Op`)."""
        statements = (*self.lets, *self.results)
        nodes = (node for _, expr in statements for node in walk(expr))
        return sum(node.op.cost for node in nodes if isinstance(node, Call))
