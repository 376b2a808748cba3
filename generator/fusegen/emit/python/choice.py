"""What a cell of a fat bundle states of the bundles that its calls may go to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..text.escape import docstring
from .words import pieces


@dataclass(frozen=True, slots=True)
class DigestText:
    """What an architecture's bundle has of the cell."""

    arch: str
    digest: str


@dataclass(frozen=True, slots=True)
class LackingText:
    """Why an architecture's bundle does not have the cell, in pieces of a string."""

    arch: str
    pieces: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ChoiceText:
    """The bundles in a fat one, as a cell sees them.

    Attributes:
        archs: a line for each: its status and the reason.
        digests: by architecture, of the cell there.
        lacking: architectures that it cannot be made for.
    """

    archs: tuple[str, ...]
    digests: tuple[DigestText, ...]
    lacking: tuple[LackingText, ...]


def choice_text(
    lines: Iterable[str], digests: Iterable[tuple[str, str]], lacking: Iterable[tuple[str, str]]
) -> ChoiceText:
    """Of lines for people, and of digests and reasons by architecture."""
    return ChoiceText(
        tuple(map(docstring, lines)),
        tuple(DigestText(arch, digest) for arch, digest in digests),
        tuple(
            LackingText(arch, tuple(map(docstring, pieces(why, separator=" "))))
            for arch, why in lacking
        ),
    )
