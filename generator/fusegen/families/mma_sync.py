"""GEMMs by ``mma.sync``, of warps by themselves: what ``gemm/config.mma.cuh`` computes, again.

All warps of a CTA load tiles of both operands into a ring of stages by ``cp.async``, and each
multiplies its part of the tile.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from pydantic.dataclasses import dataclass as validated

from ..ir.fields import STRICT, Positive
from ..ir.kernel import ATOM_BLOCKS, ATOM_ROWS, GATED, GemmKind, Work
from ..ir.kernel_set import Variant
from ..ir.quantization import Accumulation
from .contract import Contract
from .family import Configured, Constants, operand_blocks
from .limits import REGISTERS, RESERVED, SHARED_BYTES, SHARED_MEMORY

_WARP = 32  # threads
_CHUNK_BITS = 128  # `kChunkBits`: what one `cp.async` copies
_LINES = 8  # whose chunks are permuted in turn
_STAGE_BYTES = (64, 128)  # of a stage along K: two or four steps of an MMA
_TRANSPOSED_BITS = 16  # of elements that `ldmatrix` transposes, so that any major can be read
_OF_A_WARP = (16, 32, 64, 128)  # rows or columns: `ldmatrix` reads 16, and steps are powers of two
_GATED_COLUMNS = 32  # of a warp at least: units of 8, and 16 rows of them to a warp's store
_OF_WORDS = 32  # rows whose scales are as far apart as their blocks of 8 and 16
_SWIZZLED = 64  # rows or columns of a tile whose chunks are permuted together
_SLAB_BYTES = 2048  # `kSlabBytes`: of a warp, for results on their way out
_CONTROL_BYTES = 2048  # `kControlBytes`: tiles, order of groups
_LEAST_STAGES = 2
_MOST_ACCUMULATORS = 128  # registers of a thread; no thread has more than 255
_OTHER_REGISTERS = 64  # operands and addresses
_NAME = re.compile(r"mma_(\d+)x(\d+)x(\d+)_(\d+)x(\d+)_(\d+)_(\d+)")


@validated(frozen=True, slots=True, config=STRICT)
class MmaConfig:
    """One configuration of a kernel: ``MmaConfig`` of ``gemm/config.mma.cuh``.

    Attributes:
        tile: M, N and K of the result tile that a step computes, K in elements.
        warps: along M and N.
        stages: of operands in shared memory.
        ctas: that are to fit on an SM.
    """

    tile: tuple[Positive, Positive, Positive]
    warps: tuple[Positive, Positive]
    stages: Positive
    ctas: Positive

    @property
    def name(self) -> str:
        """``mma_128x128x32_2x2_4_2``: everything the configuration says."""
        tile, warps = ("x".join(map(str, extents)) for extents in (self.tile, self.warps))
        return f"mma_{tile}_{warps}_{self.stages}_{self.ctas}"

    @classmethod
    def parse(cls, name: str) -> MmaConfig:
        """The configuration of a name.

        Raises:
            ValueError: it is not a configuration's name.
        """
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"point {name!r}: expected one like mma_128x128x32_2x2_4_2")
        m, n, k, rows, columns, stages, ctas = map(int, match.groups())
        return cls((m, n, k), (rows, columns), stages, ctas)

    @property
    def work(self) -> Work:
        """A tile of each CTA on an SM."""
        return Work(*self.tile[:2], sms=1, clusters=self.ctas)

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return _WARP * prod(self.warps)

    @property
    def sums(self) -> int:
        """Results of a tile to a thread."""
        return self.tile[0] * self.tile[1] // self.threads

    def cpp(self, limits: Mapping[str, int]) -> str:
        """Arguments of ``MmaConfig``, on an architecture of these limits."""
        numbers = (*self.tile, *self.warps, self.stages, self.ctas)
        bounds = ", ".join(str(limits[name]) for name in (SHARED_MEMORY, REGISTERS))
        return f"{', '.join(map(str, numbers))}, fusegen::Limits<{bounds}>"


@dataclass(frozen=True, slots=True)
class Operands:
    """What tiles of a family's operands take of shared memory and registers.

    Attributes:
        element_bits: of an element.
        scale_block: elements of a scale that comes with them, in atoms; 0 where none does.
    """

    element_bits: int
    scale_block: int = 0

    @property
    def configured(self) -> Configured[MmaConfig]:
        """What a family of such operands knows of its configurations."""
        limits = (SHARED_MEMORY, REGISTERS)
        return Configured(MmaConfig, limits, self.problems, self.constants, lighter)

    def shared_bytes(self, config: MmaConfig) -> int:
        """Shared memory of a CTA: stages of both operands, a slab of each warp, control."""
        rows, columns, k = config.tile
        stages = config.stages * (rows + columns) * (k * self.element_bits // 8 + self._scales(k))
        return stages + prod(config.warps) * _SLAB_BYTES + _CONTROL_BYTES

    def _scales(self, k: int) -> int:
        """Bytes of a row's scales that come with a stage: those of whole atoms."""
        if not self.scale_block:
            return 0
        return max(k // self.scale_block, ATOM_BLOCKS)

    def constants(
        self, config: MmaConfig, kind: GemmKind, variant: Variant, limits: Mapping[str, int]
    ) -> Constants:
        """What ``agrees`` of ``gemm/config.mma.cuh`` and ``agrees_fp8`` of the FP8 one compare."""
        common = (
            *zip(("tile_m", "tile_n", "tile_k"), config.tile, strict=True),
            *zip(("warps_m", "warps_n"), config.warps, strict=True),
            ("stages", config.stages),
            ("ctas", config.ctas),
            ("element_bits", self.element_bits),
            (SHARED_BYTES, self.shared_bytes(config)),
            ("threads", config.threads),
            ("accumulators", _accumulators(config, variant)),
        )
        if not variant.scalings:
            return common
        own: Constants = (("scale_block", self.scale_block), ("atom_rows", ATOM_ROWS))
        if not self.scale_block:
            own = operand_blocks(variant)
        return (*common, ("promotion_interval", _interval(variant)), *own)

    def problems(
        self, config: MmaConfig, kind: GemmKind, variant: Variant, limits: Mapping[str, int]
    ) -> Iterator[str]:
        """What device code refuses to compile, and what is more than an SM has."""
        yield from self._shape_problems(config)
        if kind is GemmKind.FPROP and variant.store in GATED:
            yield from self._gated_problems(config)
        if config.stages < _LEAST_STAGES:
            yield f"expected {_LEAST_STAGES} stages at least"
        most = limits[REGISTERS] // (config.ctas * config.threads)
        accumulators = _accumulators(config, variant)
        if accumulators > _MOST_ACCUMULATORS:
            yield f"more than {_MOST_ACCUMULATORS} registers of accumulators to a thread"
        elif accumulators + _OTHER_REGISTERS > most:
            yield (
                f"{config.ctas} CTAs leave {most} registers to a thread, {accumulators} of them"
                " for accumulators"
            )
        shared = self.shared_bytes(config)
        if config.ctas * (shared + RESERVED) > limits[SHARED_MEMORY] + RESERVED:
            yield (
                f"{config.ctas} CTAs of {shared} bytes of shared memory, an SM has"
                f" {limits[SHARED_MEMORY]} for one"
            )

    def _gated_problems(self, config: MmaConfig) -> Iterator[str]:
        """``HalvesOfWarps``: halves of a warp's columns, and each thread's lines of them."""
        columns = config.tile[1] // config.warps[1]
        if columns < _GATED_COLUMNS:
            yield f"expected {_GATED_COLUMNS} columns of a warp where results are gated, at least"
        step = config.threads // max(1, config.tile[2] * self.element_bits // _CHUNK_BITS)
        if step and step % columns and columns // 2 % step:
            yield f"{config.threads} threads do not share {columns} columns of a warp by halves"

    def _shape_problems(self, config: MmaConfig) -> Iterator[str]:
        *extents, k = config.tile
        depths = [8 * each // self.element_bits for each in _STAGE_BYTES]
        if k not in depths:
            yield f"expected {' or '.join(map(str, depths))} elements along K"
        for extent, warps, what in zip(extents, config.warps, ("rows", "columns"), strict=True):
            if extent % warps or extent // warps not in _OF_A_WARP:
                words = ", ".join(map(str, _OF_A_WARP))
                yield f"expected {words} {what} of a warp, got {extent / warps:g}"
            if self.scale_block and extent // warps % _OF_WORDS:
                yield f"expected a multiple of {_OF_WORDS} {what} of a warp"
            whole = ATOM_ROWS if self.scale_block else _SWIZZLED
            if extent % whole:
                yield f"expected a multiple of {whole} {what}"
            elif not self._shared_evenly(config.threads, extent, k):
                yield (
                    f"{config.threads} threads do not share {extent} {what} of {k} elements evenly"
                )

    def _shared_evenly(self, threads: int, extent: int, k: int) -> bool:
        """Whether each thread copies the same chunks of eight lines, whichever way a tile lies."""
        chunk = _CHUNK_BITS // self.element_bits
        lines = (k, extent) if self.element_bits == _TRANSPOSED_BITS else (k,)
        rounds = [max(_LINES * length // chunk, 1) for length in lines]
        return not (any(threads % each for each in rounds) or extent * k // chunk % threads)


def _interval(variant: Variant) -> int:
    """Elements of the contraction to one partial sum; 0 where sums run through."""
    return 128 if Accumulation.SPLIT_128.value in variant.traits else 0


def _accumulators(config: MmaConfig, variant: Variant) -> int:
    """Registers of a thread that hold sums, and partial ones."""
    return config.sums * (2 if _interval(variant) else 1)


def lighter(config: MmaConfig) -> Iterator[MmaConfig]:
    """The same kernel, of which fewer CTAs are to fit on an SM."""
    for ctas in range(config.ctas - 1, 0, -1):
        yield replace(config, ctas=ctas)


def contract_by(instruction: str) -> Contract:
    """Of kernels whose operands come by ``cp.async`` and ``ldmatrix`` to an MMA."""
    return Contract(opcodes=(instruction, r"LDGSTS\.\S*128", "LDSM"))
