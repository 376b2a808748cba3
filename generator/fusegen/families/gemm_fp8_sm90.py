"""GEMMs of FP8 operands on Hopper."""

from __future__ import annotations

from ..ir.kernel import GemmKind
from ..ir.quantization import Accumulation
from ..steps import gemm
from ..steps.gemm_pointwise import GEMMS
from .family import WHOLE_ROWS, Family, GemmScaling, LayoutNeeds
from .scalings import BLOCK_1X128, BLOCK_128X128, FP8, ROW, TENSOR
from .wgmma import ARCH, Operands, contracts_of

_ANY = (Accumulation.FAST, Accumulation.SPLIT_128)
_SPLIT = (Accumulation.SPLIT_128,)

GEMM_FP8_SM90 = Family(
    "gemm_fp8_sm90",
    GEMMS,
    launch=gemm.OF_COPIES,
    summary="Chooses the FP8 kernel of a {kind} GEMM by its sizes.",
    formats=FP8,
    multiplies=(
        GemmScaling(TENSOR, TENSOR, _ANY),
        GemmScaling(ROW, ROW, _ANY),
        # Scales of blocks multiply sums over one block.
        GemmScaling(BLOCK_1X128, BLOCK_128X128, _SPLIT),
    ),
    stores=WHOLE_ROWS,
    arch=ARCH,
    row_alignment=8,
    layout=LayoutNeeds(token_alignments=(32,), token_major=(BLOCK_1X128.name,)),
    configured=Operands(
        element_bytes=1, loaded_scales=(BLOCK_1X128.name,), sorted_kinds=(GemmKind.WGRAD,)
    ).configured,
    enumerators={
        BLOCK_1X128.name: "block",
        BLOCK_128X128.name: "block",
        Accumulation.SPLIT_128.value: "split",
    },
    contracts=contracts_of("QGMMA"),
)
