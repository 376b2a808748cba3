"""Read spec folders and check them: every problem of every file in one run, each with its place."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..families.registry import ADDED
from ..spec.arch import ArchSpec, FamilySpec
from ..spec.diagnostics import Problem, SpecError
from ..spec.kinds import SpecKind
from ..spec.load import SpecKey, SpecSet, no_folder, read_folders
from . import check


class SpecWarning(UserWarning):
    """What is wrong with a spec, and with its place; the spec was left out."""


def load(folders: Iterable[Path]) -> SpecSet:
    """Read every ``<folder>/<kind>/*.yaml`` and check the specs against each other.

    Args:
        folders: the built-in folder first, then users' folders; a name may be stated only once.

    Raises:
        SpecError: with every problem of every file.
    """
    loaded, broken, others = read_folders(folders)
    problems = [*others, *(problem for each in broken.values() for problem in each)]
    problems += [problem for _, problem in check(loaded, complete=not problems)]
    if problems:
        raise SpecError(problems)
    return with_added_families(loaded)


def load_usable(folders: Iterable[Path]) -> SpecSet:
    """The same, without the specs that are wrong or name one that is; ``require`` says what of.

    Warns:
        SpecWarning: of every problem.

    Raises:
        SpecError: a folder is not there.
    """
    folders = tuple(folders)
    missing = [no_folder(folder) for folder in folders if not folder.is_dir()]
    if missing:
        raise SpecError(missing)
    loaded, broken, others = read_folders(folders)
    problems = [*others, *(problem for each in broken.values() for problem in each)]
    usable = _without(loaded, broken)
    while found := _grouped(check(usable, complete=True)):
        for key, own in found.items():
            words = set(re.findall(r"\w+", repr(usable.of(key[0])[key[1]])))
            inherited = [p for (_, name), each in broken.items() if name in words for p in each]
            broken[key] = inherited or own
            problems += [] if inherited else own
        usable = _without(loaded, broken)
    for problem in sorted(set(problems)):
        warnings.warn(f"{problem} (left out, with all that names it)", SpecWarning, stacklevel=2)
    return with_added_families(usable)


def with_added_families(specs: SpecSet) -> SpecSet:
    """The specs, with families of extensions on every architecture that has their instructions.

    What a spec lists itself has precedence: such families are not added to it.
    """
    archs = {name: replace(arch, kernels=_kernels(arch)) for name, arch in specs.archs.items()}
    return replace(specs, archs=archs) if ADDED else specs


def _kernels(arch: ArchSpec) -> Mapping[str, FamilySpec]:
    listed = {step for family in arch.kernels.values() for step in family.implements}
    added = {
        family.name: FamilySpec(
            implements=family.implements,
            formats=family.formats,
            scalings=family.scalings,
            accumulations=family.accumulations,
            stores=family.stores,
            row_alignment=family.row_alignment,
        )
        for family in ADDED
        if arch.has_kernels
        and not family.cannot_run_on(arch.name, arch.capability or (0, 0))
        and listed.isdisjoint(family.implements)
    }
    return {**arch.kernels, **added}


def _without(specs: SpecSet, broken: Mapping[SpecKey, list[Problem]]) -> SpecSet:
    kept: dict[str, Any] = {
        kind.folder: {n: spec for n, spec in specs.of(kind).items() if (kind, n) not in broken}
        for kind in SpecKind
    }
    return replace(specs, **kept, broken={key: tuple(each) for key, each in broken.items()})


def _grouped(found: Iterable[tuple[SpecKey, Problem]]) -> dict[SpecKey, list[Problem]]:
    grouped: dict[SpecKey, list[Problem]] = {}
    for key, problem in found:
        grouped.setdefault(key, []).append(problem)
    return grouped
