"""Norms that write quantised copies: tiles wait for statistics that other blocks find, or rows stay
in the shared memory of a cluster between both.

Inputs take turns in the same memory, so that statistics of the call before would show, and streams
share the device, so that blocks do not all have a place at once.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import bundles
import gpu_support as support
import pytest
import torch
from test_graphs import capture
from torch import Tensor

MODULE, CLASS = "norm_mlp_swiglu", "SwiGLUNormMLP"
RECIPES = ("fp8_delayed", "fp8_block")
ROWS = (1, 127, 129, 4097, 20000)
WIDTHS = (64, 264, 1032, 2048, 3072, 4096, 4104, 8192, 16384, 16392)
"""Teams of every kind, clusters of every size with whole and other panels, and rows that a block
holds no more."""
TURNS, STREAMS = 6, 3


def layer_of(bundle: ModuleType, folder: Path, recipe: str, width: int) -> Any:
    """A layer that begins with a norm, whose result it quantises."""
    cell = f"{MODULE}__{recipe}"
    if cell not in bundles.cells_of(folder, MODULE):
        pytest.skip(f"{folder.name} has no {cell}")
    module: Any = importlib.import_module(f"{bundle.__name__}.{cell}")
    torch.manual_seed(0)
    return getattr(module, CLASS)(hidden=width, intermediate=64).to(support.DEVICE).bfloat16()


def trained(layer: Any, x: Tensor) -> dict[str, Tensor]:
    """Result and gradients of weights, which read the two copies of the norm."""
    named = dict(layer.named_parameters())
    y = layer(x)
    gradients = torch.autograd.grad(y.float().square().sum(), list(named.values()))
    return {"y": y.detach(), **dict(zip(named, gradients, strict=True))}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
def test_streams_and_turns_change_nothing(
    bundle: ModuleType, folder: Path, rows: int, width: int
) -> None:
    layer = layer_of(bundle, folder, "fp8_block", width)  # which has no state
    inputs = [support.randn((rows, width), torch.bfloat16, seed, 2.0**seed) for seed in range(4)]
    expected = []
    for x in inputs:
        expected.append(trained(layer, x))
        torch.cuda.synchronize()
    streams = [support.cuda.Stream() for _ in range(STREAMS)]
    for turn in range(TURNS):
        found = []
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found.append(trained(layer, inputs[(turn + number) % len(inputs)]))
        torch.cuda.synchronize()
        for number, got in enumerate(found):
            support.assert_same(got, expected[(turn + number) % len(inputs)])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
def test_columnwise_copies_are_those_of_two_steps(
    bundle: ModuleType, folder: Path, rows: int, width: int
) -> None:
    """The norm's own kernel and then the quantise kernel give the same codes and scales."""
    layer = layer_of(bundle, folder, "fp8_block", width)
    norm, apart = (
        importlib.import_module(f"{bundle.__name__}.{cell}")
        for cell in ("rms_norm__bf16", "quantize__fp8_block")
    )
    x = support.randn((rows, width), torch.bfloat16, 3)
    with torch.no_grad():
        layer.norm.weight.copy_(support.randn((width,), torch.bfloat16, 4))
        wanted = apart.quantize(norm.rms_norm(x, layer.norm.weight, eps=layer.norm_eps))
    y = layer(x)  # what it has saved lives as long
    saved = [each for each in y.grad_fn.saved_tensors if each is not None]
    for copy in (wanted.columnwise_data, wanted.columnwise_scale_inv):
        assert any(_same(each, copy) for each in saved)


def _same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit; `torch.equal` does not know FP8."""
    alike = (one.shape, one.dtype) == (other.shape, other.dtype)
    return alike and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("rows", "width"), ((200, 1032), (4097, 2048), (1000, 4096), (300, 8192)))
def test_replays_follow_new_values(
    bundle: ModuleType, folder: Path, recipe: str, rows: int, width: int
) -> None:
    layer = layer_of(bundle, folder, recipe, width)
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    x = support.randn((rows, width), torch.bfloat16, 0)
    graph, results = capture(lambda: trained(layer, x))
    for seed in range(1, 6):
        x.copy_(support.randn((rows, width), torch.bfloat16, seed, 2.0**seed))
        layer.load_state_dict(state)
        graph.replay()
        replayed = {name: value.clone() for name, value in results.items()}
        layer.load_state_dict(state)
        support.assert_same(replayed, trained(layer, x))
