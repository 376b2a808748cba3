"""Forward and backward programs of an expression, or of several over the same operands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING

from .expression import (
    COMPARISONS,
    ZERO,
    Call,
    Expr,
    Expression,
    Name,
    Op,
    Program,
    names_in,
    size,
)

if TYPE_CHECKING:
    from .lower import Lowering

# A longer subexpression gets a line of its own.
MAX_INLINE = 11
# A function this costly gets a line of its own wherever it stands.
COSTLY = 10


def derive(expression: Expression, wrt: tuple[str, ...], grad: str = "dy") -> dict[str, Expr]:
    """The cotangent of each operand in `wrt`: `grad` times the partial derivative.

    Raises ValueError if `wrt` names something that is no operand or `grad` is a declared name.
    """
    from . import calculus  # late: it loads sympy

    _check_names(expression, wrt, (grad,))
    lowering = _lowering(expression, grad)
    total = calculus.to_sympy(expression)
    incoming = calculus.symbol(grad)
    return {name: lowering.lower(incoming * total.diff(calculus.symbol(name))) for name in wrt}


Named = tuple[tuple[str, Expression], ...]
"""Expressions over the same operands and attributes, each with a name: of what it gives, or of the
gradient that comes in for that."""


@cache
def forward_program(expression: Expression, result: str = "y") -> Program:
    """The program that computes the expression into `result`."""
    return joint_forward(((result, expression),))


@cache
def joint_forward(expressions: Named) -> Program:
    """The program that computes each expression into the result of its name."""
    names = tuple(name for name, _ in expressions)
    _check_names(expressions[0][1], (), names)
    values = {name: _value(expression) for name, expression in expressions}
    return _program(expressions[0][1], values, ())


@cache
def joint_backward(expressions: Named, wrt: tuple[str, ...], again: Named = ()) -> Program:
    """The program that computes `d<operand>` for each operand in `wrt`.

    Expressions go by the names of the gradients that come in. What an operand gets from several of
    them is added in their order; where it is in none, its gradient is 0. Results of `again` repeat
    values of the forward, bit for bit, and share with gradients what they can.
    """
    expression, grads = expressions[0][1], tuple(name for name, _ in expressions)
    repeated = tuple(name for name, _ in again)
    _check_names(expression, wrt, (*grads, *(f"d{name}" for name in wrt), *repeated))
    terms = [derive(each, wrt, grad) for grad, each in expressions]
    results = {f"d{name}": _added([each[name] for each in terms]) for name in wrt}
    results |= {name: _value(value) for name, value in again}
    return _program(expression, results, grads)


def _added(terms: list[Expr]) -> Expr:
    """The sum of those that are not 0, from left to right."""
    first, *others = [term for term in terms if term != ZERO] or [ZERO]
    for term in others:
        first = Call(Op.ADD, (first, term))
    return first


@cache
def backward_program(
    expression: Expression,
    wrt: tuple[str, ...],
    grad: str = "dy",
    recompute: str | None = None,
) -> Program:
    """The program that computes `d<operand>` for each operand in `wrt` from the gradient `grad`.

    With `recompute`, a result of that name repeats the forward value, bit for bit, sharing what it
    can.
    """
    again = ((recompute, expression),) if recompute else ()
    return joint_backward(((grad, expression),), wrt, again)


def _value(expression: Expression) -> Expr:
    from . import calculus  # late: it loads sympy

    return _lowering(expression, None).lower(calculus.to_sympy(expression))


def _lowering(expression: Expression, grad: str | None) -> Lowering:
    from .lower import Lowering  # late: it loads sympy

    attributes = tuple(name for name, _ in expression.attributes)
    order = (*attributes, *expression.operands, *([grad] if grad else []))
    constants = frozenset((*attributes, *([grad] if grad else [])))
    return Lowering({name: i for i, name in enumerate(order)}, constants)


def _check_names(expression: Expression, wrt: Iterable[str], fresh: tuple[str, ...]) -> None:
    unknown = [name for name in wrt if name not in expression.operands]
    if unknown:
        raise ValueError(
            f"cannot differentiate by {unknown[0]!r}; operands are {', '.join(expression.operands)}"
        )
    taken = {*expression.operands, *(name for name, _ in expression.attributes)}
    for name in fresh:
        if name in taken:
            raise ValueError(f"the name {name!r} is used twice; rename the result or the gradient")
        taken.add(name)


def _program(
    expression: Expression, results: Mapping[str, Expr], grads: tuple[str, ...]
) -> Program:
    attributes = tuple(name for name, _ in expression.attributes)
    reserved = {*expression.operands, *attributes, *results, *grads}
    sharing = _Sharing(results.values(), reserved)
    outputs = tuple((name, sharing.root(expr)) for name, expr in results.items())
    read = {name for expr in results.values() for name in names_in(expr)}
    return Program(
        operands=(
            *(name for name in expression.operands if name in read),
            *grads,
        ),
        attributes=tuple(name for name in attributes if name in read),
        lets=tuple(sharing.lets),
        results=outputs,
    )


class _Sharing:
    """Common subexpressions by value numbering: equal trees become one let, in order of need.

    sympy's cse regroups products (dy * up first), which would undo the order that `lower` chose.
    """

    def __init__(self, roots: Iterable[Expr], reserved: set[str]) -> None:
        self.lets: list[tuple[str, Expr]] = []
        self._reserved = reserved
        self._names: dict[Expr, Name] = {}
        self._uses: Counter[Expr] = Counter()
        self._next = 0
        for root in roots:
            self._count(root)

    def root(self, expr: Expr) -> Expr:
        """A result, its shared parts replaced by the names of lets."""
        if not isinstance(expr, Call):
            return expr
        return self._inline(expr) if self._uses[expr] > 1 else self._spelled(expr)

    def _count(self, expr: Expr) -> None:
        self._uses[expr] += 1
        if self._uses[expr] == 1 and isinstance(expr, Call):
            for arg in expr.args:
                self._count(arg)

    def _spelled(self, call: Call) -> Call:
        return Call(call.op, tuple(self._inline(arg) for arg in call.args))

    def _inline(self, expr: Expr) -> Expr:
        if not isinstance(expr, Call):
            return expr
        if expr in self._names:
            return self._names[expr]
        spelled = self._spelled(expr)
        if not self._deserves_name(expr, spelled):
            return spelled
        name = self._fresh()
        self.lets.append((name, spelled))
        self._names[expr] = Name(name)
        return self._names[expr]

    def _deserves_name(self, expr: Call, spelled: Call) -> bool:
        if self._uses[expr] > 1 or expr.op is Op.SELECT:
            return True
        if expr.op in COMPARISONS or expr.op is Op.DIV:
            return False
        return expr.op.cost >= COSTLY or size(spelled) > MAX_INLINE

    def _fresh(self) -> str:
        name = f"t{self._next}"
        self._next += 1
        return self._fresh() if name in self._reserved else name
