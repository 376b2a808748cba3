"""The experts of a mixture-of-experts layer, from tokens to tokens: time, and what it holds.

All contenders share tokens, weights, dy and a routing: each token's experts and their weights.
torch's is the same layer as plain functions, compiled whole: a stable sort, a gather,
`torch._grouped_mm` twice, and a gather with a sum over each token's experts.  SonicMoE's takes part
where it is installed.  Rows say what lives between forward and backward, and the peak.

`moe_forms` has no peer:

    forms SIZE            the choices that a layer has, beside each other
    whole MODEL           ours from tokens to y and back to x, the router included where the module
                          has one for so many choices, beside the expert MLP alone, whose rows are
                          there already
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import common
import sonic
import torch
from common import Case, Row
from torch import Tensor

PEER = "torch compiled"
MODULE = "moe_layer"
TOLERANCE = 0.2  # of results under a quantised recipe; 2e-2 in bf16, whose h is rounded elsewhere
GRADIENTS = 3  # GEMMs of a forward and backward, over those of a forward
EXPERTS = f"{common.OURS} expert MLP"
WRITTEN, CODES = "written_rows", "cache_quantized_input"
ROUTED = 8  # choices of `routed_moe_layer`

Step = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Size:
    """Tokens, experts of each, experts, and the widths of a layer."""

    tokens: int
    choices: int
    experts: int
    hidden: int
    intermediate: int
    model: str = ""

    def __str__(self) -> str:
        own = f"T {self.tokens} K {self.choices} E {self.experts}"
        return f"{self.model} {own} H {self.hidden} I {self.intermediate}".strip()

    @property
    def flops(self) -> int:
        """Of the GEMMs of a forward and backward."""
        rows = self.tokens * self.choices
        return GRADIENTS * 6 * rows * self.hidden * self.intermediate


# The published shapes of SonicMoE, whose experts get finer along a row of three, and models.
SONIC = (
    *(Size(24576, 16 // n, 256 // n, 1536, 128 * n) for n in (2, 4, 8)),
    *(Size(32768, 32 // n, 512 // n, 4096, 128 * n) for n in (2, 4, 8)),
    *(Size(32768, 32 // n, 512 // n, 4096, 256 * n) for n in (2, 4, 8)),
)
MODELS = (
    Size(16384, 2, 8, 4096, 14336, "mixtral"),
    Size(8192, 8, 128, 2048, 768, "qwen3"),
    Size(16384, 8, 64, 2048, 1024, "olmoe"),
    Size(8192, 8, 32, 7168, 2048, "dsv3"),
)
WHOLE = tuple(size for size in MODELS if size.model in ("mixtral", "dsv3", "qwen3"))
QUICK_SIZES = (Size(64, 2, 4, 64, 32),)
QUICK_WHOLE = (*QUICK_SIZES, Size(64, ROUTED, 16, 64, 32))


@dataclass(frozen=True)
class Operands:
    """What all contenders share.

    Attributes:
        leaves: x [T, H], fc1 [E, 2 I, H], fc2 [E, H, I], probs [T, K], which ask for gradients.
        ids: experts of each token, int32 [T, K].
        counts: how often each expert is chosen, int64 [E].
        dy: [T, H].
    """

    leaves: tuple[Tensor, ...]
    ids: Tensor
    counts: Tensor
    dy: Tensor

    @classmethod
    def drawn(cls, size: Size) -> Operands:
        """Random ones on the device; the experts of a token differ."""
        t, h, f = size.tokens, size.hidden, size.intermediate
        scores = torch.rand(t, size.experts, device=common.DEVICE)
        probs, ids = scores.topk(size.choices, dim=-1)
        parameter = torch.nn.Parameter
        leaves = (
            common.normal(t, h).requires_grad_(),
            parameter(common.normal(size.experts, 2 * f, h, scale=h**-0.5)),
            parameter(common.normal(size.experts, h, f, scale=f**-0.5)),
            (probs / probs.sum(-1, keepdim=True)).requires_grad_(),
        )
        counts = torch.bincount(ids.flatten(), minlength=size.experts)
        return cls(leaves, ids.to(torch.int32), counts, common.normal(t, h))


def torch_layer(x: Tensor, fc1: Tensor, fc2: Tensor, probs: Tensor, ids: Tensor) -> Tensor:
    """x [T, H], fc1 [E, 2 I, H], fc2 [E, H, I], probs and ids [T, K] -> [T, H]."""
    tokens, choices = ids.shape
    order = torch.argsort(ids.flatten(), stable=True)
    experts = torch.arange(fc1.shape[0], device=ids.device)
    ends = torch.searchsorted(ids.flatten()[order], experts, right=True).to(torch.int32)
    h = torch._grouped_mm(x[order // choices], fc1.transpose(-2, -1), offs=ends)
    gate, up = h.float().chunk(2, dim=-1)
    a = torch.nn.functional.silu(gate) * up * probs.flatten()[order][:, None]
    y = torch._grouped_mm(a.to(x.dtype), fc2.transpose(-2, -1), offs=ends)
    inverse = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=x.device))
    return y[inverse].view(tokens, choices, -1).sum(1)


def _step(forward: Callable[[], Tensor], leaves: tuple[Tensor, ...], dy: Tensor) -> Any:
    y = forward()
    return (y.detach(), *torch.autograd.grad(y, leaves, dy))


def _module(package: Any, cell: str, name: str, size: Size, operands: Operands) -> Any:
    """A module of ours with these weights of experts."""
    layer = getattr(common.bundles.load_cell(package, cell), name)(
        size.experts, size.hidden, size.intermediate, device=common.DEVICE
    )
    _, layer.fc1.weight, layer.fc2.weight, *_ = operands.leaves
    return layer


def _ours(package: Any, cell: str, size: Size, operands: Operands) -> Callable[[], Tensor]:
    """The forward of a layer of ours with these weights."""
    x, _, _, probs = operands.leaves
    layer = _module(package, cell, "MoELayer", size, operands)
    if "cached_weights" in cell:
        for _ in range(2):  # delayed scaling has a scale of these weights from the second on
            layer.refresh_weights()
    return partial(layer, x, probs, operands.ids, operands.counts)


def _choices(package: Any) -> list[str]:
    """Cells of the layer that the bundle has."""
    return list(common.bundles.cells_of(Path(package.__path__[0]), MODULE, choices=True))


def _bytes_of_rows(cell: str, size: Size) -> float:
    """What a layer is to hold besides x: of each row h, a weight and two places.

    Of h, `2 I` elements: two bytes, or codes and, where blocks have them, scales of 128.
    """
    of_h = 4.0 * size.intermediate
    if CODES in cell:
        scales = 4 * math.ceil(2 * size.intermediate / 128) if "block" in cell else 0
        of_h = 2.0 * size.intermediate + scales
    return size.tokens * size.choices * (of_h + 12)


def held_gib(forward: Callable[[], Tensor]) -> float:
    """What lives between forward and backward, above what was there before; without y."""
    common.synchronize()
    before = torch.cuda.memory_allocated()
    y = forward()
    common.synchronize()
    return (torch.cuda.memory_allocated() - before - y.nbytes) / 2**30


def _memory(forward: Callable[[], Tensor], step: Step) -> dict[str, float]:
    if common.DEVICE == "cpu":
        return {}
    return {"held_gib": held_gib(forward), "peak_gib": common.peak_gib(step)}


def _measure(package: Any, size: Size) -> Iterator[Row]:
    operands = Operands.drawn(size)
    torch.compiler.reset()
    compiled: Callable[..., Tensor] = torch.compile(torch_layer, fullgraph=True, dynamic=False)
    forwards: dict[str, Callable[[], Tensor]] = {
        PEER: partial(compiled, *operands.leaves, operands.ids)
    }
    for cell in _choices(package):
        if WRITTEN in cell or CODES in cell:
            continue  # beside each other in `moe_forms`
        forwards[common.contender(cell)] = _ours(package, cell, size, operands)
    steps: dict[str, Step] = {
        name: partial(_step, forward, operands.leaves, operands.dy)
        for name, forward in forwards.items()
    }
    if sonic.is_installed() and common.DEVICE != "cpu":
        x, fc1, fc2, probs = operands.leaves
        leaves = (x, sonic.alternating(fc1), fc2, probs)
        peer = partial(sonic.experts, *leaves, operands.ids)
        its_step = partial(_step, peer, leaves, operands.dy)
        try:
            its_step()
        except Exception as error:  # a peer's fault ends no benchmark of ours
            print(f"{sonic.NAME}: {size}: left out: {error}", file=sys.stderr)
        else:
            forwards[sonic.NAME], steps[sonic.NAME] = peer, its_step
    expected, case = steps[PEER](), f"{MODULE} {size}"
    for name, step in steps.items():
        step()  # delayed scaling has scales of these tensors from the second step on
        tolerance = 2e-2 if name in (PEER, common.OURS, sonic.NAME) else TOLERANCE
        for got, wanted in zip(_in_order(name, step()), expected, strict=True):
            common.require_close(f"{case} {name}", got, wanted, tolerance)
    del expected
    for row in _timed(case, size, steps):
        name = row.contender
        yield replace(row, extra=_memory(forwards[name], steps[name]))


def _timed(case: str, size: Size, steps: dict[str, Step]) -> Iterator[Row]:
    """A row for each step."""
    samples = common.compare({name: partial(_run, step) for name, step in steps.items()})
    for name, times in samples.items():
        rate = size.flops / statistics.median(times) / 1e9
        yield common.row(case, name, "ms", times, rate=rate, rate_unit="TFLOP/s")


def _forms(package: Any, size: Size) -> Iterator[Row]:
    """Rows of the choices that a layer of ours has; of sizes without a name, those in bf16."""
    operands = Operands.drawn(size)
    forwards = {
        cell: _ours(package, cell, size, operands)
        for cell in _choices(package)
        if size.model or "bf16" in cell
    }
    steps: dict[str, Step] = {
        cell: partial(_step, forward, operands.leaves, operands.dy)
        for cell, forward in forwards.items()
    }
    case, expected = f"forms {size}", steps[f"{MODULE}__bf16"]()
    for cell, step in steps.items():
        step()  # delayed scaling has scales of these tensors from the second step on
        for got, wanted in zip(step(), expected, strict=True):
            tolerance = 0 if "bf16" in cell else TOLERANCE
            common.require_close(f"{case} {cell}", got, wanted, tolerance)
    del expected
    cells = {common.contender(cell): cell for cell in steps}
    for row in _timed(case, size, {name: steps[cell] for name, cell in cells.items()}):
        cell = cells[row.contender]
        found = _memory(forwards[cell], steps[cell])
        if found:
            asked = _bytes_of_rows(cell, size) / 2**30
            found["held_over_formula"] = found["held_gib"] / asked
        yield replace(row, extra=found)


def _routed(package: Any, size: Size, given: Operands) -> tuple[Callable[[], Tensor], Operands]:
    """The forward of a layer with its router, and the operands that this router gives."""
    x, fc1, fc2, _ = given.leaves
    layer = _module(package, "routed_moe_layer__bf16", "RoutedMoELayer", size, given)
    weight = layer.router.weight
    router = common.bundles.load_cell(package, "router__bf16").router
    probs, _, _, ids, counts = router(x.detach(), weight.detach())

    def forward() -> Tensor:
        y: Tensor
        y, *_ = layer(x)
        return y

    return forward, replace(given, leaves=(x, fc1, fc2, probs, weight), ids=ids, counts=counts)


def _beside_experts(package: Any, size: Size) -> Iterator[Row]:
    """Rows of a whole layer and of its experts alone, forward and backward."""
    operands = Operands.drawn(size)
    if size.choices == ROUTED:
        forward, operands = _routed(package, size, operands)
    else:
        forward = _ours(package, "moe_layer__bf16", size, operands)
    x, fc1, fc2, probs, *router = operands.leaves
    order = operands.ids.flatten().argsort(stable=True)
    rows = x.detach()[order // size.choices].requires_grad_()
    row_probs = probs.detach().flatten()[order].requires_grad_()
    experts = _module(package, "grouped_mlp__bf16", "GroupedMLP", size, operands)
    alone = partial(experts, rows, operands.counts, row_probs)
    case = f"whole {size.model or size}"
    with torch.no_grad():
        added = alone()[order.argsort()].view(size.tokens, size.choices, -1).sum(1)
        common.require_close(case, forward(), added, 2e-2)
    leaves = (x, fc1, fc2, *(router or (probs,)))
    of_rows = (rows, fc1, fc2, row_probs)
    steps: dict[str, Step] = {
        common.OURS: partial(_step, forward, leaves, operands.dy),
        EXPERTS: partial(_step, alone, of_rows, common.normal(*rows.shape)),
    }
    yield from _timed(case, size, steps)


def _in_order(name: str, found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """y and gradients of x, fc1, fc2 and probs, with rows of fc1 as torch has them."""
    if name != sonic.NAME:
        return found
    y, dx, dfc1, *others = found
    return (y, dx, sonic.in_halves(dfc1), *others)


def _run(step: Step, _: int) -> None:
    step()


def moe_layer(*, quick: bool = False) -> Iterator[Case]:
    """Layers one after the other: their operands are large."""
    package = common.bundle()
    for size in QUICK_SIZES if quick else (*MODELS, *SONIC):
        yield Case(f"{MODULE} {size}", partial(_measure, package, size))


def moe_forms(*, quick: bool = False) -> Iterator[Case]:
    """Forms of one layer beside each other, and a whole one beside its experts alone."""
    package = common.bundle()
    for size in QUICK_SIZES if quick else (*MODELS, *SONIC):
        yield Case(f"forms {size}", partial(_forms, package, size))
    for size in QUICK_WHOLE if quick else WHOLE:
        yield Case(f"whole {size.model or size}", partial(_beside_experts, package, size))
