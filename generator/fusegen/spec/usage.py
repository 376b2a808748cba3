"""Requests that cannot be met, and the names in them."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path

from .diagnostics import did_you_mean
from .files import resolve
from .kinds import SpecKind
from .load import SpecSet
from .serving import arch_meant

_OWN_SPECS = "specs"
"""Where people put specs of their own, and `new` begins them: read where it is named alone."""


class UsageError(Exception):
    """A request that cannot be understood or met; the message says what to ask for instead."""


def command_line(*words: str | Path) -> str:
    """A command of fusegen as a message tells people to run it, ready for a shell."""
    return shlex.join(("fusegen", *map(str, words)))


def known(what: str, word: str, choices: Iterable[str]) -> str:
    """`word`, if it is one of the choices.

    Raises:
        UsageError: it is not; with the closest choice.
    """
    names = list(choices)
    if word not in names:
        raise UsageError(f"unknown {what} {word!r}{did_you_mean(word, names)}")
    return word


def unread_specs(folders: Iterable[Path]) -> Path | None:
    """The folder `specs` here, where it holds specs and is none of the folders that are read."""
    own = Path(_OWN_SPECS)
    if resolve(own) in {resolve(folder) for folder in folders}:
        return None
    held = (path for kind in SpecKind for path in own.glob(f"{kind.folder}/*.yaml"))
    return own if any(held) else None


def spec_named(specs: SpecSet, kind: SpecKind, word: str, further: Iterable[str] = ()) -> str:
    """`word`, if it names a spec of a kind, or is one of a few further words.

    Raises:
        UsageError: it does not; with the closest choice, and for a GPU its architecture.
        SpecError: that spec is wrong.
    """
    specs.require(kind, word)
    names = [*specs.of(kind), *further]
    if word in names:
        return word
    unread = Path(_OWN_SPECS, kind.folder, f"{word}.yaml")
    if unread.is_file():
        raise UsageError(
            f"unknown {kind.key} {word!r}; {unread} is not read: add --specs {_OWN_SPECS}"
        )
    if kind is SpecKind.MODULES and word in specs.ops:
        raise UsageError(
            f"unknown module {word!r}: it is an op; `fusegen new module {word}` makes a module of"
            " it (with --specs, if the op is yours)"
        )
    if kind is SpecKind.ARCHS:
        raise UsageError(f"unknown arch {word!r}{arch_meant(word, specs, names)}")
    return known(kind.key, word, names)
