"""FP8 grouped products: kernels, torch._scaled_grouped_mm and dense 8192^3 products in turns.

Rates count useful operations, 2 T N K. Group sizes are not rounded to anything, so wgrad has no
peer here: torch wants groups of multiples of 16 tokens along the contraction.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import common
import shapes
import torch
from common import OURS, Case, Contender, Row
from torch import Tensor

from kernels import build
from kernels.build import Accumulation, Format, Kind, Output, Scaling, Target
from kernels.fp8_kernels import DTYPES, Kernel
from kernels.fp8_operands import DTYPES as CODE_DTYPES
from kernels.fp8_operands import Operands, Problem, blocks, bounds

DENSE = 8192
DEVICE = "cuda"
CHUNK = 1 << 28  # codes that are drawn at a time
QUICK_SHAPES = ("qwen3_up", "dsv3_down")


@dataclass(frozen=True, slots=True)
class Mode:
    """What one comparison holds fixed besides the shape."""

    kind: Kind
    scaling: Scaling
    accumulation: Accumulation

    @classmethod
    def of(cls, target: Target) -> Mode:
        """The mode of a kernel."""
        return cls(target.kind, target.scaling, target.accumulation)

    def __str__(self) -> str:
        return f"{self.kind} {self.scaling} {self.accumulation}"


def _codes(*shape: int) -> Tensor:
    """Normal e4m3 values; a tensor of codes is drawn in pieces, since fp32 takes four times it."""
    out = torch.empty(shape, device=DEVICE, dtype=torch.uint8)
    for piece in torch.split(out.view(-1), CHUNK):
        drawn = torch.randn(piece.numel(), device=DEVICE).to(CODE_DTYPES[Format.E4M3])
        piece.copy_(drawn.view(torch.uint8))
    return out


def _scales(*shape: int) -> Tensor:
    return torch.rand(shape, device=DEVICE) + 0.5


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
    of_tokens = _scales(blocks(problem.depth), problem.padded_tokens)
    return of_tokens, _scales(count, blocks(problem.n), blocks(problem.k))


def _operands(problem: Problem, codes: tuple[Tensor, Tensor]) -> Operands:
    a, b = codes
    return Operands(a, b, a.shape[-1], b.shape[-1], *_stored_scales(problem), True, _no_values)


def _stored_codes(problem: Problem) -> tuple[Tensor, Tensor]:
    """Codes in the shapes of gemm_fp8.h, which scalings share; depths are multiples of 16."""
    if problem.target.kind is Kind.WGRAD:
        width = problem.padded_tokens
        return _codes(problem.n, width), _codes(problem.k, width)
    weights = len(problem.groups), problem.columns, problem.depth
    return _codes(problem.tokens, problem.depth), _codes(*weights)


def _peer(problem: Problem, operands: Operands, ends: Tensor) -> Callable[[], Tensor] | None:
    """torch's product of the same operands where it has one and it runs."""
    target = problem.target
    if target.kind is Kind.WGRAD or target.scaling is not Scaling.ROW:
        return None
    function: Any = getattr(torch, "_scaled_grouped_mm", None)
    if function is None:
        return None
    a = operands.a.view(CODE_DTYPES[target.format_a])
    b = operands.b.view(CODE_DTYPES[target.format_b]).transpose(1, 2)

    def run() -> Tensor:
        product: Tensor = function(
            a,
            b,
            operands.scale_a,
            operands.scale_b,
            offs=ends,
            out_dtype=DTYPES[target.output],
            use_fast_accum=target.accumulation is Accumulation.FAST,
        )
        return product

    try:
        run()
    except (RuntimeError, ValueError) as error:
        print(f"torch has no {Mode.of(target)} here: {str(error)[:200]}", flush=True)
        return None
    return run


