"""Dot products of each row with a vector of its group."""

from __future__ import annotations

from ..ir.primitives import Primitive
from .family import Family

GROUP_ROW_DOT = Family("group_row_dot", (Primitive.GROUP_ROW_DOT,))
