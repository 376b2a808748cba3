"""What every key of a spec means, from the docstrings of its dataclasses, in its JSON Schema.

The schemas for editors and the reference for people are both printed from what this gives.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

from .kinds import SpecKind
from .load import adapter

_ATTRIBUTES = "\n\nAttributes:\n"
_ENTRY = re.compile(r"(\w+): (.*)")


def described(kind: SpecKind) -> dict[str, Any]:
    """The JSON Schema of a kind of spec, the meaning of each key as its description.

    Raises:
        KeyError: of a key that no docstring says the meaning of.
    """
    schema: dict[str, Any] = copy.deepcopy(adapter(kind.spec).json_schema())
    shared = {
        "edition": "version of the format of specs",
        kind.key: f"name of the {kind.key}; its file is named so",
        "summary": "one line for people: comments, docstrings and tables have it",
    }
    _describe(schema, shared)
    for node in schema.get("$defs", {}).values():
        _describe(node, {})
    return schema


def _describe(node: dict[str, Any], shared: Mapping[str, str]) -> None:
    """Move the meanings of attributes from the description of an object to its keys."""
    if "description" not in node:
        return
    head, _, entries = node["description"].partition(_ATTRIBUTES)
    node["description"] = _one_line(head.partition("\n\n")[0])
    meanings = {**shared, **dict(_entries(entries))}
    for key, value in node.get("properties", {}).items():
        if key not in meanings:
            raise KeyError(f"{node['title']}: no docstring says what {key!r} is")
        value["description"] = meanings[key]


def _entries(text: str) -> Iterator[tuple[str, str]]:
    """Names and meanings; Python's keywords have an underscore behind them there."""
    for entry in re.split(r"\n(?=    \w)", f"\n{text}"):
        match = _ENTRY.fullmatch(_one_line(entry))
        if match:
            meaning = re.sub(r"\bNone\b", "`null`", match[2].rstrip("."))
            yield match[1].rstrip("_"), meaning


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("``", "`")
