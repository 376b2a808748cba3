"""Plans and drafts as text that reads back: ``parse(text(plan)) == plan``.

The text follows the fields of the dataclasses, so that a new field needs nothing here::

    {linear__bf16 module=linear recipe=bf16 arch=cpu ...
      buffers=(
        {x dtype=io shape=[T..., K] role=input}
        ...

``{...}`` is an object: the value of its first field, then the fields that differ from their
default by name; where objects of several classes may stand, ``program:{...}`` says which one it is.
An object of one field is that alone, but in braces where a word or a number may stand in its place.
``(...)`` is a tuple, a set or a mapping, ``a:b`` a pair or an object of two fields.  Words stand as
they are, strings that are no words in the quotes of JSON, shapes in square brackets.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, overload

from .plan import ModulePlan
from .shapes import Binary, Const, Shape, Sym, parse_expr, to_python

T = TypeVar("T")

_WIDTH = 100
_WORD = re.compile(r"[A-Za-z_][\w./-]*")
_CONSTANTS: Mapping[str, bool | None] = {"none": None, "true": True, "false": False}
_EXPRS = (Const, Sym, Binary)
_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|\[[^\]]*\]|[{}():=]|[^\s{}():="\[]+)')


def text(value: object) -> str:
    """A plan, a draft or any other dataclass of ``ir`` as text, a line for each small object."""
    return f"{_render(_node(value, type(value)), 0)}\n"


@overload
def parse(text: str) -> ModulePlan: ...
@overload
def parse(text: str, of: type[T]) -> T: ...
def parse(text: str, of: type[Any] = ModulePlan) -> Any:
    """What ``text`` has printed.

    Args:
        text: all of it.
        of: class of the object.

    Raises:
        ValueError: it is not the text of such an object; the message has the line.
    """
    reader = _Reader(text)
    tree = reader.value()
    reader.end()
    return _value(tree, of)


# Objects to nodes and back.


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A word, a number, a quoted string or a shape."""

    flat: str
    line: int = 0


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two values; with ``=`` between them, the name of a field and its value."""

    left: _Leaf
    right: _Node
    sign: str
    flat: str
    line: int = 0


@dataclass(frozen=True, slots=True)
class _Group:
    """Values in brackets, round or curly; ``flat`` is the text on one line."""

    brackets: str
    items: tuple[_Node, ...]
    flat: str
    line: int = 0


_Node = _Leaf | _Pair | _Group


def _pair(left: _Leaf, right: _Node, sign: str = ":", line: int = 0) -> _Pair:
    return _Pair(left, right, sign, f"{left.flat}{sign}{right.flat}", line)


def _group(brackets: str, items: Iterable[_Node], line: int = 0) -> _Group:
    items = tuple(items)
    inner = " ".join(item.flat for item in items)
    return _Group(brackets, items, f"{brackets[0]}{inner}{brackets[1]}", line)


@cache
def _hints(of: type) -> Mapping[str, Any]:
    """The types of a dataclass's fields, in their order."""
    hints = get_type_hints(of)
    return {field.name: hints[field.name] for field in dataclasses.fields(of)}


