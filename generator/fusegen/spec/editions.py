"""Editions of the spec format: what each changed, and how an older document becomes a current one.

A step is a pure function from the document of a file, as YAML has it, to the changes that it takes.
The same changes are made in memory when an older file is read, and in its text by `edits.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from ..ir.dtypes import INTEGERS
from .arch import capability_of
from .diagnostics import KeyPath
from .fields import Edition
from .kinds import SpecKind

Document = Mapping[str, Any]

CURRENT: int = get_args(Edition)[0]
"""The edition that this fusegen writes, and that its dataclasses are of."""


@dataclass(frozen=True, slots=True)
class Change:
    """A key that goes, or that gets another value.

    Attributes:
        path: of the key.
        value: that it gets; None where it goes.
        problem: why nobody but its author can make the change; empty where fusegen can.
    """

    path: KeyPath
    value: int | str | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class EditionStep:
    """How documents of the edition before become those of an edition.

    Attributes:
        edition: that they are of then.
        summary: what it changed, for people.
        changes: of a document of a kind.
    """

    edition: int
    summary: str
    changes: Callable[[SpecKind, Document], Iterator[Change]]


@dataclass(frozen=True, slots=True)
class Upgrade:
    """An older document in the current edition.

    Attributes:
        document: of the current edition.
        changes: that were made, each to what those before it left.
    """

    document: Document
    changes: tuple[Change, ...]


def edition_of(document: Document) -> int | None:
    """The edition that a document states; None where it states none that there could be."""
    stated = document.get("edition")
    return stated if type(stated) is int and stated > 0 else None


def is_older(document: Document) -> bool:
    """Whether a document is of an edition before the current one."""
    return (edition_of(document) or CURRENT) < CURRENT


def newer_problem(document: Document) -> str:
    """What is wrong with the edition of a document from the future; empty where it is none."""
    edition = edition_of(document) or CURRENT
    if edition <= CURRENT:
        return ""
    return (
        f"edition {edition} is newer than edition {CURRENT}, the last that this fusegen reads;"
        " upgrade fusegen: pip install --upgrade fusegen"
    )


def upgraded(kind: SpecKind, document: Document) -> Upgrade:
    """A document of any edition up to the current one, in the current one."""
    made: list[Change] = []
    for step in STEPS:
        if (edition_of(document) or CURRENT) < step.edition:
            changes = (*step.changes(kind, document), Change(("edition",), step.edition))
            for change in changes:
                document = _applied(document, change.path, change.value)
            made += changes
    return Upgrade(document, tuple(made))


def _applied(value: Any, path: KeyPath, to: int | str | None) -> Any:
    """A document, or what is in it, with another value of a key or without it."""
    key, *rest = path
    if isinstance(value, list):
        return [_applied(each, (*rest,), to) if i == key else each for i, each in enumerate(value)]
    if rest:
        return {**value, key: _applied(value[key], (*rest,), to)}
    kept = {each: own for each, own in value.items() if each != key or to is not None}
    return kept if to is None else kept | {key: to}


def _says_nothing_twice(kind: SpecKind, document: Document) -> Iterator[Change]:
    """Edition 2: keys that follow from others are gone."""
    match kind:
        case SpecKind.OPS | SpecKind.MODULES:
            yield from _integers(document)
        case SpecKind.RECIPES:
            yield from _scales(document)
        case SpecKind.ARCHS if "capability" in document:
            compiled = document.get("gencode") is not None
            implied = capability_of(str(document.get("arch"))) if compiled else None
            listed = None if implied is None else [*implied]
            yield _implied(("capability",), document["capability"], listed, "'arch' and 'gencode'")


def _integers(document: Document) -> Iterator[Change]:
    """No gradient flows into integers."""
    words = [dtype.value for dtype in INTEGERS]
    for section in ("inputs", "parameters", "internal", "outputs"):
        for name, tensor in _mapping(document.get(section)).items():
            said = _mapping(tensor)
            if "differentiable" in said and said.get("dtype") in words:
                path = (section, name, "differentiable")
                yield _implied(path, said["differentiable"], False, f"dtype: {said['dtype']}")


def _scales(document: Document) -> Iterator[Change]:
    """A scale that has a history follows it."""
    for role, said in _mapping(document.get("roles")).items():
        for key in ("scale", "tensor_scale"):
            scale = _mapping(_mapping(said).get(key))
            if "source" in scale:
                implied = "history" if scale.get("history") else "current"
                path = ("roles", role, key, "source")
                by = f"history: {scale.get('history', 0)}"
                yield _implied(path, scale["source"], implied, by)


def _implied(path: KeyPath, stated: object, implied: object, by: str) -> Change:
    """The removal of a key that says what follows from others anyway."""
    if type(stated) is type(implied) and stated == implied:
        return Change(path)
    expected, got = (json.dumps(value, default=str) for value in (implied, stated))
    key = path[-1]
    return Change(
        path,
        problem=f"{key!r} is {got}, but {expected} by {by}; correct one of them, or remove {key!r}",
    )


def _mapping(value: object) -> Mapping[str, Any]:
    """What may be anything, as keys and values."""
    return value if isinstance(value, dict) else {}


STEPS = (
    EditionStep(
        2,
        "Keys that follow from others are gone: `differentiable` of integers, into which no"
        " gradient flows, `source` of a scale, which follows a history where it has one, and"
        " `capability` of an architecture, which its name says.",
        _says_nothing_twice,
    ),
)
"""From the oldest edition that is read, which is 1, to the current one."""
