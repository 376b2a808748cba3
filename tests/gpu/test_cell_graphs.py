"""Every cell of a bundle as a CUDA graph: replays on other values give the bits of eager calls."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import bundles
import gpu_support as support
import pytest
import torch
from test_graphs import capture
from torch import Tensor

REPLAYS = 3


def tests_of(bundle: ModuleType) -> Iterator[tuple[str, Any]]:
    """Every cell without options that has a gradient, and its generated tests."""
    folder = Path(str(bundle.__file__)).parent
    for path in sorted((folder / "tests").glob("test_*__*.py")):
        tests = bundles.load_cell(bundle, f"tests.{path.stem}")
        if path.stem.count("__") == 1 and hasattr(tests, "make_dy"):
            yield path.stem.removeprefix("test_"), tests


def redraw(tensors: dict[str, Tensor | None], seed: int) -> None:
    """Other values in the same memory, for all but sizes and indices, which keep their meaning."""
    generator = torch.Generator(support.DEVICE).manual_seed(seed)
    for name, tensor in tensors.items():
        if tensor is not None and tensor.is_floating_point() and "state" not in name:
            order = torch.randperm(tensor.numel(), generator=generator, device=tensor.device)
            tensor.copy_(tensor.flatten()[order].view_as(tensor))


def results_of(tests: Any, tensors: dict[str, Tensor | None], dy: Tensor) -> dict[str, Tensor]:
    """What the function gives and all gradients, by name."""
    y, gradients = tests.run(tensors, dy)
    ys = y if isinstance(y, tuple) else (y,)
    return {f"y{i}": each.detach() for i, each in enumerate(ys)} | gradients


@pytest.mark.skipif(support.DEVICE == "cpu", reason="the CPU has no graphs")
def test_replays_follow_new_values(bundle: ModuleType) -> None:
    ran = 0
    for cell, tests in tests_of(bundle):
        tensors = tests.make_inputs(torch.bfloat16, support.DEVICE)
        dy = tests.make_dy(tensors)
        graph, results = capture(lambda: results_of(tests, tensors, dy))  # noqa: B023 - called here
        for seed in range(REPLAYS):
            redraw(tensors, seed)
            graph.replay()
            replayed = {name: value.clone() for name, value in results.items()}
            try:
                support.assert_same(replayed, results_of(tests, tensors, dy))
            except AssertionError as error:
                error.add_note(f"in {cell}, replay {seed}")
                raise
        ran += 1
    assert ran > 10


@pytest.mark.skipif(support.DEVICE == "cpu", reason="the CPU has no graphs")
def test_each_replay_of_dropout_draws_another_mask(bundle: ModuleType) -> None:
    """The module takes its numbers from PyTorch's generator, which moves on with every replay."""
    layer = bundles.load_cell(bundle, "dropout__bf16").Dropout(p=0.5)
    x = torch.ones(256, 512, dtype=torch.bfloat16, device=support.DEVICE, requires_grad=True)
    dy = torch.ones_like(x)

    def call() -> dict[str, Tensor]:
        y = layer(x)
        (dx,) = torch.autograd.grad(y, x, dy)
        return {"y": y.detach(), "dx": dx}

    graph, results = capture(call)
    masks = []
    for _ in range(REPLAYS):
        graph.replay()
        kept = results["y"] != 0
        assert torch.equal(kept, results["dx"] != 0)
        assert abs(float(kept.float().mean()) - 0.5) < 0.01
        masks.append(kept)
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(masks))
