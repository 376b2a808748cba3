"""What a bundle is made of, as its lock records it, and how a request changes that."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .emit.fileset import FileSet
from .files import resolve
from .ir.naming import Cell, default_namespace
from .ir.plan import ModulePlan
from .passes.expand import chain_of
from .publish.lock import LOCK_NAME, PENDING_NAME, LockError, read_lock, read_pending
from .spec.diagnostics import did_you_mean
from .spec.kinds import SpecKind
from .spec.load import SpecSet

DEFAULT_PREFIX = "fusegen"

_PREFIX = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_ARCH = re.compile(r"[a-z0-9]+(_[a-z0-9]+)*")
_KEYS = ("arch", "namespace", "cells", "specs", "templates")
_NO_FUSIONS = "no_fusions"
"""Key of a lock that names fusions which are left out; most locks have none."""


class UsageError(Exception):
    """A request that cannot be understood or met; the message says what to ask for instead."""


class SelectionError(LockError):
    """A lock whose selection cannot be read, though its record of files can."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What one bundle holds.

    Attributes:
        arch: its architecture; recorded because a bundle may be moved to a folder of another name.
        namespace: prefix of the namespace of its ops.
        cells: its modules, sorted.
        specs: spec folders that its cells need besides the built-in ones, relative to the lock
            and separated by `/`, sorted.
        templates: template folders, likewise.
        no_fusions: fusions that are left out, sorted.
    """

    arch: str
    namespace: str = DEFAULT_PREFIX
    cells: tuple[Cell, ...] = ()
    specs: tuple[str, ...] = ()
    templates: tuple[str, ...] = ()
    no_fusions: tuple[str, ...] = ()

    @property
    def op_namespace(self) -> str:
        """Namespace of the bundle's ops."""
        return default_namespace(self.namespace, self.arch)

    def to_json(self) -> dict[str, object]:
        """The `selection` of a lock."""
        data: dict[str, object] = {
            "arch": self.arch,
            "namespace": self.namespace,
            "cells": [str(cell) for cell in self.cells],
            "specs": list(self.specs),
            "templates": list(self.templates),
        }
        return data | ({_NO_FUSIONS: list(self.no_fusions)} if self.no_fusions else {})

    @classmethod
    def parse(cls, data: Mapping[str, object], lock: Path) -> Selection:
        """Inverse of `to_json`.

        Raises:
            SelectionError: naming the lock, the key at fault and the remedy.
        """
        unknown = sorted((set(data) - {_NO_FUSIONS}) ^ set(_KEYS))
        if unknown:
            what = "unknown" if unknown[0] in data else "missing"
            raise _malformed(lock, f"{what} key {unknown[0]!r} in selection")
        lists = {key: _strings(data[key], key, lock) for key in ("cells", "specs", "templates")}
        for key in ("specs", "templates"):
            for folder in lists[key]:
                if "\0" in folder or not _is_text(folder):
                    raise _malformed(lock, f"selection: {folder!r} cannot name a folder of {key}")
        try:
            cells = tuple(sorted({Cell.parse(text) for text in lists["cells"]}))
        except ValueError as error:
            raise _malformed(lock, f"selection: {error}") from None
        return cls(
            arch=_matching(data["arch"], _ARCH, "arch", lock),
            namespace=_matching(data["namespace"], _PREFIX, "namespace", lock),
            cells=cells,
            specs=tuple(sorted(set(lists["specs"]))),
            templates=tuple(sorted(set(lists["templates"]))),
            no_fusions=tuple(sorted(set(_strings(data.get(_NO_FUSIONS, []), _NO_FUSIONS, lock)))),
        )


def read_selection(bundle: Path) -> Selection | None:
    """The recorded selection of a bundle, or None where nothing was ever published.

    A first publish that was cut short counts: its selection is in the pending lock.

    Raises:
        LockError: the lock cannot be read.
        SelectionError: the selection in it cannot be read.
    """
    lock = read_lock(bundle)
    if lock is None:
        pending = read_pending(bundle)
        lock = pending.lock if pending else None
    return None if lock is None else Selection.parse(lock.selection, bundle / LOCK_NAME)


def find_bundles(out: Path) -> tuple[Path, ...]:
    """The folders directly below `out` that hold a lock, sorted."""
    names = (LOCK_NAME, PENDING_NAME)
    return tuple(sorted({path.parent for name in names for path in out.glob(f"*/{name}")}))


