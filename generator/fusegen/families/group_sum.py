"""Sums over the rows of each group."""

from __future__ import annotations

from ..ir.primitives import Primitive
from .family import Family

GROUP_SUM = Family("group_sum", (Primitive.GROUP_SUM, Primitive.COLUMN_SUM), row_alignment=8)
