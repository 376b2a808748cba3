"""FP8 grouped GEMMs as they ship, torch's and others', and dense 8192^3 GEMMs in turns.

Ours go through the bundle's dispatch functions with the formats of the recipes: gradients are e5m2
where a tensor or group has one scale, e4m3 elsewhere. Tiles that are built by themselves
(`run.py --target`) are timed under their own names. Rates count useful operations, 2 T N K. Group
sizes are not rounded to anything, so torch, which wants groups of multiples of 16 tokens along the
contraction, has no wgrad here.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import common
import dense
import pairs
import peers
import shapes
import torch
from common import OURS, Case, Contender, Row
from floors import Mode
from torch import Tensor

from fusegen.ir.dtypes import DType
from fusegen.tuning.cases import Case as Sizes
from kernels import dispatch
from kernels.build import Accumulation, Format, Kind, Scaling, Target
from kernels.dispatch import Shipped
from kernels.fp8_kernels import DTYPES, Emulation, Gemm, Kernel
from kernels.fp8_operands import DTYPES as CODE_DTYPES
from kernels.fp8_operands import Operands, Problem, blocks, bounds

CHUNK = 1 << 28  # codes that are drawn at a time
QUICK_SHAPES = ("qwen3_up", "dsv3_down")
ARCH = "sm_90a"


def _codes(fmt: Format, *shape: int) -> Tensor:
    """Normal values; a tensor of codes is drawn in pieces, since fp32 takes four times it."""
    out = torch.empty(shape, device=common.DEVICE, dtype=torch.uint8)
    for piece in torch.split(out.view(-1), CHUNK):
        drawn = torch.randn(piece.numel(), device=common.DEVICE).to(CODE_DTYPES[fmt])
        piece.copy_(drawn.view(torch.uint8))
    return out


def _scales(*shape: int) -> Tensor:
    return torch.rand(shape, device=common.DEVICE) + 0.5


def _no_values(group: int) -> tuple[Tensor, Tensor]:
    raise AssertionError(f"group {group}: timed operands are too large for float64")


def _stored_scales(problem: Problem) -> tuple[Tensor, Tensor]:
    """Scales in the shapes of gemm_fp8.h."""
    count, wgrad = len(problem.groups), problem.target.kind is Kind.WGRAD
    if problem.target.scaling is Scaling.TENSOR:
        return _scales(count), _scales(count)
    if problem.target.scaling is Scaling.ROW:
        of_rows = _scales(count, problem.n) if wgrad else _scales(problem.tokens)
        return of_rows, _scales(count, problem.columns)
    if wgrad:
        rows = problem.token_blocks
        return _scales(rows, problem.n), _scales(rows, problem.k)
    of_tokens = _scales(blocks(problem.contraction), problem.padded_tokens)
    return of_tokens, _scales(count, blocks(problem.n), blocks(problem.k))


def _operands(problem: Problem, codes: tuple[Tensor, Tensor]) -> Operands:
    a, b = codes
    return Operands(a, b, a.shape[-1], b.shape[-1], *_stored_scales(problem), True, _no_values)


def _stored_codes(problem: Problem) -> tuple[Tensor, Tensor]:
    """Codes in the shapes of gemm_fp8.h; contractions are multiples of 16."""
    target = problem.target
    a, b = partial(_codes, target.format_a), partial(_codes, target.format_b)
    if target.kind is Kind.WGRAD:
        width = problem.padded_tokens
        return a(problem.n, width), b(problem.k, width)
    weights = len(problem.groups), problem.columns, problem.contraction
    return a(problem.tokens, problem.contraction), b(*weights)


def _peer(problem: Problem, operands: Operands, ends: Tensor) -> Callable[[], Tensor] | None:
    """torch's GEMM of the same operands where it has one and it runs."""
    target = problem.target
    if target.kind is Kind.WGRAD or target.scaling is not Scaling.ROW:
        return None
    function: Any = getattr(torch, "_scaled_grouped_mm", None)
    if function is None:
        return None
    a = operands.a.view(CODE_DTYPES[target.format_a])
    b = operands.b.view(CODE_DTYPES[target.format_b]).transpose(1, 2)

    def run() -> Tensor:
        result: Tensor = function(
            a,
            b,
            operands.scale_a,
            operands.scale_b,
            offs=ends,
            out_dtype=DTYPES[target.output],
            use_fast_accum=target.accumulation is Accumulation.FAST,
        )
        return result

    try:
        run()
    except (RuntimeError, ValueError) as error:
        print(f"torch has no such {target.kind} here: {str(error)[:200]}", flush=True)
        return None
    return run


def _problem(target: Target, shape: shapes.Grouped, splits: Tensor) -> Problem:
    groups = bounds([int(size) for size in splits.tolist()], shape.tokens)
    return Problem(target, shape.tokens, shape.n, shape.k, groups, common.DEVICE)


