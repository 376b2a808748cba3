"""sympy back to our own expressions, ordered and guarded so that finite limits stay finite."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from . import calculus as c
from .calculus import Sym
from .expression import (
    ONE,
    ZERO,
    Call,
    Expr,
    ExpressionError,
    Name,
    Number,
    Op,
    fits_float32,
    size,
)

# -2 / log(2): exp(-2 u) as a power of 2, which takes a GPU half the instructions of exp.
_MINUS_TWO_IN_POWERS_OF_TWO = Number(Fraction("-2.8853900817779268"))

# 2 / sqrt(pi), to the last bit of a double.
_ERF_SLOPE_AT_ZERO = Number(Fraction("1.1283791670955126"))

_COMPARISON: dict[Sym, Op] = {
    c.at_most: Op.LESS_EQUAL,
    c.at_least: Op.GREATER_EQUAL,
    c.less: Op.LESS,
    c.equal: Op.EQUAL,
}
_FUNCTION: dict[Sym, Op] = {
    **{function: op for op, function in c.UNARY.items()},
    c.clamp: Op.CLAMP,
    c.at_most_value: Op.MINIMUM,
    c.at_least_value: Op.MAXIMUM,
    c.minimum: Op.MINIMUM,
    c.maximum: Op.MAXIMUM,
}
_BOUNDED = (c.sigmoid, c.tanh, c.clamp, c.erf, c.erfc, c.sign, *c.INDICATORS)
_SLOPES = (c.sigmoid_slope, c.tanh_slope, c.erf_slope)
_VANISHING = (c.sigmoid, c.exp, c.softplus, c.erfc, c.relu, *_SLOPES)
_KEEPS_ZERO = (c.tanh, c.erf, c.sqrt, c.absolute)


@dataclass(frozen=True, slots=True)
class Lowering:
    """sympy to `Expr`. `rank` orders the names: attributes, operands, gradient last.

    A product runs from its compound factors (a sigmoid, a guarded product) over the operands in
    their declared order to the incoming gradient: what damps acts before a large operand can
    overflow.
    """

    rank: Mapping[str, int]
    constants: frozenset[str]

    def lower(self, expr: Sym) -> Expr:
        if expr.is_Number:
            return _number(Fraction(int(expr.p), int(expr.q)))
        if expr.is_Symbol:
            return Name(expr.name)
        if expr.is_Add:
            common, rest = c.factored(expr)
            return self.product(Fraction(1), [*common, (rest, 1)]) if common else self.sum(expr)
        if expr.is_Mul or expr.is_Pow:
            coefficient, factors = _split(expr)
            return self.product(coefficient, factors)
        if expr.func in c.INDICATORS:
            return self.masked([expr], ONE)
        return self.function(expr)

    def function(self, call: Sym) -> Expr:
        args = tuple(self.lower(arg) for arg in call.args)
        if call.func is c.tanh_slope:
            # With e = exp(-2|u|), 1 - t^2 is 4e / (1 + e)^2, and 1 + |t| is 2 / (1 + e).
            exponent = Call(Op.MUL, (_MINUS_TWO_IN_POWERS_OF_TWO, Call(Op.ABS, args)))
            decay = Call(Op.EXP2, (exponent,))
            rise = Call(Op.ADD, (ONE, Call(Op.ABS, (Call(Op.TANH, args),))))
            return Call(Op.MUL, (Call(Op.MUL, (decay, rise)), rise))
        if call.func is c.erf_slope:
            squared = Call(Op.MUL, (args[0], args[0]))
            bell = Call(Op.EXP, (Call(Op.NEG, (squared,)),))
            return Call(Op.MUL, (_ERF_SLOPE_AT_ZERO, bell))
        return Call(_FUNCTION[call.func], args)

    def sum(self, total: Sym) -> Expr:
        terms: list[tuple[bool, Expr]] = []
        for term in total.args:
            negative = bool(term.as_coeff_Mul()[0] < 0)
            terms.append((negative, self.lower(-term if negative else term)))
        terms.sort(key=lambda item: (item[0], size(item[1]), repr(item[1])))
        negative, result = terms[0]
        if negative:
            result = _negated(result)
        for negative, term in terms[1:]:
            result = Call(Op.SUB if negative else Op.ADD, (result, term))
        return result

    def product(self, coefficient: Fraction, factors: list[tuple[Sym, int]]) -> Expr:
        masks = [base for base, _ in factors if base.func in c.INDICATORS]
        rest = [factor for factor in factors if factor[0].func not in c.INDICATORS]
        if not masks:
            return self.scaled(coefficient, rest)
        return self.masked(masks, self.scaled(coefficient, _inside(masks, rest)))

    def masked(self, masks: list[Sym], value: Expr) -> Expr:
        for mask in sorted(set(masks), key=str):
            if mask.func is c.above_zero:
                # Written as "not <= 0": a NaN operand then keeps its gradient, as PyTorch's relu
                # does.
                refused = Call(Op.LESS_EQUAL, (self.lower(mask.args[0]), ZERO))
                value = Call(Op.SELECT, (refused, ZERO, value))
            else:
                value = Call(Op.SELECT, (self.condition(mask), value, ZERO))
        return value

    def condition(self, mask: Sym) -> Expr:
        args = tuple(self.lower(arg) for arg in mask.args)
        if mask.func is c.within:
            value, low, high = args
            above = Call(Op.GREATER_EQUAL, (value, low))
            below = Call(Op.LESS_EQUAL, (value, high))
            return Call(Op.AND, (above, below))
        return Call(_COMPARISON[mask.func], args)

    def scaled(self, coefficient: Fraction, factors: list[tuple[Sym, int]]) -> Expr:
        above = [(base, exponent) for base, exponent in factors if exponent > 0]
        below = [(base, -exponent) for base, exponent in factors if exponent < 0]
        parts = self.guarded(above)
        parts.sort(key=self._order)
        result = _product(parts)
        for base, exponent in below:
            for _ in range(exponent):
                # One division at a time: the power itself would under- or overflow first.
                result = Call(Op.DIV, (result, self.lower(base)))
        if abs(coefficient) != 1:
            return _times(_number(coefficient), result)
        return _negated(result) if coefficient < 0 else result

    def guarded(self, factors: list[tuple[Sym, int]]) -> list[Expr]:
        """Lowered factors; those that fight over one operand's limit become one guarded product."""
        remaining = list(factors)
        parts: list[Expr] = []
        vanishing = [factor for factor in factors if _vanishes(factor[0])]
        groups = {self._symbols(base) for base, _ in vanishing}
        for symbols in sorted(groups, key=sorted):
            zero = [f for f in remaining if f in vanishing and self._symbols(f[0]) == symbols]
            large = [
                f
                for f in remaining
                if f not in zero
                and not self._bounded(f[0])
                and self._symbols(f[0])
                and self._symbols(f[0]) <= symbols
            ]
            if zero and large:
                parts.append(self._guard(large, zero))
                remaining = [f for f in remaining if f not in zero and f not in large]
        return parts + [self._power(base, exponent) for base, exponent in remaining]

    def _guard(self, large: list[tuple[Sym, int]], zero: list[tuple[Sym, int]]) -> Expr:
        vanishing = _product(sorted((self._power(*f) for f in zero), key=self._order))
        growing = _product(sorted((self._power(*f) for f in large), key=self._order))
        is_zero = Call(Op.EQUAL, (vanishing, ZERO))
        return Call(Op.SELECT, (is_zero, ZERO, Call(Op.MUL, (growing, vanishing))))

    def _power(self, base: Sym, exponent: int) -> Expr:
        """Squares and products: x**5 is ((x*x) * (x*x)) * x."""
        square, result = self.lower(base), None
        while exponent:
            if exponent & 1:
                result = square if result is None else Call(Op.MUL, (square, result))
            exponent >>= 1
            square = Call(Op.MUL, (square, square))
        assert result is not None
        return result

    def _symbols(self, expr: Sym) -> frozenset[str]:
        return frozenset(s.name for s in expr.free_symbols) - self.constants

    def _bounded(self, expr: Sym) -> bool:
        if not self._symbols(expr) or expr.func in _BOUNDED or expr.func in _SLOPES:
            return True
        if expr.is_Add or expr.is_Mul:
            return all(self._bounded(arg) for arg in expr.args)
        if expr.is_Pow:
            return bool(expr.exp > 0) and self._bounded(expr.base)
        return False

    def _order(self, expr: Expr) -> tuple[int, int, str]:
        if isinstance(expr, Name):
            return (1, self.rank[expr.name], expr.name)
        return (0, size(expr), repr(expr))


