"""GEMMs by ``mma.sync`` of 16-bit operands that were decoded from quantised ones."""

from __future__ import annotations

from ..ir.dtypes import DType
from ..ir.kernel import EndScale, Store
from ..steps import gemm
from ..steps.gemm_pointwise import GEMMS
from .family import WHOLE_ROWS, Family
from .mma_sync import Operands, contract_by

GEMM_DECODED_MMA = Family(
    "gemm_decoded_mma",
    GEMMS,
    launch=gemm.DECODED,
    summary="Chooses the kernel of a {kind} GEMM of decoded operands by its sizes.",
    formats=(DType.BFLOAT16,),
    stores=WHOLE_ROWS,
    ends=tuple(EndScale),
    too_many=(((EndScale.ROW, EndScale.ROW), Store.BINARY),),
    row_alignment=8,
    configured=Operands(element_bits=16).configured,
    contracts=(contract_by(r"HMMA\.16816\.F32"),),
)
