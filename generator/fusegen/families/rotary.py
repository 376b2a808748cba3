"""Rotary embeddings."""

from __future__ import annotations

from ..steps import rotary
from .contract import Contract
from .family import Family

ROTARY = Family(
    "rotary",
    (rotary.ROTARY.name,),
    launch=rotary.LAUNCH,
    summary="Rotates pairs of a head's elements by angles of their row.",
    device="rotary/rotary.cuh",
    row_alignment=8,
    contracts=(Contract(registers=72),),
)
