"""Symbolic integer expressions and shapes.

A small algebra of our own: ``+ - * //``, ``ceildiv``, ``align`` and ``min`` over named sizes.  It
prints integer operations only, because a detour through floats (``math.ceil(T / 128)``) recompiles
a traced graph for every value.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from functools import cache, cached_property
from math import lcm


class Operator(Enum):
    """Integer operators, with their Python spelling."""

    ADD = "+"
    SUB = "-"
    MUL = "*"
    FLOORDIV = "//"
    CEILDIV = "ceildiv"
    ALIGN = "align"
    MIN = "min"


_INFIX = {Operator.ADD: 1, Operator.SUB: 1, Operator.MUL: 2, Operator.FLOORDIV: 2}
_DIVIDING = (Operator.FLOORDIV, Operator.CEILDIV, Operator.ALIGN)
LONGEST = 200
"""Characters of a size that a person writes."""
LARGEST = 2**31 - 1
"""Number that a person writes in a size, at most."""
_APPLY: dict[Operator, Callable[[int, int], int]] = {
    Operator.ADD: lambda a, b: a + b,
    Operator.SUB: lambda a, b: a - b,
    Operator.MUL: lambda a, b: a * b,
    Operator.FLOORDIV: lambda a, b: a // b,
    Operator.CEILDIV: lambda a, b: -(-a // b),
    Operator.ALIGN: lambda a, b: -(-a // b) * b,
    Operator.MIN: min,
}


@dataclass(frozen=True, slots=True)
class Const:
    """An integer literal."""

    value: int

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True, slots=True)
class Sym:
    """A named dimension such as ``T``."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Binary:
    """An operator applied to two expressions."""

    operator: Operator
    left: Expr
    right: Expr

    def __str__(self) -> str:
        return to_python(self)


Expr = Const | Sym | Binary

_ZERO, _ONE = Const(0), Const(1)


def _combine(operator: Operator, left: Expr, right: Expr) -> Expr:
    """Build an operation, folding constants and neutral elements so that formulas stay readable.

    Raises ValueError for a division by zero and for a negative constant, which no size is.
    """
    if right == _ZERO and operator in _DIVIDING:
        raise ValueError(f"{to_python(left)} is divided by 0")
    if isinstance(left, Const) and isinstance(right, Const):
        value = _APPLY[operator](left.value, right.value)
        if value < 0:
            raise ValueError(f"{left} {operator.value} {right} is negative; sizes are not")
        return Const(value)
    if operator is Operator.MUL and isinstance(right, Const):
        left, right = right, left
    if operator is Operator.MUL:
        if left == _ONE:
            return right
        if left == _ZERO:
            return left
    if operator is Operator.ADD and _ZERO in (left, right):
        return right if left == _ZERO else left
    if right == _ONE and operator in _DIVIDING:
        return left
    return Binary(operator, left, right)


def add(left: Expr, right: Expr) -> Expr:
    """left + right."""
    return _combine(Operator.ADD, left, right)


def mul(left: Expr, right: Expr) -> Expr:
    """left * right."""
    return _combine(Operator.MUL, left, right)


def ceildiv(left: Expr, right: int) -> Expr:
    """left / right, rounded up."""
    return _combine(Operator.CEILDIV, left, Const(right))


def floordiv(left: Expr, right: int) -> Expr:
    """left / right, rounded down."""
    return _combine(Operator.FLOORDIV, left, Const(right))


def align(left: Expr, right: int) -> Expr:
    """left, rounded up to a multiple of right."""
    return _combine(Operator.ALIGN, left, Const(right))


def least(left: Expr, right: int) -> Expr:
    """The smaller one of left and right."""
    return _combine(Operator.MIN, left, Const(right))


def factors_of(expr: Expr) -> tuple[int, tuple[Expr, ...]]:
    """The constant of a product, and its other factors in their order."""
    match expr:
        case Const(value=value):
            return value, ()
        case Binary(operator=Operator.MUL, left=left, right=right):
            (one, some), (other, more) = factors_of(left), factors_of(right)
            return one * other, (*some, *more)
    return 1, (expr,)