def check_prefix(prefix: str) -> str:
    """A namespace prefix that Python, C++ and the dispatcher accept.

    Raises:
        UsageError: it is not snake_case.
    """
    if not _PREFIX.fullmatch(prefix):
        raise UsageError(
            f"--namespace: expected a name such as acme or acme_moe (small letters, digits and "
            f"single underscores), got {prefix!r}"
        )
    return prefix


def known(what: str, word: str, choices: Iterable[str]) -> str:
    """`word`, if it is one of the choices.

    Raises:
        UsageError: it is not; with the closest choice.
    """
    names = list(choices)
    if word not in names:
        raise UsageError(f"unknown {what} {word!r}{did_you_mean(word, names)}")
    return word


def spec_named(specs: SpecSet, kind: SpecKind, word: str) -> str:
    """`word`, if it names a spec of a kind.

    Raises:
        UsageError: it does not; with the closest choice.
        SpecError: that spec is wrong.
    """
    specs.require(kind, word)
    return known(kind.key, word, specs.of(kind))


def without_fusions(specs: SpecSet, names: Iterable[str]) -> SpecSet:
    """The specs without these fusions; one that they do not have is left out already."""
    left_out = {*names}
    fusions = {name: fusion for name, fusion in specs.fusions.items() if name not in left_out}
    return replace(specs, fusions=fusions)


def product(modules: Iterable[str], recipes: Iterable[str]) -> tuple[Cell, ...]:
    """Every module with every recipe, sorted, each once."""
    recipes = tuple(recipes)
    return tuple(sorted({Cell(module, recipe) for module in modules for recipe in recipes}))


def with_options(specs: SpecSet, cells: Iterable[Cell], words: Sequence[str]) -> tuple[Cell, ...]:
    """The cells with these choices, in the order of their modules' options.

    A first choice is what a module is without being asked, so no cell is named after it.

    Raises:
        UsageError: a module does not offer a choice, or two of them are of one option.
    """
    return tuple(sorted({_with_options(specs, cell, words) for cell in cells}))


def _with_options(specs: SpecSet, cell: Cell, words: Sequence[str]) -> Cell:
    offered = specs.modules[spec_named(specs, SpecKind.MODULES, cell.module)].options
    choices = [word for option in offered.values() for word in option]
    for word in words:
        if word not in choices:
            hint = did_you_mean(word, choices) or "; it offers none" * (not choices)
            raise UsageError(f"module {cell.module!r} offers no option {word!r}{hint}")
    chosen = []
    for option, of_option in offered.items():
        named = list(dict.fromkeys(word for word in words if word in of_option))
        if len(named) > 1:
            raise UsageError(f"{' and '.join(named)} are choices of one option, {option.value}")
        chosen += [word for word in named if word != of_option[0]]
    return Cell(cell.module, cell.recipe, tuple(chosen))


def target_cells(specs: SpecSet, targets: Iterable[str]) -> dict[str, tuple[Cell, ...]]:
    """The cells of each architecture that the targets name, in the order they name them.

    Raises:
        UsageError: an unknown target.
    """
    found: dict[str, set[Cell]] = {}
    for name in targets:
        target = specs.targets[spec_named(specs, SpecKind.TARGETS, name)]
        cells = with_options(specs, product(target.modules, target.recipes), target.options)
        for arch in target.archs:
            found.setdefault(arch, set()).update(cells)
    return {arch: tuple(sorted(cells)) for arch, cells in found.items()}


def targets_or_names(targets: Sequence[str], names: Sequence[str]) -> None:
    """Refuse a target together with single names.

    Raises:
        UsageError: both are given.
    """
    if targets and names:
        raise UsageError(
            "--target names archs, modules and recipes at once; leave out --arch, --module, "
            "--recipe and --option, or --target"
        )


def without(selection: Selection, cells: Iterable[Cell], where: Path) -> Selection:
    """The selection without these cells.

    Raises:
        UsageError: one of them is not in it.
    """
    present = [str(cell) for cell in selection.cells]
    leaving = {known(f"module of {where}", str(cell), present) for cell in cells}
    return replace(selection, cells=tuple(c for c in selection.cells if str(c) not in leaving))


