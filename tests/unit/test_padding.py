"""Rows past the groups: which pointwise steps are given the groups, and which need none."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusegen import api
from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan
from fusegen.ir.step import Step
from fusegen.passes.pipeline import resolve
from fusegen.steps.pointwise import ROW_GROUPS

MODULE = """edition: 2
module: {name}
class: Toy
summary: rows in groups
dims: {{T: tokens, E: num_groups, H: hidden}}
inputs:
  x: {{shape: [T, {width}]}}
  sizes: {{shape: [E], dtype: int64}}
  probs: {{shape: [T], dtype: float32}}
chain:
"""
FC = "  - {op: grouped_linear, as: fc, with: {split_sizes: sizes}, dims: {K: H, N: 2 * H}}\n"
ACT = "  - {op: scaled_swiglu, as: act, with: {scales: probs}, dims: {D: H}}\n"
COSH = """edition: 2
op: cosh
summary: not 0 at 0
dims: {T: rows, D: width}
inputs: {x: {shape: [T..., D]}}
outputs: {y: {shape: [T..., D]}}
pointwise: {y: (exp(x) + exp(-x)) / 2}
"""
CUBE = """edition: 2
op: cube
summary: three dimensions
dims: {T: rows, A: first, B: second}
inputs: {x: {shape: [T, A, B]}}
outputs: {y: {shape: [T, A, B]}}
pointwise: {y: x * x}
"""


def plan_of(folder: Path, chain: str, width: str = "H", recipe: str = "bf16") -> ModulePlan:
    module = MODULE.format(name="toy", width=width) + chain
    if "scales: probs" not in chain:
        module = module.replace("  probs: {shape: [T], dtype: float32}\n", "")
    for kind, name, text in (
        ("modules", "toy", module),
        ("ops", "cosh", COSH),
    ):
        (folder / kind).mkdir(exist_ok=True)
        (folder / kind / f"{name}.yaml").write_text(text)
    specs = api.load_specs(api.Folders(specs=(folder,)))
    done = resolve(specs, "sm_90a", [Cell("toy", recipe)])
    assert not done.unsupported, done.unsupported
    return done.modules[0]


def given(steps: tuple[Step, ...]) -> list[tuple[str, str]]:
    """Pointwise steps that know the groups: what they give, by which sizes."""
    found = []
    for step in steps:
        groups = step.input(ROW_GROUPS)
        assert bool(groups) == bool(step.pointwise and step.pointwise.grouped)
        if groups:
            assert step.pointwise and step.pointwise.kernel.startswith("grouped_pointwise_")
            found.append((", ".join(step.writes), groups))
    return found


def test_an_activation_before_the_groups(tmp_path: Path) -> None:
    """It reads the caller's rows, and its gradients are results."""
    plan = plan_of(tmp_path, ACT + FC, width="2 * H")
    assert given(plan.forward.steps) == []
    assert given(plan.backward.steps) == [("dx, dprobs", "sizes")]
    assert "sizes" in [result.buffer for result in plan.saved]


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
def test_an_activation_behind_the_groups(tmp_path: Path, recipe: str) -> None:
    """Scales and dy are the caller's; a step that knows the groups is merged with no other."""
    plan = plan_of(tmp_path, FC + ACT, recipe=recipe)
    assert given(plan.unmerged.forward.steps) == [("y", "sizes")]
    assert given(plan.backward.steps) == [("dfc_y, dprobs", "sizes")]


def test_an_activation_that_is_not_zero_at_zero(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, FC + "  - {op: cosh, as: act, dims: {D: 2 * H}}\n")
    assert given(plan.unmerged.forward.steps) == [("y", "sizes")]
    assert given(plan.backward.steps) == []  # dfc_y is read by rows of groups alone


def test_experts_need_none(tmp_path: Path) -> None:
    """GEMMs before and behind leave zeros on both sides."""
    names = [name for name in api.load_specs().modules if name.startswith("grouped_mlp")]
    assert len(names) == 5
    cells = [Cell(name, recipe) for name in names for recipe in ("bf16", "fp8_block")]
    plans = resolve(api.load_specs(), "sm_90a", cells).modules
    assert len(plans) == len(cells)
    assert all(given(plan.steps) == [] for plan in plans)


def test_rows_that_are_not_the_groups(tmp_path: Path) -> None:
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "cube.yaml").write_text(CUBE)
    module = MODULE.format(name="toy", width="H").replace(
        "probs: {shape: [T]", "z: {shape: [T, H, H]"
    )
    module = module.replace(", dtype: float32", "") + FC.replace("fc,", "fc, out: h,")
    module += "  - {op: cube, as: cube, with: {x: z}, dims: {A: H, B: H}}\noutputs: [y, h]\n"
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "toy.yaml").write_text(module)
    specs = api.load_specs(api.Folders(specs=(tmp_path,)))
    (reason,) = [u.reason for u in resolve(specs, "cpu", [Cell("toy", "bf16")]).unsupported]
    assert reason == ("op 'cube': rows past sizes are to be zero in y, whose rows are T * H, not T")
