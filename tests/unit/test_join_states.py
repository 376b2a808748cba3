"""Histories and scales that one op moves on lie in one tensor, and no op takes many tensors."""

from __future__ import annotations

import pytest

from fusegen.checks.load import load
from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan
from fusegen.passes.pipeline import resolve, resolve_module
from fusegen.publish.inputs import derivations
from fusegen.publish.paths import builtin_specs
from fusegen.spec.cells import target_cells

SPECS = load([builtin_specs()])
TARGETS = target_cells(SPECS, SPECS.targets)


def plan_of(cell: str, arch: str = "cpu") -> ModulePlan:
    return resolve_module(SPECS, Cell.parse(cell), arch, derivations())


def layout(plan: ModulePlan) -> dict[str, list[tuple[str, int, int | None]]]:
    return {each.buffer: [*plan.rows(each)] for each in plan.state_tensors}


def test_each_direction_has_one() -> None:
    plan = plan_of("grouped_linear__fp8_delayed")
    assert layout(plan) == {
        "forward_state": [
            ("input_amax_history", 0, 1024),
            ("input_scale", 1024, None),
            ("weight_amax_history", 1025, 1024),
            ("weight_scale", 2049, None),
        ],
        "backward_state": [
            ("grad_output_amax_history", 0, 1024),
            ("grad_output_scale", 1024, None),
        ],
    }
    assert str(plan.buffer("forward_state").shape) == "[2050, E]"
    assert plan.forward.mutated == ("forward_state",)
    assert plan.backward.mutated == ("backward_state",)
    assert plan.kept == ("forward_state", "backward_state")


def test_states_of_a_refresh_have_their_own() -> None:
    plan = plan_of("grouped_linear__fp8_delayed__cached_weights")
    assert [*layout(plan)] == ["forward_state", "backward_state", "refresh_state"]
    assert plan.refresh and "refresh_state" in plan.refresh.mutated
    assert plan.forward.mutated == ("forward_state",)


def test_reduced_states_move_on_after_the_op() -> None:
    plan = plan_of("linear__fp8_delayed__reduced_amax")
    assert [*layout(plan)] == ["forward_state", "backward_state"]
    for name, state in (("forward", "forward_state"), ("backward", "backward_state")):
        first, second = (program for _, program in plan.ops if program.name == name)
        assert not first.mutated and state in {argument.buffer for argument in first.arguments}
        assert second.mutated == (state,)


def test_other_recipes_have_none() -> None:
    assert not plan_of("linear__fp8_block").state_tensors
    assert not plan_of("linear__nvfp4").state_tensors  # random state is an integer


@pytest.mark.parametrize("arch", TARGETS)
def test_delayed_scaling_adds_one_tensor_to_an_op(arch: str) -> None:
    cells = [cell for cell in TARGETS[arch] if cell.recipe == "fp8_delayed"]
    for plan in resolve(SPECS, arch, cells, derivations()).modules:
        for _, program in plan.ops:
            joined = [a for a in program.arguments if plan.state_tensor(a.buffer)]
            assert len(joined) <= 1 and len(program.arguments) <= 16, (plan.cell, program.name)
