"""Requests that cannot be met, and the names in them."""

from __future__ import annotations

from collections.abc import Iterable

from .diagnostics import did_you_mean
from .kinds import SpecKind
from .load import SpecSet


class UsageError(Exception):
    """A request that cannot be understood or met; the message says what to ask for instead."""


def known(what: str, word: str, choices: Iterable[str]) -> str:
    """`word`, if it is one of the choices.

    Raises:
        UsageError: it is not; with the closest choice.
    """
    names = list(choices)
    if word not in names:
        raise UsageError(f"unknown {what} {word!r}{did_you_mean(word, names)}")
    return word


def spec_named(specs: SpecSet, kind: SpecKind, word: str) -> str:
    """`word`, if it names a spec of a kind.

    Raises:
        UsageError: it does not; with the closest choice.
        SpecError: that spec is wrong.
    """
    specs.require(kind, word)
    return known(kind.key, word, specs.of(kind))