def first_factor(expr: Expr) -> Expr:
    """The first name or sum of a product; a number stays what it is."""
    _, factors = factors_of(expr)
    return factors[0] if factors else expr


def without_factor(expr: Expr, factor: Expr) -> Expr | None:
    """A product without one of its factors: 2 K H of 2 T K H and T; None where it has no such."""
    count, factors = factors_of(expr)
    if factor not in factors:
        return None
    place = factors.index(factor)
    return mul(Const(count), product(factors[:place] + factors[place + 1 :]))


def is_multiple(expr: Expr, other: Expr) -> bool:
    """Whether a product has all factors of another one: 8 T K of 4 T, T of T."""
    (count, factors), (least, wanted) = factors_of(expr), factors_of(other)
    return count % max(least, 1) == 0 and not Counter(wanted) - Counter(factors)


def _unordered(expr: Expr) -> tuple[int, list[str]]:
    """The constant of a product, and its other factors in an order of their own."""
    count, factors = factors_of(expr)
    return count, sorted(map(to_python, factors))


@cache
def product(factors: tuple[Expr, ...]) -> Expr:
    """The product of any number of factors; 1 where there are none."""
    result: Expr = _ONE
    for factor in factors:
        result = mul(result, factor)
    return result


def total(terms: Iterator[Expr] | tuple[Expr, ...]) -> Expr:
    """The sum of any number of terms; 0 where there are none."""
    result: Expr = _ZERO
    for term in terms:
        result = add(result, term)
    return result


def collected(terms: Iterable[Expr]) -> Expr:
    """The sum of terms, those that differ by a number alone as one: 6 T K of 2 T K and 4 T K."""
    counts: dict[tuple[Expr, ...], int] = {}
    for count, factors in map(factors_of, terms):
        counts[factors] = counts.get(factors, 0) + count
    return total(tuple(mul(Const(count), product(rest)) for rest, count in counts.items()))


def _terms(expr: Expr) -> dict[tuple[str, ...], int]:
    """Coefficients of the products whose sum an expression is; a quotient counts as a name."""
    match expr:
        case Const(value=value):
            return {(): value} if value else {}
        case Binary(operator=Operator.ADD | Operator.SUB as operator, left=left, right=right):
            sign = 1 if operator is Operator.ADD else -1
            return _summed(
                (*_terms(left).items(), *((n, sign * c) for n, c in _terms(right).items()))
            )
        case Binary(operator=Operator.MUL, left=left, right=right):
            pairs = (
                (one, other) for one in _terms(left).items() for other in _terms(right).items()
            )
            return _summed(((*sorted((*n, *m)),), c * d) for (n, c), (m, d) in pairs)
    return {(to_python(expr),): 1}


def _summed(terms: Iterable[tuple[tuple[str, ...], int]]) -> dict[tuple[str, ...], int]:
    """Terms by their names, those that cancel left out."""
    counts: dict[tuple[str, ...], int] = {}
    for names, count in terms:
        counts[names] = counts.get(names, 0) + count
    return {names: count for names, count in counts.items() if count}


def equal(one: Expr, other: Expr) -> bool:
    """Whether two expressions are one polynomial: 6 V is 4 V + 2 V, and 2 (V + 2 V)."""
    return _terms(one) == _terms(other)


@dataclass(frozen=True, slots=True)
class Split:
    """How an expression divides where one of its names does.

    Attributes:
        slope: what it grows by with the name.
        unit: number that the name must be a multiple of, or a quotient would be rounded.
        proportional: whether it is 0 where the name is, so that equal parts add up to the whole.
    """

    slope: Fraction
    unit: int
    proportional: bool


def split(expr: Expr, name: str) -> Split | None:
    """How an expression divides with a name; None where it is not linear in it."""
    match expr:
        case Const(value=value):
            return Split(Fraction(0), 1, value == 0)
        case Sym(name=found):
            return Split(Fraction(int(found == name)), 1, found == name)
        case Binary(operator=operator, left=left, right=right):
            a, b = split(left, name), split(right, name)
            return _joined(operator, a, b, left, right) if a and b else None


