"""Rows of experts, added up for each token."""

from __future__ import annotations

from ..steps import routing
from .contract import Contract
from .family import Family

COMBINE_ROWS = Family(
    "combine_rows",
    (routing.COMBINE_ROWS.name,),
    launch=routing.COMBINE_LAUNCH,
    summary="Adds up the rows of each token.",
    device="routing/combine_rows.cuh",
    row_alignment=8,
    contracts=(Contract(registers=80),),
)
