"""Norms that write quantised copies: tiles wait for statistics that other blocks find.

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
from torch import Tensor

MODULE, CELL, CLASS = "norm_mlp_swiglu", "norm_mlp_swiglu__fp8_block", "SwiGLUNormMLP"
ROWS = (1, 127, 129, 4097, 20000)
WIDTHS = (64, 264, 2048, 4104, 16384, 16392)
"""Teams of every kind, and rows that a block holds no more."""
TURNS, STREAMS = 6, 3


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
    if CELL not in bundles.cells_of(folder, MODULE):
        pytest.skip(f"{folder.name} has no {CELL}")
    module: Any = importlib.import_module(f"{bundle.__name__}.{CELL}")
    layer = getattr(module, CLASS)(hidden=width, intermediate=64).to(support.DEVICE).bfloat16()
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
