"""What a cell that can run experts of models states of itself."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeAlias

from torch import nn

from .. import _library

Experts: TypeAlias = Any
"""A layer of experts: a module with what transformers' `use_experts_implementation` gives it."""


@dataclass(frozen=True)
class Scalar:
    """A scalar of an activation: in its expression, the function's keyword if any, and default."""

    symbol: str
    keyword: str
    default: float


@dataclass(frozen=True)
class Cell:
    """A cell that can run experts.

    Attributes:
        name: of its file.
        function: that runs it: x, weights, sizes of groups, probs, biases.
        class_name: of the module, which makes states.
        formula: of the activation, for people.
        activation: its function in the reference.
        scalars: of the activation.
        gated: whether the activation reads two halves of its rows.
        biased: whether it takes biases.
        weighted_bias: whether the last bias is multiplied by the router's probabilities.
        states: keywords of the function, and their paths in the module.
        groups, sizes: keywords of the module's constructor.
    """

    name: str
    function: str
    class_name: str
    formula: str
    activation: str
    scalars: tuple[Scalar, ...]
    gated: bool
    biased: bool
    weighted_bias: bool
    states: tuple[tuple[str, str], ...]
    groups: str
    sizes: tuple[str, ...]

    @property
    def module(self) -> ModuleType:
        """The cell's file, whose ops are registered when it is first imported."""
        return importlib.import_module(f"..{self.name}", __package__)

    @property
    def implementation(self) -> str:
        """Its name in transformers, which another bundle's cell does not have."""
        return f"{_library.NAMESPACE}::{self.name}"

    @property
    def module_class(self) -> type[nn.Module]:
        """The module, of which states are made."""
        found: type[nn.Module] = getattr(self.module, self.class_name)
        return found

    def given(self, experts: Experts) -> Iterator[tuple[Scalar, float]]:
        """Values of the activation's scalars: the experts' own where these have one of the name."""
        for scalar in self.scalars:
            own = getattr(experts, scalar.symbol, None) if scalar.keyword else None
            yield scalar, own if isinstance(own, float | int) else scalar.default
