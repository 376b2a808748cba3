"""Grouped GEMMs by Triton, told to use mma.sync: the peer of our kernels of that instruction.

Group sizes are known to the host here, which lays out the tiles beforehand, and the configuration
is the fastest of `CONFIGS` on each case: more than our kernels get. On Hopper Triton would take
wgmma; `DISABLE_MMA_V3` is its switch, read when a kernel is compiled.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import common
import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

SWITCH = "DISABLE_MMA_V3"
HEIGHT = 8  # row blocks that share the columns of B in the L2 cache
TUNING_ROUNDS = 3


@dataclass(frozen=True)
class Config:
    """Tile, warps and stages of Triton's pipeline."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


CONFIGS = (
    Config(128, 128, 32, 4, 4),
    Config(128, 128, 32, 4, 5),
    Config(128, 128, 64, 4, 3),
    Config(128, 256, 32, 8, 4),
    Config(128, 256, 64, 8, 3),
    Config(256, 128, 32, 8, 4),
    Config(256, 128, 64, 8, 3),
    Config(128, 128, 64, 8, 4),
)


# Strides of 1 and divisibility by 16 are found by Triton at each call.
@triton.jit  # type: ignore[untyped-decorator]
def _gemm(  # type: ignore[no-untyped-def]
    a, b, d, tile_groups, tile_rows, begins, sizes, row_tiles, rows, columns, k,
    a_row, a_k, b_column, b_k, b_group,
    RAGGED_K: tl.constexpr, WHOLE_K: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, HEIGHT: tl.constexpr,
):  # fmt: skip
    column_tiles = tl.cdiv(columns, N)
    first = tl.program_id(0) // (HEIGHT * column_tiles) * HEIGHT
    local = tl.program_id(0) % (HEIGHT * column_tiles)
    height = min(row_tiles - first, HEIGHT)
    tile = first + local % height
    column = local // height * N
    group = tl.load(tile_groups + tile).to(tl.int64)
    row = tl.load(tile_rows + tile)
    begin = tl.load(begins + group)
    size = tl.load(sizes + group).to(tl.int32)
    if RAGGED_K:
        extent, length = rows, size
        a += begin * a_k
        b += begin * b_k
        d += group * rows * columns
    else:
        extent, length = size, k
        a += begin * a_row
        b += group * b_group
        d += begin * columns
    m = row + tl.arange(0, M)
    n = column + tl.arange(0, N)
    steps = tl.arange(0, K)
    a_at = a + (m % extent)[:, None].to(tl.int64) * a_row + steps[None, :].to(tl.int64) * a_k
    b_at = b + steps[:, None].to(tl.int64) * b_k + (n % columns)[None, :].to(tl.int64) * b_column
    sums = tl.zeros((M, N), dtype=tl.float32)
    for at in range(0, length, K):
        if WHOLE_K:
            x, y = tl.load(a_at), tl.load(b_at)
        else:
            x = tl.load(a_at, mask=(at + steps < length)[None, :], other=0.0)
            y = tl.load(b_at, mask=(at + steps < length)[:, None], other=0.0)
        sums = tl.dot(x, y, sums)
        a_at += K * a_k
        b_at += K * b_k
    to = d + m[:, None].to(tl.int64) * columns + n[None, :]
    tl.store(to, sums.to(tl.bfloat16), mask=(m < extent)[:, None] & (n < columns)[None, :])


