"""What a command reads, each once: specs, templates, and what earlier runs have derived."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..build.objcache import default_root
from ..checks.load import load_usable
from ..emit.render import Renderer
from ..math import Derivations
from ..spec.load import SpecSet
from .folders import spec_folders, template_folders


class Inputs:
    """Specs and renderers by their extra folders; each set of folders is read once.

    Specs that are wrong are left out, with a warning.
    """

    def __init__(self) -> None:
        self._specs: dict[tuple[Path, ...], SpecSet] = {}
        self._renderers: dict[tuple[Path, ...], Renderer] = {}

    def specs(self, extra: Iterable[Path]) -> SpecSet:
        folders = spec_folders(extra)
        if folders not in self._specs:
            self._specs[folders] = load_usable(folders)
        return self._specs[folders]

    def renderer(self, extra: Iterable[Path]) -> Renderer:
        folders = template_folders(extra)
        if folders not in self._renderers:
            self._renderers[folders] = Renderer(folders, default_root() / "sandboxed_templates")
        return self._renderers[folders]


def derivations() -> Derivations:
    """Derived programs, those of earlier runs from the user's cache folder."""
    return Derivations(default_root() / "derivations")
