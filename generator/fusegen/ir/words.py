"""Closed sets of words that specs and plans share."""

from __future__ import annotations

from enum import Enum


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