def _split(expr: Sym) -> tuple[Fraction, list[tuple[Sym, int]]]:
    """Coefficient and (base, exponent) factors; sums are opened into their common powers."""
    number, rest = expr.as_coeff_Mul()
    powers: dict[Sym, int] = {}
    for base, exponent in rest.as_powers_dict().items():
        inner = c.factored(base) if base.is_Add and exponent == 1 else ([], base)
        for part, power in (*inner[0], (inner[1], 1)):
            powers[part] = powers.get(part, 0) + power * int(exponent)
    factors = sorted(powers.items(), key=lambda item: str(item[0]))
    coefficient = Fraction(int(number.p), int(number.q))
    return coefficient, [(base, power) for base, power in factors if power]


def _inside(masks: list[Sym], factors: list[tuple[Sym, int]]) -> list[tuple[Sym, int]]:
    """Where the mask says u > 0, relu(u) is u."""
    positive = {mask.args[0] for mask in masks if mask.func is c.above_zero}
    return [
        (base.args[0] if base.func is c.relu and base.args[0] in positive else base, exponent)
        for base, exponent in factors
    ]


def _vanishes(expr: Sym) -> bool:
    """Whether the value can be exactly 0 over a whole range that reaches an infinity."""
    if expr.func in _VANISHING:
        return True
    if expr.func in (c.clamp, c.at_most_value, c.at_least_value):
        return 0 in expr.args[1:]
    return expr.func in _KEEPS_ZERO and _vanishes(expr.args[0])


def _number(value: Fraction) -> Number:
    if not fits_float32(value):
        raise ExpressionError(
            f"a constant folds to about {_magnitude(value)}, outside the range of float32", 1
        )
    return Number(value)


def _magnitude(value: Fraction) -> str:
    digits = len(str(abs(value.numerator))) - len(str(value.denominator))
    return f"1e{digits:+d}"


def _times(left: Expr, right: Expr) -> Expr:
    if left == ONE:
        return right
    if right == ONE:
        return left
    return Call(Op.MUL, (left, right))


def _product(factors: list[Expr]) -> Expr:
    result: Expr = ONE
    for factor in factors:
        result = _times(result, factor)
    return result


def _negated(expr: Expr) -> Expr:
    return _number(-expr.value) if isinstance(expr, Number) else Call(Op.NEG, (expr,))
