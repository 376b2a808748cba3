"""A bundle per schedule point: the same modules, with rules that always choose that point."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .. import __version__
from ..emit.bundle import render_bundle
from ..emit.polish import polish
from ..ir.kernel import GemmKind
from ..ir.naming import Cell
from ..ir.plan import Unsupported
from ..ir.predicate import Predicate
from ..passes.pipeline import resolve
from ..publish.inputs import Inputs, derivations
from ..publish.publish import publish
from ..publish.selection import Selection
from ..spec.arch import ArchSpec, FamilySpec, KindSpec, RuleSpec
from ..spec.load import SpecSet
from ..spec.usage import UsageError, known
from ..steps.gemm import GROUPED_GEMM

MODULE = "grouped_linear"


@dataclass(frozen=True, slots=True)
class Variant:
    """A bundle in which every kind of a family has one point.

    Attributes:
        folder: the bundle.
        points: the point of each kind.
        recipes: of its cells.
    """

    folder: Path
    points: Mapping[GemmKind, str]
    recipes: tuple[str, ...]


def can_sweep(family: FamilySpec) -> bool:
    """Whether rules choose among its configurations for GEMMs that a sweep runs."""
    return bool(family.kinds) and GROUPED_GEMM.name in family.implements


def family_named(arch: ArchSpec, name: str) -> FamilySpec:
    """The family of a name.

    Raises:
        UsageError: the arch has none of it that rules choose for.
    """
    tunable = {each: family for each, family in arch.kernels.items() if can_sweep(family)}
    if not tunable:
        raise UsageError(f"{arch.name} has no kernels that selection rules choose")
    if name in arch.kernels and name not in tunable:
        raise UsageError(f"{name} of {arch.name} has no GEMMs of {MODULE}, which a sweep measures")
    return tunable[known("kernel family", name, tunable)]


def recipes_of(specs: SpecSet, arch: str, family: str) -> dict[str, frozenset[GemmKind]]:
    """Recipes whose GEMMs the family runs, with their kinds; one of those with equal kernels.

    Raises:
        UsageError: there is none.
    """
    cells = [Cell(MODULE, recipe) for recipe in specs.recipes]
    found: dict[tuple[str, ...], tuple[str, frozenset[GemmKind]]] = {}
    for plan in resolve(specs, arch, cells, derivations()).modules:
        sets = {
            each.name: each.kind
            for each in plan.kernel_sets
            if each.kind and each.name.startswith(f"{family}_{each.kind.value}")
        }
        if sets:
            found.setdefault(tuple(sorted(sets)), (plan.recipe, frozenset(sets.values())))
    if not found:
        raise UsageError(f"no recipe has GEMMs that {family} of {arch} runs: nothing to sweep")
    return dict(found.values())


def single(arch: ArchSpec, family: str, index: int) -> ArchSpec:
    """The arch with one point per kind of a family: the one of this index, or the last."""
    kinds = {
        kind: _only(spec, min(index, len(spec.points) - 1))
        for kind, spec in arch.kernels[family].kinds.items()
    }
    return replace(
        arch, kernels={**arch.kernels, family: replace(arch.kernels[family], kinds=kinds)}
    )


def _only(spec: KindSpec, index: int) -> KindSpec:
    point = spec.points[index]
    return KindSpec((point,), (RuleSpec(point.name, Predicate(())),))


def write_variants(
    specs: SpecSet, arch: str, family: str, recipes: Sequence[str], out: Path
) -> Iterator[Variant]:
    """Write the bundles that together hold every point of a family, each below `out`.

    Their namespaces differ, so that one process can load all of them.
    """
    kinds = family_named(specs.archs[arch], family).kinds
    for index in range(max(len(spec.points) for spec in kinds.values())):
        variant = single(specs.archs[arch], family, index)
        folder = out / f"{family}_{index}" / arch
        changed = replace(specs, archs={**specs.archs, arch: variant})
        cells = (Cell(MODULE, recipe) for recipe in recipes)
        publish_cells(changed, arch, cells, f"sweep_{family}_{index}", folder)
        points = {kind: spec.points[0].name for kind, spec in variant.kernels[family].kinds.items()}
        yield Variant(folder, points, tuple(recipes))


def publish_cells(
    specs: SpecSet, arch: str, cells: Iterable[Cell], namespace: str, folder: Path
) -> tuple[Unsupported, ...]:
    """Write a bundle of any cells of any specs at once, where commands make one choice at a time.

    Returns:
        the cells that it lacks, since they cannot be made.
    """
    selection = Selection(arch, namespace, tuple(sorted(cells)))
    resolved = resolve(specs, arch, selection.cells, derivations())
    renderer = Inputs().renderer(())
    files = render_bundle(resolved.modules, specs.archs[arch], selection.op_namespace, renderer)
    publish(polish(files), folder, selection.to_json(), __version__)
    return resolved.unsupported
