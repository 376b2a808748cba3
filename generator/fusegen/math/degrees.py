"""How errors of operands grow in a program."""

from __future__ import annotations

from .expression import COMPARISONS, Call, Expr, Name, Number, Op, Program

_BOUNDED = frozenset({Op.SIGMOID, Op.TANH, Op.ERF, Op.ERFC, Op.SIGN})
_DECAYING = frozenset({Op.SIGMOID_SLOPE, Op.EXP, Op.EXP2})
_FASTER_THAN_POWERS = -100


def degrees(program: Program) -> dict[str, int]:
    """The power of each operand that results grow with: 2 for `relu(x)**2`, 1 for `x * sigmoid(x)`.

    A relative error of the operand is so many times as large in the result, for operands of
    ordinary size. At least 1.
    """
    known: dict[str, dict[str, int]] = {name: {name: 1} for name in program.operands}
    known |= {name: {} for name in program.attributes}
    for name, expr in program.lets:
        known[name] = _degrees(expr, known)
    found = _largest([_degrees(expr, known) for _, expr in program.results])
    return {name: max(1, found.get(name, 1)) for name in program.operands}


def _degrees(expr: Expr, known: dict[str, dict[str, int]]) -> dict[str, int]:
    match expr:
        case Number():
            return {}
        case Name(name):
            return known[name]
        case Call(op, _) if op in _BOUNDED or op in COMPARISONS:
            return {}
        case Call(op, args) if op in _DECAYING:
            read = _largest([_degrees(arg, known) for arg in args])
            return dict.fromkeys(read, _FASTER_THAN_POWERS)
        case Call(Op.SELECT, (_, yes, no)):
            return _largest([_degrees(yes, known), _degrees(no, known)])
        case Call(op, args):
            parts = [_degrees(arg, known) for arg in args]
            if op in (Op.MUL, Op.DIV):
                names = dict.fromkeys(name for part in parts for name in part)
                return {name: sum(part.get(name, 0) for part in parts) for name in names}
            twice = 2 if op is Op.SQUARE else 1
            return {name: twice * degree for name, degree in _largest(parts).items()}


def _largest(parts: list[dict[str, int]]) -> dict[str, int]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: max(part.get(name, 0) for part in parts) for name in names}
