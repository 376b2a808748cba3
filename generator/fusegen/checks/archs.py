"""Architectures: a primitive has one family of kernels, and its rules choose points it can run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from itertools import product
from typing import Any

from ..families.family import Config, Configured, Family
from ..families.limits import CAPABILITIES, SHARED_BYTES, SHARED_MEMORY, hardware_limits
from ..families.registry import FAMILIES, known_family
from ..families.scalings import ALL, CODES, in_words
from ..ir.dtypes import DType
from ..ir.kernel import GemmKind
from ..ir.kernel_set import Variant
from ..ir.quantization import Accumulation, Scaling
from ..spec.arch import ArchSpec, Every, FamilySpec, KindSpec, RuleSpec
from ..spec.diagnostics import Problem
from ..spec.load import Source
from ..spec.offered import listed_scalings
from .common import unknown

_LIMITS = sorted(
    {limit for family in FAMILIES if family.configured for limit in family.configured.limits}
)
"""What families read of an architecture's limits."""

_CODE = re.compile(r"\b(?:compute|sm)_(\w+)")


def check_arch(arch: ArchSpec, source: Source) -> Iterator[Problem]:
    """Every problem of an architecture."""
    compiled = [arch.gencode is not None, arch.toolkit is not None]
    if any(compiled) != all(compiled):
        yield source.problem("'gencode' and 'toolkit' go together; write both or none", "arch")
    if arch.kernels and not arch.gencode:
        yield source.problem("kernels need 'gencode' and 'toolkit'", "kernels")
    yield from _check_code(arch, source)
    yield from _check_limits(arch, source)
    yield from _check_atoms(arch, source)
    yield from _check_transposed(arch, source)
    owners: dict[str, str] = {}
    for name, family in arch.kernels.items():
        for index, primitive in enumerate(family.implements):
            for served in _served(primitive, name, family):
                if owners.get(served, name) != name:
                    yield source.problem(
                        f"{served} is already implemented by {owners[served]!r}; remove one",
                        "kernels",
                        name,
                        "implements",
                        index,
                    )
                owners[served] = name
        yield from _check_family(name, family, source)
        known = known_family(family.template or name)
        if known:
            yield from _check_device_code(name, family, known, arch, source)
        else:
            yield from _check_words(name, family, source)


def _check_limits(arch: ArchSpec, source: Source) -> Iterator[Problem]:
    """Limits have names that families read, and are what the hardware has, where that is known."""
    for limit in arch.limits:
        yield from unknown(source, "limit", limit, _LIMITS, "limits", limit)
    read = {limit for each in _configured(arch) for limit in each.limits}
    hardware = hardware_limits(arch.capability)
    for limit in sorted(read):
        got, number = arch.limits.get(limit), hardware.get(limit)
        if got is None or (number is not None and got != number):
            yield source.problem(
                f"expected {limit}: {number or '<number>'}, by which kernels are laid out, got"
                f" {got or 'none'}",
                "limits",
                limit,
            )


def _check_atoms(arch: ArchSpec, source: Source) -> Iterator[Problem]:
    """Scales in atoms are of one byte each, for 32 elements or for 16 under E4M3."""
    fitting = [each.name for each in ALL if each.atom_block]
    for index, word in enumerate(arch.layout.scale_atoms):
        path = ("layout", "scale_atoms", index)
        if word not in fitting:
            words = ", ".join(fitting)
            yield source.problem(f"scales of {word!r} do not fit into atoms; {words} do", *path)
        if word in arch.layout.scale_atoms[:index]:
            yield source.problem(f"{word!r} is listed twice; remove one", *path)


def _check_transposed(arch: ArchSpec, source: Source) -> Iterator[Problem]:
    """Formats of copies that are transposed are such that copies have."""
    stated = arch.layout.transposed
    listed = () if isinstance(stated, bool) else stated
    for index, format in enumerate(listed):
        path = ("layout", "transposed", index)
        if format not in CODES:
            words = ", ".join(each.value for each in CODES)
            yield source.problem(f"no copy is of {format.value}; they are of {words}", *path)
        if format in listed[:index]:
            yield source.problem(f"{format.value!r} is listed twice; remove one", *path)


def _configured(arch: ArchSpec) -> Iterator[Configured[Any]]:
    """What is known of configurations of those families that the architecture can run."""
    listed = (known_family(family.template or name) for name, family in arch.kernels.items())
    for known in filter(None, listed):
        runs = not known.cannot_run_on(arch.isa, arch.capability or (0, 0))
        if runs and known.configured:
            yield known.configured


def _check_code(arch: ArchSpec, source: Source) -> Iterator[Problem]:
    """What an architecture is compiled for is what its name says."""
    if not arch.name.startswith("sm_"):
        return
    code = arch.isa.removeprefix("sm_")
    if arch.gencode and {*_CODE.findall(arch.gencode)} != {code}:
        yield source.problem(
            f"expected code for {arch.name}, arch=compute_{code},code=sm_{code}, got"
            f" {arch.gencode!r}",
            "gencode",
        )


