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
WIDTH = 2 * PAIRS * KEY_HEADS
"""Of keys, and of values."""
BOUNDS = {"bf16": 0.012, "fp8_current": 0.12}
"""Relative errors of results and gradients, about twice what is found."""
MODULES = {
    "norm_qkv": ("NormQKV", 1, False),
    "norm_qkv_interleaved": ("InterleavedNormQKV", 1, True),
    "norm_qkv_gqa_4": ("NormQKVGQA4", 4, False),
}
"""The class, heads of queries for each head of keys, and whether pairs are interleaved."""
GENERATED = (
    Cell("rotary", "bf16"),
    Cell("rotary_qkv", "bf16"),
    Cell("norm_qkv", "fp8_delayed", (RECOMPUTE,)),
    Cell("norm_qkv_interleaved", "bf16", ("delayed_wgrad",)),
    Cell("norm_qkv_gqa_4", "fp8_block", ("cached_weights",)),
)
"""Cells of no committed bundle."""


def test_generated_tests_pass(tmp_path: Path) -> None:
    run_generated_tests(write_cells("rotary_alone", "cpu", tmp_path, GENERATED))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> str:
    cells = [Cell("rotary", "bf16"), Cell("rotary_qkv", "bf16")]
    cells += [Cell(m, r) for m in MODULES for r in BOUNDS]
    cells += [Cell("norm_qkv_gqa_4", "fp8_current", ("cached_weights",))]
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


def test_packed_rows_are_parted(package: str) -> None:
    """Results have memory of their own, values too; the gradient is packed as rows are."""
    function = importlib.import_module(f"{package}.rotary_qkv__bf16").rotary_qkv
    x = random(*ROWS, 3 * WIDTH, seed=0).bfloat16()
    dys = [random(*ROWS, WIDTH, seed=seed).bfloat16() for seed in (1, 2, 3)]
    angles = 6 * random(*ROWS, PAIRS, seed=4)
    leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    results = function(leaf, angles.cos(), angles.sin())
    q, k, values = wide.split(WIDTH, -1)
    wanted = [*(rotated(each, angles.double(), interleaved=False) for each in (q, k)), values]
    (found,) = torch.autograd.grad(results, leaf, dys)
    (right,) = torch.autograd.grad(wanted, wide, [dy.double() for dy in dys])
    for got, true in zip((*results, found), (*wanted, right), strict=True):
        assert got.is_contiguous() and error(got, true) < 4e-3
    assert torch.equal(results[2], x[..., -WIDTH:])
    assert torch.equal(found[..., -WIDTH:], dys[2])


def exact(module: str, layer: Any, x: Tensor, angles: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """What the module gives in float64, and its parameters there.

    The weight is three, of queries, of keys and of values, one behind the other.
    """
    _, ratio, interleaved = MODULES[module]
    p = {name: each.detach().double().requires_grad_() for name, each in layer.named_parameters()}
    n = functional.rms_norm(x, (HIDDEN,), p["norm.weight"], 1e-5)
    widths = (ratio * WIDTH, WIDTH, WIDTH)
    parts = zip(p["qkv.weight"].split(widths), p["qkv.bias"].split(widths), strict=True)
    q, k, v = (functional.linear(n, weight, bias) for weight, bias in parts)
    results = [*(rotated(each, angles, interleaved=interleaved) for each in (q, k)), v]
    return results, [*p.values()]


def made(package: str, module: str, recipe: str) -> Any:
    """A module of the package, its parameters drawn."""
    name, _, _ = MODULES[module]
    torch.manual_seed(1)
    loaded = importlib.import_module(f"{package}.{module}__{recipe}")
    layer = getattr(loaded, name)(hidden=HIDDEN, key_value_width=WIDTH, bias=True).bfloat16()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


def inputs() -> tuple[Tensor, Tensor]:
    return random(*ROWS, HIDDEN, seed=3).bfloat16(), 6 * random(*ROWS, PAIRS, seed=4)


def incoming(module: str) -> list[Tensor]:
    """Gradients of the results."""
    _, ratio, _ = MODULES[module]
    widths = enumerate((ratio * WIDTH, WIDTH, WIDTH))
    return [random(*ROWS, width, seed=5 + i).bfloat16() for i, width in widths]


@pytest.mark.parametrize("recipe", BOUNDS)
@pytest.mark.parametrize("module", MODULES)
def test_queries_and_keys_are_rotated(package: str, module: str, recipe: str) -> None:
    layer, (x, angles), dys = made(package, module, recipe), inputs(), incoming(module)
    leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    results = layer(leaf, angles.cos(), angles.sin())
    wanted, parameters = exact(module, layer, wide, angles.double())
    found = torch.autograd.grad(results, [leaf, *layer.parameters()], dys)
    right = torch.autograd.grad(wanted, [wide, *parameters], [dy.double() for dy in dys])
    for got, true in zip((*results, *found), (*wanted, *right), strict=True):
        assert error(got, true) < BOUNDS[recipe]


def test_a_checkpoint_of_three_weights_is_one(package: str) -> None:
    """Queries, keys and values, one behind the other, are the packed weight; so are biases."""
    layer, (x, angles) = made(package, "norm_qkv_gqa_4", "bf16"), inputs()
    shapes = ((4 * WIDTH, HIDDEN), (WIDTH, HIDDEN), (WIDTH, HIDDEN))
    weights = [random(*shape, seed=10 + i).bfloat16() for i, shape in enumerate(shapes)]
    biases = [random(each.shape[0], seed=20 + i).bfloat16() for i, each in enumerate(weights)]
    norm = {"norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16)}
    packed = {"qkv.weight": torch.cat(weights), "qkv.bias": torch.cat(biases)}
    layer.load_state_dict(norm | packed)
    n = functional.rms_norm(x.double(), (HIDDEN,), eps=1e-5)
    parts = zip(weights, biases, strict=True)
    q, k, v = (functional.linear(n, w.double(), b.double()) for w, b in parts)
    q, k = (rotated(each, angles.double(), interleaved=False) for each in (q, k))
    for got, true in zip(layer(x, angles.cos(), angles.sin()), (q, k, v), strict=True):
        assert error(got, true) < BOUNDS["bf16"]


def test_a_cached_weight_gives_the_same_bits(package: str) -> None:
    """Its copies are made once; results and gradients are those of copies made in each call."""
    module, (x, angles) = "norm_qkv_gqa_4", inputs()
    tensors = []
    for recipe in ("fp8_current", "fp8_current__cached_weights"):
        layer, leaf = made(package, module, recipe), x.clone().requires_grad_()
        if hasattr(layer, "refresh_weights"):
            layer.refresh_weights()
        results = layer(leaf, angles.cos(), angles.sin())
        gradients = torch.autograd.grad(results, [leaf, *layer.parameters()], incoming(module))
        tensors.append((*results, *gradients))
    for plain, cached in zip(*tensors, strict=True):
        assert torch.equal(plain, cached)
