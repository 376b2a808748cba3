"""The gradient of the cross entropy of rows of logits."""

from __future__ import annotations

from ..steps import cross_entropy
from .contract import Contract
from .family import Family

CROSS_ENTROPY_GRAD = Family(
    "cross_entropy_grad",
    (cross_entropy.CROSS_ENTROPY_GRAD.name,),
    launch=cross_entropy.GRAD_LAUNCH,
    summary="The gradient of the cross entropy of logits.",
    device="softmax/cross_entropy_grad.cuh",
    row_alignment=8,
    contracts=(Contract(registers=64),),
)