def _served(primitive: str, name: str, family: FamilySpec) -> Iterator[str]:
    """What a family does, one by one: formats and scales that it takes in one primitive."""
    for format in family.formats:
        if format is DType.IO:
            yield primitive
        else:
            ways = [f" {each.value}" for each in family.accumulations] or [""]
            for scaling, way in product(listed_scalings(name, family), ways):
                yield f"{primitive} of {format.value} {scaling}{way}"


def _check_words(name: str, family: FamilySpec, source: Source) -> Iterator[Problem]:
    """Scalings of users' own families are some that a recipe can have."""
    for index, word in enumerate(listed_scalings(name, family)):
        if Scaling.parse(word) is None:
            yield source.problem(
                f"{word!r} is no scaling; expected tensor, row, or one such as block_1x128, mx_1x32"
                " and nv_1x16",
                "kernels",
                name,
                "scalings",
                index,
            )


def _check_device_code(
    name: str, family: FamilySpec, known: Family, arch: ArchSpec, source: Source
) -> Iterator[Problem]:
    """What a spec says of a family whose device code is known is what that code does."""
    path = ("kernels", name)
    template = family.template or name
    missing = known.cannot_run_on(arch.isa, arch.capability or (0, 0))
    if missing:
        yield source.problem(f"{template} {missing}; remove it, or say template: <your own>", *path)
    for key, words in _listed(name, family):
        choices = dict(_listed(name, known))[key]
        taken = in_words(choices) if key == "scalings" else ", ".join(choices)
        for index, word in enumerate(words):
            if word not in choices:
                yield source.problem(
                    f"{template} has no {word}; it takes {taken or 'none'}",
                    *path,
                    key,
                    index,
                )
    if known.accumulations and not family.accumulations:
        ways = ", ".join(each.value for each in known.accumulations)
        yield source.problem(f"{template} needs 'accumulations'; it takes {ways}", *path)
    if family.row_alignment != known.row_alignment:
        yield source.problem(
            f"{template} has rows of multiples of {known.row_alignment}, got"
            f" {family.row_alignment}; say row_alignment: {known.row_alignment}",
            *path,
            "row_alignment",
        )
    scalings = listed_scalings(name, family)
    if isinstance(family.scalings, Every) and not scalings:
        yield source.problem(f"{template} scales nothing; remove 'scalings'", *path, "scalings")
    if known.layout:
        formats = tuple(each for each in family.formats if each in known.formats)
        for key, message in known.layout.problems(template, arch.layout, formats, scalings):
            yield source.problem(message, "layout", key)
    yield from _check_scalings(template, name, family, known, source)
    yield from _check_configurations(template, name, family, known, arch, source)


def _check_scalings(
    template: str, name: str, family: FamilySpec, known: Family, source: Source
) -> Iterator[Problem]:
    """Operands of a GEMM scale in pairs, and each pair in sums that there is code for."""
    path = ("kernels", name)
    scalings = listed_scalings(name, family)
    for pair in known.multiplies:
        names = (pair.tokens.name, pair.weights.name)
        listed = [each for each in names if each in scalings]
        missing = [each for each in names if each not in scalings]
        if listed and missing:
            yield source.problem(
                f"{template} multiplies {names[0]} of tokens and {names[1]} of weights; list"
                f" {missing[0]}, too, or remove {listed[0]}",
                *path,
                "scalings",
                scalings.index(listed[0]),
            )
        for index, way in enumerate(family.accumulations):
            if listed and way in known.accumulations and way not in pair.accumulations:
                words = ", ".join(each.value for each in pair.accumulations)
                yield source.problem(
                    f"{template} has no {way.value} sums of {names[0]}; it takes {words}",
                    *path,
                    "accumulations",
                    index,
                )


def _check_configurations(
    template: str, name: str, family: FamilySpec, known: Family, arch: ArchSpec, source: Source
) -> Iterator[Problem]:
    """Every configuration is one that the device code compiles for, on an SM of these limits."""
    configured = known.configured
    limits = {**arch.limits, **hardware_limits(arch.capability)}
    for kind, spec in family.kinds.items():
        path = ("kernels", name, "kinds", kind.value)
        if configured is None:
            yield source.problem(f"{template} has no points to choose among; remove it", *path)
            continue
        variants = variants_of(kind, name, family, known)
        sound = []
        for index, point in enumerate(spec.points):
            problems = [*point_problems(configured, kind, point, variants, limits)]
            for problem in problems:
                yield source.problem(
                    f"{template} cannot run {point.name}: {problem}", *path, "points", index
                )
            sound += [] if problems else [point]
        last = len(spec.select) - 1
        for point in sound:
            if last >= 0 and point.name in spec.select[last].points:
                for problem in reach_problems(configured, kind, point, variants, arch):
                    yield source.problem(f"{template}: {problem}", *path, "select", last, "use")


