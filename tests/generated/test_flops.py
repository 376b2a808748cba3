"""Models read the same in PyTorch's counter of operations with generated modules as without."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from .loading import load_bundle

BUNDLE = Path(__file__).parents[2] / "generated" / "cpu"
T, K, N, E, F = 24, 32, 48, 3, 64


def load(cell: str) -> ModuleType:
    """A cell of the committed bundle, loaded by path."""
    name = "flops_bundle"
    if name not in sys.modules:
        load_bundle(name, BUNDLE)
    return importlib.import_module(f"{name}.{cell}")


def flops(layer: nn.Module, *inputs: Tensor) -> int:
    """Of a training step."""
    with FlopCounterMode(display=False) as counter:
        layer(*inputs).sum().backward()
    return int(counter.get_total_flops())


def tokens(*, requires_grad: bool) -> Tensor:
    return torch.randn(T, K).bfloat16().requires_grad_(requires_grad)


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_delayed", "nvfp4"])
def test_a_linear_layer(recipe: str, requires_grad: bool) -> None:
    ours = load(f"linear__{recipe}").Linear(K, N, bias=True)
    plain = nn.Linear(K, N, dtype=torch.bfloat16)
    x = tokens(requires_grad=requires_grad)
    assert flops(ours, x) == flops(plain, x) == (3 if requires_grad else 2) * 2 * T * K * N


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_experts_count_every_row(recipe: str) -> None:
    """Sizes of groups lie on the device, so rows past the last group count as others do."""
    layer = load(f"grouped_mlp__{recipe}").GroupedMLP(E, K, F)
    x, splits, probs = tokens(requires_grad=True), torch.tensor([8, 0, 8]), torch.rand(T)
    assert flops(layer, x, splits, probs) == 3 * 2 * T * (2 * F * K + K * F)


def test_what_multiplies_nothing() -> None:
    assert flops(load("rms_norm__bf16").RmsNorm(K), tokens(requires_grad=True)) == 0


def test_two_copies_register_once() -> None:
    load("linear__bf16")
    name = "flops_bundle_again"
    load_bundle(name, BUNDLE)
    layer = importlib.import_module(f"{name}.linear__bf16").Linear(K, N)
    assert flops(layer, tokens(requires_grad=False)) == 2 * 2 * T * K * N
