"""GEMMs by ``mma.sync`` of FP8 operands whose E8M0 scales the instruction reads, as sm_120a has it.

Powers of two for 128 elements are read as one for each 32 of them.
"""

from __future__ import annotations

from ..ir.quantization import Accumulation
from ..steps import gemm
from ..steps.gemm_pointwise import GEMMS
from .family import WHOLE_ROWS, Family, GemmScaling, LayoutNeeds
from .mma_sync import Operands, contract_by
from .scalings import FP8, GROUPS_START, MX_1X32, MX_32X32, POW2_1X128, POW2_128X128

_FP32 = (Accumulation.FP32,)

GEMM_MX_MMA = Family(
    "gemm_mx_mma",
    GEMMS,
    launch=gemm.OF_ATOMS,
    summary="Chooses the kernel of a {kind} GEMM with E8M0 scales by its sizes.",
    formats=FP8,
    multiplies=(
        GemmScaling(MX_1X32, MX_1X32, _FP32),
        GemmScaling(MX_1X32, MX_32X32, _FP32),
        GemmScaling(POW2_1X128, POW2_128X128, (Accumulation.SPLIT_128,)),
    ),
    stores=WHOLE_ROWS,
    row_alignment=8,
    layout=LayoutNeeds(
        GROUPS_START,
        scale_atoms=tuple(each.name for each in (MX_1X32, MX_32X32, POW2_1X128, POW2_128X128)),
    ),
    configured=Operands(element_bits=8, scale_block=32).configured,
    enumerators={Accumulation.FP32.value: "fast", Accumulation.SPLIT_128.value: "split"},
    contracts=(contract_by(r"QMMA\.SF\.16832\.F32"),),
)