@dataclass(frozen=True)
class Layout:
    """Where the operands of a kind lie: x [T, K], weight [E, N, K] and dy [T, N] are row-major.

    Attributes:
        rows: of a group's result, where those are no tokens.
        columns: of every result.
        k: of the contraction, where that is no group of tokens.
        strides: of A along rows and k, of B along columns, k and groups.
        ragged_k: whether the contraction runs over tokens.
    """

    rows: int
    columns: int
    k: int
    strides: tuple[int, int, int, int, int]
    ragged_k: bool

    @classmethod
    def of(cls, kind: str, n: int, k: int) -> Layout:
        """The layout of a kind of GEMM."""
        return {
            "fprop": cls(0, n, k, (k, 1, k, 1, n * k), False),
            "dgrad": cls(0, k, n, (n, 1, 1, k, n * k), False),
            "wgrad": cls(n, k, 0, (1, n, 1, k, 0), True),
        }[kind]

    def operands(self, kind: str, x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        """A and B."""
        return {"fprop": (x, weight), "dgrad": (dy, weight), "wgrad": (dy, x)}[kind]

    def result(self, tokens: int, groups: int) -> Tensor:
        """An empty result."""
        shape = (groups, self.rows, self.columns) if self.ragged_k else (tokens, self.columns)
        return torch.empty(shape, device=common.DEVICE, dtype=torch.bfloat16)


class Gemm:
    """One kind of GEMM of groups of known sizes, in one configuration."""

    def __init__(self, kind: str, sizes: Tensor, n: int, k: int, config: Config) -> None:
        """Lay out its tiles.

        Args:
            kind: fprop, dgrad or wgrad.
            sizes: of groups, int64 [E].
            n, k: features.
            config: of the kernel.
        """
        self._kind, self._config, self._sizes = kind, config, sizes
        self._layout = Layout.of(kind, n, k)
        self._begins = sizes.cumsum(0) - sizes
        lengths = [self._layout.rows] * len(sizes) if self._layout.ragged_k else sizes.tolist()
        tiles = [
            (group, row)
            for group, length in enumerate(lengths)
            for row in range(0, length, config.m)
        ]
        groups, rows = zip(*tiles, strict=True)
        self._tile_groups = torch.tensor(groups, dtype=torch.int32, device=sizes.device)
        self._tile_rows = torch.tensor(rows, dtype=torch.int32, device=sizes.device)

    def __call__(self, x: Tensor, weight: Tensor, dy: Tensor) -> Tensor:
        """The GEMM.

        Raises:
            RuntimeError: Triton took another instruction than mma.sync.
        """
        layout, config = self._layout, self._config
        a, b = layout.operands(self._kind, x, weight, dy)
        d = layout.result(len(x), len(self._sizes))
        row_tiles = len(self._tile_groups)
        kernel: Any = _gemm[(row_tiles * triton.cdiv(layout.columns, config.n),)](
            *(a, b, d, self._tile_groups, self._tile_rows, self._begins, self._sizes, row_tiles),
            *(layout.rows, layout.columns, layout.k, *layout.strides),
            RAGGED_K=layout.ragged_k,
            WHOLE_K=not layout.ragged_k and layout.k % config.k == 0,
            M=config.m,
            N=config.n,
            K=config.k,
            HEIGHT=HEIGHT,
            num_warps=config.warps,
            num_stages=config.stages,
        )
        if "wgmma" in kernel.asm["ptx"] or "mma.sync" not in kernel.asm["ptx"]:
            raise RuntimeError(f"Triton's {self._kind} is not by mma.sync: set {SWITCH}=1")
        return d


def fastest(
    kind: str, sizes: Tensor, n: int, k: int, operands: tuple[Tensor, Tensor, Tensor]
) -> tuple[Config, Callable[..., Tensor]]:
    """The fastest configuration on a case, and its GEMM; those that cannot run are left out."""
    os.environ[SWITCH] = "1"
    gemms: dict[Config, Gemm] = {}
    for config in CONFIGS:
        gemm = Gemm(kind, sizes, n, k, config)
        try:
            gemm(*operands)
        except triton.runtime.errors.OutOfResources:
            continue
        gemms[config] = gemm
    runs = {str(config): _runner(gemm, operands) for config, gemm in gemms.items()}
    times = common.compare(runs, rounds=TUNING_ROUNDS)
    best = min(gemms, key=lambda config: statistics.median(times[str(config)]))
    return best, gemms[best]


def _runner(gemm: Gemm, operands: tuple[Tensor, Tensor, Tensor]) -> common.Contender:
    return lambda _: gemm(*operands)
