"""The gradient of dropout."""

from __future__ import annotations

from ..steps import dropout
from .contract import Contract
from .family import Family

DROPOUT_GRAD = Family(
    "dropout_grad",
    (dropout.DROPOUT_GRAD.name,),
    launch=dropout.GRAD_LAUNCH,
    summary="The gradient of dropout, of the bits that it left.",
    device="dropout/dropout_grad.cuh",
    row_alignment=8,
    contracts=(Contract(registers=64),),
)
