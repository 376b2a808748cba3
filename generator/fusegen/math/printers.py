"""Programs as PyTorch, CUDA C++ and plain mathematics."""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from collections import Counter
from fractions import Fraction

from .expression import (
    COMPARISONS,
    ZERO,
    Call,
    Expr,
    Expression,
    Name,
    Number,
    Op,
    Program,
    names_in,
    walk,
)

_INFIX: dict[Op, int] = {
    Op.AND: 1,
    Op.LESS: 2,
    Op.LESS_EQUAL: 2,
    Op.GREATER_EQUAL: 2,
    Op.EQUAL: 2,
    Op.ADD: 3,
    Op.SUB: 3,
    Op.MUL: 4,
    Op.DIV: 4,
    Op.POW: 6,
}
_SELECT = 0
_NEGATION = 5
_ATOM = 7


def to_torch(program: Program) -> list[str]:
    """PyTorch statements, one per line, over float tensors named as the program's operands.

    Operands broadcast against each other; attributes are Python floats. The code needs `torch`
    alone and runs in the operands' dtype, so the same text evaluates in float64.
    """
    printer = _Torch(program)
    return [
        *(f"{name} = {printer.text(expr)}" for name, expr in program.lets),
        *(f"{name} = {printer.tensor(expr)}" for name, expr in program.results),
    ]


def to_cuda(program: Program) -> list[str]:
    """C++ statements, one per line, over `float` scalars; the code needs `fusegen/math.cuh`."""
    printer = _Cuda()
    lines = []
    for name, expr in (*program.lets, *program.results):
        kind = "bool" if isinstance(expr, Call) and expr.op in COMPARISONS else "float"
        lines.append(f"const {kind} {name} = {printer.text(expr)};")
    return lines


def to_math(math: Expression | Program) -> str:
    """One line for documentation: the formula as it was written, or what a program computes.

    Guards that only matter at infinity are left out.
    """
    printer = _Math()
    if isinstance(math, Expression):
        return printer.text(math.tree)
    lets = {name: _unguarded(expr) for name, expr in math.lets}
    results = {name: _unguarded(expr) for name, expr in math.results}
    uses = Counter(
        node.name
        for expr in (*lets.values(), *results.values())
        for node in walk(expr)
        if isinstance(node, Name)
    )
    once: dict[str, Expr] = {}
    shared: dict[str, Expr] = {}
    for name, expr in lets.items():
        (once if uses[name] < 2 else shared)[name] = _substitute(expr, once)
    formulas = "; ".join(f"{n} = {printer.text(_substitute(e, once))}" for n, e in results.items())
    where = ", ".join(f"{name} = {printer.text(expr)}" for name, expr in shared.items())
    return f"{formulas} where {where}" if where else formulas


class _Printer(ABC):
    """Infix printing with the fewest parentheses that keep the order of operations."""

    negative = "-"

    def text(self, expr: Expr) -> str:
        return self.render(expr)[0]

    def render(self, expr: Expr) -> tuple[str, int]:
        """The text and how tightly it binds."""
        match expr:
            case Number(value):
                return self.number(value), _ATOM if value >= 0 else _NEGATION
            case Name(name):
                return name, _ATOM
            case Call(Op.NEG, (arg,)):
                return f"-{self.wrapped(arg, _NEGATION + 1)}", _NEGATION
            case Call(Op.SELECT, (condition, yes, no)):
                return self.select(condition, yes, no)
            case Call(op, (left, right)) if op in _INFIX:
                return self.infix(op, left, right)
            case Call(op, args):
                return self.function(op, args), _ATOM
        raise AssertionError(expr)

    def wrapped(self, expr: Expr, binding: int) -> str:
        text, own = self.render(expr)
        return text if own >= binding else f"({text})"

    def infix(self, op: Op, left: Expr, right: Expr) -> tuple[str, int]:
        binding = _INFIX[op]
        chains = op in (Op.ADD, Op.SUB, Op.MUL, Op.DIV)
        first = self.wrapped(left, binding if chains else binding + 1)
        return f"{first} {self.symbol(op)} {self.wrapped(right, binding + 1)}", binding

    def symbol(self, op: Op) -> str:
        return op.text

    def function(self, op: Op, args: tuple[Expr, ...]) -> str:
        return f"{op.text}({', '.join(self.text(arg) for arg in args)})"

    @abstractmethod
    def number(self, value: Fraction) -> str:
        """A constant as the language writes it."""

    @abstractmethod
    def select(self, condition: Expr, yes: Expr, no: Expr) -> tuple[str, int]:
        """``yes`` where the condition holds, else ``no``, and how tightly the text binds."""


