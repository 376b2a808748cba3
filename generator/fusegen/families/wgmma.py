"""GEMMs by warpgroup MMA on Hopper: what ``gemm/config.sm90.cuh`` computes and refuses, again.

A producer warpgroup loads tiles of both operands into a ring of stages; two or three warpgroups
multiply, each into accumulators of its own, and store through buffers in shared memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from pydantic.dataclasses import dataclass as validated

from ..ir.fields import STRICT, Positive
from ..ir.kernel import GemmKind, Store, Work
from ..ir.kernel_set import Variant
from ..ir.quantization import Accumulation
from ..steps.gathered_gemm import gathered_slot
from .contract import CPU_SECONDS_OF_GEMM, Contract
from .family import Configured, Constants, operand_blocks
from .limits import REGISTERS, SHARED_BYTES, SHARED_MEMORY, hardware_limits

ARCH = "sm_90a"
LIMITS = hardware_limits((9, 0))
"""``Limits`` of the device code, in its order."""

_WARPGROUP = 128  # threads
_SWIZZLE_BYTES = 128  # `kSwizzleBytes` of mainloop/wgmma.sm90.cuh
_MMA_ROWS = 64  # `kMmaRows`
_CHUNK_COLUMNS = 64  # `kChunkColumns` of sink/chunk.sm90.cuh
_CHUNK_BYTES = 2048  # `kChunkBytes`: 16 rows of 16 bits
_BUFFERS = 2  # `Buffers` of `Config`
_COLUMNS = (64, 128, 192, 256)  # `select_mma`
_CLUSTERS = ((1, 1), (2, 1))
_LEAST_STAGES = 3
_LOADS = (Store.ADD, Store.ADD_IO, Store.BINARY)  # `loads` of gemm/gemm.h
_NAME = re.compile(r"([a-z]+)_(\d+)x(\d+)x(\d+)_(\d+)x(\d+)")


class Schedule(str, Enum):
    """How the math warpgroups of a kernel share the work."""

    COOPERATIVE = "cooperative"
    PINGPONG = "pingpong"


@validated(frozen=True, slots=True, config=STRICT)
class WgmmaConfig:
    """One configuration of a kernel: ``Config`` of ``gemm/config.sm90.cuh``.

    Attributes:
        schedule: of the math warpgroups.
        tile: M, N and K of the result tile a step computes.
        cluster: CTAs along M and N that share loads.
    """

    schedule: Schedule
    tile: tuple[Positive, Positive, Positive]
    cluster: tuple[Positive, Positive]

    @property
    def name(self) -> str:
        """``cooperative_128x256x64_2x1``: everything the configuration says."""
        tile = "x".join(str(extent) for extent in self.tile)
        cluster = "x".join(str(extent) for extent in self.cluster)
        return f"{self.schedule.value}_{tile}_{cluster}"

    @classmethod
    def parse(cls, name: str) -> WgmmaConfig:
        """The configuration of a name.

        Raises:
            ValueError: it is not a configuration's name.
        """
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"point {name!r}: expected one like cooperative_128x256x64_2x1")
        m, n, k, rows, columns = map(int, match.groups()[1:])
        return cls(Schedule(match[1]), (m, n, k), (rows, columns))

    @property
    def ctas(self) -> int:
        """Of a cluster."""
        return self.cluster[0] * self.cluster[1]

    @property
    def work(self) -> Work:
        """A tile of each CTA of a cluster; a CTA has an SM."""
        (rows, columns, _), (down, across) = self.tile, self.cluster
        return Work(rows * down, columns * across, sms=self.ctas, clusters=1)

    def cpp(self, limits: Mapping[str, int]) -> str:
        """Arguments of ``Config``, on an architecture of these limits."""
        tile = ", ".join(map(str, self.tile))
        bounds = ", ".join(str(limits[name]) for name in LIMITS)
        schedule = f"fusegen::Schedule::{self.schedule.value}"
        return f"{tile}, {self.ctas}, {schedule}, fusegen::Limits<{bounds}>"


@dataclass(frozen=True, slots=True)
class Resources:
    """What one CTA of a configuration takes of an SM.

    Attributes:
        stages: of operands in shared memory.
        buffers: of results in shared memory, per warp that multiplies.
        shared_bytes: of all of it.
        threads: of a CTA.
        loader_registers, math_registers: of a thread that loads, and of one that multiplies.
        accumulators: registers of a thread that hold sums.
        registers: of all threads.
    """

    stages: int
    buffers: int
    shared_bytes: int
    threads: int
    loader_registers: int
    math_registers: int
    accumulators: int
    registers: int


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
    def configured(self) -> Configured[WgmmaConfig]:
        """What a family of such operands knows of its configurations."""
        return Configured(WgmmaConfig, tuple(LIMITS), self.problems, self.constants)

    def resources(
        self, config: WgmmaConfig, kind: GemmKind, variant: Variant, limits: Mapping[str, int]
    ) -> Resources:
        """``TileTraits``, by its names in the order in which it has them."""
        config = _tiles(config, variant)
        rows, columns, k = config.tile
        groups = _math_groups(config)
        warps = 4 * groups
        scales = self._scale_bytes(config, kind, variant)
        loader = 40 if groups == 2 else 56 if scales else 32
        of_thread = limits[REGISTERS] // _WARPGROUP
        math = (of_thread - loader) // groups // 8 * 8
        control = 2048 if kind in self.sorted_kinds else 1024
        stage = (rows + columns) * k * self.element_bytes
        buffer = warps * _CHUNK_BYTES

        def stages_beside(buffers: int) -> int:
            return (limits[SHARED_MEMORY] - control - buffers * buffer) // (stage + scales)

        patient = variant.store in _LOADS and stages_beside(4) >= 4
        stages = stages_beside(4 if patient else _BUFFERS)
        tiles = stages * stage + -(-stages * scales // 1024) * 1024
        chunks = _waves(config) * columns // _CHUNK_COLUMNS
        buffers = min((limits[SHARED_MEMORY] - control - tiles) // buffer, chunks)
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

    def _scale_bytes(self, config: WgmmaConfig, kind: GemmKind, variant: Variant) -> int:
        """Scales in one stage: ``StageScales``."""
        if variant.scalings[:1] == () or variant.scalings[0] not in self.loaded_scales:
            return 0
        rows, columns, _ = config.tile
        return 4 * (rows + (columns if kind is GemmKind.WGRAD else 0))

    def constants(
        self, config: WgmmaConfig, kind: GemmKind, variant: Variant, limits: Mapping[str, int]
    ) -> Constants:
        """What ``agrees`` of ``gemm/config.sm90.cuh`` and ``gemm/config_fp8.sm90.cuh`` compares."""
        m, n, k = config.tile
        needs = self.resources(config, kind, variant, limits)
        common = {
            "tile_m": m,
            "tile_n": n,
            "tile_k": k,
            "cluster": config.ctas,
            "element_bytes": self.element_bytes,
            "stages": needs.stages,
            "store_buffers": needs.buffers,
            SHARED_BYTES: needs.shared_bytes,
            "threads": needs.threads,
            "math_warpgroups": _math_groups(_tiles(config, variant)),
            "loader_registers": needs.loader_registers,
            "math_registers": needs.math_registers,
            "accumulators": needs.accumulators,
        }
        if not variant.scalings:
            return tuple(common.items())
        split = Accumulation.SPLIT_128.value in variant.traits
        scales = self._scale_bytes(config, kind, variant)
        promotion = {"scale_bytes": scales, "promotion_interval": 128 if split else 0}
        return (*{**common, **promotion}.items(), *operand_blocks(variant))

    def problems(
        self, config: WgmmaConfig, kind: GemmKind, variant: Variant, limits: Mapping[str, int]
    ) -> Iterator[str]:
        """What device code refuses to compile, and what is more than an SM has."""
        config = _tiles(config, variant)
        rows, columns, k = config.tile
        cooperative = config.schedule is Schedule.COOPERATIVE
        if k * self.element_bytes != _SWIZZLE_BYTES:
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
            yield f"shared memory holds {stages} stages, expected {_LEAST_STAGES} at least"


def contracts_of(multiply: str) -> tuple[Contract, ...]:
    """Of families that multiply by one kind of warpgroup MMA, and load and store by TMA.

    What is added to something is added by memory, or by warps in tiles of short groups.
    """
    opcodes = (rf"{multiply}\.", "UTMALDG", "UTMASTG")
    others = tuple(rf"{each}\." for each in ("HGMMA", "QGMMA", "HMMA") if each != multiply)
    return (
        Contract(
            r"(^|_)add(_io)?$",
            opcodes=(*opcodes, "UTMAREDG"),
            without=others,
            cpu_seconds=CPU_SECONDS_OF_GEMM,
        ),
        Contract(opcodes=opcodes, without=(*others, "UTMAREDG"), cpu_seconds=CPU_SECONDS_OF_GEMM),
    )


def _tiles(config: WgmmaConfig, variant: Variant) -> WgmmaConfig:
    """``Tiles``: rows are of the operand that is gathered; the second one gives columns."""
    if gathered_slot(variant.traits) != "b":
        return config
    rows, columns, k = config.tile
    return replace(config, tile=(columns, rows, k))


def _math_groups(config: WgmmaConfig) -> int:
    """Warpgroups that multiply: ``kMathGroups``."""
    three = config.schedule is Schedule.COOPERATIVE and config.tile[0] == 3 * _MMA_ROWS
    return 3 if three else 2


def _waves(config: WgmmaConfig) -> int:
    """MMAs of 64 rows that one warpgroup issues for a tile: ``kWaves``."""
    cooperative = config.schedule is Schedule.COOPERATIVE
    return config.tile[0] // _MMA_ROWS // (_math_groups(config) if cooperative else 1)


def _either(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"
