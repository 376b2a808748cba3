"""Folders of specs and templates: those that requests name, those that locks record."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..checks.load import load, load_usable
from ..extensions import Installed, installed
from ..families.registry import FAMILIES
from ..ir.plan import ModulePlan
from ..spec.files import resolve
from ..spec.kinds import SpecKind
from ..spec.load import SpecSet
from ..spec.usage import UsageError
from ..steps import STEPS
from . import paths
from .lock import LOCK_NAME
from .remedies import regeneration


@dataclass(frozen=True, slots=True)
class Folders:
    """Folders to read besides the built-in ones."""

    specs: tuple[Path, ...] = ()
    templates: tuple[Path, ...] = ()

    @property
    def options(self) -> dict[str, Sequence[Path]]:
        """The folders by the option that names them."""
        return {"--specs": self.specs, "--templates": self.templates}


BUILTIN = Folders()


def merge_folders(*groups: Iterable[Path]) -> tuple[Path, ...]:
    """Folders, resolved and each once, in sorted order.

    Raises:
        UsageError: a name that is not UTF-8, which generated files could not state.
    """
    groups = tuple(tuple(group) for group in groups)
    for path in (path for group in groups for path in group):
        if not is_text(path.name):
            raise UsageError(f"{str(path)!r}: its name is not UTF-8; rename it")
    return tuple(sorted({resolve(path) for group in groups for path in group}))


def recorded_folders(bundle: Path, folders: Iterable[str]) -> tuple[Path, ...]:
    """The folders a lock records, as paths."""
    return tuple(resolve(bundle / folder) for folder in folders)


def foreign_folders(
    bundle: Path, recorded: Iterable[Path], given: Iterable[Path]
) -> tuple[Path, ...]:
    """The recorded folders that are not read because a lock alone names them; it may be anybody's.

    Args:
        bundle: the folder of the lock.
        recorded: folders that the lock names, resolved.
        given: folders that the command line names.

    Returns:
        Those that lie neither in the bundle's repository, or beside the bundle where there is none,
        nor in a given folder.
    """
    trusted = (_repository(bundle), *merge_folders(given))
    return tuple(f for f in recorded if not any(f.is_relative_to(place) for place in trusted))


def _repository(bundle: Path) -> Path:
    """The repository that a bundle is in, or the folder that it is in where there is none."""
    folder = resolve(bundle).parent
    return next((p for p in (folder, *folder.parents) if (p / ".git").exists()), folder)


def relative_folders(bundle: Path, folders: Sequence[Path]) -> tuple[str, ...]:
    """Folders as a lock records them. Inverse of `recorded_folders`.

    Raises:
        UsageError: a folder whose name is not UTF-8.
    """
    root = resolve(bundle)
    for folder in folders:
        if not is_text(str(folder)):
            raise UsageError(f"{str(folder)!r}: a lock cannot name it, it is not UTF-8; rename it")
    return tuple(sorted(Path(os.path.relpath(folder, root)).as_posix() for folder in folders))


def used_specs(
    folders: Iterable[Path],
    specs: SpecSet,
    plans: Sequence[ModulePlan],
    archs: Iterable[str] = (),
) -> tuple[Path, ...]:
    """The spec folders that hold a spec which some plan is made from, or one of architectures."""
    names = {(SpecKind.ARCHS, arch) for arch in archs}
    for plan in plans:
        module = specs.modules[plan.module]
        names |= {(SpecKind.MODULES, plan.module), (SpecKind.RECIPES, plan.recipe)}
        names |= {(SpecKind.ARCHS, plan.arch)}
        names |= {(SpecKind.OPS, op) for op in module.ops}
        names |= {(SpecKind.FUSIONS, each.rule) for each in plan.rewrites if not each.reason}
    named = (Path(specs.source(kind, name).file) for kind, name in names)
    files = {Path(*file.parts[1:]) for file in named}  # behind the folder's own name
    return tuple(folder for folder in folders if any((folder / file).is_file() for file in files))


def used_templates(folders: Iterable[Path], inputs: Iterable[str]) -> tuple[Path, ...]:
    """The template folders that hold a template which some file is made from."""
    names = [name.removeprefix("templates/") for name in inputs if name.startswith("templates/")]
    return tuple(folder for folder in folders if any((folder / name).is_file() for name in names))


def is_text(name: str) -> bool:
    """Whether the name of a file is text; what is not UTF-8 comes as lone surrogates."""
    return not any("\ud800" <= char <= "\udfff" for char in name)


def spec_folders(extra: Iterable[Path]) -> tuple[Path, ...]:
    """The folder of the built-in specs first, extensions' next, then the others."""
    return _besides((paths.builtin_specs(), *_folders(each.specs for each in installed())), extra)


def template_folders(extra: Iterable[Path]) -> tuple[Path, ...]:
    """The folder of the built-in templates first, extensions' next, then the others."""
    own = (paths.builtin_templates(), *_folders(each.templates for each in installed()))
    return _besides(own, extra)


def _folders(found: Iterable[Path | None]) -> tuple[Path, ...]:
    return tuple(resolve(folder) for folder in found if folder)


def _besides(own: tuple[Path, ...], extra: Iterable[Path]) -> tuple[Path, ...]:
    """Those and others, however these were written."""
    return (*own, *(path for path in merge_folders(extra) if path not in own))


def used_extensions(
    specs: SpecSet, plans: Sequence[ModulePlan], inputs: Collection[str]
) -> tuple[Installed, ...]:
    """The extensions that some plan has a spec, a step or a kernel of, or a file a template of."""
    primitives = {step.primitive for plan in plans for step in plan.steps}
    families = {each.template for plan in plans for each in plan.kernel_sets}

    def used(each: Installed) -> bool:
        return bool(
            (each.specs and used_specs([each.specs], specs, plans))
            or (each.templates and used_templates([each.templates], inputs))
            or primitives & {step.name for step in STEPS if step in each.extension.steps}
            or families & {one.name for one in FAMILIES if one in each.extension.families}
        )

    return tuple(each for each in installed() if used(each))


def load_specs(folders: Folders = BUILTIN) -> SpecSet:
    """The built-in specs and those of the extra folders, without those that are wrong.

    Warns:
        SpecWarning: of every problem.

    Raises:
        SpecError: a folder is not there.
    """
    return load_usable(spec_folders(folders.specs))


def validate_specs(folders: Folders = BUILTIN) -> SpecSet:
    """The same of specs none of which is wrong.

    Raises:
        SpecError: with every problem of every file.
    """
    return load(spec_folders(folders.specs))


def distrust(bundle: Path, option: str, foreign: Sequence[Path]) -> str:
    """What to say of foreign folders, which the option names on the command line."""
    return (
        f"{bundle / LOCK_NAME} names the folder {foreign[0]}, which is outside of "
        f"{_repository(bundle)}: what it holds would decide what is generated, so it is read only "
        f"where you name it, too: {regeneration([bundle], {option: foreign})} (fusegen check takes "
        f"{option} as well)"
    )
