"""Dense layers: the MLP of a transformer with its norm and residual, forward and backward.

All contenders share x, dy and weights. torch's is the same layer as plain functions, compiled.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import common
import torch
from common import Case, Row
from torch import Tensor
from torch.nn import functional

PEER = "torch compiled"
MODULE = "norm_mlp_swiglu"
EPS = 1e-5
TOLERANCE = 0.1  # of results under a quantised recipe; 1e-2 in bf16
GRADIENTS = 3  # GEMMs of a forward and backward, over those of a forward

Step = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Size:
    """Tokens, and the widths of a layer."""

    tokens: int
    hidden: int
    intermediate: int

    def __str__(self) -> str:
        return f"{self.tokens} x {self.hidden} x {self.intermediate}"

    @property
    def flops(self) -> int:
        """Of the GEMMs of a forward and backward."""
        return GRADIENTS * 6 * self.tokens * self.hidden * self.intermediate


SIZES = (Size(8192, 8192, 28672), Size(8192, 4096, 14336))
QUICK_SIZES = (Size(64, 64, 128),)


def torch_layer(x: Tensor, gamma: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
    """x [T, H], gamma [H], fc1 [2 F, H], fc2 [H, F] -> [T, H]."""
    normed = functional.rms_norm(x, gamma.shape, gamma, EPS)
    gate, up = functional.linear(normed, fc1).chunk(2, dim=-1)
    return x + functional.linear(functional.silu(gate) * up, fc2)


@dataclass(frozen=True)
class Operands:
    """What all contenders share: leaves x, gamma, fc1 and fc2, and dy."""

    leaves: tuple[Tensor, ...]
    dy: Tensor

    @classmethod
    def drawn(cls, size: Size) -> Operands:
        """Random ones on the device."""
        t, h, f = size.tokens, size.hidden, size.intermediate
        leaves = (
            common.normal(t, h),
            1 + common.normal(h, scale=0.1),
            common.normal(2 * f, h, scale=h**-0.5),
            common.normal(h, f, scale=f**-0.5),
        )
        return cls(tuple(leaf.requires_grad_() for leaf in leaves), common.normal(t, h))


def _step(forward: Callable[[], Tensor], operands: Operands) -> tuple[Tensor, ...]:
    y = forward()
    return (y.detach(), *torch.autograd.grad(y, operands.leaves, operands.dy))


def _ours(package: Any, cell: str, size: Size, operands: Operands) -> Step:
    """A layer of ours with these weights."""
    x, gamma, fc1, fc2 = operands.leaves
    module = common.bundles.load_cell(package, cell)
    layer = module.SwiGLUNormMLP(size.hidden, size.intermediate, bias=False, device=common.DEVICE)
    layer.norm.weight, layer.fc1.weight, layer.fc2.weight = (
        torch.nn.Parameter(each) for each in (gamma, fc1, fc2)
    )
    leaves = (x, layer.norm.weight, layer.fc1.weight, layer.fc2.weight)
    step = partial(_step, partial(layer, x), Operands(leaves, operands.dy))
    step()  # delayed scaling has scales of these tensors from the second step on
    return step


def _check(case: str, step: Step, expected: tuple[Tensor, ...], tolerance: float) -> None:
    """Refuse to time another result than torch's."""
    for got, wanted in zip(step(), expected, strict=True):
        common.require_close(case, got, wanted, tolerance)


def _ignoring_sets(step: Step) -> common.Contender:
    return lambda _: step()


def _measure(package: Any, size: Size) -> Iterator[Row]:
    operands = Operands.drawn(size)
    torch.compiler.reset()
    compiled = torch.compile(torch_layer, fullgraph=True, dynamic=False)
    steps: dict[str, Step] = {PEER: partial(_step, partial(compiled, *operands.leaves), operands)}
    expected = steps[PEER]()
    case = f"{MODULE} {size}"
    for cell in common.bundles.cells_of(Path(package.__path__[0]), MODULE):
        name = common.contender(cell)
        steps[name] = _ours(package, cell, size, operands)
        tolerance = 1e-2 if cell.endswith("__bf16") else TOLERANCE
        _check(f"{case} {name}", steps[name], expected, tolerance)
    del expected
    samples = common.compare({name: _ignoring_sets(step) for name, step in steps.items()})
    for name, times in samples.items():
        yield common.row(
            *(case, name, "ms", times),
            rate=size.flops / statistics.median(times) / 1e9,
            rate_unit="TFLOP/s",
            extra={} if common.DEVICE == "cpu" else {"peak_gib": common.peak_gib(steps[name])},
        )


def layers(*, quick: bool = False) -> Iterator[Case]:
    """Layers of models, one after the other: their operands are large."""
    package = common.bundle()
    for size in QUICK_SIZES if quick else SIZES:
        yield Case(f"{MODULE} {size}", partial(_measure, package, size))
