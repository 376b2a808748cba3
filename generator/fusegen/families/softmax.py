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
    # Two CTAs of 512 threads leave 64 to a thread; rows that are read twice have one on sm_89.
    contracts=(Contract(registers=64, registers_on={"sm_89": 96}),),
)
