"""Modules whose norms are fused with what stands around them: the bits of those that are not."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusegen import api

from .loading import load_bundle

ROWS, HIDDEN = (3, 32), 64
MLP, NORM = {"hidden": HIDDEN, "intermediate": 96}, {"width": HIDDEN}
RECIPES = ("bf16", "fp8_delayed", "fp8_block")
CLASSES = {
    "norm_mlp": ("NormMLP", MLP),
    "layer_norm_mlp": ("LayerNormMLP", MLP),
    "residual_rms_norm": ("ResidualRmsNorm", NORM),
    "residual_layer_norm": ("ResidualLayerNorm", NORM),
}
FUSIONS = {
    "norm_mlp": ("add_rms_norm",),
    "layer_norm_mlp": ("add_layer_norm",),
    "residual_rms_norm": ("residual_rms_norm", "add_rms_norm"),
    "residual_layer_norm": ("residual_layer_norm", "add_layer_norm"),
}
"""What applies in a module on the CPU."""


def bundle(folder: Path, name: str, no_fusions: tuple[str, ...]) -> str:
    request = api.Request(
        out=folder / name,
        archs=("cpu",),
        modules=tuple(CLASSES),
        recipes=RECIPES,
        namespace=name,
        no_fusions=no_fusions,
    )
    api.generate(request)
    return load_bundle(f"{name}_bundle", folder / name / "cpu")


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """With all fusions, without any that a module has, and without each alone."""
    folder = tmp_path_factory.mktemp("norm_fusions")
    every = tuple(dict.fromkeys(name for names in FUSIONS.values() for name in names))
    left_out = {"norms_fused": (), "norms_apart": every}
    left_out |= {f"norms_without_{name}": (name,) for name in every}
    return {name: bundle(folder, name, without) for name, without in left_out.items()}


def trained(package: str, module: str, recipe: str) -> list[Tensor]:
    """Results and gradients of one step."""
    made: Any = importlib.import_module(f"{package}.{module}__{recipe}")
    rng = torch.Generator().manual_seed(0)
    name, sizes = CLASSES[module]
    layer = getattr(made, name)(**sizes)
    for parameter in layer.parameters():
        parameter.data = (torch.randn(parameter.shape, generator=rng) / 4).bfloat16()
    count = 2 if module.startswith("residual") else 1
    drawn = [torch.randn(*ROWS, HIDDEN, generator=rng).bfloat16() for _ in range(2 * count)]
    inputs = [each.requires_grad_() for each in drawn[:count]]
    results = layer(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    torch.autograd.backward(results, drawn[count:])
    gradients = [each.grad for each in (*inputs, *layer.parameters())]
    return [*results, *(each for each in gradients if each is not None)]


def cells() -> Iterator[tuple[str, str]]:
    """Modules and recipes; a norm alone has no operand that one quantises."""
    for module in CLASSES:
        recipes = RECIPES if module.endswith("mlp") else ("bf16",)
        yield from ((module, recipe) for recipe in recipes)


@pytest.mark.parametrize(("module", "recipe"), [*cells()])
def test_every_bit_is_that_of_the_steps_apart(
    bundles: dict[str, str], module: str, recipe: str
) -> None:
    found = {name: trained(package, module, recipe) for name, package in bundles.items()}
    for name, results in found.items():
        assert len(results) == len(found["norms_apart"]) > 3
        for own, other in zip(results, found["norms_apart"], strict=True):
            assert torch.equal(own, other), name
