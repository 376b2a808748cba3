"""Names for conditions over gradient flags that a function asks more than once, in any language."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

from ...ir.names import plain
from ...ir.program import Program
from ...ir.step import Result
from ...steps import quantizes

_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Language:
    """How a language spells conditions.

    Attributes:
        either: between flags of which one is enough.
        assignment: of a ``value`` to a ``name``.
    """

    either: str
    assignment: str

    def any_of(self, when: Iterable[str]) -> str:
        """Source of a condition over flags, spelled out."""
        return self.either.join(when)


PYTHON = Language(" or ", "{name} = {value}")
CPP = Language(" || ", "const bool {name} = {value};")


@dataclass(frozen=True, slots=True)
class Conditions:
    """How a function spells conditions.

    Attributes:
        names: of those that have one.
        language: of the function.
    """

    names: Mapping[tuple[str, ...], str] = field(default_factory=dict)
    language: Language = PYTHON

    def text(self, when: tuple[str, ...]) -> str:
        """Source of a condition; empty where it is always true."""
        return self.names.get(when) or self.language.any_of(when)

    @property
    def lines(self) -> tuple[str, ...]:
        """``keep_h = need_dx or need_dweight`` for each that has a name."""
        return tuple(
            self.language.assignment.format(name=name, value=self.language.any_of(when))
            for when, name in self.names.items()
        )


def any_of(when: Iterable[str]) -> str:
    """Python source of a condition over flags, spelled out."""
    return PYTHON.any_of(when)


def named_conditions(
    program: Program,
    texts: Callable[[Conditions], Iterable[str]],
    language: Language = PYTHON,
    saved: Iterable[Result] = (),
) -> Conditions:
    """Names for those conditions of an op that a function asks more than once.

    Args:
        program: the op.
        texts: all source of the function in which conditions stand, as these spell them.
        language: of the function.
        saved: what the function saves besides results of the op.
    """
    candidates = _names(program, saved)
    spelled = texts(Conditions(candidates, language))
    uses = Counter(chain.from_iterable(map(_WORD.findall, spelled)))
    often = {when: name for when, name in candidates.items() if uses[name] > 1}
    return Conditions(often, language)


def _names(program: Program, saved: Iterable[Result]) -> dict[tuple[str, ...], str]:
    """A name for every condition that is more than one flag, the first thing it decides on."""
    taken = set(map(plain, program.flags))
    found: dict[tuple[str, ...], str] = {}
    kept = ((result.when, f"keep_{plain(result.buffer)}") for result in saved)
    for when, name in (*_decisions(program), *kept):
        if len(when) > 1 and when not in found:
            if name in taken:
                name = "_or_".join((plain(when[0]), *(plain(flag)[5:] for flag in when[1:])))
            taken.add(name)
            found[when] = name
    return found


def _decisions(program: Program) -> Iterator[tuple[tuple[str, ...], str]]:
    """Conditions and what each is called after what it decides on."""
    yield program.flags, "need_any"
    if program.name == "forward":
        yield from ((r.when, f"keep_{plain(r.buffer)}") for r in program.results)
    for step in program.steps:
        if quantizes(step):
            yield step.when, f"need_{plain(step.reads[0])}_copies"
        elif step.writes:
            yield step.when, f"need_{plain(step.writes[0])}"
    for step in program.steps:
        yield from ((r.when, f"need_{plain(r.buffer)}") for r in step.output_when)
