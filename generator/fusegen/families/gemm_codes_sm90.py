"""FP8 GEMMs on Hopper that go on to a gated activation in codes, by delayed scaling."""

from __future__ import annotations

from dataclasses import replace

from ..ir.kernel import GemmKind, Store
from ..ir.quantization import Accumulation
from ..steps import gemm_pointwise
from .family import Family, GemmScaling, LayoutNeeds
from .scalings import FP8, TENSOR
from .wgmma import ARCH, Operands, contracts_of

GEMM_CODES_SM90 = Family(
    "gemm_codes_sm90",
    (
        gemm_pointwise.GEMM_POINTWISE_QUANTIZE.name,
        gemm_pointwise.GROUPED_GEMM_POINTWISE_QUANTIZE.name,
    ),
    launch=gemm_pointwise.OF_CODES,
    summary="Chooses the FP8 kernel of a {kind} GEMM that gives codes of an activation.",
    formats=FP8,
    multiplies=(GemmScaling(TENSOR, TENSOR, (Accumulation.FAST,)),),
    stores=(Store.CODES,),
    arch=ARCH,
    row_alignment=8,
    layout=LayoutNeeds(token_alignments=(32,)),
    most_history=1024,
    configured=Operands(element_bytes=1, sorted_kinds=(GemmKind.WGRAD,)).configured,
    # The state of scales moves on behind the product, in the same unit.
    contracts=tuple(
        replace(each, beside=("delayed_kernel", "clear_kernel")) for each in contracts_of("QGMMA")
    ),
)
