"""Dropout of the elements of a tensor."""

from __future__ import annotations

from ..steps import dropout
from .contract import Contract
from .family import Family

DROPOUT = Family(
    "dropout",
    (dropout.DROPOUT.name,),
    launch=dropout.LAUNCH,
    summary="Elements zeroed at random; what is kept, as bits.",
    device="dropout/dropout.cuh",
    row_alignment=8,
    contracts=(Contract(registers=64),),
)
