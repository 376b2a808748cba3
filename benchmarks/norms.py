"""Norms of rows against a device copy of the same bytes, torch eager and compiled, and QuACK."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import bandwidth
import common
import torch
from bandwidth import Call
from common import OURS, Case, Row
from torch import Tensor
from torch.nn import functional

EPS = 1e-5
ROWS = (4096, 16384, 65536)
WIDTHS = (2048, 4096, 8192, 16384)
QUICK_SIZES = ((64, 256),)
# Of gradients of weight and bias, which torch adds up in bf16 on the CPU.
TOLERANCE = 2e-2

Formula = Callable[..., Any]


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, EPS)


def _layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.layer_norm(x, weight.shape, weight, bias, EPS)


def _l2(x: Tensor) -> Tensor:
    return functional.normalize(x, dim=-1)


def _residual_rms(x: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    h = x + residual
    return _rms(h, weight), h


@dataclass(frozen=True)
class Norm:
    """A norm, by torch and by what its cell is called.

    Attributes:
        module: of the cell.
        torch: the same of torch.
        vectors: how many of a row's width it takes behind x: weight, and bias.
        statistics: numbers that it keeps of a row.
        sizes: rows and widths that are measured.
        beside_quack: those of them at which QuACK is, which compiles for every one.
        residual: whether it takes one, and gives the sum, too.
    """

    module: str
    torch: Formula
    vectors: int
    statistics: int
    sizes: tuple[tuple[int, int], ...]
    beside_quack: tuple[tuple[int, int], ...] = ()
    residual: bool = False

    @property
    def tensors(self) -> int:
        """Of rows that the forward moves; the backward, which has y's gradient, one more."""
        return 4 if self.residual else 2

    def moved(self, rows: int, width: int) -> tuple[int, int]:
        """Bytes of forward and backward, each read or written once.

        x's gradient and that of the residual are the same values, and count once.
        """
        others = rows * self.statistics * 4
        of_rows = rows * width * 2
        backward = self.tensors if self.residual else self.tensors + 1
        return self.tensors * of_rows + others, backward * of_rows + others


GRID = tuple((rows, width) for rows in ROWS for width in WIDTHS)
BESIDE_QUACK = ((4096, 4096), (16384, 4096), (16384, 8192), (16384, 16384))
NORMS = (
    Norm("rms_norm", _rms, 1, 1, GRID, BESIDE_QUACK),
    Norm("layer_norm", _layer, 2, 2, GRID, BESIDE_QUACK),
    Norm("l2_normalization", _l2, 0, 1, ((16384, 4096),)),
)
RESIDUAL_SIZES = (
    *((4096, 2048), (4096, 4096), (4096, 16384)),
    *((16384, 2048), (16384, 4096), (16384, 8192), (16384, 16384)),
    *((65536, 2048), (65536, 8192)),
)
RESIDUAL = Norm("residual_rms_norm", _residual_rms, 1, 1, RESIDUAL_SIZES, BESIDE_QUACK, True)


@dataclass(frozen=True)
class Inputs:
    """Operands of one norm.

    Attributes:
        gradients: of the results.
        leaves: what is differentiated, as the forward takes it.
        saved: what the forward leaves for the backward, as the backward takes it.
    """

    gradients: tuple[Tensor, ...]
    leaves: tuple[Tensor, ...]
    saved: tuple[Tensor, ...]


def _inputs(package: Any, norm: Norm, rows: int, width: int) -> Inputs:
    x = common.normal(rows, width)
    vectors = tuple(common.normal(width) for _ in range(norm.vectors))
    residual = (common.normal(rows, width),) if norm.residual else ()
    leaves = (x, *vectors, *residual)
    forward = common.op(package, f"{norm.module}__bf16_forward")
    _, *rest = forward(*leaves, *[True] * len(leaves), EPS)
    kept = rest[1:] if norm.residual else rest
    source = rest[0] if norm.residual else x
    gradients = tuple(common.normal(rows, width) for _ in range(1 + norm.residual))
    return Inputs(gradients, leaves, (source, *vectors[:1], *kept))


def _backwards(norm: Norm, compiled: Formula, inputs: Inputs) -> dict[str, Call]:
    """Backwards of graphs that are kept, so that each call runs them alone."""
    leaves = tuple(leaf.detach().requires_grad_() for leaf in inputs.leaves)

    def gradients(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(outputs, leaves, inputs.gradients, retain_graph=True)

    made = {"torch": norm.torch(*leaves), "torch compiled": compiled(*leaves)}
    return {name: partial(gradients, bandwidth.results(each)) for name, each in made.items()}


def _of_all(norm: Norm, found: Any) -> tuple[Tensor, ...]:
    """A gradient for each leaf, of what our op gives: the residual has that of x."""
    given = bandwidth.results(found)
    return (*given, given[0]) if norm.residual else given


def _measure(
    norm: Norm, direction: str, size: tuple[int, int], contenders: dict[str, Call], operands: Any
) -> Iterator[Row]:
    """Times of a direction; `operands` are what QuACK is given."""
    rows, width = size
    case = f"{norm.module} {direction} {rows} x {width}"
    bandwidth.require_results(case, contenders[OURS](), contenders["torch"](), TOLERANCE)
    if size in norm.beside_quack:
        contenders = bandwidth.with_peers(case, contenders, f"{norm.module} {direction}", operands)
    forward, backward = norm.moved(rows, width)
    yield from bandwidth.measure(case, contenders, forward if direction == "forward" else backward)


def _both(package: Any, norm: Norm, size: tuple[int, int]) -> Iterator[Row]:
    inputs = _inputs(package, norm, *size)
    torch.compiler.reset()
    compiled = torch.compile(norm.torch, fullgraph=True, dynamic=False)
    flags = [True] * len(inputs.leaves)
    forward = common.op(package, f"{norm.module}__bf16_forward")
    backward = common.op(package, f"{norm.module}__bf16_backward")
    asked = flags if len(flags) > 1 else []  # an op with one gradient asks for no other
    taken = (*inputs.gradients, *inputs.saved)
    forwards = {
        OURS: lambda: forward(*inputs.leaves, *flags, EPS),
        "torch": lambda: norm.torch(*inputs.leaves),
        "torch compiled": lambda: compiled(*inputs.leaves),
    }
    yield from _measure(norm, "forward", size, forwards, (*inputs.leaves, EPS))
    backwards = {
        OURS: lambda: _of_all(norm, backward(*taken, *asked, EPS)),
        **_backwards(norm, compiled, inputs),
    }
    yield from _measure(norm, "backward", size, backwards, taken)


def _cases(norm: Norm, quick: bool) -> Iterator[Case]:
    package = common.bundle()
    for size in QUICK_SIZES if quick else norm.sizes:
        name = f"{norm.module} {size[0]} x {size[1]}"
        yield Case(name, partial(_both, package, norm, size))


def norms(*, quick: bool = False) -> Iterator[Case]:
    """Every norm in both directions, at widths and rows of models."""
    for norm in NORMS:
        yield from _cases(norm, quick)


def residual_norms(*, quick: bool = False) -> Iterator[Case]:
    """A residual is added before the norm, and its gradient behind the norm's."""
    yield from _cases(RESIDUAL, quick)