def reach_problems(
    configured: Configured[Any],
    kind: GemmKind,
    point: Config,
    variants: Iterable[Variant],
    arch: ArchSpec,
) -> Iterator[str]:
    """Why the configuration that is used where no rule holds cannot be launched everywhere.

    None where a limit is missing, which is a problem of its own.
    """
    if not {*configured.limits} <= {*arch.limits}:
        return
    memory = {
        each: hardware_limits(each)[SHARED_MEMORY] for each in CAPABILITIES if arch.runs_on(each)
    }
    stated = (configured.constants(point, kind, each, arch.limits) for each in variants)
    taken = max((dict(numbers).get(SHARED_BYTES, 0) for numbers in stated), default=0)
    if taken > min(memory.values(), default=taken):
        least = min(memory, key=lambda each: memory[each])
        yield (
            f"a CTA of {point.name} takes {taken} bytes of shared memory, but GPUs of compute"
            f" capability {'.'.join(map(str, least))} run this code, too, and let one have"
            f" {memory[least]}; end with a rule for a point that takes no more"
        )


def variants_of(
    kind: GemmKind, name: str, family: FamilySpec, known: Family
) -> tuple[Variant, ...]:
    """Of every GEMM of a kind that a spec lists."""
    return tuple(
        Variant(family.formats[:1], scalings, tuple(way.value for way in ways), store)
        for scalings in _scalings_of(kind, name, family, known)
        for ways in _each(family.accumulations)
        for store in family.stores
    )


def point_problems(
    configured: Configured[Any],
    kind: GemmKind,
    point: Config,
    variants: Iterable[Variant],
    limits: Mapping[str, int],
) -> Iterable[str]:
    """Problems of a configuration in any GEMM that a spec lists, each once.

    None where a limit is missing, which is a problem of its own.
    """
    if not isinstance(point, configured.config):
        own = ", ".join(each.name for each in fields(configured.config))
        return (f"its points say {own}; this one is another family's",)
    if not {*configured.limits} <= {*limits}:
        return ()
    return dict.fromkeys(
        problem
        for variant in variants
        for problem in configured.problems(point, kind, variant, limits)
    )


def _each(ways: tuple[Accumulation, ...]) -> Iterable[tuple[Accumulation, ...]]:
    """Every accumulation by itself; one empty choice where a spec lists none."""
    return [(way,) for way in ways] or [()]


def _scalings_of(
    kind: GemmKind, name: str, family: FamilySpec, known: Family
) -> tuple[tuple[str, ...], ...]:
    """Scalings of the operands of the GEMMs that a spec lists; none where they have none."""
    listed = {*listed_scalings(name, family)}
    pairs = (pair.of(kind) for pair in known.multiplies)
    return tuple(pair for pair in pairs if {*pair} <= listed) or ((),)


def _listed(name: str, offer: FamilySpec | Family) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The words of each list of a family, by its key."""
    scalings = offer.scalings if isinstance(offer, Family) else listed_scalings(name, offer)
    return (
        ("implements", offer.implements),
        ("formats", tuple(each.value for each in offer.formats)),
        ("scalings", scalings),
        ("accumulations", tuple(each.value for each in offer.accumulations)),
        ("stores", tuple(each.value for each in offer.stores)),
    )


def _check_family(name: str, family: FamilySpec, source: Source) -> Iterator[Problem]:
    for key, words in _listed(name, family):
        for index, word in enumerate(words):
            if word in words[:index]:
                yield source.problem(
                    f"{word!r} is listed twice; remove one", "kernels", name, key, index
                )
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
        yield from _check_choice(rule, names, source, (*path, "select", index))
        last = index == len(spec.select) - 1
        if last and rule.least:
            yield source.problem(
                "the last rule names one point, for any size; say 'use'", *path, "select", index
            )
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
    unused = set(names) - {point for rule in spec.select for point in rule.points}
    for name in sorted(unused):
        yield source.problem(
            f"no rule uses point {name}; remove it or add a rule",
            *path,
            "points",
            names.index(name),
        )


def _check_choice(
    rule: RuleSpec, names: list[str], source: Source, path: tuple[str | int, ...]
) -> Iterator[Problem]:
    """A rule names one point, or says how long each of several takes."""
    if (rule.use is None) != bool(rule.least):
        yield source.problem("expected one of 'use' and 'least'", *path)
    if len(rule.least) == 1:
        yield source.problem(
            f"one point has nothing to be less than; say use: {rule.points[0]}", *path, "least"
        )
    where = ("use",) if rule.use is not None else ("least",)
    for point in rule.points:
        yield from unknown(source, "point", point, names, *path, *where)
