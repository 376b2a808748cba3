"""Which folders of specs and templates a command reads, and reading each once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import paths
from .checks.load import load, load_usable
from .selection import merge_folders
from .spec.load import SpecSet

if TYPE_CHECKING:
    from .emit.render import Renderer
    from .math import Derivations


@dataclass(frozen=True, slots=True)
class Sources:
    """Folders to read besides the built-in ones."""

    specs: tuple[Path, ...] = ()
    templates: tuple[Path, ...] = ()

    @property
    def options(self) -> dict[str, Sequence[Path]]:
        """The folders by the option that names them."""
        return {"--specs": self.specs, "--templates": self.templates}


class Inputs:
    """Specs and renderers by their extra folders; each set of folders is read once.

    Specs that are wrong are left out, with a warning.
    """

    def __init__(self) -> None:
        self._specs: dict[tuple[Path, ...], SpecSet] = {}
        self._renderers: dict[tuple[Path, ...], Renderer] = {}

    def specs(self, extra: Iterable[Path]) -> SpecSet:
        folders = _besides(paths.builtin_specs(), extra)
        if folders not in self._specs:
            self._specs[folders] = load_usable(folders)
        return self._specs[folders]

    def renderer(self, extra: Iterable[Path]) -> Renderer:
        from .build.objcache import default_root
        from .emit.render import Renderer

        folders = _besides(paths.builtin_templates(), extra)
        if folders not in self._renderers:
            self._renderers[folders] = Renderer(folders, default_root() / "sandboxed_templates")
        return self._renderers[folders]


def derivations() -> Derivations:
    """Derived programs, those of earlier runs from the user's cache folder."""
    from .build.objcache import default_root
    from .math import Derivations

    return Derivations(default_root() / "derivations")


def _besides(builtin: Path, extra: Iterable[Path]) -> tuple[Path, ...]:
    """The built-in folder first, then the others, however they were written."""
    return (builtin, *(path for path in merge_folders(extra) if path != builtin))


BUILTIN = Sources()


def load_specs(sources: Sources = BUILTIN) -> SpecSet:
    """The built-in specs and those of the extra folders, without those that are wrong.

    Warns:
        SpecWarning: of every problem.

    Raises:
        SpecError: a folder is not there.
    """
    return Inputs().specs(sources.specs)


def validate_specs(sources: Sources = BUILTIN) -> SpecSet:
    """The same of specs none of which is wrong.

    Raises:
        SpecError: with every problem of every file.
    """
    return load(_besides(paths.builtin_specs(), sources.specs))
