"""Closed sets of words that specs and plans share."""

from __future__ import annotations

from enum import Enum
from math import isfinite


class Init(str, Enum):
    """How ``reset_parameters`` fills a parameter."""

    KAIMING_UNIFORM = "kaiming_uniform"
    ZEROS = "zeros"
    ONES = "ones"


class Broadcast(str, Enum):
    """Along what a pointwise operand repeats: one value per row, or one per column."""

    ROW = "row"
    COLUMN = "column"


class AttributeType(str, Enum):
    """Types of scalar attributes."""

    FLOAT = "float"
    INT = "int"
    BOOL = "bool"
    STRING = "string"

    def holds(self, value: object) -> bool:
        """Whether a value is of the type: true is no number, infinities and NaN have no literal."""
        if isinstance(value, bool):
            return self is AttributeType.BOOL
        if isinstance(value, float):
            return self is AttributeType.FLOAT and isfinite(value)
        if isinstance(value, int):
            return self in (AttributeType.FLOAT, AttributeType.INT)
        return self is AttributeType.STRING and isinstance(value, str)
