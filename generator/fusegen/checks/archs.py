"""Architectures: a primitive has one kernel family, and its rules always choose a point."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from ..load import Source
from ..model.dtypes import DType
from ..model.source import Problem
from ..model.specs import ArchSpec, FamilySpec, KindSpec
from .common import unknown


def check_arch(arch: ArchSpec, source: Source) -> Iterator[Problem]:
    """Every problem of an architecture."""
    compiled = [arch.capability is not None, arch.gencode is not None, arch.toolkit is not None]
    if any(compiled) != all(compiled):
        yield source.problem(
            "'capability', 'gencode' and 'toolkit' go together; write all or none", "arch"
        )
    if arch.kernels and not arch.gencode:
        yield source.problem("kernels need 'capability', 'gencode' and 'toolkit'", "kernels")
    owners: dict[str, str] = {}
    for name, family in arch.kernels.items():
        for index, primitive in enumerate(family.implements):
            for served in _served(primitive.value, family):
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


def _served(primitive: str, family: FamilySpec) -> Iterator[str]:
    """What a family does, one by one: formats and scales that it takes in one primitive."""
    for format in family.formats:
        if format is DType.IO:
            yield primitive
        else:
            ways = [f" {each.value}" for each in family.accumulations] or [""]
            for scaling, way in product(family.scalings, ways):
                yield f"{primitive} of {format.value} {scaling}{way}"


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
