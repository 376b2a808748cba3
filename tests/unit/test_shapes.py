"""Shape expressions: what is written is read back, and every print means the same number."""

from __future__ import annotations

import ast
import re
from types import FunctionType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusegen.ir.shapes import (
    Binary,
    Const,
    Expr,
    Operator,
    Shape,
    Sym,
    add,
    collected,
    equal,
    evaluate,
    mul,
    parse_expr,
    product,
    substitute,
    symbols,
    to_code,
    to_cpp,
    to_markdown,
    to_python,
    total,
)

SYMBOLS = ("T", "E", "K", "N")


def ceildiv(a: int, b: int) -> int:
    return -(-a // b)


def align(a: int, b: int) -> int:
    return ceildiv(a, b) * b


@st.composite
def expressions(draw: st.DrawFn, depth: int = 3) -> Expr:
    """Expressions as the parser makes them: divisors are positive constants."""
    if depth == 0 or draw(st.booleans()):
        leaf: Expr = draw(
            st.one_of(st.sampled_from(SYMBOLS).map(Sym), st.integers(0, 200).map(Const))
        )
        return leaf
    left = draw(expressions(depth=depth - 1))
    match draw(st.sampled_from(Operator)):
        case Operator.ADD:
            return add(left, draw(expressions(depth=depth - 1)))
        case Operator.MUL:
            right = draw(expressions(depth=depth - 1))
            try:
                return mul(left, right)
            except ValueError:  # constants whose product is no size
                return add(left, right)
        case Operator.SUB:
            return parse_expr(f"{to_python(add(left, Const(400)))} - {draw(st.integers(0, 400))}")
        case Operator.FLOORDIV:
            return parse_expr(f"({to_python(left)}) // {draw(st.integers(1, 128))}")
        case name:
            divisor = draw(st.integers(1, 128))
            return parse_expr(f"{name.value}({to_python(left)}, {divisor})")


VALUES = st.fixed_dictionaries({name: st.integers(0, 5000) for name in SYMBOLS})
FUNCTIONS = {"__builtins__": {"min": min}, "ceildiv": ceildiv, "align": align}


@given(expressions())
def test_what_is_printed_is_read_back(expr: Expr) -> None:
    assert parse_expr(to_python(expr)) == expr
    assert str(expr) == to_python(expr)


@given(expressions(), VALUES)
def test_python_means_the_same(expr: Expr, values: dict[str, int]) -> None:
    code = compile(to_python(expr), "<shape>", "eval")
    assert _run(code, values) == evaluate(expr, values)


@given(expressions(), VALUES)
def test_cpp_means_the_same(expr: Expr, values: dict[str, int]) -> None:
    """Sizes are not negative, so C++'s ``/`` on int64_t is Python's ``//``; all else agrees."""
    text = to_cpp(expr)
    assert "//" not in text
    assert _run(compile(text.replace("/", "//"), "<shape>", "eval"), values) == evaluate(
        expr, values
    )


@given(expressions(), VALUES)
def test_code_means_the_same_without_functions(expr: Expr, values: dict[str, int]) -> None:
    text = to_code(expr)
    assert "ceildiv" not in text and "align" not in text
    assert _run(compile(text, "<shape>", "eval"), values) == evaluate(expr, values)


@pytest.mark.parametrize(
    ("text", "cpp"),
    [
        ("T * (2 * F)", "T * 2 * F"),
        ("4 * ((T // 128 + (2 * E + 1)) * H)", "4 * (T / 128 + 2 * E + 1) * H"),
        ("T * (N // 2 * K)", "T * (N / 2 * K)"),
        ("align(2 * F, 16)", "align(2 * F, 16)"),
    ],
)
def test_cpp_has_no_bracket_to_spare(text: str, cpp: str) -> None:
    assert to_cpp(parse_expr(text)) == cpp


def test_terms_that_differ_by_a_number_are_one() -> None:
    terms = [parse_expr(text) for text in ("2 * T * K", "T", "4 * T * K", "T", "8")]
    assert to_markdown(collected(terms)) == "6 T K + 2 T + 8"
    assert collected([]) == Const(0)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("6 * V", "4 * V + 2 * V"),
        ("(R + 2) * V", "V * R + 2 * V"),
        ("(A + B) * (A - B)", "A * A - B * B"),
        ("2 * ceildiv(T, 8) + 1", "1 + ceildiv(T, 8) + ceildiv(T, 8)"),
        ("V - V", "0"),
    ],
)
def test_expressions_of_one_polynomial_are_equal(one: str, other: str) -> None:
    assert equal(parse_expr(one), parse_expr(other))
    assert not equal(parse_expr(one), parse_expr(f"{other} + 1"))
    assert not equal(parse_expr(one), parse_expr(f"2 * ({other}) + V"))


