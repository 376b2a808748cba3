"""Changes of editions made in the text of a file: nothing else of it moves, comments stay."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import yaml

from .diagnostics import KeyPath
from .editions import Change


class EditError(Exception):
    """A change that cannot be made in the text; carries the path of the key."""

    def __init__(self, path: KeyPath, message: str) -> None:
        self.path = path
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class _Pair:
    """A key with its value, where it stands: offsets in the text.

    Attributes:
        flow: whether it stands within braces.
        before: end of the pair before it; None where it is the first.
        after: start of the pair behind it; None where it is the last.
    """

    start: int
    value: int
    end: int
    flow: bool
    before: int | None
    after: int | None


def rewritten(text: str, changes: Iterable[Change]) -> str:
    """The text of a spec with the changes made, each in what those before it left.

    Raises:
        EditError: a comment stands within what is to go, or a key shares a line with others.
    """
    for change in changes:
        pair = _find(text, change.path)
        if change.value is not None:
            text = f"{text[: pair.value]}{change.value}{text[pair.end :]}"
        elif pair.flow:
            text = _without_in_braces(text, pair)
        else:
            text = _without_lines(text, pair, change.path)
    return text


def _find(text: str, path: KeyPath) -> _Pair:
    # Not the loader in C, which does not count a byte order mark.
    node: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    for key in path[:-1]:
        node = _child(node, key)
    index = next(i for i, (key, _) in enumerate(node.value) if key.value == path[-1])
    key, value = node.value[index]
    return _Pair(
        key.start_mark.index,
        value.start_mark.index,
        _end(value),
        bool(node.flow_style),
        _end(node.value[index - 1][1]) if index else None,
        node.value[index + 1][0].start_mark.index if index + 1 < len(node.value) else None,
    )


def _child(node: Any, key: str | int) -> Any:
    if isinstance(node, yaml.SequenceNode):
        return node.value[key]
    return next(value for each, value in node.value if each.value == key)


def _end(node: yaml.Node) -> int:
    """Where a value ends; the mark of a list of lines is where the next key begins."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    end: int = node.end_mark.index
    return end


def _without_in_braces(text: str, pair: _Pair) -> str:
    """Without the pair and one comma; with the comments around them."""
    if pair.after is not None:
        start, end = pair.start, pair.after
        if "#" in text[pair.end : end]:
            end = text.index(",", pair.end) + 1
    elif pair.before is not None:
        start, end = pair.before, pair.end
        if "#" in text[start : pair.start]:
            start = pair.start  # a comma may stand before the brace
    else:
        start, end = pair.start, pair.end
    return text[:start] + text[end:]


def _without_lines(text: str, pair: _Pair, path: KeyPath) -> str:
    """Without the lines of the pair; a comment behind it gets a line of its own."""
    start = text.rfind("\n", 0, pair.start) + 1
    stop = text.find("\n", pair.end)
    stop = len(text) if stop < 0 else stop + 1
    indent, behind = text[start : pair.start], text[pair.end : stop].lstrip(" \t")
    if indent.strip(" \ufeff"):
        raise EditError(path, f"{path[-1]!r} shares its line with what stands before it")
    if "#" in text[pair.start : pair.end]:
        raise EditError(path, f"a comment stands between {path[-1]!r} and its value")
    kept = f"{indent}{behind}" if behind.startswith("#") else indent.strip(" ")
    return text[:start] + kept + text[stop:]
