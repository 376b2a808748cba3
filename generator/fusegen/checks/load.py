"""Read spec folders and check them: every problem of every file in one run, each with its place."""

from __future__ import annotations

import re
import shlex
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..extensions import installed
from ..families.registry import ADDED
from ..spec.arch import ArchSpec, FamilySpec
from ..spec.diagnostics import Problem, SpecError
from ..spec.editions import CURRENT
from ..spec.files import resolve
from ..spec.kinds import SpecKind
from ..spec.load import SpecKey, SpecSet, no_folder, read_folders
from . import check

_NAMED = 3
"""Files of a folder that a warning names."""


class SpecWarning(UserWarning):
    """What is wrong with a spec that was left out, with its place, or that specs are older."""


def load(folders: Iterable[Path]) -> SpecSet:
    """Read every ``<folder>/<kind>/*.yaml`` and check the specs against each other.

    Args:
        folders: the built-in folder first, then users' folders; a name may be stated only once.

    Warns:
        SpecWarning: of files of an older edition.

    Raises:
        SpecError: with every problem of every file.
    """
    loaded, broken, others = read_folders(folders)
    _say_older(loaded)
    problems = [*others, *(problem for each in broken.values() for problem in each)]
    problems += [problem for _, problem in check(loaded, complete=not problems)]
    if problems:
        raise SpecError(problems)
    return with_added_families(loaded)


def load_usable(folders: Iterable[Path]) -> SpecSet:
    """The same, without the specs that are wrong or name one that is; ``require`` says what of.

    Warns:
        SpecWarning: of every problem, and of files of an older edition.

    Raises:
        SpecError: a folder is not there.
    """
    folders = tuple(folders)
    missing = [no_folder(folder) for folder in folders if not folder.is_dir()]
    if missing:
        raise SpecError(missing)
    loaded, broken, others = read_folders(folders)
    _say_older(loaded)
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


def _say_older(specs: SpecSet) -> None:
    """One warning of all files of an older edition, which were read all the same."""
    if not specs.older:
        return
    parts = [f"{_some(files)}: {_remedy(folder)}" for folder, files in specs.older.items()]
    text = f"specs of an older edition were read as edition {CURRENT}; {'; '.join(parts)}"
    warnings.warn(text, SpecWarning, stacklevel=3)


def _some(files: tuple[str, ...]) -> str:
    """Names of files, of many the first ones and how many more."""
    more = len(files) - _NAMED
    return ", ".join(files[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _remedy(folder: Path) -> str:
    """Who rewrites the specs of a folder, and how."""
    packages = {resolve(each.specs): each.package for each in installed() if each.specs}
    if package := packages.get(resolve(folder)):
        return f"a newer release of package {package} may have them of this edition"
    here = resolve(Path())
    shown = folder.relative_to(here) if folder.is_relative_to(here) else folder
    return f"fusegen fix-specs {shlex.quote(str(shown))} rewrites them"


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
