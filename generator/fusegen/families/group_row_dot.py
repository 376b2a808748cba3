"""Dot products of each row with a vector, or with its group's."""

from __future__ import annotations

from ..steps import group_row_dot
from .contract import Contract
from .family import Family

GROUP_ROW_DOT = Family(
    "group_row_dot",
    (group_row_dot.GROUP_ROW_DOT.name, group_row_dot.ROW_DOT.name),
    launch=group_row_dot.LAUNCH,
    summary="Multiplies each row with a vector, or with that of its group.",
    device="reduce/group_row_dot.cuh",
    contracts=(Contract(registers=64),),
)
