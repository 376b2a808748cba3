"""Extensions: installed packages that bring step kinds, kernel families, specs and templates.

A package names its extension as an entry point of the group ``fusegen.extensions``:

    [project.entry-points."fusegen.extensions"]
    log_sum_exp = "fusegen_log_sum_exp:EXTENSION"

They are read once, before the registries of steps and families are complete; what those take of
them is theirs to check.  An installed package that cannot be read is an error and not a warning: a
cell must not be another one because something failed to load.
"""

from __future__ import annotations

import hashlib
import importlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Protocol, TypeVar

GROUP = "fusegen.extensions"
"""Group of the entry points of extensions."""

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


class ExtensionError(Exception):
    """An installed extension cannot be used; the message names its package and the remedy."""


@dataclass(frozen=True, slots=True)
class Extension:
    """What a package adds.

    Attributes:
        steps: kinds of steps, each a ``StepDef``.
        families: of kernels, each a ``Family``.  One that has no configurations is a family of
            every compiled architecture whose instructions it needs; others stand in the spec of
            their architecture, with their points.
        folder: that has its ``specs`` and ``templates``; None where it has neither.
    """

    steps: tuple[object, ...] = ()
    families: tuple[object, ...] = ()
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class Installed:
    """An extension of this environment.

    Attributes:
        name: of its entry point.
        package: distribution that it came with.
        version: of that.
        module: that its entry point names.
        extension: what it adds.
    """

    name: str
    package: str
    version: str
    module: str
    extension: Extension

    @property
    def specs(self) -> Path | None:
        """Its folder of specs; None where it has none."""
        return self._folder("specs")

    @property
    def templates(self) -> Path | None:
        """Its folder of templates; None where it has none."""
        return self._folder("templates")

    def _folder(self, name: str) -> Path | None:
        folder = self.extension.folder
        return folder / name if folder and (folder / name).is_dir() else None

    @property
    def digest(self) -> str:
        """Hex sha256 over the names and bytes of its Python, specs and templates."""
        return _digest(tuple(self._files()))

    def _files(self) -> Iterator[tuple[str, Path]]:
        code = importlib.import_module(self.module.partition(".")[0])
        paths = [Path(each) for each in getattr(code, "__path__", ())]
        paths = paths or [Path(code.__file__ or "")]
        paths += [self.extension.folder] if self.extension.folder else []
        seen: set[Path] = set()
        for root in (path.resolve() for path in paths):
            for path in sorted(root.rglob("*")) if root.is_dir() else [root]:
                if path.is_file() and "__pycache__" not in path.parts and path not in seen:
                    seen.add(path)
                    yield path.relative_to(root.parent).as_posix(), path


@cache
def _digest(files: tuple[tuple[str, Path], ...]) -> str:
    total = hashlib.sha256()
    for name, path in files:
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{name}\0{content}\n".encode())
    return total.hexdigest()


@cache
def installed() -> tuple[Installed, ...]:
    """The extensions of this environment, by name.

    Raises:
        ExtensionError: one cannot be imported, is no extension, or has the name of another one.
    """
    found: dict[str, Installed] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
        each = _read(entry)
        if found.setdefault(each.name, each).package != each.package:
            raise _failed(each, f"package {found[each.name].package} has that name, too")
    return tuple(found.values())


def _read(entry: EntryPoint) -> Installed:
    package, version = (entry.dist.name, entry.dist.version) if entry.dist else (entry.module, "")
    each = Installed(entry.name, package, version, entry.module, Extension())
    if not _NAME.fullmatch(entry.name):
        raise _failed(each, "a name is small letters, digits and single underscores")
    begun = sys.modules.get(entry.module)
    if begun is not None and not hasattr(begun, entry.attr):
        why = f"{entry.value} is not there yet; where a program imports both, fusegen comes first"
        raise _failed(each, why)
    try:
        loaded: Any = entry.load()
    except Exception as error:  # whatever importing somebody's module raises
        raise _failed(each, f"{entry.value} fails with {type(error).__name__}: {error}") from error
    if not isinstance(loaded, Extension):
        raise _failed(each, f"{entry.value} is no fusegen.extensions.Extension")
    return Installed(entry.name, package, version, entry.module, loaded)


class Named(Protocol):
    """What a registry holds."""

    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=Named)


def extended(
    shipped: tuple[N, ...],
    kind: type[N],
    of: Callable[[Extension], Iterable[object]],
    problem: Callable[[N], str],
) -> tuple[N, ...]:
    """A registry with what extensions add to it, in the order of their names.

    Args:
        shipped: what comes with fusegen.
        kind: type of its members.
        of: those of an extension.
        problem: why one cannot be a member; empty where it can.

    Raises:
        ExtensionError: a member is of another type, cannot be one, or has the name of another.
    """
    owners = {each.name: "fusegen" for each in shipped}
    members = [*shipped]
    for found in installed():
        for each in of(found.extension):
            if not isinstance(each, kind):
                raise _failed(found, f"expected a {kind.__name__}, got {type(each).__name__}")
            if not _NAME.fullmatch(each.name):
                raise _failed(found, f"{each.name!r} is no name: small letters, digits and _")
            if each.name in owners:
                owner = owners[each.name]
                raise _failed(
                    found, f"{each.name!r} is a {kind.__name__} of {owner}, too; rename it"
                )
            if wrong := problem(each):
                raise _failed(found, f"{kind.__name__} {each.name!r} {wrong}")
            owners[each.name] = found.package
            members.append(each)
    return tuple(members)


def _failed(found: Installed, what: str) -> ExtensionError:
    name = f"{found.package} {found.version}".strip()
    return ExtensionError(
        f"extension {found.name!r} of package {name}: {what}; mend the package, or uninstall it:"
        f" pip uninstall {found.package}"
    )
