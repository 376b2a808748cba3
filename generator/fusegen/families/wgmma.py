"""Products by warpgroup MMA on Hopper: what ``config_sm90.cuh`` computes and refuses, once more.

A producer warpgroup loads tiles of both operands into a ring of stages; two or three warpgroups
multiply, each into accumulators of its own, and store through buffers in shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..ir.kernel import GemmKind, PointSpec, Schedule, Store
from ..ir.plan import Variant
from ..ir.quantization import Accumulation
from .family import Configured, Resources

ARCH = "sm_90a"
LIMITS: Mapping[str, int] = {"shared_memory": 232448, "registers": 65536}
"""Bytes that one CTA may have, ``kSharedBytes``, and registers of an SM."""

_WARPGROUP = 128  # threads
_SWIZZLE_BYTES = 128  # `kSwizzleBytes` of mma_sm90.cuh
_MMA_ROWS = 64  # `kMmaRows`
_CHUNK_COLUMNS = 64  # `kChunkColumns` of epilogue.cuh
_CHUNK_BYTES = 2048  # `kChunkBytes`: 16 rows of 16 bits
_BUFFERS = 2  # `Buffers` of `Config`
_COLUMNS = (64, 128, 192, 256)  # `select_mma`
_CLUSTERS = ((1, 1), (2, 1))
_LEAST_STAGES = 3
_ADDS = (Store.ADD, Store.ADD_IO)


@dataclass(frozen=True, slots=True)
class Operands:
    """What tiles of a family's operands take of shared memory.

    Attributes:
        element_bytes: of an element.
        loaded_scales: names of scalings whose scales lie in each stage: of a tile's rows and, in
            wgrad, of its columns, in fp32.
        sorted_kinds: kinds that sort their groups, which takes another KiB of control.
    """

    element_bytes: int
    loaded_scales: tuple[str, ...] = ()
    sorted_kinds: tuple[GemmKind, ...] = tuple(GemmKind)

    @property
    def configured(self) -> Configured:
        """What a family of such operands knows of its configurations."""
        return Configured(LIMITS, self.resources, self.problems)

    def resources(
        self, config: PointSpec, kind: GemmKind, variant: Variant, limits: Mapping[str, int]
    ) -> Resources:
        """``TileTraits``, by its names in the order in which it has them."""
        rows, columns, depth = config.tile
        groups = _math_groups(config)
        warps = 4 * groups
        scales = self._scale_bytes(config, kind, variant)
        loader = 40 if groups == 2 else 56 if scales else 32
        of_thread = limits["registers"] // _WARPGROUP
        math = (of_thread - loader) // groups // 8 * 8
        control = 2048 if kind in self.sorted_kinds else 1024
        stage = (rows + columns) * depth * self.element_bytes
        buffer = warps * _CHUNK_BYTES

        def stages_beside(buffers: int) -> int:
            return (limits["shared_memory"] - control - buffers * buffer) // (stage + scales)

        patient = variant.store in _ADDS and stages_beside(4) >= 4
        stages = stages_beside(4 if patient else _BUFFERS)
        tiles = stages * stage + -(-stages * scales // 1024) * 1024
        chunks = _waves(config) * columns // _CHUNK_COLUMNS
        buffers = min((limits["shared_memory"] - control - tiles) // buffer, chunks)
        return Resources(
            stages=stages,
            buffers=buffers,
            shared_bytes=tiles + buffers * buffer + control,
            threads=_WARPGROUP + 32 * warps,
            loader_registers=loader,
            math_registers=math,
            accumulators=_waves(config) * columns // 2,
            registers=_WARPGROUP * (loader + groups * math),
        )

    def _scale_bytes(self, config: PointSpec, kind: GemmKind, variant: Variant) -> int:
        """Scales in one stage: ``StageScales``."""
        if variant.scalings[:1] == () or variant.scalings[0] not in self.loaded_scales:
            return 0
        rows, columns, _ = config.tile
        return 4 * (rows + (columns if kind is GemmKind.WGRAD else 0))

    def problems(
        self, config: PointSpec, kind: GemmKind, variant: Variant, limits: Mapping[str, int]
    ) -> Iterator[str]:
        """What device code refuses to compile, and what is more than an SM has."""
        rows, columns, depth = config.tile
        cooperative = config.schedule is Schedule.COOPERATIVE
        if depth * self.element_bytes != _SWIZZLE_BYTES:
            elements = _SWIZZLE_BYTES // self.element_bytes
            yield f"expected {elements} elements along K, {_SWIZZLE_BYTES} bytes"
        row_choices = (128, 192, 256) if cooperative else (64, 128)
        if rows not in row_choices:
            yield f"expected {_either(row_choices)} rows in a {config.schedule.value} tile"
        if columns not in _COLUMNS:
            yield f"expected {_either(_COLUMNS)} columns"
        if config.cluster not in _CLUSTERS:
            yield "expected cluster [1, 1] or [2, 1]"
        if _waves(config) * columns > 384:
            yield "more than 192 registers of accumulators to a thread"
        if Accumulation.SPLIT_128.value in variant.traits:
            if not cooperative or _waves(config) != 1:
                yield "split sums need the cooperative schedule, and 64 rows to a warpgroup"
            if columns % 128:
                yield "split sums need a multiple of 128 columns"
        stages = self.resources(config, kind, variant, limits).stages
        if stages < _LEAST_STAGES:
            yield f"room for {stages} stages in shared memory, expected {_LEAST_STAGES} at least"


def _math_groups(config: PointSpec) -> int:
    """Warpgroups that multiply: ``kMathGroups``."""
    three = config.schedule is Schedule.COOPERATIVE and config.tile[0] == 3 * _MMA_ROWS
    return 3 if three else 2


def _waves(config: PointSpec) -> int:
    """MMAs of 64 rows that one warpgroup issues for a tile: ``kWaves``."""
    cooperative = config.schedule is Schedule.COOPERATIVE
    return config.tile[0] // _MMA_ROWS // (_math_groups(config) if cooperative else 1)


def _either(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"
