"""GEMMs of 16-bit operands on Hopper that were decoded from quantised ones."""

from __future__ import annotations

from ..ir.dtypes import DType
from ..ir.kernel import EndScale
from ..steps import gemm
from ..steps.gemm_pointwise import GEMMS
from .family import WHOLE_ROWS, Family
from .wgmma import ARCH, Operands, contracts_of

GEMM_DECODED_SM90 = Family(
    "gemm_decoded_sm90",
    GEMMS,
    launch=gemm.DECODED,
    summary="Chooses the kernel of a {kind} GEMM of decoded operands by its sizes.",
    formats=(DType.BFLOAT16,),
    stores=WHOLE_ROWS,
    ends=tuple(EndScale),
    arch=ARCH,
    row_alignment=8,
    configured=Operands(element_bytes=2).configured,
    contracts=contracts_of("HGMMA"),
)
