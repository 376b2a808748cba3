"""Activations that are made again beside their gradients, in one step."""

from __future__ import annotations

import pytest
import torch
from plans import SPECS
from torch import Tensor

from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan
from fusegen.ir.step import Step
from fusegen.math import Derivations, parse, to_torch
from fusegen.passes.pipeline import resolve_module

SWIGLU = parse("gate * sigmoid(gate) * up * scales", ("gate", "up", "scales"))


def plan_of(cell: str, arch: str = "sm_90a") -> ModulePlan:
    return resolve_module(SPECS, Cell.parse(cell), arch)


def expressions(plan: ModulePlan) -> list[Step]:
    direction = plan.direction("backward")
    assert direction is not None
    return [s for op in direction.programs for s in op.steps if s.primitive.startswith("pointwise")]


@pytest.mark.parametrize("arch", ["cpu", "sm_80", "sm_90a"])
@pytest.mark.parametrize(
    "cell", ["moe_layer__bf16", "grouped_mlp__bf16__recompute_activations", "moe_layer_srelu__bf16"]
)
def test_one_step_does_both(cell: str, arch: str) -> None:
    (step,) = expressions(plan_of(cell, arch))
    assert step.primitive == "pointwise_grad" and step.pointwise is not None
    assert step.pointwise.kernel.endswith("_with_y_backward")
    assert [r.symbol for r in step.pointwise.results][-2:] == ["dscales", "y"]
    assert {"dh", "a"} <= {*step.writes}


def test_who_waits_for_it_stands_behind_it() -> None:
    """The gradient of fc2's weight stood before the activation's."""
    plan = plan_of("moe_layer__bf16")
    direction = plan.direction("backward")
    assert direction is not None
    writers = [name for op in direction.programs for s in op.steps for name in s.writes]
    assert writers.index("a") < writers.index("dfc2_weight")


def test_each_result_has_flags_of_its_own() -> None:
    (step,) = expressions(plan_of("grouped_mlp__bf16__recompute_activations"))
    assert step.wanted("a") == ("need_dfc2_weight",)
    assert "need_dfc2_weight" not in step.wanted("dh")
    assert step.wanted("dprobs") == ("need_dprobs",)


@pytest.mark.parametrize("recipe", ["fp8_block", "fp8_delayed", "fp8_current"])
def test_recipes_that_quantise_keep_them_apart(recipe: str) -> None:
    made = [step.writes for step in expressions(plan_of(f"moe_layer__{recipe}"))]
    assert len(made) == 2
    assert not any({"dh", "a"} <= {*names} for names in made)


def test_halves_that_alternate_keep_them_apart() -> None:
    made = expressions(plan_of("grouped_mlp__bf16__interleaved_32__recompute_activations"))
    assert [step.primitive for step in made] == ["pointwise_grad", "pointwise"]


def test_nothing_is_joined_that_the_forward_saves() -> None:
    made = [step.writes for step in expressions(plan_of("grouped_mlp__bf16"))]
    assert made == [("dh", "dprobs")]


def test_the_bits_are_those_of_each_alone() -> None:
    derivations = Derivations()
    wrt = ("gate", "up", "scales")
    both = derivations.backward((("dy", SWIGLU),), wrt, (("y", SWIGLU),))
    torch.manual_seed(0)
    values = {name: torch.randn(1000) * 3 for name in ("gate", "up", "scales", "dy")}
    values["gate"][:3] = torch.tensor([-torch.inf, torch.inf, -0.0])

    def run(program: object) -> dict[str, Tensor]:
        found = {"torch": torch, **values}
        exec("\n".join(to_torch(program)), found)  # type: ignore[arg-type]
        return found

    joint = run(both)
    for alone, names in (
        (derivations.forward((("y", SWIGLU),)), ("y",)),
        (derivations.backward((("dy", SWIGLU),), wrt), ("dgate", "dup", "dscales")),
    ):
        own = run(alone)
        for name in names:
            assert torch.equal(joint[name].nan_to_num(7.0), own[name].nan_to_num(7.0)), name
