"""Targets: selections by name."""

from __future__ import annotations

from enum import Enum

from pydantic.dataclasses import dataclass

from ..ir.fields import STRICT
from .fields import Edition, Line, Name


class Kept(str, Enum):
    """What a bundle has of a cell."""

    FILES = "files"
    DIGESTS = "digests"
    """A line of its manifest: what the cell's files would be, so that a change of them shows."""


@dataclass(frozen=True, slots=True, config=STRICT)
class TargetSpec:
    """A named selection: every listed module with every listed recipe on every listed arch.

    Attributes:
        archs: for which bundles are made; `all` is one bundle with those of all GPUs in it.
        modules: that each bundle has.
        recipes: of each module.
        options: choices that every module is generated with.
        every_option: whether each choice that a module offers comes by itself, and the module
            without any does not; what fusegen learns to offer is then named, too.
        kept: what bundles have of these cells: their files, or digests of them in a manifest;
            files where another target asks for those.
    """

    edition: Edition
    target: Name
    summary: Line
    archs: tuple[Name, ...]
    modules: tuple[Name, ...]
    recipes: tuple[Name, ...]
    options: tuple[Name, ...] = ()
    every_option: bool = False
    kept: Kept = Kept.FILES

    @property
    def name(self) -> str:
        return self.target
