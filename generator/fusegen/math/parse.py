"""Text to `Expression`, through Python's own grammar and a whitelist of its nodes."""

from __future__ import annotations

import ast
import difflib
import keyword
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from .expression import (
    CALLABLE,
    Call,
    Expr,
    Expression,
    ExpressionError,
    Name,
    Number,
    Op,
    fits_float32,
    names_in,
)

MAX_LENGTH = 500
MAX_DEPTH = 32
MAX_POWER = 8
# Bounds the degree of the polynomial that nested powers and products spell, and with it the digits
# of every exact constant that the derivation computes.
MAX_DEGREE = 64

_BINARY: dict[type[ast.operator], Op] = {
    ast.Add: Op.ADD,
    ast.Sub: Op.SUB,
    ast.Mult: Op.MUL,
    ast.Div: Op.DIV,
}
_CPP_WORD = re.compile(
    r"alignas|alignof|and|and_eq|asm|auto|bitand|bitor|bool|case|catch|char|"
    r"char16_t|char32_t|char8_t|co_await|co_return|co_yield|compl|concept|const|"
    r"const_cast|consteval|constexpr|constinit|decltype|default|delete|do|double|"
    r"dynamic_cast|enum|explicit|export|extern|float|friend|goto|inline|int|"
    r"long|mutable|namespace|new|noexcept|not_eq|nullptr|operator|private|"
    r"protected|public|register|reinterpret_cast|requires|short|signed|sizeof|"
    r"static|static_assert|static_cast|struct|switch|template|this|thread_local|"
    r"throw|typedef|typeid|typename|union|unsigned|using|virtual|void|volatile|"
    r"wchar_t|xor|xor_eq"
)
_TAKEN = ("torch", "fusegen", "math", "std")
_IDENTIFIER = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


