"""Softmax of the rows of a tensor."""

from __future__ import annotations

from ..steps import softmax
from .contract import Contract
from .family import Family

SOFTMAX = Family(
    "softmax",
    (softmax.SOFTMAX.name,),
    launch=softmax.LAUNCH,
    summary="Softmax of scaled, masked rows.",
    device="softmax/softmax.cuh",
    row_alignment=8,
    contracts=(Contract(registers=128),),
)
