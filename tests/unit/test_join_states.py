"""What lies in one tensor: states and statistics of an op, saved amaxes; no op takes many."""

from __future__ import annotations

import pytest

from fusegen.checks.load import load
from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan
from fusegen.options import OPTIONS
from fusegen.passes.pipeline import resolve, resolve_module
from fusegen.publish.inputs import derivations
from fusegen.publish.paths import builtin_specs
from fusegen.spec.cells import target_cells, with_options

from . import gpu_files

evidence = gpu_files.load("evidence")
SPECS = load([builtin_specs()])
TARGETS = target_cells(SPECS, SPECS.targets)


def plan_of(cell: str, arch: str = "cpu") -> ModulePlan:
    return resolve_module(SPECS, Cell.parse(cell), arch, derivations())


def layout(plan: ModulePlan) -> dict[str, list[tuple[str, int, int | None]]]:
    return {each.buffer: [*plan.rows(each)] for each in plan.joined}


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
    assert not plan_of("linear__fp8_block").joined
    assert layout(plan_of("linear__nvfp4")).keys() == {"saved_amaxes"}  # random state is an integer


def test_statistics_of_an_op_lie_in_one() -> None:
    plan = plan_of("grouped_linear__fp8_delayed__debug")
    assert layout(plan)["backward_statistics"] == [
        ("dy_rowwise_statistics", 0, None),
        ("dy_columnwise_statistics", 1, None),
    ]
    assert str(plan.buffer("backward_statistics").shape) == "[2, 5]"
    assert plan.record_tensors == ("forward_statistics", "backward_statistics")
    assert plan.backward.mutated == ("backward_state", "backward_statistics")


SAVED = (
    "fc2_weight_columnwise_amax",
    "a_columnwise_amax",
    "fc1_weight_columnwise_amax",
    "x_columnwise_amax",
)


@pytest.mark.parametrize("arch", ["cpu", "sm_90a"])
def test_saved_amaxes_lie_in_one(arch: str) -> None:
    plan = plan_of("grouped_mlp__nvfp4", arch)
    assert layout(plan) == {"saved_amaxes": [(name, i, None) for i, name in enumerate(SAVED)]}
    assert str(plan.buffer("saved_amaxes").shape) == "[4, E]"
    (left,) = [each for each in plan.saved if "amax" in each.buffer]
    flags = {flag for step in plan.forward.steps for name in SAVED for flag in step.wanted(name)}
    assert {*left.when} == flags and "need_dfc2_bias" not in flags
    taken = [a for a in plan.backward.arguments if "amax" in a.buffer]
    assert [(a.buffer, a.optional, a.when) for a in taken] == [("saved_amaxes", True, left.when)]


def test_a_saved_amax_is_written_for_its_own_copy_alone() -> None:
    plan = plan_of("grouped_mlp__nvfp4")
    asked = {n: step.wanted(n) for step in plan.forward.steps for n in step.writes if n in SAVED}
    assert asked["x_columnwise_amax"] == ("need_dfc1_weight",)
    assert asked["a_columnwise_amax"] == ("need_dfc2_weight",)


def test_delayed_products_read_the_same_tensor() -> None:
    plan = plan_of("grouped_mlp__nvfp4__delayed_wgrad")
    assert (
        plan.wgrad and "saved_amaxes" in plan.wgrad.takes and "saved_amaxes" in plan.backward.takes
    )


def test_one_amax_stays_as_it_is() -> None:
    plan = plan_of("linear__nvfp4__cached_weights")
    assert not plan.joined and "x_columnwise_amax" in plan.backward.takes


@pytest.mark.parametrize("arch", TARGETS)
def test_delayed_scaling_adds_one_tensor_to_an_op(arch: str) -> None:
    cells = [cell for cell in TARGETS[arch] if cell.recipe == "fp8_delayed"]
    for plan in resolve(SPECS, arch, cells, derivations()).modules:
        for _, program in plan.ops:
            joined = [a for a in program.arguments if plan.joined_tensor(a.buffer)]
            assert len(joined) <= 1, (plan.cell, program.name)


MOST = 16
"""Tensors that an op takes: each costs the host time in every call."""

WIDER = {"grouped_mlp__nvfp4__add_to_main_grad__quantized_weights": 18}
"""Weights kept quantised are buffers of the module, each under its own name in state dicts: the two
amaxes of theirs stay arguments beside those that are saved, two main gradients and random state."""


def cells_with_options(recipe: str) -> list[Cell]:
    """Every module under a recipe: plain, and with each option by itself."""
    words = (word for option in OPTIONS for word in option.further)
    choices = ((), *((word,) for word in words))
    return [Cell(module, recipe, options) for module in SPECS.modules for options in choices]


def combined() -> list[Cell]:
    """What users combine."""
    return [
        cell
        for module, recipes, words in evidence.TOGETHER
        for recipe in recipes
        for cell in with_options(SPECS, [Cell(module, recipe)], words)
    ]


def too_wide(arch: str, cells: list[Cell]) -> dict[str, int]:
    """Cells with an op of more tensors than most, and how many that has."""
    plans = resolve(SPECS, arch, cells, derivations()).modules
    assert plans
    widths = {p.cell: max(len(program.arguments) for _, program in p.ops) for p in plans if p.ops}
    return {cell: width for cell, width in widths.items() if width > MOST}


@pytest.mark.parametrize("arch", ["cpu", "sm_90a"])
@pytest.mark.parametrize("recipe", SPECS.recipes)
def test_no_op_takes_many_tensors(recipe: str, arch: str) -> None:
    assert not too_wide(arch, cells_with_options(recipe))


@pytest.mark.parametrize("arch", ["cpu", "sm_90a"])
def test_nor_do_combinations_of_options(arch: str) -> None:
    assert too_wide(arch, combined()) == WIDER
