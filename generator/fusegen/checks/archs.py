"""Architectures: a primitive has one family of kernels, and its rules choose points it can run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import product

from ..families.table import FAMILIES, LIMITS, PITCH, Family
from ..ir.dtypes import DType
from ..spec.arch import ArchSpec, FamilySpec, KindSpec
from ..spec.diagnostics import Problem
from ..spec.load import Source
from .common import unknown

_CODE = re.compile(r"\b(?:compute|sm)_(\w+)")


def check_arch(arch: ArchSpec, source: Source) -> Iterator[Problem]:
    """Every problem of an architecture."""
    compiled = [arch.capability is not None, arch.gencode is not None, arch.toolkit is not None]
    if any(compiled) != all(compiled):
        yield source.problem(
            "'capability', 'gencode' and 'toolkit' go together; write all or none", "arch"
        )
    if arch.kernels and not arch.gencode:
        yield source.problem("kernels need 'capability', 'gencode' and 'toolkit'", "kernels")
    yield from _check_code(arch, source)
    owners: dict[str, str] = {}
    for name, family in arch.kernels.items():
        for index, primitive in enumerate(family.implements):
            for served in _served(primitive, family):
                if served in owners:
                    yield source.problem(
                        f"{served} is already implemented by {owners[served]!r}; remove one",
                        "kernels",
                        name,
                        "implements",
                        index,
                    )
                owners[served] = name
        yield from _check_family(name, family, source)
        known = FAMILIES.get(family.template or name)
        if known:
            yield from _check_device_code(name, family, known, arch, source)


def _check_code(arch: ArchSpec, source: Source) -> Iterator[Problem]:
    """What an architecture is compiled for is what its name says."""
    if not arch.name.startswith("sm_"):
        return
    code = arch.name.removeprefix("sm_")
    if arch.gencode and {*_CODE.findall(arch.gencode)} != {code}:
        yield source.problem(
            f"expected code for {arch.name}, arch=compute_{code},code=sm_{code}, got"
            f" {arch.gencode!r}",
            "gencode",
        )
    digits = code.rstrip("a").rjust(2, "0")
    capability = (int(digits[:-1]), int(digits[-1]))
    if arch.capability not in (None, capability):
        yield source.problem(
            f"expected {[*capability]}, as the name {arch.name!r} says, got {[*arch.capability]}",
            "capability",
        )


def _served(primitive: str, family: FamilySpec) -> Iterator[str]:
    """What a family does, one by one: formats and scales that it takes in one primitive."""
    for format in family.formats:
        if format is DType.IO:
            yield primitive
        else:
            ways = [f" {each.value}" for each in family.accumulations] or [""]
            for scaling, way in product(family.scalings, ways):
                yield f"{primitive} of {format.value} {scaling}{way}"


def _check_device_code(
    name: str, family: FamilySpec, known: Family, arch: ArchSpec, source: Source
) -> Iterator[Problem]:
    """What a spec says of a family whose device code is known is what that code does."""
    path = ("kernels", name)
    template = family.template or name
    missing = known.cannot_run_on(arch.name, arch.capability or (0, 0))
    if missing:
        yield source.problem(f"{template} {missing}; remove it, or say template: <your own>", *path)
    listed: tuple[tuple[str, Iterable[str], Iterable[str]], ...] = (
        ("implements", [*family.implements], [*known.implements]),
        ("formats", [f.value for f in family.formats], [f.value for f in known.formats]),
        ("scalings", family.scalings, known.scalings),
        (
            "accumulations",
            [a.value for a in family.accumulations],
            [a.value for a in known.accumulations],
        ),
        ("stores", [s.value for s in family.stores], [s.value for s in known.stores]),
    )
    for key, words, choices in listed:
        for index, word in enumerate(words):
            if word not in choices:
                yield source.problem(
                    f"{template} has no {word}; it takes {', '.join(choices) or 'none'}",
                    *path,
                    key,
                    index,
                )
    if known.accumulations and not family.accumulations:
        words = ", ".join(each.value for each in known.accumulations)
        yield source.problem(f"{template} needs 'accumulations'; it takes {words}", *path)
    if family.row_alignment % known.row_alignment:
        yield source.problem(
            f"{template} needs a multiple of {known.row_alignment}, got {family.row_alignment}",
            *path,
            "row_alignment",
        )
    yield from _check_layout(template, family, known, arch, source)
    yield from _check_points(template, name, family, known, arch, source)


def _check_layout(
    template: str, family: FamilySpec, known: Family, arch: ArchSpec, source: Source
) -> Iterator[Problem]:
    """Copies are stored as the device code reads them."""
    if not known.reads_copies:
        return
    layout = arch.layout
    if not layout.transposed:
        yield source.problem(
            f"{template} reads columnwise copies transposed; say transposed: true",
            "layout",
            "transposed",
        )
    if layout.pitch != PITCH:
        yield source.problem(
            f"{template} has rows of {PITCH} bytes, got {layout.pitch}", "layout", "pitch"
        )
    if layout.token_alignment not in known.token_alignments:
        words = " or ".join(map(str, known.token_alignments))
        yield source.problem(
            f"{template} has groups that start at multiples of {words}, got"
            f" {layout.token_alignment}",
            "layout",
            "token_alignment",
        )
    along = [scaling for scaling in family.scalings if scaling in known.token_major]
    if along and not layout.token_major:
        yield source.problem(
            f"{template} reads scales of {along[0]} by token; say token_major: true",
            "layout",
            "token_major",
        )


def _check_points(
    template: str, name: str, family: FamilySpec, known: Family, arch: ArchSpec, source: Source
) -> Iterator[Problem]:
    """Every point is one that the device code compiles for, on an SM that has what it takes."""
    for kind, spec in family.kinds.items():
        path = ("kernels", name, "kinds", kind.value)
        if not known.operand_bytes:
            yield source.problem(f"{template} has no points to choose among; remove it", *path)
            continue
        for index, point in enumerate(spec.points):
            for problem in known.point_problems(kind, family, point):
                yield source.problem(
                    f"{template} cannot run {point.name}: {problem}", *path, "points", index
                )
    for limit, taken in LIMITS.items() if known.operand_bytes else ():
        if arch.limits.get(limit, taken) < taken:
            yield source.problem(
                f"{template} takes {taken}, got {arch.limits[limit]}", "limits", limit
            )


def _check_family(name: str, family: FamilySpec, source: Source) -> Iterator[Problem]:
    for kind, spec in family.kinds.items():
        yield from _check_kind(spec, source, ("kernels", name, "kinds", kind.value))


def _check_kind(spec: KindSpec, source: Source, path: tuple[str, ...]) -> Iterator[Problem]:
    names = [point.name for point in spec.points]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield source.problem(
                f"point {name} is written twice; remove one", *path, "points", index
            )
    if not spec.select:
        yield source.problem("expected a rule; the last one has no condition", *path, "select")
    for index, rule in enumerate(spec.select):
        yield from unknown(source, "point", rule.use, names, *path, "select", index, "use")
        last = index == len(spec.select) - 1
        if last and rule.when.conditions:
            yield source.problem(
                "the last rule must have no condition; remove 'when' or add a rule",
                *path,
                "select",
                index,
                "when",
            )
        if not last and not rule.when.conditions:
            yield source.problem(
                "rules after this one are never used; move it to the end or give it a condition",
                *path,
                "select",
                index,
            )
    unused = set(names) - {rule.use for rule in spec.select}
    for name in sorted(unused):
        yield source.problem(
            f"no rule uses point {name}; remove it or add a rule",
            *path,
            "points",
            names.index(name),
        )
