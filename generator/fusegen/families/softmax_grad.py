"""The gradient of the softmax of the rows of a tensor."""

from __future__ import annotations

from ..steps import softmax
from .contract import Contract
from .family import Family

SOFTMAX_GRAD = Family(
    "softmax_grad",
    (softmax.SOFTMAX_GRAD.name,),
    launch=softmax.GRAD_LAUNCH,
    summary="The gradient of the softmax of rows.",
    device="softmax/softmax_grad.cuh",
    row_alignment=8,
    contracts=(Contract(registers=64),),
)
