"""What every key of a spec means, from the docstrings of its dataclasses, in its JSON Schema.

The schemas for editors and the reference for people are both printed from what this gives.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

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


# ---- meanings beside a text


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a key means, and where it stands; lines and columns count from 0."""

    line: int
    column: int
    key: str
    meaning: str


def meanings_in(kind: SpecKind, text: str) -> Iterator[Meaning]:
    """The meaning of each key of a spec's text that begins a line, where it stands first."""
    schema = described(kind)
    seen: set[tuple[str, str]] = set()
    lines = text.splitlines()
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    for node, key in () if root is None else _keys(root, schema, schema):
        line, column = key.start_mark.line, key.start_mark.column
        begins = not lines[line][:column].strip()
        if begins and (node["title"], key.value) not in seen:
            seen.add((node["title"], key.value))
            yield Meaning(line, column, key.value, node["properties"][key.value]["description"])


def _keys(
    value: yaml.Node, node: Mapping[str, Any], schema: Mapping[str, Any]
) -> Iterator[tuple[Mapping[str, Any], yaml.ScalarNode]]:
    """Every key that a schema says the meaning of, with the object that has it."""
    node = _resolved(node, schema)
    if isinstance(value, yaml.SequenceNode) and "items" in node:
        for item in value.value:
            yield from _keys(item, node["items"], schema)
    if not isinstance(value, yaml.MappingNode):
        return
    patterns = node.get("patternProperties", {})
    others = next(iter(patterns.values()), node.get("additionalProperties"))
    for key, below in value.value:
        inner = node.get("properties", {}).get(key.value)
        if inner is not None and "description" in inner:
            yield node, key
        inner = others if inner is None else inner
        if isinstance(inner, Mapping):
            yield from _keys(below, inner, schema)


def _resolved(node: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a node of a schema refers to; of several, the first that is an object of ours."""
    if "anyOf" in node:
        node = next((each for each in node["anyOf"] if "$ref" in each), node["anyOf"][0])
    if "$ref" in node:
        found: Mapping[str, Any] = schema["$defs"][node["$ref"].rsplit("/", 1)[1]]
        return found
    return node
