"""What a cell that takes adapters states of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Linear:
    """A cell that is one linear layer.

    Attributes:
        function: that runs it: x, weight, sizes of groups.
        class_name: of the module.
        grouped: whether its rows are of groups, each with a weight.
        held_quantized: whether its weight is there as quantised copies alone.
    """

    function: str
    class_name: str
    grouped: bool
    held_quantized: bool


@dataclass(frozen=True)
class Fused:
    """A cell of experts, which are two linear layers and an activation in one op.

    Attributes:
        parts: paths of a linear layer, the activation and the other layer.
        linear: the cell of either layer by itself; empty where the bundle has none.
        activation, activation_class: likewise, of the activation.
        scalars: keywords of the activation, and attributes of the experts with their values.
        recipe: of the linear cell.
        formula: of the activation, for people.
    """

    parts: tuple[str, str, str]
    linear: str
    activation: str
    activation_class: str
    scalars: tuple[tuple[str, str], ...]
    recipe: str
    formula: str
