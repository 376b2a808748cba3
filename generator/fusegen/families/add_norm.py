"""Norms of rows that are sums."""

from __future__ import annotations

from ..steps import norm
from .contract import Contract
from .family import Family

ADD_NORM = Family(
    "add_norm",
    (norm.ADD_NORM.name,),
    launch=norm.ADD_LAUNCH,
    summary="Adds two tensors and norms the rows of their sum, in one pass.",
    device="norm/add_norm.cuh",
    row_alignment=8,
    contracts=(Contract(registers=128),),
)