@dataclass(frozen=True)
class Work:
    """One kernel set on one shape.

    Attributes:
        shape: of the GEMM.
        shipped: the set.
        gemm: of the bundle; on the CPU its address arithmetic in float64.
        tiles: others of the same formats and mode, built by themselves.
        copy_rate: bytes per second.
    """

    shape: shapes.Grouped
    shipped: Shipped
    gemm: Callable[[Shipped, Target], Gemm]
    tiles: Sequence[Target]
    copy_rate: float

    @property
    def case(self) -> str:
        """What its rows are of."""
        return f"{self.shape.name} {self.shipped.mode}"

    def measure(self) -> list[Row]:
        """Check, then time everybody in turns on one set of operands, which exceeds the cache.

        Raises:
            SystemExit: a GEMM is wrong.
        """
        shape = self.shape
        target = self.shipped.target(Sizes(shape.groups, shape.tokens, shape.n, shape.k))
        splits = shapes.splits(shape.groups, shape.tokens)
        problem = _problem(target, shape, splits)
        operands = _operands(problem, _stored_codes(problem))
        d = torch.empty(problem.result_shape, device=common.DEVICE, dtype=DTYPES[target.output])
        gemms = {OURS: self.gemm(self.shipped, target)}
        gemms |= {f"tile {each.tile.name}": Kernel(each) for each in self.tiles}
        contenders: dict[str, Contender] = {
            name: partial(_run, gemm, problem, operands, d, splits) for name, gemm in gemms.items()
        }
        for name, run in contenders.items():
            d.fill_(torch.nan)
            run(0)
            dispatch.require_right(f"{self.case} {name}", self.shipped, problem, operands, d)
        contenders |= self._others(problem, operands, splits)
        mode = Mode(
            tuple(DType(each.value) for each in self.shipped.formats),
            self.shipped.accumulation is Accumulation.FAST,
        )
        samples = common.compare({**contenders, "dense": dense.contender(mode)})
        moved = operands.a.numel() + operands.b.numel() + d.numel() * d.element_size()
        rows = list(_rows(self.case, shape, samples, moved / self.copy_rate))
        print(f"{self.case:34} {target.tile.name:32} {rows[0].rate:8.0f} TFLOP/s", flush=True)
        return rows

    def _others(self, problem: Problem, operands: Operands, splits: Tensor) -> dict[str, Contender]:
        found: dict[str, Contender] = {}
        torchs = _peer(problem, operands, splits.cumsum(0).to(torch.int32))
        if torchs is not None:
            found["torch"] = partial(_call, torchs)
        if self.shipped.scaling is Scaling.BLOCK:
            sizes = (problem.tokens, problem.n, problem.k)
            there = peers.installed(peers.SCALED)
            runs = peers.scaled_calls(there, str(self.shipped.kind), splits, *sizes)
            found |= {name: partial(_call, run) for name, run in runs.items()}
        return found


def _run(
    gemm: Gemm, problem: Problem, operands: Operands, d: Tensor, splits: Tensor, _: int
) -> None:
    gemm(problem, operands, d, splits)


def _call(run: Callable[[], Any], _: int) -> Any:
    return run()


def _rows(
    case: str,
    shape: shapes.Grouped,
    samples: Mapping[str, Sequence[float]],
    copy_seconds: float,
) -> Iterator[Row]:
    """A row for each contender, held against the dense GEMMs of the same rounds."""
    operations, of_dense = 2 * shape.tokens * shape.n * shape.k, 2 * dense.SIZE**3
    dense_rate = of_dense / statistics.median(samples["dense"]) * 1e3
    for name, times in samples.items():
        if name == "dense":
            continue
        over = pairs.ratio(times, samples["dense"])
        yield common.row(
            *(case, name, "ms", times),
            floor=1e3 * max(operations / dense_rate, copy_seconds),
            rate=operations / statistics.median(times) / 1e9,
            rate_unit="TFLOP/s",
            fraction=operations / of_dense / over.median,
            extra={"dense_tflops": dense_rate / 1e12},
            paired={"dense": over},
        )


def _tiles_like(shipped: Shipped, targets: Sequence[Target]) -> list[Target]:
    mode = (shipped.kind, *shipped.formats, shipped.scaling, shipped.accumulation)
    return [
        each
        for each in targets
        if (each.kind, each.format_a, each.format_b, each.scaling, each.accumulation) == mode
    ]


def _emulation(_: Shipped, target: Target) -> Gemm:
    return Emulation(target)


def run(targets: Sequence[Target] = (), *, quick: bool = False) -> Iterator[Case]:
    """Time what ships at the shapes of three models; quick: at two shapes, on the CPU at one.

    Args:
        targets: built kernels to time beside it.
    """
    torch.manual_seed(1)
    copy_rate = common.copy_rate()
    gemm: Callable[[Shipped, Target], Gemm]
    of: Sequence[shapes.Grouped]
    if common.DEVICE == "cpu":
        sets, of = dispatch.shipped(ARCH), shapes.SMALL.gemms()[:1]
        gemm = _emulation
    else:
        bundle = Path(common.bundle().__path__[0])
        sets = dispatch.shipped(bundle.name)
        gemm, of = dispatch.Library(bundle, sets).gemm, shapes.GROUPED
    for shape in of:
        if quick and len(of) > 1 and shape.name not in QUICK_SHAPES:
            continue
        for each in sets:
            work = Work(shape, each, gemm, _tiles_like(each, targets), copy_rate)
            yield Case(work.case, work.measure)
            if common.DEVICE != "cpu":
                torch.cuda.empty_cache()
