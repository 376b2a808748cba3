"""Norms of rows."""

from __future__ import annotations

from ..steps import norm
from .contract import Contract
from .family import Family

NORM = Family(
    "norm",
    (norm.NORM.name,),
    launch=norm.LAUNCH,
    summary="Divides each row by its root mean square, standard deviation or length.",
    device="norm/norm.cuh",
    row_alignment=8,
    contracts=(Contract(registers=128),),
)
