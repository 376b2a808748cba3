"""A dense decoder layer as one graph, forward and backward: modules of ours around attention.

All contenders share x, dy, weights and PyTorch's causal attention; torch's is the same layer as
plain functions. Each is compiled without a break, and timed as it is called and as one CUDA graph
of forward and backward.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import common
import graphs
import layers
import pairs
import torch
from common import Case, Outcome
from torch import Tensor, nn
from torch.nn import functional

PEER = "torch compiled"
PROJECTION, OUTPUT, MLP = "norm_qkv", "linear_residual", layers.MODULE
HEAD = 128
BASE = 10000.0
# Of results against those of eager torch. What differs in attention's gradients are differences of
# probabilities, small beside what they are differences of.
TOLERANCES = {"bf16": 2e-2, "nvfp4": 0.5}
TOLERANCE = 0.25

Results = tuple[Tensor, ...]
Step = Callable[[], Results]


@dataclass(frozen=True)
class Size:
    """Sequences, tokens of each, and the widths of a layer."""

    batch: int
    tokens: int
    hidden: int
    intermediate: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.tokens}"

    @property
    def heads(self) -> int:
        """Of `HEAD` elements each."""
        return self.hidden // HEAD

    @property
    def flops(self) -> int:
        """Of GEMMs, and of attention below the diagonal, in a forward and backward."""
        tokens = self.batch * self.tokens
        weights = self.hidden * (4 * self.hidden + 3 * self.intermediate)
        attention = 2 * tokens * self.tokens * self.hidden  # a forward; a backward has 2.5 of it
        return 6 * tokens * weights + attention * 7 // 2


SIZES = (Size(1, 8192, 4096, 14336), Size(4, 2048, 4096, 14336))
QUICK_SIZES = (Size(2, 64, 256, 384),)


# ---- what all share


@dataclass(frozen=True)
class Operands:
    """Of one layer.

    Attributes:
        x: [B, S, H].
        weights: by name: two vectors of norms [H], qkv [3 H, H], out [H, H], fc1 [2 F, H] and
            fc2 [H, F].
        angles: cos and sin, fp32 [B, S, HEAD / 2].
        dy: [B, S, H].
    """

    x: Tensor
    weights: Mapping[str, Tensor]
    angles: tuple[Tensor, Tensor]
    dy: Tensor

    @classmethod
    def drawn(cls, size: Size) -> Operands:
        """Random ones on the device."""
        h, f = size.hidden, size.intermediate
        weights = {
            "attention_norm": 1 + common.normal(h, scale=0.1),
            "qkv": common.normal(3 * h, h, scale=h**-0.5),
            "out": common.normal(h, h, scale=h**-0.5),
            "mlp_norm": 1 + common.normal(h, scale=0.1),
            "fc1": common.normal(2 * f, h, scale=h**-0.5),
            "fc2": common.normal(h, f, scale=f**-0.5),
        }
        shape = (size.batch, size.tokens, h)
        return cls(
            common.normal(*shape).requires_grad_(),
            {name: weight.requires_grad_() for name, weight in weights.items()},
            _angles(size),
            common.normal(*shape),
        )


def _angles(size: Size) -> tuple[Tensor, Tensor]:
    """Of every token and pair, by its place in its sequence."""
    pairs_of_head = torch.arange(HEAD // 2, device=common.DEVICE) / (HEAD // 2)
    places = torch.arange(size.tokens, device=common.DEVICE, dtype=torch.float32)
    angles = (places[:, None] * BASE**-pairs_of_head).expand(size.batch, -1, -1)
    return angles.cos().contiguous(), angles.sin().contiguous()


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of heads that lie beside each other, [B, S, H] each -> [B, S, H]."""
    shape = (*q.shape[:2], -1, HEAD)
    q, k, v = (each.view(shape).transpose(1, 2) for each in (q, k, v))
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed.transpose(1, 2).flatten(2)


