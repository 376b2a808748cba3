"""GEMMs by ``mma.sync`` of NVFP4 operands whose scales the instruction reads, as sm_120a has it."""

from __future__ import annotations

from ..ir.dtypes import DType
from ..ir.quantization import Accumulation
from ..steps import gemm
from ..steps.gemm_pointwise import GEMMS
from .family import WHOLE_ROWS, Family, GemmScaling, LayoutNeeds
from .mma_sync import Operands, contract_by
from .scalings import GROUPS_START, NV_1X16, NV_16X16

_FP32 = (Accumulation.FP32,)

GEMM_NV_MMA = Family(
    "gemm_nv_mma",
    GEMMS,
    launch=gemm.OF_ATOMS,
    summary="Chooses the NVFP4 kernel of a {kind} GEMM by its sizes.",
    formats=(DType.E2M1,),
    multiplies=(GemmScaling(NV_1X16, NV_16X16, _FP32), GemmScaling(NV_1X16, NV_1X16, _FP32)),
    stores=WHOLE_ROWS,
    row_alignment=8,
    layout=LayoutNeeds(GROUPS_START, scale_atoms=(NV_1X16.name, NV_16X16.name)),
    configured=Operands(element_bits=4, scale_block=16).configured,
    enumerators={Accumulation.FP32.value: "fast"},
    contracts=(contract_by(r"OMMA\.SF\.16864\.F32"),),
)
