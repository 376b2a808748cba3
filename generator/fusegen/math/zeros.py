"""What a program gives where operands are 0: results that are 0, too, and results that jump."""

from __future__ import annotations

from collections.abc import Collection
from enum import IntEnum

from .expression import COMPARISONS, ZERO, Call, Expr, Name, Number, Op, Program, names_in, walk


class _Value(IntEnum):
    """What is known of a value; each says less than the one before it."""

    ZERO = 0
    NONZERO = 1  # and finite
    FINITE = 2
    ANY = 3  # NaN and infinities as well


_ODD = frozenset({Op.TANH, Op.RELU, Op.ERF, Op.ABS, Op.SIGN, Op.SQUARE, Op.NEG})
_BOUNDED = frozenset({Op.SIGMOID, Op.SIGMOID_SLOPE, Op.SOFTPLUS, Op.ERFC})
_SUMS = frozenset({Op.ADD, Op.SUB, Op.CLAMP, Op.MINIMUM, Op.MAXIMUM})


def zero_results(program: Program, zeros: Collection[str]) -> frozenset[str]:
    """Names of results that are exactly 0 where every operand in `zeros` is.

    The other operands may hold anything, NaN included; attributes are finite and divide.
    """
    known = dict.fromkeys(program.operands, _Value.ANY) | dict.fromkeys(zeros, _Value.ZERO)
    known |= dict.fromkeys(program.attributes, _Value.NONZERO)
    for name, expr in program.lets:
        known[name] = _value(expr, known)
    return frozenset(n for n, e in program.results if _value(e, known) is _Value.ZERO)


def jumps(program: Program) -> frozenset[str]:
    """Names of operands at whose zero, or at whose equality with another, a result jumps.

    The gradient of `relu(x)` does, that of `relu(x)**2` does not.
    """
    lets = dict(program.lets)
    found: set[str] = set()
    for _, expr in (*program.lets, *program.results):
        for node in walk(expr):
            if isinstance(node, Call) and node.op is Op.SIGN:
                found |= _operands(node, lets)
            elif isinstance(node, Call) and node.op is Op.SELECT:
                condition, _, value = node.args
                if isinstance(condition, Name):
                    condition = lets[condition.name]
                found |= _switches(condition, value, program)
    return frozenset(found & {*program.operands})


def _switches(condition: Expr, value: Expr, program: Program) -> set[str]:
    """Operands whose sign or order decides, and does not where the value it decides on is 0."""
    names = _operands(condition, dict(program.lets))
    match condition:
        case Call(Op.LESS_EQUAL, (_, right)) if right == ZERO:
            return {name for name in names if not _is_zero(value, name, program)}
        case Call(Op.LESS, _):
            return names
    return set()


def _operands(expr: Expr, lets: dict[str, Expr]) -> set[str]:
    """What an expression reads, by way of lets, too."""
    read = set(names_in(expr))
    return read | {name for let in read & lets.keys() for name in _operands(lets[let], lets)}


def _is_zero(value: Expr, name: str, program: Program) -> bool:
    """Whether a value is 0 where an operand is, all others being finite."""
    known = dict.fromkeys((*program.operands, *program.attributes), _Value.NONZERO)
    known[name] = _Value.ZERO
    for let, expr in program.lets:
        known[let] = _value(expr, known)
    return _value(value, known) is _Value.ZERO


def _value(expr: Expr, known: dict[str, _Value]) -> _Value:
    match expr:
        case Number(value):
            return _Value.NONZERO if value else _Value.ZERO
        case Name(name):
            return known[name]
        case Call(op, args):
            return _of(op, [_value(arg, known) for arg in args])


def _of(op: Op, args: list[_Value]) -> _Value:
    largest = max(args)
    if op in COMPARISONS:
        return _Value.FINITE
    if op is Op.SELECT:
        return _joined(args[1:])
    if op in (Op.EXP, Op.EXP2):
        return _Value.NONZERO if args == [_Value.ZERO] else _Value.ANY
    if op is Op.SQRT and args == [_Value.ZERO]:
        return _Value.ZERO
    if largest is _Value.ANY or op in (Op.SQRT, Op.RSQRT):
        return _Value.ANY
    if op is Op.MUL:
        return _Value.ZERO if _Value.ZERO in args else largest
    if op is Op.DIV:
        return args[0] if args[1] is _Value.NONZERO else _Value.ANY
    if op in _ODD or op in _SUMS:
        return _Value.ZERO if largest is _Value.ZERO else _Value.FINITE
    if op in _BOUNDED:
        return _Value.FINITE
    raise AssertionError(f"no program calls {op}")


def _joined(args: list[_Value]) -> _Value:
    """What is known of a value that is one of several."""
    return args[0] if len(set(args)) == 1 else max(*args, _Value.FINITE)
