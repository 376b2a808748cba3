"""Targets: selections by name."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from ..ir.fields import STRICT
from .fields import Edition, Line, Name


@dataclass(frozen=True, slots=True, config=STRICT)
class TargetSpec:
    """A named selection: every listed module with every listed recipe on every listed arch.

    Attributes:
        archs: for which bundles are made; `all` is one bundle with those of all GPUs in it.
        modules: that each bundle has.
        recipes: of each module.
        options: choices that every module is generated with.
    """

    edition: Edition
    target: Name
    summary: Line
    archs: tuple[Name, ...]
    modules: tuple[Name, ...]
    recipes: tuple[Name, ...]
    options: tuple[Name, ...] = ()

    @property
    def name(self) -> str:
        return self.target