def _dense(accumulation: Accumulation) -> Contender:
    """torch's dense 8192^3 product with one scale per operand."""
    a, b = (_codes(DENSE, DENSE).view(CODE_DTYPES[Format.E4M3]) for _ in range(2))
    one = torch.ones((), device=DEVICE)
    fast = accumulation is Accumulation.FAST
    return lambda _: torch._scaled_mm(
        a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def _ours(
    target: Target, problem: Problem, operands: Operands, d: Tensor, splits: Tensor
) -> Contender:
    kernel = Kernel(target)
    return lambda _: kernel(problem, operands, d, splits)


def _problem(target: Target, shape: shapes.Grouped, splits: Tensor) -> Problem:
    groups = bounds([int(size) for size in splits.tolist()], shape.tokens)
    return Problem(target, shape.tokens, shape.n, shape.k, groups, DEVICE)


def measure(
    shape: shapes.Grouped,
    targets: Sequence[Target],
    codes: tuple[Tensor, Tensor],
    splits: Tensor,
    copy_rate: float,
) -> list[Row]:
    """Time kernels of one mode, torch's and the dense product in turns on one set of operands.

    One set is enough: its operands are larger than the cache.

    Raises:
        SystemExit: a kernel and torch disagree.
    """
    problem = _problem(targets[0], shape, splits)
    operands = _operands(problem, codes)
    d = torch.empty(problem.result_shape, device=DEVICE, dtype=DTYPES[targets[0].output])
    contenders = {each.tile.name: _ours(each, problem, operands, d, splits) for each in targets}
    case = f"{shape.name} {Mode.of(targets[0])}"
    peer = _peer(problem, operands, splits.cumsum(0).to(torch.int32))
    if peer is not None:
        _require_agreement(case, contenders, d, peer)
        contenders["torch"] = lambda _: peer()
    contenders["dense"] = _dense(targets[0].accumulation)
    samples = common.compare(contenders)
    dense_rate = 2 * DENSE**3 / statistics.median(samples.pop("dense")) * 1e3
    moved = operands.a.numel() + operands.b.numel() + d.numel() * d.element_size()
    return list(_rows(case, shape, samples, dense_rate, moved / copy_rate))


def _require_agreement(
    case: str, contenders: Mapping[str, Contender], d: Tensor, peer: Callable[[], Tensor]
) -> None:
    wanted = peer()
    for name, run in contenders.items():
        d.fill_(torch.nan)
        run(0)
        common.require_close(f"{case} {name}", d, wanted, tolerance=3e-2)


def _rows(
    case: str,
    shape: shapes.Grouped,
    samples: Mapping[str, Sequence[float]],
    dense_rate: float,
    copy_seconds: float,
) -> Iterator[Row]:
    """A row for each contender, and one named as ours for the fastest tile."""
    operations = 2 * shape.tokens * shape.n * shape.k
    floor = 1e3 * max(operations / dense_rate, copy_seconds)
    tiles = [name for name in samples if name != "torch"]
    fastest = min(tiles, key=lambda name: statistics.median(samples[name]))
    for name, times in ((OURS, samples[fastest]), *samples.items()):
        rate = operations / statistics.median(times) * 1e3
        yield common.row(
            case,
            name,
            "ms",
            times,
            floor=floor,
            rate=rate / 1e12,
            rate_unit="TFLOP/s",
            fraction=rate / dense_rate,
            extra={"dense_tflops": dense_rate / 1e12},
        )


def _timed(targets: Sequence[Target]) -> dict[Mode, list[Target]]:
    """Kernels of e4m3 and bf16 by mode: what is timed shares its operands."""
    found: dict[Mode, list[Target]] = {}
    for target in targets:
        formats = target.format_a, target.format_b
        if formats == (Format.E4M3, Format.E4M3) and target.output is Output.BFLOAT16:
            found.setdefault(Mode.of(target), []).append(target)
    return found


def _of_shape(
    shape: shapes.Grouped, modes: Mapping[Mode, Sequence[Target]], copy_rate: float
) -> Iterator[Row]:
    splits = shapes.splits(shape.groups, shape.tokens)
    for kind in Kind:
        chosen = [targets for mode, targets in modes.items() if mode.kind is kind]
        if not chosen:
            continue
        codes = _stored_codes(_problem(chosen[0][0], shape, splits))
        for targets in chosen:
            rows = measure(shape, targets, codes, splits, copy_rate)
            for row in rows:
                print(f"{row.case:34} {row.contender:32} {row.rate:8.0f} TFLOP/s", flush=True)
            yield from rows
            torch.cuda.empty_cache()


def run(targets: Sequence[Target] = (), *, quick: bool = False) -> Iterator[Case]:
    """Time built kernels (all by default) at the shapes of three models; quick: at two shapes."""
    torch.manual_seed(1)
    modes, copy_rate = _timed(targets or build.targets()), common.copy_rate()
    for shape in shapes.GROUPED:
        if not quick or shape.name in QUICK_SHAPES:
            yield Case(shape.name, partial(_of_shape, shape, modes, copy_rate))
