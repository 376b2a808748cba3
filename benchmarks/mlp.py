"""The whole expert MLP under every recipe, forward and backward, against torch.

Torch's runs torch._grouped_mm in bf16.  Every recipe pays for its quantisation here, weights
included; without a recipe's name, ours is bf16 too.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import common
import shapes
import torch
from common import OURS, Case, Outcome
from torch import Tensor

DENSE = 8192
PEER, EAGER = "torch compiled", "torch eager"

# Relative difference from bf16 that a whole chain of quantised products may have.
TOLERANCES = {OURS: 2e-2, EAGER: 2e-2, f"{OURS} nvfp4": 5e-1}
TOLERANCE = 2e-1

Step = Callable[[], tuple[Tensor, ...]]


def torch_mlp(x: Tensor, fc1: Tensor, fc2: Tensor, probs: Tensor, ends: Tensor) -> Tensor:
    """The experts of torch: x [T, H], fc1 [E, 2F, H], fc2 [E, H, F], probs [T], ends int32 [E]."""
    h = torch._grouped_mm(x, fc1.transpose(-2, -1), offs=ends)
    gate, up = h.float().chunk(2, dim=-1)
    a = (torch.nn.functional.silu(gate) * up * probs[:, None]).to(x.dtype)
    return torch._grouped_mm(a, fc2.transpose(-2, -1), offs=ends)


def _leaves(shape: shapes.Expert) -> list[Tensor]:
    hidden, inner = shape.hidden, shape.intermediate
    parameter = torch.nn.Parameter
    return [
        common.normal(shape.tokens, hidden).requires_grad_(),
        parameter(common.normal(shape.groups, 2 * inner, hidden, scale=hidden**-0.5)),
        parameter(common.normal(shape.groups, hidden, inner, scale=inner**-0.5)),
        torch.rand(shape.tokens, device=common.DEVICE).requires_grad_(),
    ]


def _step(forward: Callable[[], Tensor], leaves: list[Tensor], dy: Tensor) -> tuple[Tensor, ...]:
    y = forward()
    return (y.detach(), *torch.autograd.grad(y, leaves, dy))


def _run(step: Step, _: int) -> Any:
    """One step; its tensors exceed every cache, so there is one set of them."""
    return step()


def _floor(shape: shapes.Expert, dense_rate: float, copy_rate: float) -> float:
    """Milliseconds for bf16 products at the dense rate, then the activation's bytes at the copy's.

    The activation reads h and writes a, its gradient reads h and da and writes dh.
    """
    products = 18 * shape.tokens * shape.hidden * shape.intermediate / dense_rate
    activation = shape.tokens * shape.intermediate * (2 * 3 + 2 * 5) / copy_rate
    return 1e3 * (products + activation)


def _layers(package: Any, shape: shapes.Expert, leaves: list[Tensor]) -> dict[str, torch.nn.Module]:
    """Ours by contender, a layer for every recipe and choice; all share the same weights."""
    found: dict[str, torch.nn.Module] = {}
    folder = Path(package.__path__[0])
    for cell in common.bundles.cells_of(folder, "grouped_mlp", choices=True):
        layer = common.bundles.load_cell(package, cell).GroupedMLP(
            shape.groups, shape.hidden, shape.intermediate, device=common.DEVICE
        )
        layer.fc1.weight, layer.fc2.weight = leaves[1], leaves[2]
        found[common.contender(cell)] = layer
    return found


def _steps(package: Any, shape: shapes.Expert) -> dict[str, Step]:
    sizes = shapes.splits(shape.groups, shape.tokens)
    ends = sizes.cumsum(0).to(torch.int32)
    compiled = torch.compile(torch_mlp, fullgraph=True, dynamic=False)
    leaves, dy = _leaves(shape), common.normal(shape.tokens, shape.hidden)
    x, fc1, fc2, probs = leaves
    forwards: dict[str, Callable[[], Tensor]] = {
        name: partial(function, x, fc1, fc2, probs, ends)
        for name, function in ((PEER, compiled), (EAGER, torch_mlp))
    }
    for name, layer in _layers(package, shape, leaves).items():
        forwards[name] = partial(layer, x, sizes, probs)
    return {name: partial(_step, forward, leaves, dy) for name, forward in forwards.items()}


def _checked(
    shape: shapes.Expert, steps: dict[str, Step]
) -> tuple[dict[str, Step], list[common.Failure]]:
    """The steps whose gradients are torch's; a recipe with state has warmed up."""
    expected = steps[PEER]()

    def check(name: str, step: Step) -> Step:
        step()
        case, tolerance = f"{shape.name} {name}", TOLERANCES.get(name, TOLERANCE)
        for got, wanted in zip(step(), expected, strict=True):
            common.require_close(case, got, wanted, tolerance)
        return step

    return common.try_each(shape.name, steps, check)


def measure(package: Any, shape: shapes.Expert, copy_rate: float) -> list[Outcome]:
    """Check all gradients, then time a forward and backward of each in turns."""
    steps, failures = _checked(shape, _steps(package, shape))
    torch.cuda.empty_cache()
    peaks = {name: common.peak_gib(step) for name, step in steps.items()}
    a, b = common.normal(DENSE, DENSE), common.normal(DENSE, DENSE)
    contenders: dict[str, common.Contender] = {
        name: partial(_run, step) for name, step in steps.items()
    }
    samples = common.compare({**contenders, "dense": lambda _: a @ b.t()}, seconds=0.15)
    dense_rate = 2 * DENSE**3 / statistics.median(samples.pop("dense")) * 1e3
    flops = 18 * shape.tokens * shape.hidden * shape.intermediate
    peer = statistics.median(samples[PEER])
    rows = [
        common.row(
            *(shape.name, name, "ms", times),
            floor=_floor(shape, dense_rate, copy_rate),
            rate=flops / statistics.median(times) / 1e9,
            rate_unit="TFLOP/s",
            fraction=flops / statistics.median(times) * 1e3 / dense_rate,
            extra={
                "peak_gib": peaks[name],
                "dense_tflops": dense_rate / 1e12,
                "speedup_over_torch": peer / statistics.median(times),
            },
        )
        for name, times in samples.items()
    ]
    return [*rows, *failures]


def mlp() -> Iterator[Case]:
    """The expert MLP of three models."""
    package, copy_rate = common.bundle(), common.copy_rate()
    for shape in shapes.EXPERTS:
        yield Case(shape.name, partial(measure, package, shape, copy_rate))
        torch.cuda.empty_cache()