class _Torch(_Printer):
    def __init__(self, program: Program) -> None:
        self._example = program.operands[0]
        self._scalars = set(program.attributes)
        for name, expr in program.lets:
            if self._is_scalar(expr):
                self._scalars.add(name)

    def tensor(self, expr: Expr) -> str:
        """Like `text`, but a tensor even where the value is constant."""
        if self._is_scalar(expr):
            return f"torch.full_like({self._example}, {self.text(expr)})"
        return self.text(expr)

    def _is_scalar(self, expr: Expr) -> bool:
        return names_in(expr) <= self._scalars

    def number(self, value: Fraction) -> str:
        return repr(float(value))

    def symbol(self, op: Op) -> str:
        return "&" if op is Op.AND else op.text

    def select(self, condition: Expr, yes: Expr, no: Expr) -> tuple[str, int]:
        # torch.where of two Python scalars would fall to the default dtype.
        first = self.tensor(yes) if self._is_scalar(no) else self.text(yes)
        return f"torch.where({self.text(condition)}, {first}, {self.text(no)})", _ATOM

    def infix(self, op: Op, left: Expr, right: Expr) -> tuple[str, int]:
        if op is Op.AND:
            # Python's & binds tighter than a comparison.
            return f"{self.wrapped(left, _ATOM)} & {self.wrapped(right, _ATOM)}", _INFIX[op]
        return super().infix(op, left, right)

    def function(self, op: Op, args: tuple[Expr, ...]) -> str:
        texts = [self.text(arg) for arg in args]
        if op in (Op.MINIMUM, Op.MAXIMUM) and self._is_scalar(args[1]):
            bound = "max" if op is Op.MINIMUM else "min"
            return f"torch.clamp({texts[0]}, {bound}={texts[1]})"
        if op is Op.SOFTPLUS:
            # torch.nn.functional.softplus is the identity above its threshold of 20.
            return f"torch.logaddexp({texts[0]}, torch.zeros_like({texts[0]}))"
        if op is Op.SIGMOID_SLOPE:
            mirrored = self.wrapped(args[0], _NEGATION + 1)
            return f"(torch.sigmoid({texts[0]}) * torch.sigmoid(-{mirrored}))"
        return f"torch.{op.text}({', '.join(texts)})"


class _Cuda(_Printer):
    def number(self, value: Fraction) -> str:
        """The shortest decimal that reads back as the nearest float32."""
        nearest = _float32(float(value))
        if nearest.is_integer() and abs(nearest) < 10**6:
            return f"{int(nearest)}.0f"
        shortest = next(
            text
            for text in (f"{nearest:.{digits}g}" for digits in range(1, 10))
            if _float32(float(text)) == nearest
        )
        return f"{shortest}f" if set(shortest) & set(".e") else f"{shortest}.0f"

    def symbol(self, op: Op) -> str:
        return "&&" if op is Op.AND else op.text

    def select(self, condition: Expr, yes: Expr, no: Expr) -> tuple[str, int]:
        test = self.wrapped(condition, _SELECT + 1)
        return f"{test} ? {self.wrapped(yes, 1)} : {self.wrapped(no, 1)}", _SELECT

    def function(self, op: Op, args: tuple[Expr, ...]) -> str:
        return f"fusegen::{super().function(op, args)}"


class _Math(_Printer):
    def function(self, op: Op, args: tuple[Expr, ...]) -> str:
        if op is Op.SIGMOID_SLOPE:
            return f"sigmoid'({self.text(args[0])})"
        return super().function(op, args)

    def number(self, value: Fraction) -> str:
        if value.denominator == 1:
            return str(value.numerator)
        return repr(float(value))

    def select(self, condition: Expr, yes: Expr, no: Expr) -> tuple[str, int]:
        test = self.text(condition)
        if yes == ZERO:
            return f"(0 if {test} else {self.text(no)})", _ATOM
        return f"({self.text(yes)} if {test} else {self.text(no)})", _ATOM


def _float32(value: float) -> float:
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def _unguarded(expr: Expr) -> Expr:
    """Without the selects that `lower` puts around products that fight over a limit."""
    match expr:
        case Call(Op.SELECT, (Call(Op.EQUAL, (_, zero)), yes, product)) if zero == yes == ZERO:
            return _unguarded(product)
        case Call(op, args):
            return Call(op, tuple(_unguarded(arg) for arg in args))
    return expr


def _substitute(expr: Expr, values: dict[str, Expr]) -> Expr:
    match expr:
        case Name(name):
            return values.get(name, expr)
        case Call(op, args):
            return Call(op, tuple(_substitute(arg, values) for arg in args))
    return expr
