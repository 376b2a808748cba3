"""GEMMs with sums in tensor memory: what ``gemm/config.sm100.cuh`` computes and refuses, again.

One warp loads tiles of both operands into a ring of stages, one asks the tensor core for MMAs, and
four store one accumulator while the other one is added to.  A pair of CTAs, on two SMs, may share
an MMA: each has half of the tile's rows and loads half of the columns of the second operand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pydantic.dataclasses import dataclass as validated

from ..ir.fields import STRICT, Positive
from ..ir.kernel import ATOM_BLOCKS, ATOM_ROWS, GemmKind, Store, Work
from ..ir.kernel_set import Variant
from .contract import CPU_SECONDS_OF_GEMM, Contract
from .family import Configured, Constants, operand_blocks
from .limits import REGISTERS, SHARED_BYTES, SHARED_MEMORY

ARCH = "sm_100a"

_SWIZZLE_BYTES = 128  # `kSwizzleBytes` of mainloop/umma.sm100.cuh
_ROWS = 128  # lanes of tensor memory, of each CTA
_COLUMNS = (128, 256)
_LEAST_LOADED = 128  # columns of B that a CTA loads
_TENSOR_COLUMNS = (128, 256, 512)  # that can be allocated
_ATOM_COLUMNS = 4  # `kAtomColumns`: of tensor memory
_THREADS = 256
_STORING_WARPS = 4
_CHUNK_COLUMNS = 64  # `kChunkColumns` of sink/chunk.sm90.cuh
_CHUNK_BYTES = 2048  # `kChunkBytes`
_CONTROL_BYTES = 2048  # `kControlBytes`
_LOADS = (Store.ADD, Store.ADD_IO, Store.BINARY)  # `loads` of gemm/gemm.h
_LEAST_STAGES = 3
_NAME = re.compile(r"umma_(\d+)x(\d+)x(\d+)_(\d+)(?:_(\d+))?")


@validated(frozen=True, slots=True, config=STRICT)
class Tcgen05Config:
    """One configuration of a kernel: ``Tcgen05Config`` of ``gemm/config.sm100.cuh``.

    Attributes:
        tile: M, N and K of the result tile that a step computes, K in elements.
        sums: accumulators in tensor memory.
        ctas_per_mma: 2 for a pair of CTAs that make a tile together.
    """

    tile: tuple[Positive, Positive, Positive]
    sums: Positive
    ctas_per_mma: Positive = 1

    @property
    def name(self) -> str:
        """``umma_128x256x64_2``, ``umma_256x256x64_2_2``: everything the configuration says."""
        pair = f"_{self.ctas_per_mma}" if self.ctas_per_mma > 1 else ""
        return f"umma_{'x'.join(map(str, self.tile))}_{self.sums}{pair}"

    @classmethod
    def parse(cls, name: str) -> Tcgen05Config:
        """The configuration of a name.

        Raises:
            ValueError: it is not a configuration's name.
        """
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"point {name!r}: expected one like umma_128x256x64_2")
        m, n, k, sums = (int(number) for number in match.groups()[:4])
        return cls((m, n, k), sums, int(match[5] or 1))

    @property
    def work(self) -> Work:
        """A tile of each CTA or pair; a CTA has an SM."""
        return Work(*self.tile[:2], sms=self.ctas_per_mma, clusters=1)

    @property
    def of_cta(self) -> tuple[int, int]:
        """Rows of A and columns of B that a CTA loads; at least one of each, whatever is stated."""
        rows, columns, _ = self.tile
        return max(1, rows // self.ctas_per_mma), max(1, columns // self.ctas_per_mma)

    def cpp(self, limits: Mapping[str, int]) -> str:
        """Arguments of ``Tcgen05Config``, on an architecture of these limits."""
        numbers = ", ".join(map(str, (*self.tile, self.sums, self.ctas_per_mma)))
        bounds = ", ".join(str(limits[name]) for name in (SHARED_MEMORY, REGISTERS))
        return f"{numbers}, fusegen::Limits<{bounds}>"


@dataclass(frozen=True, slots=True)
class Operands:
    """What tiles of a family's operands take of shared memory and tensor memory.

    Attributes:
        element_bits: of an element.
        scale_block: elements of a scale that comes with them, in atoms; 0 where none does.
    """

    element_bits: int
    scale_block: int = 0

    @property
    def configured(self) -> Configured[Tcgen05Config]:
        """What a family of such operands knows of its configurations."""
        limits = (SHARED_MEMORY, REGISTERS)
        return Configured(Tcgen05Config, limits, self.problems, self.constants)

    def shared_memory(
        self, config: Tcgen05Config, store: Store, limits: Mapping[str, int]
    ) -> tuple[int, int, int]:
        """Stages of operands, buffers of results per warp that stores, and bytes of all."""
        columns, k = config.tile[1:]
        stage = sum(config.of_cta) * k * self.element_bits // 8
        scales = self._atoms(config) * ATOM_ROWS * ATOM_BLOCKS
        buffer = _STORING_WARPS * _CHUNK_BYTES
        left = limits[SHARED_MEMORY] - _CONTROL_BYTES
        stages = (left - (4 if store in _LOADS else 2) * buffer) // (stage + scales)
        tiles = stages * stage + -(-stages * scales // 1024) * 1024
        chunks = 2 * columns // _CHUNK_COLUMNS
        buffers = min((left - tiles) // buffer, chunks)
        return stages, buffers, tiles + buffers * buffer + _CONTROL_BYTES

    def _atoms(self, config: Tcgen05Config) -> int:
        """Of scales of a CTA's rows and of all columns, that come with a stage."""
        columns, k = config.tile[1:]
        rows = config.of_cta[0]
        if not self.scale_block:
            return 0
        return k // (ATOM_BLOCKS * self.scale_block) * (rows + columns) // ATOM_ROWS

    def tensor_columns(self, config: Tcgen05Config) -> int:
        """Of tensor memory that accumulators and the scales of a stage take."""
        return config.sums * config.tile[1] + self._atoms(config) * _ATOM_COLUMNS

    def constants(
        self, config: Tcgen05Config, kind: GemmKind, variant: Variant, limits: Mapping[str, int]
    ) -> Constants:
        """What ``agrees`` and those that build on it compare: ``gemm/config.sm100.cuh``."""
        stages, buffers, shared_bytes = self.shared_memory(config, variant.store, limits)
        needed = self.tensor_columns(config)
        allocated = next((each for each in _TENSOR_COLUMNS if each >= needed), needed)
        common = (
            *zip(("tile_m", "tile_n", "tile_k"), config.tile, strict=True),
            ("ctas_per_mma", config.ctas_per_mma),
            ("sums", config.sums),
            ("element_bits", self.element_bits),
            ("stages", stages),
            ("store_buffers", buffers),
            (SHARED_BYTES, shared_bytes),
            ("tensor_columns", allocated),
            ("threads", _THREADS),
        )
        if self.scale_block:
            return (*common, ("scale_block", self.scale_block), ("atom_rows", ATOM_ROWS))
        if variant.scalings:
            return (*common, ("promotion_interval", 0), *operand_blocks(variant))
        return common

    def problems(
        self, config: Tcgen05Config, kind: GemmKind, variant: Variant, limits: Mapping[str, int]
    ) -> Iterator[str]:
        """What device code refuses to compile, and what is more than an SM has."""
        rows, columns, k = config.tile
        if k * self.element_bits != 8 * _SWIZZLE_BYTES:
            elements = 8 * _SWIZZLE_BYTES // self.element_bits
            yield f"expected {elements} elements along K, {_SWIZZLE_BYTES} bytes"
        ctas = config.ctas_per_mma
        if ctas not in (1, 2):
            yield "expected 1 CTA per MMA, or 2"
        if rows != ctas * _ROWS:
            yield f"expected {ctas * _ROWS} rows, one for each lane of a CTA's tensor memory"
        if columns not in _COLUMNS:
            yield f"expected {' or '.join(map(str, _COLUMNS))} columns"
        elif columns < ctas * _LEAST_LOADED:
            yield f"expected {_LEAST_LOADED} columns for each CTA to load, at least"
        if config.sums not in (1, 2):
            yield "expected 1 or 2 sums"
        elif self.tensor_columns(config) > _TENSOR_COLUMNS[-1]:
            scales = " and scales" if self.scale_block else ""
            yield f"sums{scales} take more than {_TENSOR_COLUMNS[-1]} columns of tensor memory"
        stages, *_ = self.shared_memory(config, variant.store, limits)
        if stages < _LEAST_STAGES:
            yield f"shared memory holds {stages} stages, expected {_LEAST_STAGES} at least"


