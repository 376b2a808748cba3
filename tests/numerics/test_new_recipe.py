"""A new recipe is one YAML: formats and blocks nobody has written kernels or templates for."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fusegen import api
from fusegen.ir.plan import Status

BLOCKS_OF_64 = """\
edition: 2
recipe: fp8_block64
summary: FP8 with one scale per 1x64 of activations and gradients and per 64x64 of weights
source: a variation of DeepSeek-V3's blocks
gemm: {fprop: split_128, dgrad: split_128, wgrad: split_128}
tolerance: {gemm: 4.0e-3, end_to_end: 1.5e-1, float32: 1.0e-3}
roles:
  input:
    format: e4m3
    block: [1, 64]
    scale: {dtype: float32, rule: max_over_amax, round: pow2_down}
  weight:
    format: e4m3
    block: [64, 64]
    scale: {dtype: float32, rule: max_over_amax, round: pow2_down}
  grad_output:
    format: e4m3
    block: [1, 64]
    scale: {dtype: float32, rule: max_over_amax, round: pow2_down}
"""
MX_FLOOR = """\
edition: 2
recipe: mxfp8_floor
summary: MXFP8 with exponents rounded down, as the OCP specification says
source: OCP Microscaling Formats (MX) v1.0
gemm: {fprop: fp32, dgrad: fp32, wgrad: fp32}
tolerance: {gemm: 4.0e-3, end_to_end: 1.5e-1, float32: 1.0e-3}
roles:
  input:
    format: e4m3
    block: [1, 32]
    scale: {dtype: e8m0, rule: mx, round: pow2_down}
  weight:
    format: e4m3
    block: [1, 32]
    scale: {dtype: e8m0, rule: mx, round: pow2_down}
  grad_output:
    format: e4m3
    block: [1, 32]
    scale: {dtype: e8m0, rule: mx, round: pow2_down}
"""


def generate(folder: Path, name: str, text: str) -> ModuleType:
    """A bundle of grouped_linear under a recipe that only a folder of ours knows."""
    recipes = folder / "specs" / "recipes"
    recipes.mkdir(parents=True)
    (recipes / f"{name}.yaml").write_text(text)
    request = api.Request(
        archs=("cpu",),
        modules=("grouped_linear",),
        recipes=(name,),
        out=folder / "out",
        namespace=f"new_{name}",
        folders=api.Folders(specs=(folder / "specs",)),
    )
    api.generate(request, api.Policy.WRITE)
    bundle = folder / "out" / "cpu"
    spec = importlib.util.spec_from_file_location(
        name, bundle / "__init__.py", submodule_search_locations=[str(bundle)]
    )
    assert spec and spec.loader
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return importlib.import_module(f"{name}.grouped_linear__{name}")


@pytest.mark.parametrize(
    ("name", "text", "scales"),
    [("fp8_block64", BLOCKS_OF_64, (300, 2)), ("mxfp8_floor", MX_FLOOR, (300, 4))],
)
def test_one_yaml_makes_a_module_that_trains(
    tmp_path: Path, name: str, text: str, scales: tuple[int, int]
) -> None:
    module = generate(tmp_path, name, text)
    torch.manual_seed(0)
    x = torch.randn(300, 128).bfloat16().requires_grad_()
    weight = (torch.randn(3, 96, 128) / 128**0.5).bfloat16().requires_grad_()
    splits = torch.tensor([70, 0, 200])
    y = module.grouped_linear(x, weight, splits)
    dy = torch.randn_like(y)
    dx, dweight = torch.autograd.grad(y, (x, weight), dy)

    wide = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    exact = module.reference.exact(wide[0], wide[1], splits, None)
    expected = torch.autograd.grad(exact, wide, dy.double())
    for got, want in ((y, exact), (dx, expected[0]), (dweight, expected[1])):
        error = (got.double() - want).norm() / want.norm()
        assert 0.01 < error < 0.06, float(error)  # quantised, and no worse than three mantissa bits

    quantized = module.reference.quantized
    copy = quantized.quantize(x.detach(), module.reference.INPUT, group_sizes=splits).rowwise
    assert copy.scale.shape == scales


def test_the_plan_knows_it_at_once(tmp_path: Path) -> None:
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    (recipes / "fp8_block64.yaml").write_text(BLOCKS_OF_64)
    query = api.Query(archs=("cpu",), modules=("grouped_mlp",), recipes=("fp8_block64",))
    rows = api.plan(query, api.Folders(specs=(tmp_path,)))
    assert [row.status for row in rows] == [Status.NATIVE.value]
