"""Where a statement stands in a spec, and what is wrong with it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

KeyPath = tuple[str | int, ...]
"""Where a value stands in a document: keys, and indices of lists."""


@dataclass(frozen=True, slots=True, order=True)
class Loc:
    """A place in a spec file.  Lines and columns count from 1, as editors show them."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"

    @classmethod
    def parse(cls, text: str) -> Loc:
        """Inverse of ``str``.  Raises ValueError where text is not ``file:line:column``."""
        file, line, column = text.rsplit(":", 2)
        return cls(file, int(line), int(column))


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One mistake in the specs, with its place and, where one is known, its remedy."""

    loc: Loc
    message: str

    def __str__(self) -> str:
        return f"{self.loc}: {self.message}"


class SpecError(Exception):
    """The specs are wrong.  Carries every problem found, not only the first."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(set(problems)))
        super().__init__("\n".join(str(problem) for problem in self.problems))


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """The end of an error message that helps with an unknown name: a close match or the choices."""
    known = sorted(choices)
    close = difflib.get_close_matches(word, known, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(known)}" if known else ""