def _joined(operator: Operator, a: Split, b: Split, left: Expr, right: Expr) -> Split | None:
    unit = lcm(a.unit, b.unit)
    if operator is Operator.ADD:
        return Split(a.slope + b.slope, unit, a.proportional and b.proportional)
    if operator is Operator.MUL and isinstance(left, Const):
        return Split(left.value * b.slope, unit, b.proportional)
    if operator in _DIVIDING and isinstance(right, Const):
        quotient = a.slope / right.value
        slope = a.slope if operator is Operator.ALIGN else quotient
        return Split(slope, lcm(unit, quotient.denominator), a.proportional)
    return Split(Fraction(0), unit, False) if a.slope == b.slope == 0 else None


@dataclass(frozen=True, slots=True)
class Along:
    """Where a tensor has tokens, in as many elements more for each.

    Attributes:
        dim: the dimension, of the shape whose leading ones are one.
        tail: elements there that lie behind those of all tokens.
        unit: number that the tokens of a part must be a multiple of, so that no element is about
            those of two.
    """

    dim: int
    tail: int
    unit: int


def along(shape: Shape, tokens: str) -> Along | None:
    """Where a tensor has tokens; None where it has none, or not in proportion."""
    sizes = shape.flat
    dim = next((axis for axis, size in enumerate(sizes) if tokens in symbols(size)), None)
    grows = None if dim is None else split(sizes[dim], tokens)
    if dim is None or grows is None:
        return None
    return Along(dim, evaluate(sizes[dim], {tokens: 0}), grows.unit)


_AST_INFIX: dict[type[ast.operator], Operator] = {
    ast.Add: Operator.ADD,
    ast.Sub: Operator.SUB,
    ast.Mult: Operator.MUL,
    ast.FloorDiv: Operator.FLOORDIV,
}
_AST_CALL = {each.value: each for each in (Operator.CEILDIV, Operator.ALIGN, Operator.MIN)}


def parse_expr(text: str | int, longest: int = LONGEST) -> Expr:
    """Read an expression such as ``128 * (T // 128 + E)``.

    Args:
        text: of it.
        longest: characters that it may have; sizes of several tensors have more than people write.

    Raises:
        ValueError: text is not made of names, non-negative integers, + - * //, ceildiv, align and
            min.
    """
    if isinstance(text, int):
        if isinstance(text, bool) or text < 0:
            raise ValueError(f"{text!r} is not a size; write a name or an integer from 0 on")
        return _bounded(Const(text))
    if len(text) > longest:
        raise ValueError(f"a size takes at most {longest} characters, got {len(text)}")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text!r} is not an integer expression such as 2 * D") from error
    return _from_ast(tree, text)


def _bounded(expr: Expr) -> Expr:
    """A size that a person writes; what comes of several is computed in 64 bits."""
    if isinstance(expr, Const) and expr.value > LARGEST:
        raise ValueError(f"a size is {LARGEST} at most, got {expr}")
    return expr


def _from_ast(node: ast.expr, text: str) -> Expr:
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return parse_expr(value)
        case ast.Name(id=name):
            return Sym(name)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _AST_INFIX:
            operator = _AST_INFIX[type(op)]
            return _bounded(_combine(operator, _from_ast(left, text), _from_ast(right, text)))
        case ast.Call(func=ast.Name(id=name), args=[left, right], keywords=[]) if name in _AST_CALL:
            return _combine(_AST_CALL[name], _from_ast(left, text), _from_ast(right, text))
    raise ValueError(
        f"{text!r}: a size uses names, integers, + - * //, ceildiv(a, b), align(a, b) and min(a, b)"
        " only"
    )


def symbols(expr: Expr) -> frozenset[str]:
    """Names that occur in an expression."""
    match expr:
        case Const():
            return frozenset()
        case Sym(name=name):
            return frozenset((name,))
        case Binary(left=left, right=right):
            return symbols(left) | symbols(right)