# ---- the layer, by torch and by ours


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads of x [B, S, H], whose pairs are half a head apart, by angles [B, S, HEAD / 2]."""
    first, second = x.float().view(*x.shape[:2], -1, 2, HEAD // 2).unbind(-2)
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-2)
    return rotated.flatten(2).to(x.dtype)


def torch_layer(x: Tensor, weights: Mapping[str, Tensor], angles: tuple[Tensor, Tensor]) -> Tensor:
    """The layer as plain functions."""
    gamma = weights["attention_norm"]
    normed = functional.rms_norm(x, gamma.shape, gamma, layers.EPS)
    q, k, v = functional.linear(normed, weights["qkv"]).chunk(3, dim=-1)
    mixed = attention(_rotated(q, *angles), _rotated(k, *angles), v)
    h = x + functional.linear(mixed, weights["out"])
    return layers.torch_layer(h, weights["mlp_norm"], weights["fc1"], weights["fc2"])


class Layer(nn.Module):
    """The layer of modules of ours under one recipe; `leaves` are those of `Operands.weights`."""

    def __init__(
        self, package: Any, recipe: str, size: Size, weights: Mapping[str, Tensor]
    ) -> None:
        super().__init__()
        load = partial(common.bundles.load_cell, package)
        h, make = size.hidden, {"bias": False, "device": common.DEVICE}
        self.project = load(f"{PROJECTION}__{recipe}").NormQKV(h, h, **make)
        self.out = load(f"{OUTPUT}__{recipe}").LinearResidual(h, h, **make)
        self.mlp = load(f"{MLP}__{recipe}").SwiGLUNormMLP(h, size.intermediate, **make)
        self.project.norm.weight = nn.Parameter(weights["attention_norm"])
        self.project.qkv.weight = nn.Parameter(weights["qkv"])
        self.out.fc.weight = nn.Parameter(weights["out"])
        self.mlp.norm.weight = nn.Parameter(weights["mlp_norm"])
        self.mlp.fc1.weight = nn.Parameter(weights["fc1"])
        self.mlp.fc2.weight = nn.Parameter(weights["fc2"])
        first = (self.project.norm, self.project.qkv, self.out.fc)
        parts = (*first, self.mlp.norm, self.mlp.fc1, self.mlp.fc2)
        self.leaves = tuple(part.weight for part in parts)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """x [B, S, H] -> [B, S, H]."""
        q, k, v = self.project(x, *angles)
        result: Tensor = self.mlp(self.out(attention(q, k, v), x))
        return result


# ---- steps


@dataclass(frozen=True)
class Contender:
    """Who takes a step.

    Attributes:
        step: forward and backward: y, and the gradients of x and of the weights.
        tolerance: relative Frobenius distance from those of eager torch.
    """

    step: Step
    tolerance: float


def _step(forward: Callable[[], Tensor], leaves: Results, dy: Tensor) -> Results:
    y = forward()
    return (y.detach(), *torch.autograd.grad(y, leaves, dy))


def _torch(operands: Operands, compile_layer: bool) -> Contender:
    layer: Any = torch_layer
    if compile_layer:
        layer = torch.compile(torch_layer, fullgraph=True, dynamic=False)
    leaves = (operands.x, *operands.weights.values())
    forward = partial(layer, operands.x, operands.weights, operands.angles)
    return Contender(partial(_step, forward, leaves, operands.dy), TOLERANCES["bf16"])


def _ours(package: Any, recipe: str, size: Size, operands: Operands) -> Contender:
    layer = Layer(package, recipe, size, operands.weights)
    compiled = torch.compile(layer, fullgraph=True, dynamic=False)
    forward = partial(compiled, operands.x, operands.angles)
    step = partial(_step, forward, (operands.x, *layer.leaves), operands.dy)
    step()  # delayed scaling has scales of these tensors from the second step on
    return Contender(step, TOLERANCES.get(recipe, TOLERANCE))


def recipes(package: Any) -> list[str]:
    """Those under which the bundle has every module of the layer.

    Raises:
        SystemExit: there are none.
    """
    folder = Path(package.__path__[0])
    found = [
        {cell.partition("__")[2] for cell in common.bundles.cells_of(folder, module)}
        for module in (PROJECTION, OUTPUT, MLP)
    ]
    if not (shared := set.intersection(*found)):
        raise SystemExit(f"{folder} has no recipe with {PROJECTION}, {OUTPUT} and {MLP}")
    return sorted(shared)


def _contenders(
    package: Any, size: Size, operands: Operands
) -> Mapping[str, Callable[[], Contender]]:
    """What makes each."""
    ours = {
        common.contender(f"{MLP}__{recipe}"): partial(_ours, package, recipe, size, operands)
        for recipe in recipes(package)
    }
    return {
        "torch": partial(_torch, operands, compile_layer=False),
        PEER: partial(_torch, operands, compile_layer=True),
        **ours,
    }


def _check(case: str, who: Contender, step: Step, expected: Results) -> None:
    """Refuse to time other results than those of eager torch."""
    for got, wanted in zip(step(), expected, strict=True):
        common.require_close(case, got, wanted, who.tolerance)


def _measure(package: Any, size: Size) -> Iterator[Outcome]:
    """As called, then captured; in one stream, since a step is captured where it ran before."""
    torch.compiler.reset()
    case = f"decoder {size}"
    with graphs.own_stream():
        operands = Operands.drawn(size)
        expected = _torch(operands, compile_layer=False).step()

        def checked(name: str, make: Callable[[], Contender]) -> Contender:
            made = make()
            _check(f"{case} {name}", made, made.step, expected)
            return made

        made, failures = common.try_each(case, _contenders(package, size, operands), checked)
        yield from failures
        yield from _rows(case, size, {name: who.step for name, who in made.items()})

        def captured(name: str, who: Contender) -> Step:
            replay = graphs.capture(who.step)
            _check(f"{case} captured {name}", who, replay, expected)
            return replay

        steps, failures = common.try_each(f"{case} captured", made, captured)
        yield from failures
        yield from _rows(f"{case} captured", size, steps)


def _rows(case: str, size: Size, steps: Mapping[str, Step]) -> Iterator[Outcome]:
    samples = common.compare({name: _ignoring_sets(step) for name, step in steps.items()})
    for name, times in samples.items():
        extra = {}
        if PEER in samples:
            extra["speedup_over_torch"] = pairs.ratio(samples[PEER], times).median
        if common.DEVICE != "cpu" and not isinstance(steps[name], graphs.Replay):
            extra["peak_gib"] = common.peak_gib(steps[name])
        yield common.row(
            *(case, name, "ms", times),
            rate=size.flops / statistics.median(times) / 1e9,
            rate_unit="TFLOP/s",
            extra=extra,
        )


def _ignoring_sets(step: Step) -> common.Contender:
    return lambda _: step()


def decoder(*, quick: bool = False) -> Iterator[Case]:
    """One long sequence, and several short ones."""
    package = common.bundle()
    recipes(package)  # before the time is spent
    for size in QUICK_SIZES if quick else SIZES:
        yield Case(f"decoder {size}", partial(_measure, package, size))
