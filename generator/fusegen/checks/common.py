"""What checks of several kinds of specs share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ..load import Source
from ..model.source import Problem, did_you_mean
from ..model.specs import AttributeSpec, AttributeType

_PYTHON_TYPES: Mapping[AttributeType, type | tuple[type, ...]] = {
    AttributeType.FLOAT: (float, int),
    AttributeType.INT: int,
    AttributeType.BOOL: bool,
    AttributeType.STRING: str,
}


def unknown(
    source: Source, what: str, word: str, known: Iterable[str], *path: str | int
) -> Iterator[Problem]:
    """A problem where a word is not among the known ones."""
    choices = list(known)
    if word not in choices:
        yield source.problem(f"unknown {what} {word!r}{did_you_mean(word, choices)}", *path)


def check_symbols(dims: Mapping[str, str], source: Source) -> Iterator[Problem]:
    """Dimensions have a keyword and a symbol of their own."""
    words = list(dims.values())
    for symbol, word in dims.items():
        if words.count(word) > 1:
            yield source.problem(
                f"two dimensions have the keyword {word!r}; rename one", "dims", symbol
            )
        if symbol in ("I", "O"):
            yield source.problem(
                f"symbol {symbol!r} reads like a digit, and linters refuse it; use another letter",
                "dims",
                symbol,
            )


def fits(attribute: AttributeSpec, value: object) -> bool:
    """Whether a value is of an attribute's type; a YAML ``true`` is no number."""
    number = not isinstance(value, bool) or attribute.type is AttributeType.BOOL
    return number and isinstance(value, _PYTHON_TYPES[attribute.type])
