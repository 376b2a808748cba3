"""A norm that leaves quantised copies of its rows, beside a device copy of the same bytes.

No module ends behind this step: a GEMM reads what it leaves. It is timed where it ships, in the
forward of a layer whose other steps move next to nothing of its size but run in kernels of their
own, and those up to its own are counted, as the profiler saw them; all contenders are measured like
that. A bundle of a module that only norms and quantises would be another kernel set to build, and
the time of the whole op less that of its other steps a difference of two larger numbers.

Where `make before REVISION=...` has made a bundle of an earlier revision, its layer takes turns
with ours; both have to give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import bandwidth
import common
import profiled
import revisions
import torch
from common import OURS, Case, Row
from layers import EPS, MODULE, TOLERANCE, torch_layer
from torch import Tensor
from torch.nn import functional

STEP = "norm_quantize"  # in the name of the last kernel that counts
INTERMEDIATE = 128
SIZES = (
    *((4096, 2048), (4096, 4096), (4096, 8192), (16384, 4096), (16384, 8192)),
    *((16384, 16384), (65536, 2048), (65536, 8192)),
)
QUICK_SIZES = ((128, 256),)
BLOCK = 128
MAX = torch.finfo(torch.float8_e4m3fn).max

Quantized = tuple[Tensor, ...]


def _codes(values: Tensor) -> Tensor:
    return values.clamp(-MAX, MAX).to(torch.float8_e4m3fn)


def _of_tensor(x: Tensor, gamma: Tensor) -> Quantized:
    """By one scale that is known before, here 1: codes, transposed codes, and the amax."""
    normed = functional.rms_norm(x, gamma.shape, gamma, EPS).float()
    codes = _codes(normed)
    return codes, codes.t().contiguous(), normed.abs().amax()


def _of_blocks(x: Tensor, gamma: Tensor) -> Quantized:
    """By a scale for 128 elements along each direction: codes and scales of both copies."""
    normed = functional.rms_norm(x, gamma.shape, gamma, EPS).float()
    rows, width = x.shape
    blocks = normed.view(rows, width // BLOCK, BLOCK)
    scale = _power_of_two(blocks.abs().amax(-1, keepdim=True))
    bands = normed.view(rows // BLOCK, BLOCK, width)
    band_scale = _power_of_two(bands.abs().amax(1, keepdim=True))
    columnwise = _codes(bands * band_scale).view(rows, width).t().contiguous()
    return _codes(blocks * scale).view(rows, width), 1 / scale, columnwise, 1 / band_scale


def _power_of_two(amax: Tensor) -> Tensor:
    """The scale that takes an amax to the largest code at most, rounded down."""
    return torch.exp2(torch.floor(torch.log2(MAX / amax)))


RECIPES: dict[str, Callable[[Tensor, Tensor], Quantized]] = {
    "fp8_delayed": _of_tensor,
    "fp8_block": _of_blocks,
}


def moved(recipe: str, rows: int, width: int) -> int:
    """Bytes that are read and written, each once: x, two copies, their scales, and statistics."""
    scales = 0
    if recipe == "fp8_block":
        scales = 4 * (rows * math.ceil(width / BLOCK) + width * math.ceil(rows / BLOCK))
    return 4 * rows * width + scales + 4 * rows


def _layer(package: Any, recipe: str, x: Tensor, gamma: Tensor) -> Callable[[int], Tensor]:
    """The layer that begins with this step; its result is checked against torch's."""
    width = x.shape[1]
    module = common.bundles.load_cell(package, f"{MODULE}__{recipe}")
    layer = module.SwiGLUNormMLP(width, INTERMEDIATE, bias=False, device=common.DEVICE)
    fc1 = common.normal(2 * INTERMEDIATE, width, scale=width**-0.5)
    fc2 = common.normal(width, INTERMEDIATE, scale=INTERMEDIATE**-0.5)
    layer.norm.weight, layer.fc1.weight, layer.fc2.weight = (
        torch.nn.Parameter(each) for each in (gamma, fc1, fc2)
    )

    def run(_: int) -> Tensor:
        result: Tensor = layer(x)
        return result

    run(0)  # delayed scaling has scales of these tensors from the second step on
    common.require_close(f"{MODULE} {recipe}", run(0), torch_layer(x, gamma, fc1, fc2), TOLERANCE)
    return run


def _measure(
    packages: Mapping[str, Any], recipe: str, case: str, rows: int, width: int
) -> Iterator[Row]:
    """Of a layer of each package, by name, of torch compiled and of a copy.

    Raises:
        SystemExit: layers of two packages give other bits.
    """
    x = common.normal(rows, width)
    gamma = 1 + common.normal(width, scale=0.1)
    torch.compiler.reset()
    compiled = torch.compile(RECIPES[recipe], fullgraph=True, dynamic=False)
    bytes_moved = moved(recipe, rows, width)
    copy = bandwidth.copy(bytes_moved)
    layers = {}
    for name, package in packages.items():
        torch.manual_seed(3)
        layers[name] = _layer(package, recipe, x, gamma)
    first, *others = (layer(0) for layer in layers.values())
    if any(not torch.equal(first, each) for each in others):
        raise SystemExit(f"{case}: revisions give other bits")
    samples = profiled.compare(
        {
            **{name: profiled.Part(layer, STEP) for name, layer in layers.items()},
            "torch compiled": profiled.Part(lambda _: compiled(x, gamma)),
            bandwidth.COPY: profiled.Part(lambda _: copy()),
        }
    )
    yield from bandwidth.rows(case, samples, bytes_moved)


def norm_quantize(*, quick: bool = False) -> Iterator[Case]:
    """Under every recipe whose norms quantise, at widths and rows of models."""
    package = common.bundle()
    packages = {OURS: package, **revisions.earlier(package)}
    shipped = common.bundles.cells_of(Path(package.__path__[0]), MODULE)
    for recipe in RECIPES:
        if f"{MODULE}__{recipe}" not in shipped:
            continue
        for rows, width in QUICK_SIZES if quick else SIZES:
            case = f"norm_quantize {recipe} {rows} x {width}"
            yield Case(case, partial(_measure, packages, recipe, case, rows, width))
