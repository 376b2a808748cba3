"""How a tensor is quantised: formats, blocks, scales."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from .dtypes import DType
from .fields import STRICT, Block
from .kernel import ATOM_BLOCKS, EndScale, GemmKind

_FP32_MAX = 3.4028234663852886e38


class Role(str, Enum):
    """How a tensor enters a GEMM; recipes say one format per role."""

    INPUT = "input"
    WEIGHT = "weight"
    GRAD_OUTPUT = "grad_output"


class ScaleRule(str, Enum):
    """How a scale follows from an amax."""

    MAX_OVER_AMAX = "max_over_amax"
    MX = "mx"
    NVFP4 = "nvfp4"


class ScaleRounding(str, Enum):
    """How a scale is rounded: not at all, to a power of two downwards or upwards."""

    NONE = "none"
    POW2_DOWN = "pow2_down"
    POW2_UP = "pow2_up"


class AmaxSource(str, Enum):
    """Which tensor's amax a scale follows: this one's, or the newest of a history."""

    CURRENT = "current"
    HISTORY = "history"


class Extent(str, Enum):
    """A block that spans a whole dimension of a tensor, or of a group of rows."""

    ALL = "all"


class Orientation(str, Enum):
    """Along which dimension the blocks of a quantised copy run."""

    ROWWISE = "rowwise"
    COLUMNWISE = "columnwise"


OPERANDS: Mapping[tuple[GemmKind, str], tuple[Role, Orientation]] = {
    (GemmKind.FPROP, "a"): (Role.INPUT, Orientation.ROWWISE),
    (GemmKind.FPROP, "b"): (Role.WEIGHT, Orientation.ROWWISE),
    (GemmKind.DGRAD, "a"): (Role.GRAD_OUTPUT, Orientation.ROWWISE),
    (GemmKind.DGRAD, "b"): (Role.WEIGHT, Orientation.COLUMNWISE),
    (GemmKind.WGRAD, "a"): (Role.GRAD_OUTPUT, Orientation.COLUMNWISE),
    (GemmKind.WGRAD, "b"): (Role.INPUT, Orientation.COLUMNWISE),
}
"""What each operand of each GEMM is, and along which dimension its blocks run."""


class Rounding(str, Enum):
    """How an element is rounded to its format."""

    NEAREST = "nearest"
    STOCHASTIC = "stochastic"


class Accumulation(str, Enum):
    """Where partial sums of a GEMM are kept."""

    FP32 = "fp32"
    FAST = "fast"
    SPLIT_128 = "split_128"


@dataclass(frozen=True, slots=True, config=STRICT)
class ScaleSpec:
    """Scale factors of a quantised tensor.

    Attributes:
        dtype: of the stored inverse scale.
        rule: formula from amax (numerics documentation).
        round: of the scale.
        epsilon: an amax below it is raised to it.
        margin: the scale is divided by 2^margin.
        history: number of amaxes kept, the newest of which the scale follows; 0 for none, where it
            follows that of the tensor itself.
    """

    dtype: DType
    rule: ScaleRule
    round: ScaleRounding = ScaleRounding.NONE
    epsilon: Annotated[float, Field(ge=0, le=_FP32_MAX)] = 0.0
    margin: Annotated[int, Field(ge=0, le=100)] = 0
    history: Annotated[int, Field(ge=0, le=65536)] = 0

    @property
    def source(self) -> AmaxSource:
        """Whose amax it follows."""
        return AmaxSource.HISTORY if self.history else AmaxSource.CURRENT


_BLOCKS = re.compile(r"(block|pow2|mx|nv)_(\d+|all)x(\d+|all)")
_KINDS: Mapping[str, tuple[ScaleRule, DType, bool]] = {
    "block": (ScaleRule.MAX_OVER_AMAX, DType.FLOAT32, False),
    "pow2": (ScaleRule.MAX_OVER_AMAX, DType.E8M0, False),
    "mx": (ScaleRule.MX, DType.E8M0, False),
    "nv": (ScaleRule.NVFP4, DType.E4M3, True),
}
"""Rule, format and second level of the scales of blocks, by the word for them."""
_WORDS = {(rule, dtype): word for word, (rule, dtype, _) in _KINDS.items()}


@dataclass(frozen=True, slots=True)
class Scaling:
    """How elements of a tensor share scales, of a rowwise copy; columnwise ones swap the extents.

    Attributes:
        rows, columns: that share a scale.
        rule: formula from amax.
        dtype: of a stored scale.
        tensor_scale: whether there is a second scale over the whole tensor or group.
    """

    rows: int | Extent
    columns: int | Extent
    rule: ScaleRule = ScaleRule.MAX_OVER_AMAX
    dtype: DType = DType.FLOAT32
    tensor_scale: bool = False

    @property
    def extents(self) -> tuple[int | Extent, int | Extent]:
        """Rows and columns."""
        return (self.rows, self.columns)

    @property
    def name(self) -> str:
        """``tensor``, ``row``, ``block_1x128``, ``mx_1x32`` ...: what specs and kernels call it."""
        extents = self.extents
        words = {(Extent.ALL, Extent.ALL): "tensor", (1, Extent.ALL): "row"}
        if self.rule is ScaleRule.MAX_OVER_AMAX and extents in words:
            return words[extents]
        kind = _WORDS[self.rule, self.dtype]
        rows, columns = (e.value if isinstance(e, Extent) else e for e in extents)
        return f"{kind}_{rows}x{columns}"

    @property
    def atom_block(self) -> int:
        """Elements of one byte in an atom of scales; 0 where these do not fit into atoms.

        Longer blocks have several bytes, all alike.
        """
        sizes = {DType.E8M0: 32, DType.E4M3: 16}
        size = sizes.get(self.dtype, 0)
        if not size or isinstance(self.columns, Extent) or self.rows not in (1, self.columns):
            return 0
        whole = self.columns % size == 0 and self.columns <= ATOM_BLOCKS * size
        return size if whole else 0

    @classmethod
    def parse(cls, name: str) -> Scaling | None:
        """Inverse of ``name``; None for words that no scaling has."""
        blocks = _BLOCKS.fullmatch(name)
        words = {"tensor": cls(Extent.ALL, Extent.ALL), "row": cls(1, Extent.ALL)}
        if blocks is None:
            return words.get(name)
        rows, columns = (Extent.ALL if each == "all" else int(each) for each in blocks.groups()[1:])
        found = cls(rows, columns, *_KINDS[blocks[1]])
        return found if found.name == name else None


@dataclass(frozen=True, slots=True, config=STRICT)
class HadamardSpec:
    """A random Hadamard transform before quantisation, along the blocks of one orientation.

    Attributes:
        size: elements that are transformed together, a power of two.
        orientation: of the copies that are transformed.
    """

    size: Annotated[int, Field(ge=2, le=256)]
    orientation: Orientation


@dataclass(frozen=True, slots=True, config=STRICT)
class QuantizationSpec:
    """How one role is quantised.

    Attributes:
        format: of the elements.
        block: rows and columns that share a scale, for rowwise copies; columnwise copies swap them.
        scale: scale factors per block.
        tensor_scale: a second scale over the whole tensor or group (NVFP4).
        rounding: of elements.
        hadamard: transform before quantisation.
    """

    format: DType
    block: tuple[Block | Extent, Block | Extent]
    scale: ScaleSpec
    tensor_scale: ScaleSpec | None = None
    rounding: Rounding = Rounding.NEAREST
    hadamard: HadamardSpec | None = None

    @property
    def shares(self) -> Scaling:
        """How elements share scales."""
        second = self.tensor_scale is not None
        return Scaling(*self.block, self.scale.rule, self.scale.dtype, second)

    @property
    def scaling(self) -> str:
        """Name of how elements share a scale: ``tensor``, ``row``, ``block_1x128``, ``mx_1x32``."""
        return self.shares.name

    @property
    def square(self) -> int:
        """Rows of a square block; 1 where blocks are of one row, or span all of them."""
        rows, columns = self.block
        return 1 if isinstance(rows, Extent) or isinstance(columns, Extent) else rows

    @property
    def end_scale(self) -> EndScale:
        """What of its scales a GEMM can apply at its end: those constant along its contraction.

        That runs along the columns of a rowwise copy.  A columnwise copy swaps the extents, and its
        contraction runs along the rows: so it is the second extent that counts for both.
        """
        if self.scale.rule is not ScaleRule.MAX_OVER_AMAX:
            return EndScale.NONE
        return _END_SCALES.get(self.block, EndScale.NONE)

    @property
    def amax_pass(self) -> bool:
        """Whether a tensor is read for its amaxes before it can be quantised.

        It is where a scale of this very tensor spans more than a kernel has at hand: all of a row,
        a column or a group.
        """
        spans = self.block[1] is Extent.ALL and self.scale.source is AmaxSource.CURRENT
        return spans or self.tensor_scale is not None

    def along_tokens(self, role: Role, orientation: Orientation) -> bool:
        """Whether a copy has several fp32 scales per token, in blocks of its row."""
        rows, columns = self.block
        fp32 = self.scale.dtype is DType.FLOAT32
        blocks = fp32 and rows == 1 and columns is not Extent.ALL
        return role is not Role.WEIGHT and orientation is Orientation.ROWWISE and blocks


_END_SCALES: Mapping[tuple[int | Extent, int | Extent], EndScale] = {
    (Extent.ALL, Extent.ALL): EndScale.TENSOR,
    (1, Extent.ALL): EndScale.ROW,
}
"""By rows and columns that share an fp32 scale."""
