"""What a bundle is made of, as its lock records it, and how a request changes that."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ..ir.naming import Cell, default_namespace
from ..spec.kinds import SpecKind
from ..spec.load import SpecSet
from ..spec.serving import ALL, CPU
from ..spec.usage import UsageError, known, spec_named
from .folders import is_text
from .lock import LOCK_NAME, PENDING_NAME, LockError, read_lock, read_pending
from .remedies import out_option, removal

DEFAULT_PREFIX = "fusegen"

_PREFIX = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_ARCH = re.compile(r"[a-z0-9]+(_[a-z0-9]+)*")
_GPU = re.compile(r"sm_[a-z0-9]+(_[a-z0-9]+)*")
_KEYS = ("arch", "namespace", "cells", "specs", "templates")
_NO_FUSIONS = "no_fusions"
"""Key of a lock that names fusions which are left out; most locks have none."""
_EXTENSIONS = "extensions"
"""Key of a lock of cells that extensions have a part in; most locks have none."""
_ARCHS = "archs"
"""Key of the lock of a fat bundle."""
_DIGESTS = "digests"
"""Key of a lock of a bundle with a manifest; most have none."""
_RARE = {_NO_FUSIONS, _EXTENSIONS, _ARCHS, _DIGESTS}


class SelectionError(LockError):
    """A lock whose selection cannot be read, though its record of files can."""


@dataclass(frozen=True, slots=True, order=True)
class UsedExtension:
    """An extension that cells were made with.

    Attributes:
        name: of its entry point.
        package: that it came with.
        version: of that.
        digest: of its content.
    """

    name: str
    package: str
    version: str
    digest: str

    def __str__(self) -> str:
        return f"{self.name} ({self.package} {self.version}, {self.digest[:12]})"


@dataclass(frozen=True, slots=True)
class Selection:
    """What one bundle holds.

    Attributes:
        arch: its architecture, or `all` for a fat bundle; recorded because a bundle may be moved to
            a folder of another name.
        namespace: prefix of the namespace of its ops.
        cells: its modules, sorted.
        specs: spec folders that its cells need besides the built-in ones, relative to the lock
            and separated by `/`, sorted.
        templates: template folders, likewise.
        no_fusions: fusions that are left out, sorted.
        extensions: that its cells were made with, sorted.
        archs: of the bundles in a fat one, sorted; empty for every other.
        digests: cells of which its manifest has digests alone, sorted; those that cannot be made
            are among them.
    """

    arch: str
    namespace: str = DEFAULT_PREFIX
    cells: tuple[Cell, ...] = ()
    specs: tuple[str, ...] = ()
    templates: tuple[str, ...] = ()
    no_fusions: tuple[str, ...] = ()
    extensions: tuple[UsedExtension, ...] = ()
    archs: tuple[str, ...] = ()
    digests: tuple[Cell, ...] = ()

    @property
    def is_fat(self) -> bool:
        """Whether it is one that chooses among those of several architectures, by device."""
        return self.arch == ALL

    @property
    def own_arch(self) -> str:
        """The architecture that its own files are for: that of a fat one is the reference."""
        return CPU if self.is_fat else self.arch

    @property
    def every(self) -> tuple[Cell, ...]:
        """Cells that it has files or digests of, sorted."""
        return tuple(sorted((*self.cells, *self.digests)))

    def adding(self, cells: Iterable[Cell]) -> Selection:
        """With files of these cells, too, in the place of digests."""
        files = {*self.cells, *cells}
        digests = tuple(cell for cell in self.digests if cell not in files)
        return replace(self, cells=tuple(sorted(files)), digests=digests)

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
        data |= {_NO_FUSIONS: list(self.no_fusions)} if self.no_fusions else {}
        data |= {_ARCHS: list(self.archs)} if self.is_fat else {}
        data |= {_DIGESTS: [str(cell) for cell in self.digests]} if self.digests else {}
        return data | ({_EXTENSIONS: _extensions_json(self)} if self.extensions else {})

    @classmethod
    def parse(cls, data: Mapping[str, object], lock: Path) -> Selection:
        """Inverse of `to_json`.

        Raises:
            SelectionError: naming the lock, the key at fault and the remedy.
        """
        unknown = sorted((set(data) - _RARE) ^ set(_KEYS))
        if unknown:
            what = "unknown" if unknown[0] in data else "missing"
            raise _malformed(lock, f"{what} key {unknown[0]!r} in selection")
        lists = {key: _strings(data[key], key, lock) for key in ("cells", "specs", "templates")}
        for key in ("specs", "templates"):
            for folder in lists[key]:
                if "\0" in folder or not is_text(folder):
                    raise _malformed(lock, f"selection: {folder!r} cannot name a folder of {key}")
        lists[_DIGESTS] = _strings(data.get(_DIGESTS, []), _DIGESTS, lock)
        try:
            cells, digests = (
                tuple(sorted({Cell.parse(text) for text in lists[key]}))
                for key in ("cells", _DIGESTS)
            )
        except ValueError as error:
            raise _malformed(lock, f"selection: {error}") from None
        if both := {*cells} & {*digests}:
            raise _malformed(lock, f"selection: {min(both)} is in cells and in {_DIGESTS}")
        return cls(
            arch=_matching(data["arch"], _ARCH, "arch", lock),
            namespace=_matching(data["namespace"], _PREFIX, "namespace", lock),
            cells=cells,
            specs=tuple(sorted(set(lists["specs"]))),
            templates=tuple(sorted(set(lists["templates"]))),
            no_fusions=tuple(sorted(set(_strings(data.get(_NO_FUSIONS, []), _NO_FUSIONS, lock)))),
            extensions=_used_extensions(data.get(_EXTENSIONS, {}), lock),
            archs=_archs(data, lock),
            digests=digests,
        )


def _archs(data: Mapping[str, object], lock: Path) -> tuple[str, ...]:
    """The architectures of a fat bundle, whose names are those of folders in it."""
    if (_ARCHS in data) != (data["arch"] == ALL):
        raise _malformed(
            lock, f"selection: expected {_ARCHS!r} where arch is {ALL!r}, and there alone"
        )
    if _ARCHS in data and _DIGESTS in data:
        raise _malformed(lock, f"selection: {_ARCHS!r} and {_DIGESTS!r} do not go together")
    names = _strings(data.get(_ARCHS, []), _ARCHS, lock)
    return tuple(sorted({_matching(name, _GPU, _ARCHS, lock) for name in names}))


_FACTS = ("package", "version", "digest")


def _extensions_json(selection: Selection) -> dict[str, dict[str, str]]:
    return {
        each.name: {fact: getattr(each, fact) for fact in _FACTS} for each in selection.extensions
    }


def _used_extensions(value: object, lock: Path) -> tuple[UsedExtension, ...]:
    """Inverse of ``_extensions_json``."""
    found = []
    for name, facts in value.items() if isinstance(value, dict) else ((None, None),):
        words = [facts.get(fact) for fact in _FACTS] if isinstance(facts, dict) else [None]
        if not all(isinstance(word, str) for word in (name, *words)):
            raise _malformed(lock, f"selection: expected {', '.join(_FACTS)} by name in extensions")
        found.append(UsedExtension(str(name), *map(str, words)))
    return tuple(sorted(found))


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


def bundles_at(folder: Path) -> tuple[Path, ...]:
    """The bundle that a folder is, or those directly below it.

    Raises:
        UsageError: it is none, and has none.
    """
    found = (folder,) if _is_bundle(folder) else find_bundles(folder)
    if not found:
        raise UsageError(
            f"{folder}: is not a bundle, and no folder of bundles either: there is no {LOCK_NAME}, "
            "neither in it nor in a folder of it"
        )
    return found


def _is_bundle(folder: Path) -> bool:
    return any((folder / name).exists() for name in (LOCK_NAME, PENDING_NAME))


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


def without(selection: Selection, cells: Iterable[Cell], where: Path) -> Selection:
    """The selection without these cells.

    Raises:
        UsageError: one of them is not in it.
    """
    present = [str(cell) for cell in selection.every]
    leaving = {known(f"module of {where}", str(cell), present) for cell in cells}

    def staying(cells: tuple[Cell, ...]) -> tuple[Cell, ...]:
        return tuple(cell for cell in cells if str(cell) not in leaving)

    return replace(selection, cells=staying(selection.cells), digests=staying(selection.digests))


def check_cells(
    specs: SpecSet, selection: Selection, bundle: Path, given: frozenset[Cell] = frozenset()
) -> None:
    """Refuse a cell whose module, recipe or arch the specs no longer know.

    Args:
        given: the cells that the request itself names; about the others the lock is to blame.

    Raises:
        UsageError: naming the closest name or, for a recorded cell, the ways out.
    """
    for arch in (selection.own_arch, *selection.archs):
        spec_named(specs, SpecKind.ARCHS, arch)
    for cell in selection.every:
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


def _malformed(lock: Path, what: str) -> SelectionError:
    return SelectionError(
        f"{lock}: {what}; restore the file from version control, or name anew what the bundle is "
        f"to hold: fusegen generate --target <target>{out_option(lock.parent.parent)}"
    )


def _strings(value: object, key: str, lock: Path) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _malformed(lock, f"selection: expected a list of strings as {key!r}")
    return value


def _matching(value: object, pattern: re.Pattern[str], key: str, lock: Path) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise _malformed(lock, f"selection: expected a name as {key!r}, got {value!r}")
    return value
