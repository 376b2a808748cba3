"""The symbolic half: sympy functions that know their own derivative, and the way there and back.

Importing this module imports sympy (about 0.2 s), so only `derive` does, inside its functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, TypeAlias

import sympy  # type: ignore[import-untyped]

from .expression import CALLABLE, Call, Expr, Expression, ExpressionError, Name, Number, Op

# sympy ships no types.
Sym: TypeAlias = Any
Slope: TypeAlias = Callable[[Sym, int], Sym]


def _opaque(name: str, slope: Slope | None = None) -> Sym:
    """A function sympy does not evaluate. `slope(call, index)` is its partial derivative.

    sympy's own sigmoid is `1/(1 + exp(-x))`, whose derivative is inf/inf in floating point at x =
    -100.
    """
    members: dict[str, Any] = {}
    if slope is not None:
        members["fdiff"] = lambda self, argindex=1: slope(self, argindex)
    return type(name, (sympy.Function,), members)


# Indicators: 1 or 0. Lowering turns a product with one into a select.
above_zero = _opaque("above_zero")
within = _opaque("within")
at_most = _opaque("at_most")
at_least = _opaque("at_least")
less = _opaque("less")
equal = _opaque("equal")
INDICATORS = (above_zero, within, at_most, at_least, less, equal)

# Slopes of u: s (1 - s), 1 - t^2 and 2/sqrt(pi) exp(-u^2). As calls they stay one factor that
# vanishes where the function saturates, and that lowering computes without the differences, which
# would be 0 long before the slope is too small for 16 bits.
sigmoid_slope = _opaque("sigmoid_slope")
tanh_slope = _opaque("tanh_slope", lambda call, _: -2 * tanh(call.args[0]) * call)
erf_slope = _opaque("erf_slope")
sign = _opaque("sign")

sigmoid = _opaque("sigmoid", lambda call, _: sigmoid_slope(call.args[0]))
tanh: Sym = _opaque("tanh", lambda call, _: tanh_slope(call.args[0]))
relu = _opaque("relu", lambda call, _: above_zero(call.args[0]))
clamp = _opaque("clamp", lambda call, _: within(*call.args))
at_most_value = _opaque("at_most_value", lambda call, _: at_most(*call.args))
at_least_value = _opaque("at_least_value", lambda call, _: at_least(*call.args))
softplus = _opaque("softplus", lambda call, _: sigmoid(call.args[0]))
erf = _opaque("erf", lambda call, _: erf_slope(call.args[0]))
erfc = _opaque("erfc", lambda call, _: -erf_slope(call.args[0]))
exp = _opaque("exp", lambda call, _: call)
sqrt = _opaque("sqrt", lambda call, _: 1 / (2 * call))
rsqrt = _opaque("rsqrt", lambda call, _: -(call**3) / 2)
absolute = _opaque("absolute", lambda call, _: sign(call.args[0]))


def _smaller_first(low: Sym, high: Sym) -> Sym:
    return less(low, high) + equal(*sorted((low, high), key=str)) / 2


minimum = _opaque("minimum", lambda call, i: _smaller_first(call.args[i - 1], call.args[2 - i]))
maximum = _opaque("maximum", lambda call, i: _smaller_first(call.args[2 - i], call.args[i - 1]))

# Functions that mean the same in the text, in sympy and in a program.
UNARY: dict[Op, Sym] = {
    Op.SIGMOID: sigmoid,
    Op.SIGMOID_SLOPE: sigmoid_slope,
    Op.TANH: tanh,
    Op.RELU: relu,
    Op.SOFTPLUS: softplus,
    Op.ERF: erf,
    Op.ERFC: erfc,
    Op.EXP: exp,
    Op.SQRT: sqrt,
    Op.RSQRT: rsqrt,
    Op.ABS: absolute,
    Op.SIGN: sign,
}


_FUNCTIONS = frozenset(op for op, _ in CALLABLE.values())


def to_sympy(expression: Expression) -> Sym:
    """The expression over real symbols, numeric attributes folded in, cancellation removed."""
    bindings: dict[str, Sym] = {name: sympy.Symbol(name, real=True) for name in expression.operands}
    for name, value in expression.attributes:
        bindings[name] = sympy.Symbol(name, real=True) if value is None else _rational(value)
    built = _build(expression.tree, bindings, set(expression.operands))
    if built.has(sympy.zoo, sympy.nan):
        raise ExpressionError("divides by an expression that is always 0", 1)
    if not _reads(built, set(expression.operands)):
        raise ExpressionError(f"is the constant {built} whatever the operands are", 1)
    return _without_cancellation(built)


def symbol(name: str) -> Sym:
    return sympy.Symbol(name, real=True)


def _reads(expr: Sym, operands: set[str]) -> bool:
    return any(s.name in operands for s in expr.free_symbols)


def _rational(value: Fraction) -> Sym:
    return sympy.Rational(value.numerator, value.denominator)


def _build(expr: Expr, bindings: Mapping[str, Sym], operands: set[str]) -> Sym:
    match expr:
        case Number(value):
            return _rational(value)
        case Name(name):
            return bindings[name]
        case Call(op, args):
            return _apply(op, [_build(arg, bindings, operands) for arg in args], operands)


def _apply(op: Op, args: list[Sym], operands: set[str]) -> Sym:
    if op in _FUNCTIONS and not any(_reads(arg, operands) for arg in args):
        spelled = ", ".join(str(arg) for arg in args)
        raise ExpressionError(f"simplifies to {op.text}({spelled}), a constant; write its value", 1)
    if op in UNARY:
        return UNARY[op](*args)
    match op, args:
        case Op.ADD, [a, b]:
            return a + b
        case Op.SUB, [a, b]:
            return a - b
        case Op.MUL, [a, b]:
            return a * b
        case Op.DIV, [a, b]:
            return a / b
        case Op.NEG, [a]:
            return -a
        case Op.POW, [a, b]:
            return a**b
        case Op.SQUARE, [a]:
            return a**2
        case Op.CLAMP, _:
            return clamp(*args)
        case ((Op.MINIMUM | Op.MAXIMUM), _):
            return _extremum(op, args, operands)
    raise AssertionError(f"the parser produces no {op}")


def _extremum(op: Op, args: list[Sym], operands: set[str]) -> Sym:
    """With a constant on one side it is half a clamp: the whole gradient on a tie, not one half."""
    constant = [arg for arg in args if not _reads(arg, operands)]
    if not constant:
        return (minimum if op is Op.MINIMUM else maximum)(*args)
    variable = args[0] if constant[0] is args[1] else args[1]
    return (at_most_value if op is Op.MINIMUM else at_least_value)(variable, constant[0])


def factored(total: Sym) -> tuple[list[tuple[Sym, int]], Sym]:
    """Split a sum into the powers common to all its terms and the sum that remains."""
    terms = [dict(term.as_coeff_Mul()[1].as_powers_dict()) for term in total.args]
    common: list[tuple[Sym, int]] = []
    for base in terms[0]:
        exponents = [term.get(base, 0) for term in terms]
        if base.is_Number or not all(e > 0 for e in exponents):
            continue
        common.append((base, int(min(exponents))))
    common.sort(key=lambda item: sympy.default_sort_key(item[0]))
    divisor = sympy.Mul(*(base**exponent for base, exponent in common))
    rest = sympy.Add(*(term / divisor for term in total.args)) if common else total
    return common, rest


def _without_cancellation(expr: Sym) -> Sym:
    if not expr.args:
        return expr
    expr = expr.func(*(_without_cancellation(arg) for arg in expr.args))
    if not expr.is_Add:
        return expr
    common, rest = factored(expr)
    closed = _complement(rest)
    if closed is None:
        return expr
    return sympy.Mul(*(base**exponent for base, exponent in common), closed)


def _complement(total: Sym) -> Sym | None:
    """A sum that cancels as one call times c, else None.

    c + c tanh(u) = 2c sigmoid(2u) and c + c erf(u) = c erfc(-u), either sign; c - c sigmoid(u) = c
    sigmoid(-u); c - c tanh(u)^2 = c tanh_slope(u).
    """
    constant, rest = total.as_coeff_Add()
    if constant == 0 or rest.is_Add:
        return None
    coefficient, call = rest.as_coeff_Mul()
    if abs(coefficient) != abs(constant):
        return None
    falls = coefficient == -constant
    if call.func is tanh:
        return 2 * constant * sigmoid((-2 if falls else 2) * call.args[0])
    if call.func is erf:
        return constant * erfc(call.args[0] if falls else -call.args[0])
    if call.func is sigmoid and falls:
        return constant * sigmoid(-call.args[0])
    if call.is_Pow and call.base.func is tanh and call.exp == 2 and falls:
        return constant * tanh_slope(call.base.args[0])
    return None
