"""Rows of tokens, one for each choice."""

from __future__ import annotations

from ..steps import routing
from .contract import Contract
from .family import Family

GATHER_ROWS = Family(
    "gather_rows",
    (routing.GATHER_ROWS.name,),
    launch=routing.GATHER_LAUNCH,
    summary="Copies each token to the rows of its choices.",
    device="routing/gather_rows.cuh",
    row_alignment=8,
    contracts=(Contract(registers=64),),
)
