"""Experts of transformers by compiled kernels: as in float64, without waiting, as a graph."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import gpu_support as support
import pytest
import torch
from test_graphs import capture
from torch import Tensor
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

EXPERTS, HIDDEN, TOKENS, CHOICES = 8, 128, 300, 2
LARGEST_ERROR = {"grouped_mlp__bf16": 0.01, "grouped_mlp__fp8_delayed": 0.15}
every_cell = pytest.mark.parametrize("cell", LARGEST_ERROR)
on_device = pytest.mark.skipif(support.DEVICE == "cpu", reason="the CPU has no streams")


def layer_of(bundle: ModuleType, cell: str = "") -> Any:
    """Experts of random weights, by their own code where no cell is named."""
    config = MixtralConfig(hidden_size=HIDDEN, intermediate_size=192, num_local_experts=EXPERTS)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    layer = MixtralExperts(config).to(torch.bfloat16)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_(0.0, 0.1)
    layer = layer.to(support.DEVICE)
    if cell:
        importlib.import_module(f"{bundle.__name__}.integrations.transformers").swap(layer, cell)
    return layer


class Batch:
    """What a call reads; `draw` puts other values into the same memory."""

    def __init__(self) -> None:
        self.x = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16, device=support.DEVICE)
        self.chosen = torch.empty(TOKENS, CHOICES, dtype=torch.int64, device=support.DEVICE)
        self.weights = torch.empty(TOKENS, CHOICES, device=support.DEVICE)
        self.dy = torch.empty_like(self.x)
        self.x.requires_grad_()
        self.weights.requires_grad_()
        self.draw(0)

    @torch.no_grad()
    def draw(self, seed: int) -> None:
        """Other tokens for other experts; the last one is nobody's choice."""
        generator = torch.Generator().manual_seed(seed)
        order = torch.rand(TOKENS, EXPERTS - 1, generator=generator).argsort(dim=1)
        self.chosen.copy_(order[:, :CHOICES])
        for tensor in (self.x, self.weights, self.dy):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))

    def step(self, layer: Any, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
        """Result and all gradients."""
        y = layer(self.x.to(dtype), self.chosen, self.weights.to(dtype))
        leaves = {"x": self.x, "weights": self.weights, **dict(layer.named_parameters())}
        gradients = torch.autograd.grad(y, [*leaves.values()], self.dy.to(dtype))
        return {"y": y.detach(), **dict(zip(leaves, gradients, strict=True))}


@every_cell
def test_as_in_float64(bundle: ModuleType, cell: str) -> None:
    layer, batch = layer_of(bundle, cell), Batch()
    expected = batch.step(layer_of(bundle).double(), torch.float64)
    for _ in range(2):  # scales of a history are those of the step before
        found = batch.step(layer)
    for name, value in expected.items():
        assert support.relative_error(found[name], value) <= LARGEST_ERROR[cell], name


@on_device
@every_cell
def test_nothing_waits_for_the_device(bundle: ModuleType, cell: str) -> None:
    """Once the first call has compared the activations."""
    layer, batch = layer_of(bundle, cell), Batch()
    batch.step(layer)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = batch.step(layer)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(bool(value.isfinite().all()) for value in found.values())


@on_device
def test_replays_follow_the_router(bundle: ModuleType) -> None:
    layer, batch = layer_of(bundle, "grouped_mlp__bf16"), Batch()
    graph, results = capture(lambda: batch.step(layer))
    for seed in range(1, 4):
        batch.draw(seed)
        graph.replay()
        replayed = {name: value.clone() for name, value in results.items()}
        support.assert_same(replayed, batch.step(layer))
