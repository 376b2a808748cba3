"""Rotary embeddings of packed queries and keys, which are parted from values."""

from __future__ import annotations

from ..steps import rotary
from .contract import Contract
from .family import Family

ROTARY_QKV = Family(
    "rotary_qkv",
    (rotary.ROTARY_QKV.name,),
    launch=rotary.QKV_LAUNCH,
    summary="Packed rows to queries and keys, whose pairs it rotates, and to values.",
    device="rotary/rotary_qkv.cuh",
    row_alignment=8,
    contracts=(Contract(registers=72),),
)
