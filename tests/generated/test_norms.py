"""Norms of the reference against PyTorch's own in float64."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fusegen.ir.naming import Cell

from .loading import load_cells

ROWS, WIDTH = 37, 264


def _rms(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, eps)


def _layer(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> Tensor:
    return functional.layer_norm(x, weight.shape, weight, bias, eps)


def _l2(x: Tensor, *, eps: float) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + eps).rsqrt()


NORMS = {
    "rms_norm": ("RmsNorm", _rms, 1e-5, 1),
    "layer_norm": ("LayerNorm", _layer, 1e-5, 2),
    "l2_normalization": ("L2Normalization", _l2, 1e-6, 0),
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> str:
    cells = [Cell(module, "bf16") for module in NORMS]
    return load_cells("norms_bundle", tmp_path_factory.mktemp("norms"), cells)


def module_of(package: str, name: str) -> Any:
    return importlib.import_module(f"{package}.{name}__bf16")


@pytest.mark.parametrize("eps", [None, 0.25])
@pytest.mark.parametrize("name", NORMS)
def test_results_and_gradients_are_those_of_pytorch(
    package: str, name: str, eps: float | None
) -> None:
    _, formula, default, vectors = NORMS[name]
    given = {} if eps is None else {"eps": eps}
    own = [torch.randn(ROWS, WIDTH), *(torch.randn(WIDTH) for _ in range(vectors))]
    leaves = [each.bfloat16().requires_grad_() for each in own]
    dy = torch.randn(ROWS, WIDTH).bfloat16()
    y = getattr(module_of(package, name), name)(*leaves, **given)
    y.backward(dy)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    wanted = formula(*exact, eps=default if eps is None else eps)
    wanted.backward(dy.double())
    for got, right in (
        (y, wanted),
        *((a.grad, b.grad) for a, b in zip(leaves, exact, strict=True)),
    ):
        assert got.dtype is torch.bfloat16
        error = (got.detach().double() - right.detach()).norm() / right.detach().norm()
        assert error < 4e-3


@pytest.mark.parametrize("name", NORMS)
def test_a_module_begins_without_a_gain(package: str, name: str) -> None:
    class_name, _, _, vectors = NORMS[name]
    layer = getattr(module_of(package, name), class_name)(*[WIDTH] * bool(vectors))
    assert [path for path, _ in layer.named_parameters()] == ["weight", "bias"][:vectors]
    x = torch.randn(3, 5, WIDTH).bfloat16()
    y = layer.bfloat16()(x)
    assert y.shape == x.shape
    length = 1.0 if name == "l2_normalization" else WIDTH**0.5
    torch.testing.assert_close(
        y.float().norm(dim=-1), torch.full((3, 5), length), rtol=1e-2, atol=0
    )


def test_no_rows_have_gradients_of_zero(package: str) -> None:
    x, weight = torch.zeros(0, WIDTH).bfloat16(), torch.ones(WIDTH).bfloat16().requires_grad_()
    module_of(package, "rms_norm").rms_norm(x, weight).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.zeros_like(weight))
