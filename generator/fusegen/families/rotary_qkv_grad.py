"""The gradient of rotary embeddings of packed queries and keys."""

from __future__ import annotations

from ..steps import rotary
from .contract import Contract
from .family import Family

ROTARY_QKV_GRAD = Family(
    "rotary_qkv_grad",
    (rotary.ROTARY_QKV_GRAD.name,),
    launch=rotary.QKV_GRAD_LAUNCH,
    summary="Gradients of queries, of keys and of values to packed rows, pairs rotated back.",
    device="rotary/rotary_qkv_grad.cuh",
    row_alignment=8,
    contracts=(Contract(registers=72),),
)
