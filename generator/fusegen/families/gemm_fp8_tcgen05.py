"""GEMMs of FP8 operands, in either major, with sums in tensor memory."""

from __future__ import annotations

from ..ir.quantization import Accumulation
from ..steps import gemm
from ..steps.gemm_pointwise import GEMMS
from .family import WHOLE_ROWS, Family, GemmScaling, LayoutNeeds
from .scalings import FP8, ROW, TENSOR
from .tcgen05 import ARCH, Operands, contracts_of

# The tensor core's own sums have about 25 bits: what is split elsewhere needs no other code.
_ANY = (Accumulation.FAST, Accumulation.SPLIT_128)

GEMM_FP8_TCGEN05 = Family(
    "gemm_fp8_tcgen05",
    GEMMS,
    launch=gemm.OF_COPIES,
    summary="Chooses the FP8 kernel of a {kind} GEMM by its sizes.",
    formats=FP8,
    multiplies=(GemmScaling(TENSOR, TENSOR, _ANY), GemmScaling(ROW, ROW, _ANY)),
    stores=WHOLE_ROWS,
    arch=ARCH,
    row_alignment=8,
    layout=LayoutNeeds(transposed=(), untransposed=FP8),
    configured=Operands(element_bits=8).configured,
    enumerators={Accumulation.SPLIT_128.value: "split"},
    contracts=contracts_of("UTCQMMA"),
)
