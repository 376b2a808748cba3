"""Which GEMMs there are, and how kernels store what they read and write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from enum import Enum

from pydantic.dataclasses import dataclass

from .dtypes import DType
from .fields import STRICT, Nanoseconds, Positive
from .predicate import SizeVariable


class Store(str, Enum):
    """What becomes of a GEMM: written in the module's own type or in fp32, or added in one.

    SCALED_BIAS is the module's own type after a bias times a scale of each row was added, UNARY the
    same type after expressions of the result, BINARY after some that read another tensor, too.
    UNARY_AUX is UNARY and, in a second tensor, the result before its expressions.  GATED is half as
    wide: an expression of both halves of a row, and perhaps of a value of each row; GATED_AUX is
    that and the result before it.  CODES is GATED_AUX in codes, by scales that are known.
    """

    IO = "io"
    SCALED_BIAS = "scaled_bias"
    UNARY = "unary"
    UNARY_AUX = "unary_aux"
    BINARY = "binary"
    GATED = "gated"
    GATED_AUX = "gated_aux"
    CODES = "codes"
    FP32 = "fp32"
    ADD = "add"
    ADD_IO = "add_io"


STORES = tuple(each for each in Store if each is not Store.CODES)
"""Those of results in 16 or 32 bits."""

GATED = (Store.GATED, Store.GATED_AUX, Store.CODES)
"""Of both halves of a result's rows, which one thread needs to have."""


class EndScale(str, Enum):
    """What a GEMM of decoded operands multiplies its result by, for one of them.

    A scale of the TENSOR or group, or one of each ROW as the GEMM reads it, is constant along the
    contraction: the codes alone are decoded then.  NONE: elements were decoded by their scales.
    """

    NONE = "none"
    TENSOR = "tensor"
    ROW = "row"


class GemmKind(str, Enum):
    """Which of the three GEMMs of a linear layer."""

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


@dataclass(frozen=True, slots=True)
class Work:
    """What SMs make of a GEMM's result at a time, under one configuration.

    Attributes:
        rows, columns: of the result, that the CTAs of a cluster make together.
        sms: that they take.
        clusters: that those SMs hold at once.
    """

    rows: int
    columns: int
    sms: int
    clusters: int

    def waves(self, sizes: Mapping[SizeVariable, int]) -> int:
        """How many times the GPU is filled, the last time perhaps in part."""
        rows, columns = sizes[SizeVariable.ROWS], sizes[SizeVariable.COLUMNS]
        tiles = -(-rows // self.rows) * -(-columns // self.columns)
        return -(-tiles // max(1, sizes[SizeVariable.SMS] // self.sms * self.clusters))


@dataclass(frozen=True, slots=True, config=STRICT)
class WaveTime:
    """An estimate of how long a GEMM takes under one configuration, in nanoseconds.

    Attributes:
        launch: whatever its size.
        wave: of each wave of tiles.
        k: of each wave, per 1024 of the contraction.
    """

    launch: Nanoseconds
    wave: Nanoseconds
    k: Nanoseconds

    def of(self, work: Work, sizes: Mapping[SizeVariable, int]) -> int:
        """The time of a GEMM; ``estimate`` of gemm/quickest.h says the same."""
        along = sizes[SizeVariable.K] * self.k // 1024
        return self.launch + work.waves(sizes) * (self.wave + along)


ATOM_ROWS, ATOM_BLOCKS = 128, 4
"""Rows, and blocks of each, whose scales an atom has: ``quantize/scale_atoms.cuh``."""


@dataclass(frozen=True, slots=True, config=STRICT)
class LayoutSpec:
    """How an architecture's kernels store quantised copies.

    Attributes:
        transposed: columnwise data is ``[K, rows]``, because the MMA reads one major only; or the
            formats of which it does.  Data of others is ``[rows, K]`` in either orientation, and
            groups start in it where they do in the tensor.  A recipe of which some formats are
            transposed has all of them so.
        token_alignment: elements that a group's transposed data starts at a multiple of.
        pitch: bytes that rows of data are padded to a multiple of.
        token_major: fp32 scales of blocks along a row are stored ``[blocks, tokens]``, groups where
            transposed data has them, because the MMA's scales are loaded for many tokens at once.
        scale_atoms: scalings whose scales lie in atoms of 128 rows by 4 blocks, as block-scaled
            MMAs load them; groups then start at multiples of 128 rows.  Of a recipe all scalings
            are among them, or its scales are in logical order.
    """

    transposed: bool | tuple[DType, ...] = True
    token_alignment: Positive = 32
    pitch: Positive = 16
    token_major: bool = False
    scale_atoms: tuple[str, ...] = ()

    def transposes(self, format: DType) -> bool:
        """Whether columnwise data of a format is transposed."""
        return self.transposed if isinstance(self.transposed, bool) else format in self.transposed

    def of(self, formats: Iterable[DType], scalings: Iterable[str]) -> LayoutSpec:
        """How copies of a recipe with these formats and scalings are stored."""
        of_formats = [self.transposes(each) for each in formats]
        own = replace(self, transposed=any(of_formats) or not of_formats)
        names = {*scalings}
        if names and names <= {*self.scale_atoms}:
            return replace(own, token_alignment=ATOM_ROWS)
        return replace(own, scale_atoms=())