_ADDS = r"(^|_)add(_io)?$"
"""Variants whose results are added to."""


def contracts_of(multiply: str, *more: str) -> tuple[Contract, ...]:
    """Of families that multiply by one instruction in tensor memory, and load and store by TMA.

    Args:
        multiply: the instruction.
        more: others that each kernel has.
    """
    every = ("UTCHMMA", "UTCQMMA", "UTCOMMA", "HGMMA", "QGMMA", "HMMA", "QMMA", "OMMA")
    others = tuple(each for each in every if each != multiply)
    common = ("LDTM", "UTMALDG", "UTMASTG", *more)
    of_pair = r".*\.2CTA"
    ways = (
        (r"_\d+_2$", (f"{multiply}{of_pair}", *common), others),
        ("", (multiply, *common), (*others, f"{multiply}{of_pair}")),
    )
    return tuple(
        each
        for point, opcodes, without in ways
        for each in (
            Contract(
                _ADDS,
                opcodes=(*opcodes, "UTMAREDG"),
                without=without,
                cpu_seconds=CPU_SECONDS_OF_GEMM,
                point=point,
            ),
            Contract(
                opcodes=opcodes,
                without=(*without, "UTMAREDG"),
                cpu_seconds=CPU_SECONDS_OF_GEMM,
                point=point,
            ),
        )
    )
