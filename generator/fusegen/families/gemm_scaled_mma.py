"""GEMMs by ``mma.sync`` of operands whose scales the instruction reads: GeForce's Blackwell.

Powers of two for 128 elements are read as one for each 32 of them.
"""

from __future__ import annotations

from ..ir.dtypes import DType
from ..ir.kernel import Store
from ..ir.quantization import Accumulation
from ..steps import gemm
from ..steps.gemm_pointwise import GEMMS
from .family import Family, GemmScaling, LayoutNeeds
from .mma_sync import Operands, contract_by
from .scalings import (
    FP8,
    GROUPS_START,
    MX_1X32,
    MX_32X32,
    NV_1X16,
    NV_16X16,
    POW2_1X128,
    POW2_128X128,
)

_FP32 = (Accumulation.FP32,)
_OF_MX = (
    GemmScaling(MX_1X32, MX_1X32, _FP32),
    GemmScaling(MX_1X32, MX_32X32, _FP32),
    GemmScaling(POW2_1X128, POW2_128X128, (Accumulation.SPLIT_128,)),
)
_OF_NV = (GemmScaling(NV_1X16, NV_16X16, _FP32), GemmScaling(NV_1X16, NV_1X16, _FP32))


def _layout(pairs: tuple[GemmScaling, ...]) -> LayoutNeeds:
    names = (each.name for pair in pairs for each in (pair.tokens, pair.weights))
    return LayoutNeeds(GROUPS_START, scale_atoms=tuple(dict.fromkeys(names)))


GEMM_MX_MMA = Family(
    "gemm_mx_mma",
    GEMMS,
    launch=gemm.OF_ATOMS,
    summary="Chooses the kernel of a {kind} GEMM with E8M0 scales by its sizes.",
    formats=FP8,
    multiplies=_OF_MX,
    stores=tuple(Store),
    row_alignment=8,
    layout=_layout(_OF_MX),
    configured=Operands(element_bits=8, scale_block=32).configured,
    enumerators={Accumulation.FP32.value: "fast", Accumulation.SPLIT_128.value: "split"},
    contracts=(contract_by(r"QMMA\.SF\.16832\.F32"),),
)

GEMM_NV_MMA = Family(
    "gemm_nv_mma",
    GEMMS,
    launch=gemm.OF_ATOMS,
    summary="Chooses the NVFP4 kernel of a {kind} GEMM by its sizes.",
    formats=(DType.E2M1,),
    multiplies=_OF_NV,
    stores=tuple(Store),
    row_alignment=8,
    layout=_layout(_OF_NV),
    configured=Operands(element_bits=4, scale_block=16).configured,
    enumerators={Accumulation.FP32.value: "fast"},
    contracts=(contract_by(r"OMMA\.SF\.16864\.F32"),),
)
