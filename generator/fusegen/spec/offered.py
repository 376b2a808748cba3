"""What an architecture has kernels for, in words: the remedy in messages about what it has not."""

from __future__ import annotations

from collections.abc import Iterator

from ..families.registry import FAMILIES, known_family
from ..families.scalings import in_words
from ..ir.dtypes import DType
from .arch import ArchSpec, Every, FamilySpec

_EVERY = tuple(dict.fromkeys(name for family in FAMILIES for name in family.scalings))


def listed_scalings(name: str, family: FamilySpec) -> tuple[str, ...]:
    """How elements may share scales, spelled out: of users' own templates, as anything knows it."""
    if not isinstance(family.scalings, Every):
        return family.scalings
    known = known_family(family.template or name)
    return known.scalings if known else _EVERY


def offered(primitive: str, arch: ArchSpec) -> str:
    """All that an architecture has of a primitive, or of others where it has none.

    Such as ``it has quantize of e4m3, e5m2 by tensor, row``.
    """
    words = [*_each(primitive, arch)]
    if words:
        return f"it has {'; '.join(words)}"
    others = sorted({each for family in arch.kernels.values() for each in family.implements})
    return f"it has {', '.join(others) or 'none'}"


def _each(primitive: str, arch: ArchSpec) -> Iterator[str]:
    for name, family in arch.kernels.items():
        if primitive not in family.implements:
            continue
        if family.formats == (DType.IO,):
            yield f"{primitive} of what is not quantised"
            continue
        formats = ", ".join(each.value for each in family.formats)
        scalings = in_words(listed_scalings(name, family))
        ways = ", ".join(each.value for each in family.accumulations)
        by = f" by {scalings}" if scalings else ""
        yield f"{primitive} of {formats}{by}" + (f" in {ways} sums" if ways else "")
