"""The cross entropy of rows of logits with a target each."""

from __future__ import annotations

from ..steps import cross_entropy
from .contract import Contract
from .family import Family

CROSS_ENTROPY = Family(
    "cross_entropy",
    (cross_entropy.CROSS_ENTROPY.name,),
    launch=cross_entropy.LAUNCH,
    summary="The cross entropy of logits with a target for each row.",
    device="softmax/cross_entropy.cuh",
    row_alignment=8,
    contracts=(Contract(registers=64),),
)
