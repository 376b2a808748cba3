"""What the device code of each kernel family can do.

Device code fixes some numbers that an architecture's spec states, too, and knows some formats and
scales only.  One row per family says which; a spec is held against it when it is loaded, lest a
kernel read memory otherwise than the spec says.  A family is known by its template, so that users'
own templates have no row, and nothing is known of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ..ir.dtypes import DType
from ..ir.kernel import GemmKind, PointSpec, Schedule, Store
from ..ir.quantization import Accumulation
from ..spec.arch import FamilySpec
from ..steps.dequantize import DEQUANTIZE, DEQUANTIZE_GROUPS
from ..steps.gemm import GEMM, GROUPED_GEMM
from ..steps.group_row_dot import GROUP_ROW_DOT
from ..steps.pointwise import POINTWISE, POINTWISE_GRAD
from ..steps.pointwise_quantize import POINTWISE_GRAD_QUANTIZE, POINTWISE_QUANTIZE
from ..steps.quantize import QUANTIZE
from ..steps.statistics import STATISTICS
from ..steps.sums import COLUMN_SUM, GROUP_SUM

_FP8 = (DType.E4M3, DType.E5M2)
_CODES = (*_FP8, DType.E2M1)
_ACTIVATIONS = ("tensor", "row", "block_1x128", "mx_1x32", "nv_1x16")
_SCALINGS = (*_ACTIVATIONS, "block_128x128", "mx_32x32", "nv_16x16")
_SHARED_BYTES = 232448  # `kSharedBytes` of config_sm90.cuh
_REGISTERS = 65536
_CHUNK_BYTES = 2048  # `kChunkBytes` of epilogue.cuh
_MMA_ROWS = 64  # of one warpgroup
_LEAST_STAGES = 3
_COLUMNS = (64, 128, 192, 256)  # `select_mma`
_CLUSTERS = ((1, 1), (2, 1))


@dataclass(frozen=True, slots=True)
class Family:
    """A row of the table.

    Attributes:
        implements: kinds of steps it has code for.
        formats: element formats of what it reads and writes quantised; ``io`` for none.
        scalings: how their elements may share scales.
        weights: of a product, the scaling that weights have beside each scaling of tokens.
        accumulations: of products of quantised operands; a spec lists at least one of them.  Empty
            where sums are kept in fp32 and a spec lists none.
        stores: what may become of its products.
        capability: least compute capability.  Programmatic launches (``launch.cuh``) and clusters
            came with 9.0.
        arch: the only architecture whose instructions it uses; None for every later one, too.
        row_alignment: elements that innermost dimensions must be multiples of.
        token_alignments: starts of groups in transposed copies that it can read; empty for any.
        reads_copies: whether it reads or writes codes, transposed where columnwise, in rows that
            are padded to 16 bytes.
        token_major: scalings of tokens whose scales it reads in token-major order only.
        transformed: scalings before which it has the Hadamard transform.
        most_history: amaxes that a delayed scale may look back on.
        operand_bytes: of an element that tiles of a product hold; 0 where there are no tiles.
    """

    implements: tuple[str, ...]
    formats: tuple[DType, ...] = (DType.IO,)
    scalings: tuple[str, ...] = ()
    weights: Mapping[str, str] = field(default_factory=dict)
    accumulations: tuple[Accumulation, ...] = ()
    stores: tuple[Store, ...] = (Store.IO,)
    capability: tuple[int, int] = (9, 0)
    arch: str | None = None
    row_alignment: int = 1
    token_alignments: tuple[int, ...] = ()
    reads_copies: bool = False
    token_major: tuple[str, ...] = ()
    transformed: tuple[str, ...] = ()
    most_history: int = 0
    operand_bytes: int = 0

    def cannot_run_on(self, arch: str, capability: tuple[int, int]) -> str:
        """Why an architecture has not the instructions; empty where it has them."""
        if self.arch is not None and arch != self.arch:
            return f"uses instructions of {self.arch} alone"
        if capability < self.capability:
            needed, got = (".".join(map(str, each)) for each in (self.capability, capability))
            return f"needs compute capability {needed} (programmatic launches), this is {got}"
        return ""

    def point_problems(self, kind: GemmKind, spec: FamilySpec, point: PointSpec) -> Iterator[str]:
        """What ``config_sm90.cuh`` and ``config_fp8_sm90.cuh`` refuse to compile."""
        rows, columns, depth = point.tile
        cooperative = point.schedule is Schedule.COOPERATIVE
        if depth * self.operand_bytes != 128:
            yield f"expected a depth of {128 // self.operand_bytes} elements, 128 bytes"
        row_choices = (128, 192, 256) if cooperative else (64, 128)
        if rows not in row_choices:
            yield f"expected {_either(row_choices)} rows in a {point.schedule.value} tile"
        if columns not in _COLUMNS:
            yield f"expected {_either(_COLUMNS)} columns"
        if point.cluster not in _CLUSTERS:
            yield "expected cluster [1, 1] or [2, 1]"
        waves = rows // _MMA_ROWS // (_math_groups(point) if cooperative else 1)
        if waves * columns > 384:
            yield "more than 192 registers of accumulators to a thread"
        if Accumulation.SPLIT_128 in spec.accumulations:
            if not cooperative or waves != 1:
                yield "split sums need the cooperative schedule, and 64 rows to a warpgroup"
            if columns % 128:
                yield "split sums need a multiple of 128 columns"
        stages = self._stages(kind, spec, point)
        if stages < _LEAST_STAGES:
            yield f"room for {stages} stages in shared memory, expected {_LEAST_STAGES} at least"

    def _stages(self, kind: GemmKind, spec: FamilySpec, point: PointSpec) -> int:
        """Stages of operands that lie in shared memory beside the buffers of results."""
        rows, columns, depth = point.tile
        stage = (rows + columns) * depth * self.operand_bytes
        if any(scaling in self.token_major for scaling in spec.scalings):
            stage += 4 * (rows + (columns if kind is GemmKind.WGRAD else 0))
        small = bool(self.accumulations) and kind is not GemmKind.WGRAD
        buffers = 2 * 4 * _math_groups(point) * _CHUNK_BYTES
        return (_SHARED_BYTES - (1024 if small else 2048) - buffers) // stage


def _math_groups(point: PointSpec) -> int:
    """Warpgroups that multiply: `kMathGroups`."""
    three = point.schedule is Schedule.COOPERATIVE and point.tile[0] == 3 * _MMA_ROWS
    return 3 if three else 2


def _either(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"


LIMITS = {"shared_memory": _SHARED_BYTES, "registers": _REGISTERS}
"""What tiles of products take of an SM, by the name of the limit."""

PITCH = 16
"""Bytes that rows of codes are padded to."""

_PRODUCTS = (GEMM.name, GROUPED_GEMM.name)
_GROUPS_START = (32, 64, 128)

FAMILIES: Mapping[str, Family] = {
    "gemm_sm90": Family(
        _PRODUCTS,
        stores=tuple(Store),
        arch="sm_90a",
        row_alignment=8,
        operand_bytes=2,
    ),
    "gemm_fp8_sm90": Family(
        _PRODUCTS,
        formats=_FP8,
        scalings=("tensor", "row", "block_1x128", "block_128x128"),
        weights={"tensor": "tensor", "row": "row", "block_1x128": "block_128x128"},
        accumulations=(Accumulation.FAST, Accumulation.SPLIT_128),
        stores=tuple(Store),
        arch="sm_90a",
        row_alignment=8,
        token_alignments=(32,),
        reads_copies=True,
        token_major=("block_1x128",),
        operand_bytes=1,
    ),
    "gemm_decoded_sm90": Family(
        _PRODUCTS,
        formats=(DType.BFLOAT16,),
        stores=tuple(Store),
        arch="sm_90a",
        row_alignment=8,
        operand_bytes=2,
    ),
    "quantize_sm90": Family(
        (QUANTIZE.name,),
        formats=_CODES,
        scalings=_SCALINGS,
        row_alignment=8,
        token_alignments=_GROUPS_START,
        reads_copies=True,
        transformed=("nv_1x16",),
        most_history=1024,
    ),
    "pointwise_quantize_sm90": Family(
        (POINTWISE_QUANTIZE.name, POINTWISE_GRAD_QUANTIZE.name),
        formats=_CODES,
        scalings=_ACTIVATIONS,
        row_alignment=8,
        token_alignments=_GROUPS_START,
        reads_copies=True,
        transformed=("nv_1x16",),
        most_history=1024,
    ),
    "dequantize": Family(
        (DEQUANTIZE.name,),
        formats=_CODES,
        scalings=_SCALINGS,
        row_alignment=8,
        token_alignments=_GROUPS_START,
        reads_copies=True,
    ),
    "dequantize_groups": Family(
        (DEQUANTIZE_GROUPS.name,),
        formats=_CODES,
        scalings=("mx_1x32", "nv_1x16"),
        row_alignment=8,
        token_alignments=_GROUPS_START,
        reads_copies=True,
    ),
    "statistics": Family(
        (STATISTICS.name,),
        formats=_CODES,
        scalings=_SCALINGS,
        token_alignments=_GROUPS_START,
        reads_copies=True,
        transformed=("nv_1x16",),
    ),
    "group_sum": Family((GROUP_SUM.name, COLUMN_SUM.name), row_alignment=8),
    "group_row_dot": Family((GROUP_ROW_DOT.name,)),
    "pointwise": Family((POINTWISE.name, POINTWISE_GRAD.name)),
}
"""By template."""
