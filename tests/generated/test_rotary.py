"""Rotary embeddings, alone and behind the layers whose results they rotate."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fusegen.ir.naming import Cell
from fusegen.options.save import RECOMPUTE

from .loading import load_cells, run_generated_tests, write_cells

pytestmark = pytest.mark.usefixtures("fresh_compiler")

ROWS, HIDDEN, HEADS, KEY_HEADS, PAIRS = (2, 24), 64, 4, 2, 8
BOUNDS = {"bf16": 0.012, "fp8_current": 0.12}
"""Relative errors of results and gradients, about twice what is found."""
MODULES = {"norm_qkv": False, "norm_qkv_interleaved": True}
"""Whether pairs are interleaved."""
GENERATED = (
    Cell("rotary", "bf16"),
    Cell("norm_qkv", "fp8_delayed", (RECOMPUTE,)),
    Cell("norm_qkv_interleaved", "bf16", ("delayed_wgrad",)),
)
"""Cells of no committed bundle."""


def test_generated_tests_pass(tmp_path: Path) -> None:
    run_generated_tests(write_cells("rotary_alone", "cpu", tmp_path, GENERATED))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> str:
    cells = [Cell("rotary", "bf16"), *(Cell(m, r) for m in MODULES for r in BOUNDS)]
    return load_cells("rotary", tmp_path_factory.mktemp("rotary"), cells)


def rotated(x: Tensor, angles: Tensor, *, interleaved: bool) -> Tensor:
    """Each pair as a complex number, times that of its angle."""
    heads = x.unflatten(-1, (-1, PAIRS, 2) if interleaved else (-1, 2, PAIRS))
    pairs = heads if interleaved else heads.transpose(-1, -2)
    numbers = torch.view_as_complex(pairs.contiguous())
    products = torch.view_as_real(
        numbers * torch.polar(torch.ones_like(angles), angles)[..., None, :]
    )
    return (products if interleaved else products.transpose(-1, -2)).flatten(-3)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.detach().double() - wanted.detach()).norm() / wanted.detach().norm())


def test_rotary(package: str) -> None:
    """Results and gradients; lengths of heads stay as they are."""
    function = importlib.import_module(f"{package}.rotary__bf16").rotary
    x, dy = (random(*ROWS, 2 * PAIRS * HEADS, seed=seed).bfloat16() for seed in (0, 1))
    angles = 6 * random(*ROWS, PAIRS, seed=2)
    leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    y = function(leaf, angles.cos(), angles.sin())
    wanted = rotated(wide, angles.double(), interleaved=False)
    y.backward(dy)
    wanted.backward(dy.double())
    assert leaf.grad is not None and wide.grad is not None
    assert error(y, wanted) < 4e-3 and error(leaf.grad, wide.grad) < 4e-3
    assert abs(float(y.float().norm() / x.float().norm()) - 1) < 1e-3


def test_a_row_that_holds_no_whole_number_of_heads_is_refused(package: str) -> None:
    function = importlib.import_module(f"{package}.rotary__bf16").rotary
    x, angles = random(4, 24, seed=0).bfloat16(), random(4, PAIRS, seed=1)
    with pytest.raises(RuntimeError, match=r"N \(width\).* a multiple of 16 on cpu, got 24"):
        function(x, angles, angles)
    with pytest.raises(RuntimeError):
        function(x, angles[:, :0], angles[:, :0])


def exact(module: str, layer: Any, x: Tensor, angles: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """What the module gives in float64, and its parameters there."""
    p = {name: each.detach().double().requires_grad_() for name, each in layer.named_parameters()}
    n = functional.rms_norm(x, (HIDDEN,), p["norm.weight"], 1e-5)
    q, k, v = (
        functional.linear(n, p[f"{name}.weight"], p[f"{name}.bias"])
        for name in ("query", "key", "value")
    )
    interleaved = MODULES[module]
    results = [*(rotated(each, angles, interleaved=interleaved) for each in (q, k)), v]
    return results, [*p.values()]


@pytest.mark.parametrize("recipe", BOUNDS)
@pytest.mark.parametrize("module", MODULES)
def test_queries_and_keys_are_rotated(package: str, module: str, recipe: str) -> None:
    loaded = importlib.import_module(f"{package}.{module}__{recipe}")
    name = "InterleavedNormQKV" if MODULES[module] else "NormQKV"
    width, key_width = 2 * PAIRS * HEADS, 2 * PAIRS * KEY_HEADS
    torch.manual_seed(1)
    layer = getattr(loaded, name)(
        hidden=HIDDEN, query_width=width, key_value_width=key_width, bias=True
    ).bfloat16()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x, angles = random(*ROWS, HIDDEN, seed=3).bfloat16(), 6 * random(*ROWS, PAIRS, seed=4)
    dys = [random(*ROWS, w, seed=5 + i).bfloat16() for i, w in enumerate((width, *[key_width] * 2))]
    leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    results = layer(leaf, angles.cos(), angles.sin())
    wanted, parameters = exact(module, layer, wide, angles.double())
    leaves = [leaf, *layer.parameters()]
    found = torch.autograd.grad(results, leaves, dys)
    right = torch.autograd.grad(wanted, [wide, *parameters], [dy.double() for dy in dys])
    for got, true in zip((*results, *found), (*wanted, *right), strict=True):
        assert error(got, true) < BOUNDS[recipe]
