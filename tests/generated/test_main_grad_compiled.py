"""Inductor and gradients that go to ``main_grad``: the bits of eager code."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusegen.ir.naming import Cell

from .loading import load_cells

pytestmark = pytest.mark.usefixtures("fresh_compiler")

CLASSES = {"linear": "Linear", "grouped_linear": "GroupedLinear", "grouped_mlp": "GroupedMLP"}
RECIPE = "mxfp8"
"""Its scales are of E8M0, which inductor leaves alone in all but few ops."""
MAIN_GRADS = ("add_to_main_grad", "write_main_grad")
T, E, K, N = 24, 3, 32, 48
CASES = [
    Cell(module, RECIPE, options)
    for module in CLASSES
    for word in MAIN_GRADS
    for options in ((word,), (word, "delayed_wgrad"))
] + [
    Cell("grouped_mlp", RECIPE, ("add_to_main_grad", word))
    for word in ("recompute_activations", "cached_weights")
]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> str:
    return load_cells("main_grad_compiled", tmp_path_factory.mktemp("main_grad"), CASES)


def make(bundle: str, cell: Cell) -> Any:
    torch.manual_seed(0)
    sizes = (K, N) if cell.module == "linear" else (E, K, N)
    slots = {"max_in_flight": 1, "max_tokens": T} if "delayed_wgrad" in cell.options else {}
    loaded = importlib.import_module(f"{bundle}.{cell}")
    layer = getattr(loaded, CLASSES[cell.module])(*sizes, bias=True, **slots)
    for parameter in layer.parameters():
        parameter.main_grad = torch.full(parameter.shape, 0.5)
    return layer


def train(layer: Any, module: str, backend: str | None) -> dict[str, Tensor]:
    """What two micro-batches give, and where the gradients went."""
    calls = [layer, getattr(layer, "backward_dw", lambda: None)]
    if backend:
        calls = [torch.compile(call, fullgraph=True, backend=backend) for call in calls]
    found = {}
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(T, K, generator=generator).bfloat16().requires_grad_()
        probs = torch.rand(T, generator=generator)
        data = [x, torch.tensor([9, 0, 13]), probs][: 1 + [*CLASSES].index(module)]
        y = calls[0](*data)
        (y.float().square().sum() + y.float().sum()).backward()
        calls[1]()
        assert x.grad is not None
        found |= {f"{seed} y": y.detach(), f"{seed} dx": x.grad}
        found |= {f"{seed} {name}": grad.clone() for name, grad in gradients(layer).items()}
    return found


def gradients(layer: nn.Module) -> dict[str, Tensor]:
    """Of weights in ``main_grad``, of biases where they always are."""
    return {
        name: parameter.main_grad if name.endswith("weight") else parameter.grad
        for name, parameter in layer.named_parameters()
    }


@pytest.mark.parametrize("cell", CASES, ids=str)
def test_inductor_gives_the_bits_of_eager(bundle: str, cell: Cell) -> None:
    eager, compiled = (make(bundle, cell) for _ in range(2))
    expected = train(eager, cell.module, None)
    got = train(compiled, cell.module, "inductor")
    assert expected.keys() == got.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, got[name]), name
    assert all((grad != 0.5).any() for grad in gradients(compiled).values())