@cache
def _defaults(of: type) -> Mapping[str, Any]:
    """What fields without a value are."""
    made = {}
    for field in dataclasses.fields(of):
        if field.default is not dataclasses.MISSING:
            made[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            made[field.name] = field.default_factory()
    return made


@cache
def _is_pair(of: type) -> bool:
    return len(_hints(of)) == 2 and not _defaults(of)


@cache
def _alternatives(hint: Any) -> tuple[Any, ...]:
    """The types that a value may have."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


@cache
def _classes(hint: Any) -> Mapping[str, type]:
    """Classes of objects that a value may be of, by the words that tell them apart.

    Where there is only one, no word is needed.
    """
    found: list[Any] = [each for each in _alternatives(hint) if dataclasses.is_dataclass(each)]
    return {each.__name__.lower(): each for each in found} if len(found) > 1 else {}


def _container(hint: Any) -> Any:
    """The one of the types that has elements."""
    kinds = (tuple, frozenset)
    return next(h for h in _alternatives(hint) if get_origin(h) in kinds or _is_mapping(h))


def _is_mapping(hint: Any) -> bool:
    origin = get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _node(value: Any, hint: Any) -> _Node:
    match value:
        case None | bool() | Enum() | int() | float() | str():
            return _Leaf(_word(value))
        case Const() | Sym() | Binary():
            return _Leaf(_word(to_python(value)) if not isinstance(value, Const) else str(value))
        case Shape():
            return _Leaf(str(value))
        case tuple():
            return _tuple_node(value, get_args(_container(hint)))
        case Mapping():
            key, element = get_args(_container(hint))
            pairs = ((_node(k, key), _node(v, element)) for k, v in value.items())
            return _group("()", (_joined(left, right) for left, right in pairs))
        case frozenset():
            (element,) = get_args(_container(hint))
            return _group("()", sorted((_node(v, element) for v in value), key=lambda n: n.flat))
    node = _object_node(value)
    if _classes(hint):
        return _pair(_Leaf(type(value).__name__.lower()), node)
    return _group("{}", [node]) if isinstance(node, _Leaf) and _or_scalar(hint) else node


def _or_scalar(hint: Any) -> bool:
    """Whether a word or a number may stand in the place of an object."""
    hints = {*_alternatives(hint)} - {NoneType, Shape, *_EXPRS}
    return not all(dataclasses.is_dataclass(each) for each in hints)


def _word(value: bool | float | int | str | Enum | None) -> str:
    """A word or a number as it is; other strings, and those that look like something else, quoted.

    Booleans and None come before numbers, because True is one.
    """
    if isinstance(value, Enum):
        return _word(value.value)
    if value is None or isinstance(value, bool):
        return next(word for word, constant in _CONSTANTS.items() if constant is value)
    if not isinstance(value, str):
        return repr(value)
    plain = _WORD.fullmatch(value) and value not in _CONSTANTS and _number(value) is None
    return value if plain else json.dumps(value, ensure_ascii=False)


def _tuple_node(values: tuple[Any, ...], hints: tuple[Any, ...]) -> _Node:
    if len(hints) == 2 and hints[1] is Ellipsis:
        return _group("()", (_node(value, hints[0]) for value in values))
    nodes = [_node(value, hint) for value, hint in zip(values, hints, strict=True)]
    return _joined(*nodes) if len(nodes) == 2 else _group("()", nodes)


def _joined(left: _Node, right: _Node) -> _Node:
    return _pair(left, right) if isinstance(left, _Leaf) else _group("()", (left, right))


def _object_node(value: Any) -> _Node:
    of: Any = type(value)
    nodes = {name: _node(getattr(value, name), hint) for name, hint in _hints(of).items()}
    if _is_pair(of):
        return _joined(*nodes.values())
    if len(nodes) == 1:
        return next(iter(nodes.values()))
    defaults = _defaults(of)
    first = next(iter(nodes))
    items = [
        node if name == first and isinstance(node, _Leaf) else _pair(_Leaf(name), node, "=")
        for name, node in nodes.items()
        if name not in defaults or getattr(value, name) != defaults[name]
    ]
    return _group("{}", items)


def _value(node: _Node, hint: Any) -> Any:
    """The object that a node stands for, of a type.

    Raises:
        ValueError: it stands for no such object.
    """
    alternatives = _alternatives(hint)
    if isinstance(node, _Leaf) and node.flat == "none" and NoneType in alternatives:
        return None
    if isinstance(node, _Leaf) and bool in alternatives and node.flat in ("true", "false"):
        return _scalar(node, (bool,))
    read, found = _reading(hint)
    return read(node, found)


@cache
def _reading(hint: Any) -> tuple[Callable[[_Node, Any], Any], Any]:
    """The function that reads values of a type, and which of its alternatives it reads."""
    hints = tuple(each for each in _alternatives(hint) if each is not NoneType)
    if hint is Shape:
        return _shape, hint
    if set(hints) <= {*_EXPRS}:
        return _expr, hint
    if _classes(hint):
        return _one_of_several, hint
    for each in hints:
        if get_origin(each) in (tuple, frozenset) or _is_mapping(each):
            return _elements, each
        if dataclasses.is_dataclass(each):
            return (_object_or_scalar, hints) if _or_scalar(hint) else (_object, each)
    return _scalar, hints


def _leaf(node: _Node, what: str) -> _Leaf:
    if isinstance(node, _Leaf):
        return node
    raise ValueError(f"line {node.line}: expected {what}, got {node.flat[:60]}")


def _expr(node: _Node, _: Any) -> Any:
    leaf = _leaf(node, "a size")
    try:
        text = json.loads(leaf.flat) if leaf.flat.startswith('"') else leaf.flat
        return parse_expr(text, longest=len(leaf.flat))
    except ValueError as error:
        raise ValueError(f"line {leaf.line}: {error}") from None


def _shape(node: _Node, _: Any) -> Shape:
    leaf = _leaf(node, "a shape")
    dims = re.split(r",\s*(?![^(]*\))", leaf.flat.removeprefix("[").removesuffix("]"))
    try:
        return Shape.parse([dim for dim in dims if dim], longest=len(leaf.flat))
    except ValueError as error:
        raise ValueError(f"line {leaf.line}: {error}") from None


def _elements(node: _Node, hint: Any) -> Any:
    items = node.items if isinstance(node, _Group) and node.brackets == "()" else None
    if isinstance(node, _Pair):
        items = (node.left, node.right)
    if items is None:
        raise ValueError(f"line {node.line}: expected values in brackets, got {node.flat[:60]}")
    args = get_args(hint)
    if _is_mapping(hint):
        return dict(_both(item, args) for item in items)
    if get_origin(hint) is frozenset:
        return frozenset(_value(item, args[0]) for item in items)
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_value(item, args[0]) for item in items)
    if len(items) != len(args):
        raise ValueError(f"line {node.line}: expected {len(args)} values, got {len(items)}")
    return tuple(_value(item, each) for item, each in zip(items, args, strict=True))


def _both(node: _Node, hints: tuple[Any, ...]) -> tuple[Any, Any]:
    items: tuple[_Node, ...] = ()
    if isinstance(node, _Pair):
        items = (node.left, node.right)
    elif isinstance(node, _Group):
        items = node.items
    if len(items) != 2:
        raise ValueError(f"line {node.line}: expected a pair, got {node.flat[:60]}")
    return _value(items[0], hints[0]), _value(items[1], hints[1])


def _one_of_several(node: _Node, hint: Any) -> Any:
    known = _classes(hint)
    if not isinstance(node, _Pair) or node.left.flat not in known:
        words = " or ".join(f"{word}:..." for word in known)
        raise ValueError(f"line {node.line}: expected {words}, got {node.flat[:60]}")
    return _value(node.right, known[node.left.flat])


def _object(node: _Node, of: type) -> Any:
    hints = _hints(of)
    if _is_pair(of):
        return of(*_both(node, tuple(hints.values())))
    if len(hints) == 1:
        (hint,) = hints.values()
        return of(_value(node, hint))
    if not isinstance(node, _Group) or node.brackets != "{}":
        raise ValueError(f"line {node.line}: expected a {of.__name__}, got {node.flat[:60]}")
    given: dict[str, Any] = {}
    for index, item in enumerate(node.items):
        named = isinstance(item, _Pair) and item.sign == "="
        name = item.left.flat if isinstance(item, _Pair) and named else next(iter(hints))
        if name not in hints or (index and not named):
            known = ", ".join(hints)
            raise ValueError(
                f"line {item.line}: {of.__name__} has no field {item.flat[:60]}; known: {known}"
            )
        given[name] = _value(item.right if isinstance(item, _Pair) and named else item, hints[name])
    missing = [name for name in hints if name not in {**given, **_defaults(of)}]
    if missing:
        raise ValueError(f"line {node.line}: {of.__name__} lacks {', '.join(missing)}")
    return _made(of, {**_defaults(of), **given})


def _object_or_scalar(node: _Node, hints: tuple[Any, ...]) -> Any:
    """What stands in braces is an object, what does not is none."""
    (of,) = [each for each in hints if isinstance(each, type) and dataclasses.is_dataclass(each)]
    if not isinstance(node, _Group):
        return _scalar(node, tuple(each for each in hints if each is not of))
    single = len(_hints(of)) == 1 and len(node.items) == 1
    return _object(node.items[0] if single else node, of)


def _made(of: type, values: Mapping[str, Any]) -> Any:
    """An object of its fields; what specs validate once, by other names, is not validated again."""
    made: Any = object.__new__(of)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def _scalar(node: _Node, hints: tuple[Any, ...]) -> Any:
    leaf = _leaf(node, "a word or a number")
    quoted = leaf.flat.startswith('"')
    word = json.loads(leaf.flat) if quoted else leaf.flat
    if bool in hints and not quoted and word in _CONSTANTS:
        return _CONSTANTS[word]
    number = None if quoted else _number(word)
    if isinstance(number, int) and int in hints:
        return number
    if number is not None and float in hints:
        return float(number)
    for hint in hints:
        if isinstance(hint, type) and issubclass(hint, Enum):
            if word in {each.value for each in hint}:
                return hint(word)
        elif get_origin(hint) is Literal and number in get_args(hint):
            return number
    if str in hints and number is None:
        return word
    names = " or ".join(getattr(hint, "__name__", str(hint)) for hint in hints)
    raise ValueError(f"line {leaf.line}: {leaf.flat} is no {names}")


def _number(word: str) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return None


# Nodes to lines and back.


def _render(node: _Node, indent: int, column: int = 0) -> str:
    """The node as text; what does not fit goes on below, two columns further in.

    Args:
        node: what is printed.
        indent: of the line that it begins on.
        column: where on that line it begins, counted from the indent.
    """
    if indent + column + len(node.flat) <= _WIDTH and not _holds_objects(node):
        return node.flat
    match node:
        case _Leaf(flat=flat):
            return flat
        case _Pair(left=left, right=right, sign=sign):
            return f"{left.flat}{sign}{_render(right, indent, column + len(left.flat) + 1)}"
        case _Group():
            return "\n".join(_lines(node, indent, column))


def _holds_objects(node: _Node) -> bool:
    """Whether each item has a line of its own: objects, alone or behind a key."""
    value = _behind(node)
    return (
        isinstance(value, _Group)
        and value.brackets == "()"
        and any(
            isinstance(each, _Group) and each.brackets == "{}" for each in map(_behind, value.items)
        )
    )


def _behind(node: _Node) -> _Node:
    return node.right if isinstance(node, _Pair) else node


def _lines(group: _Group, indent: int, column: int) -> Iterator[str]:
    inner = " " * (indent + 2)
    apart = _holds_objects(group)
    line, first, broken = group.brackets[0], True, apart
    for item in group.items:
        gap = "" if first else " "
        fits = indent + column + len(line) + len(item.flat) + 2 <= _WIDTH
        if not broken and fits and not _holds_objects(item):
            line += gap + item.flat
        else:
            yield line
            column = 0
            *whole, line = f"{inner}{_render(item, indent + 2)}".splitlines()
            yield from whole
            broken = apart or bool(whole)
        first = False
    yield line + group.brackets[1]


class _Reader:
    """Tokens of a text, one after the other.

    Raises:
        ValueError: a quote or a bracket stays open.
    """

    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, int]] = []
        self._at = 0
        position, line, end = 0, 1, len(text.rstrip())
        while position < end:
            match = _TOKEN.match(text, position)
            if match is None:
                raise ValueError(f"line {line}: a quote or a bracket stays open")
            line += text.count("\n", position, match.start(1))
            self._tokens.append((match[1], line))
            position = match.end()
        self._last = line

    def _next(self) -> tuple[str, int]:
        if self._at == len(self._tokens):
            raise ValueError(f"line {self._last}: the text ends, but a value or bracket is open")
        self._at += 1
        return self._tokens[self._at - 1]

    def _peek(self) -> str:
        return self._tokens[self._at][0] if self._at < len(self._tokens) else ""

    def value(self) -> _Node:
        """The next value, with what follows its colon or sign of equality."""
        token, line = self._next()
        if token in ("{", "("):
            closing = {"{": "}", "(": ")"}[token]
            items = []
            while self._peek() != closing:
                items.append(self.value())
            self._next()
            return _group(token + closing, items, line)
        if token in "}):=":
            raise ValueError(f"line {line}: expected a value, got {token!r}")
        leaf = _Leaf(token, line)
        sign = self._peek()
        if sign not in (":", "="):
            return leaf
        self._next()
        return _pair(leaf, self.value(), sign, line)

    def end(self) -> None:
        """Nothing may follow.  Raises ValueError where something does."""
        if self._at < len(self._tokens):
            token, line = self._tokens[self._at]
            raise ValueError(f"line {line}: expected the end, got {token!r}")
