"""Sums over the rows of each group."""

from __future__ import annotations

from ..steps import sums
from .contract import Contract
from .family import Family

GROUP_SUM = Family(
    "group_sum",
    (sums.GROUP_SUM.name, sums.COLUMN_SUM.name),
    launch=sums.LAUNCH,
    summary="Sums the rows of each group.",
    device="reduce/group_sum.cuh",
    row_alignment=8,
    contracts=(Contract(registers=64),),
)