@given(expressions())
def test_code_has_no_bracket_to_spare(expr: Expr) -> None:
    text = to_code(expr)
    tree = ast.dump(ast.parse(text))
    opened = []
    for index, letter in enumerate(text):
        if letter == "(":
            opened.append(index)
        elif letter == ")":
            start = opened.pop()
            without = text[:start] + text[start + 1 : index] + text[index + 1 :]
            twice = "--" in without  # -(-(...)) reads better than --(...)
            assert twice or ast.dump(ast.parse(without)) != tree


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("2 * F", "2 * F"),
        ("T // 32 + (2 * E + 1)", "T // 32 + 2 * E + 1"),
        ("T - (E - K)", "T - (E - K)"),
        ("T * (N * K)", "T * N * K"),
        ("T * (N // 2 * K)", "T * (N // 2 * K)"),
        ("T * (N // 2 * K * E)", "T * (N // 2 * K * E)"),
        ("align(H, 16)", "-(-H // 16) * 16"),
        ("align(2 * F, 16)", "-(-(2 * F) // 16) * 16"),
        ("align(N, 32) // 2", "-(-N // 32) * 32 // 2"),
        ("align(32 * (T // 32 + E), 16)", "-(-(32 * (T // 32 + E)) // 16) * 16"),
        ("ceildiv(ceildiv(T, 16), 4)", "-(-(-(-T // 16)) // 4)"),
    ],
)
def test_code_reads_well(text: str, code: str) -> None:
    assert to_code(parse_expr(text)) == code


class Tight(int):
    """A number whose ``**`` is a product: written side by side, factors bind tightest of all."""

    def __pow__(self, other: int, modulo: int | None = None) -> Tight:  # type: ignore[override]
        return Tight(int(self) * int(other))


@given(expressions(), VALUES)
def test_markdown_means_the_same(expr: Expr, values: dict[str, int]) -> None:
    text = re.sub(r"(?<=[\w)]) (?=[\w(])", " ** ", to_markdown(expr))
    text = re.sub(r"\b\d+\b", r"Tight(\g<0>)", text)
    tight: dict[str, Any] = {name: Tight(value) for name, value in values.items()}
    tight |= {
        "Tight": Tight,
        "ceildiv": lambda a, b: Tight(ceildiv(a, b)),
        "align": lambda a, b: Tight(align(a, b)),
        "min": lambda a, b: Tight(min(a, b)),
    }
    # A sum of Tight is a plain int; brackets around it are the only place where a factor may stand.
    text = re.sub(r"\(", "Tight(", re.sub(r"\b(ceildiv|align|min|Tight)\(", r"\1[", text))
    text = text.replace("[", "(")
    assert _run(compile(text, "<formula>", "eval"), tight) == evaluate(expr, values)


def _run(code: Any, values: dict[str, Any]) -> int:
    return int(FunctionType(code, {**FUNCTIONS, **values})())


@pytest.mark.parametrize(
    ("text", "markdown"),
    [
        ("2 * T * N * K", "2 T N K"),
        ("(T + E) // 128", "(T + E) // 128"),
        ("T * (N // 2)", "T (N // 2)"),
        ("T - (E - K)", "T - (E - K)"),
        ("align(T + 1, 16)", "align(T + 1, 16)"),
    ],
)
def test_markdown_reads_well(text: str, markdown: str) -> None:
    assert to_markdown(parse_expr(text)) == markdown


@pytest.mark.parametrize(
    ("text", "folded"),
    [
        ("2 * 3", "6"),
        ("T * 2", "2 * T"),
        ("T * 1", "T"),
        ("0 * T", "0"),
        ("T + 0", "T"),
        ("T // 1", "T"),
        ("align(T, 1)", "T"),
        ("ceildiv(7, 2)", "4"),
    ],
)
def test_constants_are_folded(text: str, folded: str) -> None:
    assert to_python(parse_expr(text)) == folded


@pytest.mark.parametrize(
    "text",
    [
        "T / 2", "T ** 2", "-T", "T.shape", "f(T)", "ceildiv(T)", "ceildiv(a=T, b=2)",
        "T if T else 1", "lambda: 1", "[T]", "1.5", "'T'", "True", "", "T +", "T // 0",
        "align(T, 0)", "1 - 2", "+".join(["T"] * 200), "(" * 150, "T\0",
    ],
)  # fmt: skip
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"size|integer|divided|negative"):
        parse_expr(text)


@pytest.mark.parametrize("value", [True, -1])
def test_numbers_that_are_no_size_are_refused(value: int) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_expr(value)


@pytest.mark.parametrize("items", [["T...", "2 * D"], ["E", "N", "K"], ["T..."], []])
def test_a_shape_is_read_back(items: list[str | int]) -> None:
    shape = Shape.parse(items)
    inner = str(shape)[1:-1]
    assert Shape.parse(tuple(part for part in inner.split(", ") if part)) == shape


def test_leading_dimensions_count_as_one() -> None:
    shape = Shape.parse(["T...", "2 * D"])
    assert str(shape.elements) == "T * (2 * D)"
    assert shape.symbols() == {"T", "D"}
    assert shape.fixed() == Shape.parse(["T", "2 * D"])
    assert shape.substitute({"T": Sym("S"), "D": parse_expr("F + 1")}) == Shape.parse(
        ["S...", "2 * (F + 1)"]
    )
    assert shape.substitute({"T": Const(4)}) == Shape.parse([4, "2 * D"])


def test_sums_and_products_of_nothing() -> None:
    assert product(()) == Const(1)
    assert total(()) == Const(0)


@given(expressions(), expressions(), VALUES)
def test_substitution_is_evaluation(expr: Expr, inner: Expr, values: dict[str, int]) -> None:
    replaced = substitute(expr, {"T": inner})
    assert symbols(replaced) <= symbols(expr) | symbols(inner)
    assert evaluate(replaced, values) == evaluate(expr, {**values, "T": evaluate(inner, values)})


def test_a_name_without_a_value_is_an_error() -> None:
    with pytest.raises(KeyError):
        evaluate(Binary(Operator.ADD, Sym("T"), Const(1)), {})
