"""The fusions of docs/features/fusions.md: each passes the generated tests, with equal bits."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusegen import api
from fusegen.ir.plan import ModulePlan

from .loading import load_bundle, run_generated_tests
from .test_docs import PAGES, write_files

FUSIONS = {
    "linear_activation_again": "joint",
    "linear_unit_scale": "forward",
    "centre_gradient": "backward",
}
UNWRITTEN = {"linear_unit_scale": ("forward", "z"), "centre_gradient": ("backward", "dc")}
"""What a step of a direction writes unless the fusion applies."""
RECIPES = ("bf16", "fp8_block")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page's specs, and the bundle that has none of its fusions."""
    folder = tmp_path_factory.mktemp("fusions")
    write_files(next(page for page in PAGES if page.stem == "fusions"), folder)
    generate(folder, "plain", FUSIONS)
    return folder


def generate(folder: Path, name: str, no_fusions: Iterable[str] | None) -> Path:
    request = api.Request(
        out=folder / name,
        archs=("cpu",),
        modules=("silu_mlp",),
        recipes=RECIPES,
        namespace=name,
        folders=sources(folder),
        no_fusions=None if no_fusions is None else tuple(no_fusions),
    )
    api.generate(request)
    return folder / name / "cpu"


def sources(folder: Path) -> api.Folders:
    return api.Folders(specs=(folder / "my_specs",))


def trained(bundle: Path, name: str, recipe: str) -> tuple[list[Tensor], int]:
    """Results and gradients of one step, and how many bytes it saves."""
    module: Any = importlib.import_module(f"{load_bundle(name, bundle)}.silu_mlp__{recipe}")
    generator = torch.Generator().manual_seed(0)
    layer = module.SiLUMLP(hidden=128, intermediate=256)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).bfloat16() / 8
    x = torch.randn(3, 128, 128, generator=generator).bfloat16().requires_grad_()
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = layer(x)
    y.square().sum().backward()
    return [y, x.grad, *(p.grad for p in layer.parameters())], sum(saved.values())


@pytest.mark.parametrize("fusion", FUSIONS)
def test_a_fusion_keeps_every_bit(folder: Path, fusion: str) -> None:
    bundle = generate(folder, fusion, [name for name in FUSIONS if name != fusion])
    run_generated_tests(bundle)
    for recipe in RECIPES:
        fused, less = trained(bundle, f"{fusion}_bundle", recipe)
        plain, more = trained(folder / "plain" / "cpu", "plain_bundle", recipe)
        assert all(torch.equal(one, other) for one, other in zip(fused, plain, strict=True))
        assert (less < more) == (FUSIONS[fusion] == "joint")
        assert fusion in applied(plan_without(folder, recipe))
        assert fusion not in applied(plan_without(folder, recipe, fusion))


def plan_without(folder: Path, recipe: str, *fusions: str) -> ModulePlan:
    """The plan of the page's module, some fusions left out."""
    plan = api.explain("silu_mlp", recipe, "cpu", sources(folder), no_fusions=fusions).plan
    assert plan is not None
    return plan


def applied(plan: ModulePlan) -> set[str]:
    """Fusions that replaced something."""
    return {each.rule for each in plan.rewrites if not each.reason}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("fusion", UNWRITTEN)
def test_what_a_fusion_spares_is_written_without_it(folder: Path, fusion: str, recipe: str) -> None:
    direction, buffer = UNWRITTEN[fusion]

    def written(plan: ModulePlan) -> list[str]:
        steps = plan.forward.steps if direction == "forward" else plan.backward.steps
        return [name for step in steps for name in step.writes]

    fused, plain = plan_without(folder, recipe), plan_without(folder, recipe, fusion)
    assert buffer not in written(fused)
    assert buffer in written(plain)
    assert len(written(fused)) == len(written(plain)) - 1


def test_a_lock_records_what_is_left_out(folder: Path) -> None:
    generate(folder, "kept", None)
    cell = folder / "kept" / "cpu" / "silu_mlp__bf16.py"
    whole = cell.read_text()
    bundle = generate(folder, "kept", ["linear_activation_again"])
    assert cell.read_text() != whole
    assert not api.check([bundle], folders=sources(folder)).drifted
    api.generate(api.Request(out=folder / "kept", folders=sources(folder)))
    assert cell.read_text() != whole
    api.generate(api.Request(out=folder / "kept", folders=sources(folder), no_fusions=()))
    assert cell.read_text() == whole
