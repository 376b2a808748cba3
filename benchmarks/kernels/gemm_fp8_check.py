"""FP8 GEMMs against float64 of the same dequantised operands.

Results stand between guards and are NaN before; each case runs twice and must repeat its bits;
rows past the groups and gradients of empty groups must be zero.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import common
import torch
from torch import Tensor

from kernels import build
from kernels.build import Accumulation, Kind, Scaling, Target
from kernels.fp8_kernels import DTYPES, Emulation, Gemm, Kernel
from kernels.fp8_operands import Operands, Problem, bounds, make, reference

GUARD = 4096  # elements
# Relative Frobenius distance: one rounding to 16 bits, or an accumulator of about 14 bits.
TOLERANCE = {Accumulation.SPLIT: 4e-3, Accumulation.FAST: 2e-2}
GROUP_SLACK = 1.25  # of the tolerance, for the distance of one small group
SMALLEST = 900  # tokens of a random case where float64 runs on the CPU


@dataclass(frozen=True, slots=True)
class Case:
    """Sizes of one GEMM; splits None: dense."""

    name: str
    tokens: int
    n: int
    k: int
    splits: Sequence[int] | None
    bias: bool = False
    early: bool = False
    shared_scale: bool = False


def _ragged(groups: int, tokens: int, concentration: float = 8.0) -> list[int]:
    """Random sizes that fill the tokens; a small concentration makes empty groups."""
    weights = torch.full((groups,), concentration, dtype=torch.float64)
    draws = torch._standard_gamma(weights).clamp(min=1e-300)
    sizes = (draws / draws.sum() * tokens).long()
    sizes[0] += tokens - sizes.sum()
    return [int(size) for size in sizes]


def _feature_cases() -> Iterator[Case]:
    yield Case("plain", 1000, 512, 256, _ragged(4, 1000))
    yield Case("odd", 1001, 264, 520, _ragged(5, 1001))
    for n, k in (
        *((8, 8), (24, 72), (136, 200), (200, 136), (72, 24)),
        *((648, 328), (256, 1024), (384, 640)),
    ):
        yield Case(f"n{n}_k{k}", 700, n, k, _ragged(6, 700, 1.0))
    yield Case("bias", 1000, 328, 72, _ragged(5, 800, 1.0), bias=True)
    yield Case("shared_scale", 1000, 328, 200, _ragged(5, 800, 1.0), shared_scale=True)
    yield Case("early", 1000, 512, 256, _ragged(4, 1000), early=True)


def _group_cases() -> Iterator[Case]:
    yield Case("giant", 3000, 520, 200, [0, 0, 3000, 0])
    yield Case("first", 300, 256, 256, [300] + [0] * 40)
    yield Case("short", 1500, 392, 264, _ragged(7, 900, 0.5))
    yield Case("all_empty", 300, 392, 264, [0] * 5)
    yield Case("negative", 900, 136, 264, [100, -5, 300, -(2**62), 200, 0, -1, 77])
    yield Case("oversized", 900, 136, 264, [100, 50, 2**62, 2**62, 2**63 - 1, 5])
    for length in (31, 32, 33, 64, 65, 96, 97, 127, 128, 129, 160, 255, 257):
        yield Case(f"length{length}", 3 * length + 50, 264, 136, [length, 0, length, length])
    for count in (1, 2, 31, 32, 33, 65, 128, 512):
        yield Case(f"groups{count}", 2111, 136, 136, _ragged(count, 2111, 0.4))
    yield Case("ones", 512, 264, 72, [1] * 512)
    for tokens in (0, 1, 7):
        yield Case(f"tokens{tokens}", tokens, 136, 200, [0, tokens, 0])
    yield Case("dense", 1003, 520, 328, None)
    yield Case("dense_small", 3, 520, 328, None)


def _random_cases(most: int) -> Iterator[Case]:
    for index in range(4):
        groups, tokens = random.choice((3, 9, 50)), random.randint(1, most)
        splits = _ragged(groups, random.randint(0, tokens), 0.7)
        n, k = 8 * random.randint(1, 200), 8 * random.randint(1, 150)
        yield Case(f"random{index}", tokens, n, k, splits)


def cases(device: str) -> Iterator[Case]:
    """Every case; large ones on a GPU alone."""
    yield from _feature_cases()
    yield from _group_cases()
    if device == "cuda":
        yield Case("large", 20000, 1536, 1024, _ragged(40, 19990))
        yield Case("deep", 700, 4096, 4096, _ragged(3, 690))
    yield from _random_cases(6000 if device == "cuda" else SMALLEST)


# A quarter of the cases, for kernels that share their mainloop with one that runs all.
QUICK = frozenset(
    (
        *("odd", "n24_k72", "short", "negative", "length33", "length160", "groups65", "tokens1"),
        *("bias", "shared_scale", "dense", "deep"),
    )
)


# The mainloops: those run every case, for each kind of GEMM.
MAINLOOPS = {
    (Scaling.BLOCK, Accumulation.SPLIT): "cooperative_128x256x128_2x1",
    (Scaling.ROW, Accumulation.SPLIT): "cooperative_128x256x128_2x1",
    (Scaling.ROW, Accumulation.FAST): "pingpong_128x192x128_2x1",
}


class Wrong(AssertionError):
    """A result that is not what it should be."""


def _require(condition: Any, what: str) -> None:
    if not bool(condition):
        raise Wrong(what)


def _problem(target: Target, case: Case, device: str) -> Problem:
    whole = [(0, case.tokens)]
    groups = whole if case.splits is None else bounds(case.splits, case.tokens)
    return Problem(target, case.tokens, case.n, case.k, groups, device)


def _guarded(problem: Problem) -> tuple[Tensor, Tensor]:
    """A buffer and the result in it: NaN between guards."""
    shape = problem.result_shape
    count = torch.Size(shape).numel()
    dtype = DTYPES[problem.target.output]
    buffer = torch.full((count + 2 * GUARD,), torch.nan, device=problem.device, dtype=dtype)
    buffer[:GUARD] = 7.0
    buffer[GUARD + count :] = 9.0
    return buffer, buffer[GUARD : GUARD + count].view(shape)


def _distance(found: Tensor, wanted: Tensor) -> float:
    """Relative Frobenius distance; of zeros the norm of what was found."""
    norm = float(wanted.norm())
    return float((found - wanted).norm()) / norm if norm else float(found.norm())


def _result(problem: Problem, gemm: Gemm, operands: Operands, case: Case, bias: Any) -> Any:
    """The result of two runs that agree."""
    splits = None
    if case.splits is not None:
        splits = torch.tensor(case.splits, device=problem.device, dtype=torch.int64)
    found = []
    for _ in range(2):
        buffer, d = _guarded(problem)
        gemm(problem, operands, d, splits, bias=bias, early=case.early)
        intact = (buffer[:GUARD] == 7.0).all() & (buffer[GUARD + d.numel() :] == 9.0).all()
        _require(intact, "wrote outside of its result")
        found.append(d)
    same = torch.equal(found[0].view(torch.int16), found[1].view(torch.int16))
    _require(same, "two runs differ")
    return found[0].double()


def _check_groups(problem: Problem, found: Tensor, wanted: Tensor, tolerance: float) -> None:
    wgrad = problem.target.kind is Kind.WGRAD
    if not wgrad:
        _require((found[problem.end :] == 0).all(), "rows past the groups are not zero")
    for group, (begin, end) in enumerate(problem.groups):
        own = group if wgrad else slice(begin, end)
        if end > begin:
            error = _distance(found[own], wanted[own])
            _require(error <= GROUP_SLACK * tolerance, f"group {group}: distance {error:.2e}")
        elif wgrad:
            _require((found[own] == 0).all(), f"empty group {group} is not zero")


def check(gemm: Gemm, target: Target, case: Case, device: str) -> float:
    """Distance of one case to float64.

    Raises:
        Wrong: it is too large, or another property of the result does not hold.
    """
    problem = _problem(target, case, device)
    operands = make(problem, shared_scale=case.shared_scale)
    bias = None
    if case.bias and target.kind is Kind.FPROP:
        bias = torch.randn(len(problem.groups), case.n, device=device).mul(40)
        bias = bias.to(DTYPES[target.output])
    found = _result(problem, gemm, operands, case, bias)
    if found.numel() == 0:
        return 0.0
    wanted, tolerance = reference(problem, operands, bias), TOLERANCE[target.accumulation]
    error = _distance(found, wanted)
    _require(error <= tolerance, f"distance {error:.2e}, expected at most {tolerance}")
    _check_groups(problem, found, wanted, tolerance)
    return error


def check_graph(gemm: Gemm, target: Target) -> float:
    """A captured launch follows operands and group sizes that change after the capture.

    Raises:
        Wrong: a replay is too far from float64.
    """
    sizes = [_ragged(16, 3950, concentration) for concentration in (8.0, 8.0, 0.3)]
    first, *later = (_problem(target, Case("graph", 4000, 520, 264, s), "cuda") for s in sizes)
    splits, operands = torch.tensor(sizes[0], device="cuda"), make(first)
    d = torch.empty(first.result_shape, device="cuda", dtype=DTYPES[target.output])
    gemm(first, operands, d, splits)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gemm(first, operands, d, splits)
        gemm(first, operands, d, splits, early=True)
    worst = 0.0
    for problem, current in zip(later, sizes[1:], strict=True):
        fresh = make(problem)
        splits.copy_(torch.tensor(current))
        operands.copy_from(fresh)
        d.fill_(torch.nan)
        graph.replay()
        worst = max(worst, _distance(d.double(), reference(problem, fresh)))
    _require(worst <= TOLERANCE[target.accumulation], f"graph: distance {worst:.2e}")
    return worst


def _runs_all(target: Target) -> bool:
    return MAINLOOPS.get((target.scaling, target.accumulation)) == target.tile.name


def _check_target(target: Target, device: str, every: bool) -> tuple[list[float], int]:
    """Distances of the cases that hold, and how many do not."""
    gemm: Gemm = Kernel(target) if device == "cuda" else Emulation(target)
    errors, wrong = [], 0
    for case in cases(device):
        if not every and case.name not in QUICK:
            continue
        try:
            errors.append(check(gemm, target, case, device))
        except Wrong as found:
            wrong += 1
            print(f"FAILED {target.name} {case.name}: {found}", flush=True)
    if device == "cuda":
        try:
            errors.append(check_graph(gemm, target))
        except Wrong as found:
            wrong += 1
            print(f"FAILED {target.name}: {found}", flush=True)
    return errors, wrong


def run(
    targets: Sequence[Target] = (), device: str = "cuda", *, quick: bool = False, seed: int = 11
) -> list[common.Row]:
    """Check kernels, one row each: a sample is the distance of a case.

    Without `targets` all kernels, those of MAINLOOPS on all cases; with `quick` none is.

    Raises:
        SystemExit: a case is wrong; all of them were printed.
    """
    torch.manual_seed(seed)
    random.seed(seed)
    rows, failures = [], 0
    for target in targets or build.targets():
        every = not quick and (bool(targets) or _runs_all(target))
        errors, wrong = _check_target(target, device, every)
        failures += wrong
        worst = max(errors, default=0.0)
        print(f"{target.name}: {len(errors)} cases hold, largest distance {worst:.2e}", flush=True)
        if errors:
            rows.append(common.row(target.name, common.OURS, "distance", errors))
    if failures:
        raise SystemExit(f"{failures} cases are wrong")
    return rows
