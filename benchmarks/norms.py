"""Norms of rows against a device copy of the same bytes, and against torch eager and compiled."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import common
import torch
from common import OURS, Case, Row
from torch import Tensor
from torch.nn import functional

EPS = 1e-5
ROWS = (4096, 16384, 65536)
WIDTHS = (2048, 4096, 8192, 16384)
QUICK_SIZES = ((64, 256),)
LARGE = 256 * 2**20
"""Bytes moved from which the fraction of a copy's bandwidth counts; below, microseconds do."""

Formula = Callable[..., Any]


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, EPS)


def _layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.layer_norm(x, weight.shape, weight, bias, EPS)


def _l2(x: Tensor) -> Tensor:
    return functional.normalize(x, dim=-1)


@dataclass(frozen=True)
class Norm:
    """A norm, by torch and by what its cell is called.

    Attributes:
        module: of the cell.
        shared: how many vectors of a row's width it takes: weight, and bias.
        statistics: numbers that it keeps of a row.
        torch: the same of torch.
        sizes: rows and widths that are measured.
    """

    module: str
    shared: int
    statistics: int
    torch: Formula
    sizes: tuple[tuple[int, int], ...]


GRID = tuple((rows, width) for rows in ROWS for width in WIDTHS)
NORMS = (
    Norm("rms_norm", 1, 1, _rms, GRID),
    Norm("layer_norm", 2, 2, _layer, GRID),
    Norm("l2_normalization", 0, 1, _l2, ((16384, 4096),)),
)


@dataclass(frozen=True)
class Inputs:
    """Operands of one norm, and what its forward leaves for the backward."""

    dy: Tensor
    leaves: tuple[Tensor, ...]
    saved: tuple[Tensor, ...]


def _inputs(package: Any, norm: Norm, rows: int, width: int) -> Inputs:
    x = common.normal(rows, width)
    vectors = tuple(common.normal(width) for _ in range(norm.shared))
    forward = common.op(package, f"{norm.module}__bf16_forward")
    _, *kept = forward(x, *vectors, *[True] * (1 + norm.shared), EPS)
    return Inputs(common.normal(rows, width), (x, *vectors), (x, *vectors[:1], *kept))


def _forward(norm: Norm, compiled: Formula, leaves: tuple[Tensor, ...]) -> dict[str, Formula]:
    return {
        "torch": lambda _: norm.torch(*leaves),
        "torch compiled": lambda _: compiled(*leaves),
    }


def _backward(norm: Norm, compiled: Formula, inputs: Inputs) -> dict[str, Formula]:
    """Backwards of graphs that are kept, so that each call runs them alone."""
    leaves = tuple(leaf.detach().requires_grad_() for leaf in inputs.leaves)
    results = {"torch": norm.torch(*leaves), "torch compiled": compiled(*leaves)}

    def gradients(y: Tensor, _: int) -> tuple[Tensor, ...]:
        return torch.autograd.grad(y, leaves, inputs.dy, retain_graph=True)

    return {name: partial(gradients, y) for name, y in results.items()}


def _copy(moved: int) -> Formula:
    """A copy that reads half of the bytes and writes the other."""
    source = torch.empty(moved // 2, dtype=torch.uint8, device=common.DEVICE)
    target = torch.empty_like(source)
    return lambda _: target.copy_(source)


def _first(result: Any) -> Tensor:
    tensor: Tensor = result[0] if isinstance(result, tuple) else result
    return tensor


def _measure(case: str, contenders: dict[str, Formula], moved: int) -> Iterator[Row]:
    """Times of all; the floor is that of the copy in the same rounds."""
    wanted = _first(contenders["torch"](0))
    common.require_close(case, _first(contenders[OURS](0)), wanted)
    samples = common.compare({**contenders, "copy": _copy(moved)})
    floor = statistics.median(samples["copy"])
    for name, times in samples.items():
        median = statistics.median(times)
        yield common.row(
            *(case, name, "ms", times),
            floor=floor,
            rate=moved / median / 1e9,
            rate_unit="TB/s",
            fraction=floor / median,
            extra={} if moved >= LARGE else {"us_above_copy": (median - floor) * 1e3},
        )


def _both(package: Any, norm: Norm, rows: int, width: int) -> Iterator[Row]:
    inputs = _inputs(package, norm, rows, width)
    torch.compiler.reset()
    compiled = torch.compile(norm.torch, fullgraph=True, dynamic=False)
    flags = [True] * (1 + norm.shared)
    forward = common.op(package, f"{norm.module}__bf16_forward")
    backward = common.op(package, f"{norm.module}__bf16_backward")
    asked = flags if norm.shared else []  # an op with one gradient asks for no other
    scalars = rows * norm.statistics * 4
    yield from _measure(
        f"{norm.module} forward {rows} x {width}",
        {
            OURS: lambda _: forward(*inputs.leaves, *flags, EPS),
            **_forward(norm, compiled, inputs.leaves),
        },
        2 * rows * width * 2 + scalars,
    )
    yield from _measure(
        f"{norm.module} backward {rows} x {width}",
        {
            OURS: lambda _: backward(inputs.dy, *inputs.saved, *asked, EPS),
            **_backward(norm, compiled, inputs),
        },
        3 * rows * width * 2 + scalars,
    )


def norms(*, quick: bool = False) -> Iterator[Case]:
    """Every norm in both directions, at widths and rows of models."""
    package = common.bundle()
    for norm in NORMS:
        for rows, width in QUICK_SIZES if quick else norm.sizes:
            name = f"{norm.module} {rows} x {width}"
            yield Case(name, partial(_both, package, norm, rows, width))