def parse(
    text: str,
    operands: Sequence[str],
    attributes: Mapping[str, float | int | Fraction | None] | None = None,
) -> Expression:
    """Parse one line such as `gate * sigmoid(gate) * up`.

    `operands` name tensors. `attributes` map a scalar's name to its value, or to None to keep it a
    run-time argument of the printed code. Raises ExpressionError, whose column counts from 1 in
    `text`; nothing in `text` is ever executed.
    """
    values = {name: _attribute(name, value) for name, value in (attributes or {}).items()}
    _check_declared((*operands, *values))
    start = len(text) - len(text.lstrip())
    body = text.strip()
    _check_text(body, start)
    try:
        root = ast.parse(body, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        column = getattr(error, "offset", None) or len(body) + 1
        reason = getattr(error, "msg", None) or "too deeply nested"
        raise ExpressionError(f"not an expression: {reason}", start + column) from None
    reader = _Reader(body, start, frozenset(operands), values)
    tree = reader.read(root, 1)
    if not names_in(tree) & set(operands):
        expected = ", ".join(operands) or "none declared"
        raise ExpressionError(f"uses no operand; expected at least one of: {expected}", start + 1)
    return Expression(body, tree, tuple(operands), tuple(values.items()))


def _attribute(name: str, value: float | int | Fraction | None) -> Fraction | None:
    if value is None:
        return None
    try:
        exact = None if isinstance(value, bool) else Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        exact = None
    if exact is None:
        raise ExpressionError(f"attribute '{name}' must be a finite number, got {value!r}", 1)
    if not fits_float32(exact):
        raise ExpressionError(f"attribute '{name}' = {value} is outside the range of float32", 1)
    return exact


def _check_declared(names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if not _IDENTIFIER.fullmatch(name):
            raise ExpressionError(f"declared name {name!r} is not an identifier", 1)
        if is_reserved(name):
            raise ExpressionError(f"declared name '{name}' is reserved; choose another", 1)
        if name in seen:
            raise ExpressionError(f"'{name}' is declared twice", 1)
        seen.add(name)


def is_reserved(name: str) -> bool:
    """Whether a name means something in Python, C++ or the printed code."""
    words = keyword.iskeyword(name) or _CPP_WORD.fullmatch(name) is not None
    return words or name in _TAKEN or name in CALLABLE


def _check_text(body: str, start: int) -> None:
    if not body:
        raise ExpressionError("empty expression", 1)
    if len(body) > MAX_LENGTH:
        raise ExpressionError(
            f"{len(body)} characters, at most {MAX_LENGTH} are allowed", start + MAX_LENGTH + 1
        )
    odd = next((i for i, c in enumerate(body) if not (" " <= c <= "~") or c in "#\\"), None)
    if odd is not None:
        raise ExpressionError(
            f"character {body[odd]!r} is not allowed; write one line of ASCII", start + odd + 1
        )


@dataclass(frozen=True, slots=True)
class _Reader:
    """Checks one syntax tree against the whitelist and rebuilds it as our own."""

    body: str
    start: int
    operands: frozenset[str]
    values: Mapping[str, Fraction | None]

    def fail(self, message: str, node: ast.expr) -> ExpressionError:
        return ExpressionError(message, self.start + node.col_offset + 1)

    def read(self, node: ast.expr, depth: int) -> Expr:
        if depth > MAX_DEPTH:
            raise self.fail(f"nested deeper than {MAX_DEPTH} levels", node)
        expr = self._read(node, depth + 1)
        if _degree(expr) > MAX_DEGREE:
            raise self.fail(f"products and powers exceed degree {MAX_DEGREE}", node)
        return expr

    def _read(self, node: ast.expr, depth: int) -> Expr:
        match node:
            case ast.Constant():
                return self.number(node)
            case ast.Name():
                return self.name(node)
            case ast.UnaryOp(op=ast.USub()):
                return Call(Op.NEG, (self.read(node.operand, depth),))
            case ast.BinOp(op=ast.Pow()):
                return self.power(node, depth)
            case ast.BinOp() if type(node.op) in _BINARY:
                return self.binary(node, depth)
            case ast.Call():
                return self.call(node, depth)
        source = ast.get_source_segment(self.body, node) or ""
        raise self.fail(
            f"'{source}' is not allowed; use + - * /, ** by an integer, unary minus, numbers, "
            f"declared names and {', '.join(sorted(CALLABLE))}",
            node,
        )

    def number(self, node: ast.Constant) -> Expr:
        source = ast.get_source_segment(self.body, node) or ""
        if isinstance(node.value, bool) or not isinstance(node.value, (int, float)):
            raise self.fail(f"{source} is not a number", node)
        if isinstance(node.value, float) and not math.isfinite(node.value):
            raise self.fail(f"{source} is outside the range of float32", node)
        # repr is the shortest decimal of the double: what the author wrote, up to 17 digits.
        exact = Fraction(repr(node.value))
        underflowed = exact == 0 and re.search(r"[1-9]", re.split("[eE]", source)[0])
        if underflowed or not fits_float32(exact):
            raise self.fail(f"{source} is outside the range of float32", node)
        return Number(exact)

    def name(self, node: ast.Name) -> Expr:
        if node.id in self.operands or node.id in self.values:
            return Name(node.id)
        if node.id in CALLABLE:
            raise self.fail(f"'{node.id}' is a function; write {node.id}({_usage(node.id)})", node)
        declared = [*sorted(self.operands), *self.values]
        raise self.fail(_unknown("name", node.id, declared), node)

    def binary(self, node: ast.BinOp, depth: int) -> Expr:
        left, right = self.read(node.left, depth), self.read(node.right, depth)
        op = _BINARY[type(node.op)]
        if op is Op.DIV and self.constant(right) == 0:
            raise self.fail("division by zero", node.right)
        return Call(op, (left, right))

    def power(self, node: ast.BinOp, depth: int) -> Expr:
        exponent = node.right
        value = exponent.value if isinstance(exponent, ast.Constant) else None
        if type(value) is not int or not 0 <= value <= MAX_POWER:
            raise self.fail(
                f"an exponent must be an integer literal from 0 to {MAX_POWER}; "
                "use sqrt, rsqrt, exp or a division for others",
                exponent,
            )
        return Call(Op.POW, (self.read(node.left, depth), Number(Fraction(value))))

    def call(self, node: ast.Call, depth: int) -> Expr:
        if not isinstance(node.func, ast.Name):
            raise self.fail("only functions by plain name can be called", node)
        name = node.func.id
        if name not in CALLABLE:
            raise self.fail(_unknown("function", name, list(CALLABLE)), node)
        op, usage = CALLABLE[name]
        if node.keywords or any(isinstance(arg, ast.Starred) for arg in node.args):
            raise self.fail(f"arguments are positional: {name}({usage})", node)
        if len(node.args) != op.arity:
            raise self.fail(
                f"{name}({usage}) takes {op.arity} argument(s), got {len(node.args)}", node
            )
        args = tuple(self.read(arg, depth) for arg in node.args)
        self.check_arguments(op, args, node)
        return Call(op, args)

    def check_arguments(self, op: Op, args: tuple[Expr, ...], node: ast.Call) -> None:
        if not any(names_in(arg) & self.operands for arg in args):
            raise self.fail(f"{op.text} of constants alone; write its value instead", node)
        if op is not Op.CLAMP:
            return
        for arg, place, bound in zip(args[1:], node.args[1:], ("lo", "hi"), strict=True):
            if names_in(arg) & self.operands:
                raise self.fail(
                    f"clamp's {bound} must not depend on an operand; use minimum or maximum", place
                )
        if not names_in(args[0]) & self.operands:
            raise self.fail("clamp of a constant; write its value instead", node.args[0])
        low, high = (self.constant(arg) for arg in args[1:])
        if low is not None and high is not None and low > high:
            raise self.fail(f"clamp's lo = {float(low)} exceeds hi = {float(high)}", node.args[1])

    def constant(self, expr: Expr) -> Fraction | None:
        """The value of an expression of numbers and numeric attributes; None if it has none yet."""
        match expr:
            case Number(value):
                return value
            case Name(name):
                return self.values.get(name)
            case Call(op, args):
                parts = [self.constant(arg) for arg in args]
                known = [part for part in parts if part is not None]
                return _fold(op, known) if len(known) == len(parts) else None


def _fold(op: Op, args: list[Fraction]) -> Fraction | None:
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
            return a ** int(b)
    return None


def _degree(expr: Expr) -> int:
    match expr:
        case Call(Op.POW, (base, Number(exponent))):
            return _degree(base) * max(int(exponent), 1)
        case Call(Op.MUL | Op.DIV | Op.SQUARE, args):
            total = sum(_degree(arg) for arg in args)
            return total * 2 if len(args) == 1 else total
        case Call(_, args):
            return max(_degree(arg) for arg in args)
    return 1


def _usage(function: str) -> str:
    return CALLABLE[function][1]


def _unknown(kind: str, name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"known: {', '.join(known)}"
    return f"unknown {kind} '{name}'; {hint}"