def uses(expr: Expr, operator: Operator) -> bool:
    """Whether an expression has an operator in it."""
    match expr:
        case Binary(operator=own, left=left, right=right):
            return own is operator or uses(left, operator) or uses(right, operator)
    return False


def substitute(expr: Expr, values: Mapping[str, Expr]) -> Expr:
    """Replace names by expressions; names without an entry stay."""
    match expr:
        case Const():
            return expr
        case Sym(name=name):
            return values.get(name, expr)
        case Binary(operator=operator, left=left, right=right):
            return _combine(operator, substitute(left, values), substitute(right, values))


def evaluate(expr: Expr, values: Mapping[str, int]) -> int:
    """The value of an expression.  Raises KeyError for a name without a value."""
    match expr:
        case Const(value=value):
            return value
        case Sym(name=name):
            return values[name]
        case Binary(operator=operator, left=left, right=right):
            return _APPLY[operator](evaluate(left, values), evaluate(right, values))


@dataclass(frozen=True, slots=True)
class _Style:
    """How a language spells sizes.

    Attributes:
        division: sign of a quotient that is rounded down.
        functions: whether ``ceildiv`` and ``align`` are functions of its own, as ``min`` always is.
        regroups: whether ``a + (b + c)`` may become ``a + b + c``: the number is the same, but what
            is read back is another expression.
    """

    division: str
    functions: bool
    regroups: bool


_SPEC = _Style("//", functions=True, regroups=False)
_CODE = _Style("//", functions=False, regroups=True)
_CPP = _Style("/", functions=True, regroups=True)
_NEGATION = 3  # binds tighter than every infix operator


def _print(expr: Expr, style: _Style, context: int = 0) -> str:
    """Source of an operand; in brackets only where it binds looser than ``context`` asks for."""
    match expr:
        case Const(value=value):
            return str(value)
        case Sym(name=name):
            return name
        case Binary(operator=operator, left=left, right=right) if operator in _INFIX:
            rank = _INFIX[operator]
            sign = style.division if operator is Operator.FLOORDIV else operator.value
            loose = style.regroups and _joins(operator, right)
            tail = _print(right, style, rank if loose else rank + 1)
            text = f"{_print(left, style, rank)} {sign} {tail}"
            return f"({text})" if rank < context else text
        case Binary(operator=operator, left=left, right=right) if (
            style.functions or operator is Operator.MIN
        ):
            return f"{operator.value}({_print(left, style)}, {_print(right, style)})"
        case Binary(operator=Operator.ALIGN, left=left, right=right):
            blocks = Binary(Operator.CEILDIV, left, right)
            return _print(Binary(Operator.MUL, blocks, right), style, context)
        case Binary(left=left, right=right):
            divided = f"{_print(left, style, _NEGATION + 1)} {style.division}"
            text = f"-(-{divided} {_print(right, style, _NEGATION)})"
            return f"({text})" if context > _NEGATION else text


def _joins(operator: Operator, right: Expr) -> bool:
    """Whether an operand on the right may stand without brackets, evaluated from the left."""
    if operator is Operator.ADD:
        return isinstance(right, Binary) and right.operator in (Operator.ADD, Operator.SUB)
    if operator is not Operator.MUL or not isinstance(right, Binary):
        return False
    while isinstance(right, Binary) and right.operator is Operator.MUL:
        right = right.left
    # a * (b // c * d) is not a * b // c * d.
    return not isinstance(right, Binary) or right.operator is not Operator.FLOORDIV


@cache
def to_python(expr: Expr) -> str:
    """Python source, and the form specs are written in: ``parse_expr(to_python(e)) == e``."""
    return _print(expr, _SPEC)


@cache
def to_code(expr: Expr) -> str:
    """Python source that needs no functions: ``ceildiv(a, b)`` becomes ``-(-a // b)``."""
    return _print(expr, _CODE)


