"""GEMMs, with sums in tensor memory, of 16-bit operands that were decoded from quantised ones."""

from __future__ import annotations

from ..ir.dtypes import DType
from ..ir.kernel import EndScale
from ..steps import gemm
from ..steps.gemm_pointwise import GEMMS
from .family import WHOLE_ROWS, Family
from .tcgen05 import ARCH, Operands, contracts_of

GEMM_DECODED_TCGEN05 = Family(
    "gemm_decoded_tcgen05",
    GEMMS,
    launch=gemm.DECODED,
    summary="Chooses the kernel of a {kind} GEMM of decoded operands by its sizes.",
    formats=(DType.BFLOAT16,),
    stores=WHOLE_ROWS,
    ends=tuple(EndScale),
    arch=ARCH,
    row_alignment=8,
    configured=Operands(element_bits=16).configured,
    contracts=contracts_of("UTCHMMA"),
)
