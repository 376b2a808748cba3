"""The six kinds of spec.

Every field is what a person writes in YAML; nothing is derived here.  pydantic checks types and
closed sets from the annotations, ``load`` adds places to what it finds, and the JSON Schemas under
``specs/schema`` are printed from these classes.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from .arch import ArchSpec
from .fusion import FusionSpec
from .module import ModuleSpec
from .op import OpSpec
from .recipe import RecipeSpec
from .target import TargetSpec

SCHEMA_FOLDER = "schema"
"""Folder beside those of the kinds: the JSON Schemas of all of them, for editors."""

AnySpec = OpSpec | ModuleSpec | RecipeSpec | ArchSpec | TargetSpec | FusionSpec


class SpecKind(Enum):
    """The six kinds: folder under ``specs/`` (also the plural people use), key field, class."""

    OPS = ("ops", "op", OpSpec)
    FUSIONS = ("fusions", "fusion", FusionSpec)
    MODULES = ("modules", "module", ModuleSpec)
    RECIPES = ("recipes", "recipe", RecipeSpec)
    ARCHS = ("archs", "arch", ArchSpec)
    TARGETS = ("targets", "target", TargetSpec)

    def __init__(self, folder: str, key: str, spec: type[Any]) -> None:
        self.folder = folder
        self.key = key
        self.spec = spec