def check_cells(
    specs: SpecSet, selection: Selection, bundle: Path, given: frozenset[Cell] = frozenset()
) -> None:
    """Refuse a cell whose module, recipe or arch the specs no longer know.

    Args:
        given: the cells that the request itself names; about the others the lock is to blame.

    Raises:
        UsageError: naming the closest name or, for a recorded cell, the ways out.
    """
    spec_named(specs, SpecKind.ARCHS, selection.arch)
    for cell in selection.cells:
        try:
            spec_named(specs, SpecKind.MODULES, cell.module)
            spec_named(specs, SpecKind.RECIPES, cell.recipe)
        except UsageError as error:
            if cell in given:
                raise
            raise UsageError(
                f"{bundle / LOCK_NAME} records {cell}: {error}; restore the spec, name its folder "
                f"with --specs, or take the module out: {removal(cell, selection.arch, bundle)}"
            ) from None


def removal(cell: Cell, arch: str, bundle: Path) -> str:
    """The command that takes one cell out of a bundle."""
    names = f"--arch {arch} --module {cell.module} --recipe {cell.recipe}"
    names += "".join(f" --option {word}" for word in cell.options)
    return f"fusegen generate --remove {names}{_out_option(bundle.parent)}"


def regeneration(bundles: Sequence[Path], sources: Mapping[str, Sequence[Path]]) -> str:
    """The command, or the lines of commands, that bring these bundles up to date.

    Args:
        sources: folders given on the command line by option, such as `--specs`.
    """
    extra = "".join(f" {option} {path}" for option, paths in sources.items() for path in paths)
    parents = dict.fromkeys(bundle.parent for bundle in bundles)
    return "\n".join(f"fusegen generate{_out_option(parent)}{extra}" for parent in parents)


def _out_option(parent: Path) -> str:
    return "" if parent == Path("generated") else f" --out {parent}"


def merge_folders(*groups: Iterable[Path]) -> tuple[Path, ...]:
    """Folders, resolved and each once, in sorted order.

    Raises:
        UsageError: a name that is not UTF-8, which generated files could not state.
    """
    groups = tuple(tuple(group) for group in groups)
    for path in (path for group in groups for path in group):
        if not _is_text(path.name):
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


def distrust(bundle: Path, option: str, foreign: Sequence[Path]) -> str:
    """What to say of foreign folders, which the option names on the command line."""
    return (
        f"{bundle / LOCK_NAME} names the folder {foreign[0]}, which is outside of "
        f"{_repository(bundle)}: what it holds would decide what is generated, so it is read only "
        f"where you name it, too: {regeneration([bundle], {option: foreign})} (fusegen check takes "
        f"{option} as well)"
    )


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
        if not _is_text(str(folder)):
            raise UsageError(f"{str(folder)!r}: a lock cannot name it, it is not UTF-8; rename it")
    return tuple(sorted(Path(os.path.relpath(folder, root)).as_posix() for folder in folders))


def used_specs(
    folders: Iterable[Path], specs: SpecSet, plans: Sequence[ModulePlan]
) -> tuple[Path, ...]:
    """The spec folders that hold a spec which some plan is made from."""
    names: set[tuple[SpecKind, str]] = set()
    for plan in plans:
        module = specs.modules[plan.module]
        names |= {(SpecKind.MODULES, plan.module), (SpecKind.RECIPES, plan.recipe)}
        names |= {(SpecKind.ARCHS, plan.arch)}
        names |= {(SpecKind.OPS, item.op) for item in chain_of(module)}
        names |= {(SpecKind.FUSIONS, each.rule) for each in plan.rewrites if not each.reason}
    files = {Path(kind.folder) / f"{name}.yaml" for kind, name in names}
    return tuple(folder for folder in folders if any((folder / file).is_file() for file in files))


def used_templates(folders: Iterable[Path], files: FileSet) -> tuple[Path, ...]:
    """The template folders that hold a template which some file is made from."""
    inputs = {name for artifact in files.values() for name in artifact.inputs}
    names = [name.removeprefix("templates/") for name in inputs if name.startswith("templates/")]
    return tuple(folder for folder in folders if any((folder / name).is_file() for name in names))


def _malformed(lock: Path, what: str) -> SelectionError:
    return SelectionError(
        f"{lock}: {what}; restore the file from version control, or name anew what the bundle is "
        f"to hold: fusegen generate --target <target>{_out_option(lock.parent.parent)}"
    )


def _is_text(name: str) -> bool:
    """Whether the name of a file is text; what is not UTF-8 comes as lone surrogates."""
    return not any("\ud800" <= char <= "\udfff" for char in name)


def _strings(value: object, key: str, lock: Path) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _malformed(lock, f"selection: expected a list of strings as {key!r}")
    return value


def _matching(value: object, pattern: re.Pattern[str], key: str, lock: Path) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise _malformed(lock, f"selection: expected a name as {key!r}, got {value!r}")
    return value
