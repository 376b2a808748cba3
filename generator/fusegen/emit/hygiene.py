"""Names of specs beside the words of generated text: neither can be mistaken for the other.

A printer lays text out with marked names (``marked``).  Once a text is whole, every word in it that
is not marked is one of its own: a local, an import, a builtin, a keyword.  ``settle`` gives both
kinds their spelling and takes the marks out.  No list of taken words is kept anywhere.

Where a name and a word of the text meet, an underscore tells them apart; neither kind ends in one.

- Python: names of specs are keywords of public functions, so they stay, and the word yields:
  ``grad_ = torch.is_grad_enabled()``.  A word that stands for something outside of the function
  gets a second name behind its definition: ``nn_ = nn``.
- C++ and CUDA: all names are private, so the name yields: ``const int64_t NULL_ = extent(x, -1);``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from ..ir.buffers import Attribute, Buffer, JoinedTensor, Parameter, State
from ..ir.names import MARK, mark, plain
from ..ir.plan import Dimension, ModulePlan, Sharding
from ..ir.program import Argument, Binding, Check, Program
from ..ir.segments import Start, Wait
from ..ir.shapes import Binary, Const, Shape, Sym
from ..ir.step import AttributeRef, Chunks, Copy, Operand, Pointwise, PointwiseOperand, Result, Step
from .fileset import ArtifactKind, RenderError

T = TypeVar("T")

_NAMES: Mapping[type, tuple[str, ...]] = {
    Argument: ("buffer", "when"),
    Attribute: ("name",),
    AttributeRef: ("name",),
    Binding: ("symbol", "candidates"),
    Buffer: ("name",),
    Check: ("tensor", "reference"),
    Chunks: ("symbol", "memory"),
    Copy: ("original", "data", "scale", "amax", "groups"),
    Dimension: ("symbol", "keyword"),
    ModulePlan: (
        *("inputs", "gradients", "arguments", "outputs", "main_grads", "exact_outputs"),
        *("input_copies", "output_copies", "split"),
    ),
    Operand: ("buffer",),
    Parameter: ("buffer",),
    Pointwise: ("attributes",),
    PointwiseOperand: ("symbol", "buffer"),
    Program: ("flags", "when", "arriving"),
    Result: ("buffer", "when"),
    Shape: ("leading",),
    Sharding: ("symbol", "axes", "partial"),
    Start: ("operands", "future", "when", "by_rows"),
    State: ("buffer",),
    JoinedTensor: ("buffer", "parts"),
    Step: ("when", "mutates"),
    Sym: ("name",),
    Wait: ("future", "results", "when", "by_rows"),
}
"""The fields of a plan that hold names, or tuples of names."""


def marked(plan: T) -> T:
    """A plan, or part of one, with every name that a spec or a pass gave it marked."""
    return _marked(plan, {})  # type: ignore[no-any-return]


def _marked(value: Any, known: dict[int, tuple[Any, Any]]) -> Any:
    if isinstance(value, tuple):
        return tuple(_marked(item, known) for item in value)
    if not is_dataclass(value) or isinstance(value, Const):
        return value
    if id(value) not in known:  # with the value, so that its id is not used again
        known[id(value)] = (value, _marked_fields(value, known))
    return known[id(value)][1]


def _marked_fields(value: Any, known: dict[int, tuple[Any, Any]]) -> Any:
    own = _NAMES.get(type(value), ())
    changed = {}
    for each in fields(value):
        before = getattr(value, each.name)
        after = _marked_names(before) if each.name in own else _marked(before, known)
        if isinstance(value, Pointwise) and each.name in ("cuda", "torch"):
            after = tuple(map(_marked_math(value), before))
        if after != before:
            changed[each.name] = after
    if isinstance(value, Binary):
        return Binary(value.operator, *(_marked(e, known) for e in (value.left, value.right)))
    return replace(value, **changed) if changed else value


def _marked_names(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_marked_names, value))
    return mark(value) if isinstance(value, str) else value


def _marked_math(math: Pointwise) -> Callable[[str], str]:
    """Marks the symbols of a printed statement; functions have a bracket or a dot beside them."""
    symbols = {each.symbol for each in (*math.operands, *math.results)} | {*math.attributes}
    word = re.compile(r"(?<![\w.:])[A-Za-z]\w*\b(?![(=])")

    def marked_line(line: str) -> str:
        return word.sub(lambda m: mark(m[0]) if m[0] in symbols else m[0], line)

    return marked_line


def settle(text: str, kind: ArtifactKind) -> str:
    """A text with marked names as it is to be read."""
    if MARK not in text:
        return text
    if kind is ArtifactKind.PYTHON:
        text = _settle_python(text)
    elif kind is ArtifactKind.CUDA:
        text = _settle_cpp(text)
    return plain(text)


# C++ ------------------------------------------------------------------------------------------

_CPP_TOKEN = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|(?:(?:\.|->)\s*)?\w+', re.DOTALL)
_MACRO = re.compile(
    "[A-Z][A-Z0-9]+|true|false|unix|linux|errno|stdin|stdout|stderr|math_errhandling|sched_priority"
)
"""Words that the preprocessor or the compiler reads before any scope; all but the first are few."""


def _settle_cpp(text: str) -> str:
    words = {token for token in _CPP_TOKEN.findall(text) if MARK not in token}

    def spelled(match: re.Match[str]) -> str:
        token = match[0]
        if MARK not in token or not (token[0].isalpha() or token[0] == "_"):
            return token
        name = plain(token)
        return f"{name}_" if name in words or _MACRO.fullmatch(name) else name

    return _CPP_TOKEN.sub(spelled, text)


# Python ---------------------------------------------------------------------------------------

_WORD = re.compile(r"\w+")
_CONTEXT = re.compile(rf"\bctx\.{MARK}(\w+)")

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def _settle_python(text: str) -> str:
    text = _CONTEXT.sub(r"ctx.\1_", text)  # beside what autograd keeps there
    words = set(_WORD.findall(text))
    names = {plain(word) for word in words if MARK in word}
    met = names & words
    return _let_words_yield(text, met) if met else text


def _let_words_yield(text: str, met: set[str]) -> str:
    try:
        tree = ast.parse(text)
    except SyntaxError:  # ruff says it with its place
        return text
    edits: list[tuple[int, int, str]] = []
    outside: set[str] = set()
    for function in _functions(tree.body):
        found = list(_identifiers(function))
        names = {plain(word) for word, _, _ in found if MARK in word}
        for name in sorted(names & met):
            own = [(node, bound) for word, node, bound in found if word == name]
            _refuse_shared_keyword(function, name)
            edits += [(node.lineno, node.col_offset, name) for node, _ in own]
            if own and not any(bound for _, bound in own):
                outside.add(name)
    lines = text.split("\n")
    for row, column, name in sorted(edits, reverse=True):
        line = lines[row - 1].encode()
        end = column + len(name)
        if line[column:end] != name.encode():
            raise RenderError(f"line {row}: {name!r} is not where the parser finds it")
        lines[row - 1] = (line[:end] + b"_" + line[end:]).decode()
    for name, row in sorted(((n, _defined(tree, n)) for n in outside), key=lambda e: -e[1]):
        lines.insert(row, f"{name}_ = {name}")
    return "\n".join(lines)


def _functions(body: list[ast.stmt]) -> Iterator[_Function]:
    """Functions and methods, not those inside of them."""
    for node in body:
        if isinstance(node, _Function):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body)


def _identifiers(function: _Function) -> Iterator[tuple[str, Any, bool]]:
    """Words of a function that a scope resolves: word, node, and whether it is bound there."""
    waiting: list[ast.AST] = [function.args, *function.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Name):
            yield node.id, node, not isinstance(node.ctx, ast.Load)
        elif isinstance(node, ast.arg):
            yield node.arg, node, True
        else:
            waiting += _in_scope(node)


def _in_scope(node: ast.AST) -> Iterator[ast.AST]:
    """The children of a node but for annotations: text, which no scope of a function reads."""
    for field in node._fields:
        child = getattr(node, field, None)
        if isinstance(child, list):
            yield from (each for each in child if isinstance(each, ast.AST))
        elif isinstance(child, ast.AST) and field not in ("annotation", "returns"):
            yield child


def _refuse_shared_keyword(function: _Function, name: str) -> None:
    """An argument of the text's own is one that callers name, all but the first of a method.

    PyTorch names none of ``setup_context``.
    """
    if function.name == "setup_context":
        return
    arguments = function.args
    given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    own = [each.arg for index, each in enumerate(given) if index or each.arg not in ("self", "ctx")]
    if name in own:
        raise RenderError(f"{function.name}: two arguments are called {name!r}; rename one")


def _defined(tree: ast.Module, name: str) -> int:
    """The line behind which a name of the module, or a builtin, is there."""
    rows = [0]
    for node in tree.body:
        bound = {getattr(node, "name", "")}
        if isinstance(node, ast.Import | ast.ImportFrom):
            rows[0] = node.end_lineno or 0  # builtins, after all imports
            bound = {each.asname or each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.Assign):
            bound = {each.id for each in node.targets if isinstance(each, ast.Name)}
        if name in bound:
            rows.append(node.end_lineno or 0)
    return max(rows)
