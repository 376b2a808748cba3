"""How elements share scales, where the shipped device code knows it."""

from __future__ import annotations

from collections.abc import Iterable

from ..ir.dtypes import DType
from ..ir.quantization import Extent, ScaleRule, Scaling

BLOCKS = (16, 32, 64, 128)
"""Elements of a block, ``kLeastBlock`` to ``kMostBlock`` of quantize/config.cuh: a warp has whole
blocks of rows, a tile of 128 x 128 whole blocks."""

_MX = (ScaleRule.MX, DType.E8M0)
_NV = (ScaleRule.NVFP4, DType.E4M3, True)
_RATIO = (ScaleRule.MAX_OVER_AMAX, DType.FLOAT32)
_POW2 = (ScaleRule.MAX_OVER_AMAX, DType.E8M0)


def _lines(rule: ScaleRule, dtype: DType, tensor_scale: bool = False) -> tuple[Scaling, ...]:
    """Blocks along a row."""
    return tuple(Scaling(1, block, rule, dtype, tensor_scale) for block in BLOCKS)


def _squares(rule: ScaleRule, dtype: DType, tensor_scale: bool = False) -> tuple[Scaling, ...]:
    return tuple(Scaling(block, block, rule, dtype, tensor_scale) for block in BLOCKS)


TENSOR = Scaling(Extent.ALL, Extent.ALL)
ROW = Scaling(1, Extent.ALL)
BLOCK_1X128 = Scaling(1, 128)
BLOCK_128X128 = Scaling(128, 128)
NV_1X16 = Scaling(1, 16, *_NV)
NV_16X16 = Scaling(16, 16, *_NV)
MX_1X32 = Scaling(1, 32, *_MX)
MX_32X32 = Scaling(32, 32, *_MX)
POW2_1X128 = Scaling(1, 128, *_POW2)
POW2_128X128 = Scaling(128, 128, *_POW2)

OF_TOKENS = (TENSOR, ROW, *_lines(*_RATIO), *_lines(*_POW2), *_lines(*_MX), *_lines(*_NV))
"""Those whose scales no two tokens share, unless all do."""
ALL = (
    *OF_TOKENS,
    *_squares(*_RATIO),
    *_squares(*_POW2),
    *_squares(*_MX),
    *_squares(*_NV),
)
"""What ``Scaling`` of quantize/config.cuh can be instantiated for."""
AT_ONCE = tuple(each for each in ALL if each != ROW and not each.tensor_scale)
"""Those that may leave nothing to find before a tensor is quantised: a scale that spans all of it
may follow from amaxes of earlier steps."""

FP8 = (DType.E4M3, DType.E5M2)
CODES = (*FP8, DType.E2M1)
"""Formats that quantised tensors have."""

GROUPS_START = (32, 64, 128)
"""Alignments of groups in transposed copies that kernels other than GEMMs can have."""


def in_words(names: Iterable[str]) -> str:
    """Names in a list; those of every size of block together, as in ``block_1xN``."""
    listed = tuple(names)
    short: dict[str, None] = {}
    for name in listed:
        scaling = Scaling.parse(name)
        every = "" if scaling is None else _of_any_size(scaling)
        whole = every and all(every.replace("N", str(block)) in listed for block in BLOCKS)
        short[every if whole else name] = None
    sizes = (
        f", N one of {', '.join(map(str, BLOCKS))}" if any("N" in word for word in short) else ""
    )
    return ", ".join(short) + sizes


def _of_any_size(scaling: Scaling) -> str:
    """The name of a scaling without the size of its blocks; empty where it has none."""
    if scaling.columns is Extent.ALL or scaling.rows not in (1, scaling.columns):
        return ""
    kind = scaling.name.split("_")[0]
    return f"{kind}_1xN" if scaling.rows == 1 else f"{kind}_NxN"