@cache
def to_cpp(expr: Expr) -> str:
    """C++ source on ``int64_t``; the values are non-negative, so ``/`` is floor division."""
    return _print(expr, _CPP)


@cache
def to_markdown(expr: Expr) -> str:
    """A formula for people: products without stars or needless brackets (``2 T N K``)."""
    match expr:
        case Binary(operator=Operator.MUL, left=left, right=right):
            return f"{_factor(left)} {_factor(right)}"
        case Binary(operator=operator, left=left, right=right) if operator in _INFIX:
            head = _factor(left) if operator is Operator.FLOORDIV else to_markdown(left)
            tail = to_markdown(right) if operator is Operator.ADD else _factor(right)
            return f"{head} {operator.value} {tail}"
        case Binary(operator=operator, left=left, right=right):
            return f"{operator.value}({to_markdown(left)}, {to_markdown(right)})"
    return str(expr)


def _factor(expr: Expr) -> str:
    """An operand of a product; sums and quotients need their brackets."""
    text = to_markdown(expr)
    infix = isinstance(expr, Binary) and expr.operator in _INFIX
    return f"({text})" if infix and expr.operator is not Operator.MUL else text  # type: ignore[union-attr]


@dataclass(frozen=True)  # no slots: it remembers what passes always ask
class Shape:
    """Dimensions of a buffer, outermost first, row-major.

    Attributes:
        leading: symbol that stands for the product of any number of leading dimensions
            (written ``T...``), or None where the rank is fixed.
        dims: the remaining dimensions.
    """

    leading: str | None
    dims: tuple[Expr, ...]

    def __str__(self) -> str:
        lead = [f"{self.leading}..."] if self.leading else []
        return f"[{', '.join(lead + [str(dim) for dim in self.dims])}]"

    @classmethod
    def parse(cls, items: list[str | int] | tuple[str | int, ...], longest: int = LONGEST) -> Shape:
        """Read ``[T..., 2 * D]``.  Raises ValueError for a malformed dimension."""
        leading: str | None = None
        dims = list(items)
        if dims and isinstance(dims[0], str) and dims[0].endswith("..."):
            leading = dims[0].removesuffix("...")
            if not leading.isidentifier():
                raise ValueError(f"{dims[0]!r}: write a name before the dots, such as T...")
            dims = dims[1:]
        for dim in dims:
            if isinstance(dim, str) and dim.endswith("..."):
                raise ValueError(f"{dim!r}: only the first dimension stands for several")
        return cls(leading, tuple(parse_expr(dim, longest) for dim in dims))

    @cached_property
    def flat(self) -> tuple[Expr, ...]:
        """All dimensions with the leading ones multiplied into one."""
        return ((Sym(self.leading),) if self.leading else ()) + self.dims

    @property
    def elements(self) -> Expr:
        """Number of elements."""
        return product(self.flat)

    def holds_as_many_as(self, other: Shape) -> bool:
        """Whether the numbers of elements are the same, as far as factors without order tell."""
        return _unordered(self.elements) == _unordered(other.elements)

    def symbols(self) -> frozenset[str]:
        """Names that occur in the shape."""
        return self._symbols

    @cached_property
    def _symbols(self) -> frozenset[str]:
        return frozenset().union(*(symbols(dim) for dim in self.flat))

    def substitute(self, values: Mapping[str, Expr]) -> Shape:
        """Replace dimension names.  A leading name may only be renamed, or become fixed."""
        dims = tuple(substitute(dim, values) for dim in self.dims)
        if self.leading is None:
            return Shape(None, dims)
        lead = values.get(self.leading, Sym(self.leading))
        if isinstance(lead, Sym):
            return Shape(lead.name, dims)
        return Shape(None, (lead, *dims))

    def led_by(self, leading: str | None) -> Shape:
        """The same shape, its leading dimensions counted as one unless they are the given ones."""
        return self if self.leading == leading else self.fixed()

    def fixed(self) -> Shape:
        """The same shape with its leading dimensions counted as one."""
        return Shape(None, self.flat)
