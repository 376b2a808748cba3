"""What lies in one tensor: states and statistics of an op, saved amaxes; no op takes many."""

from __future__ import annotations

import pytest
from plans import SPECS

from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan
from fusegen.options import OPTIONS
from fusegen.options.cached_input import CACHE_QUANTIZED
from fusegen.passes.pipeline import resolve, resolve_module
from fusegen.publish.inputs import derivations
from fusegen.spec.cells import target_cells, with_options

from . import gpu_files

evidence = gpu_files.load("evidence")
TARGETS = {
    arch: cells.every
    for arch, cells in target_cells(SPECS, SPECS.targets).items()
    if arch in SPECS.archs
}


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
    assert layout(plan_of("linear__nvfp4__held_weights")).keys() == {
        "saved_amaxes"
    }  # random state is an integer


def test_statistics_of_an_op_lie_in_one() -> None:
    plan = plan_of("grouped_linear__fp8_delayed__held_weights__debug")
    assert layout(plan)["backward_statistics"] == [
        ("dy_rowwise_statistics", 0, None),
        ("dy_columnwise_statistics", 1, None),
    ]
    assert str(plan.buffer("backward_statistics").shape) == "[2, 5]"
    assert plan.record_tensors == ("forward_statistics", "backward_statistics")
    assert plan.backward.mutated == ("backward_state", "backward_statistics")


SAVED = ("a_columnwise_amax", "x_columnwise_amax")


@pytest.mark.parametrize("arch", ["cpu", "sm_90a"])
def test_saved_amaxes_lie_in_one(arch: str) -> None:
    plan = plan_of("grouped_mlp__nvfp4", arch)
    assert layout(plan) == {"saved_amaxes": [(name, i, None) for i, name in enumerate(SAVED)]}
    assert str(plan.buffer("saved_amaxes").shape) == "[2, E]"
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


def test_delayed_gemms_read_the_same_tensor() -> None:
    plan = plan_of("grouped_mlp__nvfp4__delayed_wgrad__held_weights")
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
            others = [a for a in joined if a.buffer not in plan.record_tensors]
            # What the backward alone reads moves on only where there is one.
            most = 1 + (CACHE_QUANTIZED in plan.options and program.name == "forward")
            assert len(others) <= most, (plan.cell, program.name)
            assert len(joined) - len(others) <= 1, (plan.cell, program.name)


MOST = 16
"""Tensors that an op takes: each costs the host time in every call."""

OF_A_ROUTER = 8
"""More of a router and experts in one call: its losses and its own gradients are among them."""

OF_SHARED_EXPERTS = 12
"""More of experts that every token has beside those of a router: their weights, with the copies of
them that a caller keeps, their gradients, and what is saved of them."""

WIDEST = [
    f"grouped_mlp__{recipe}__scaled_bias__{words}__debug"
    for recipe in ("fp8_delayed", "nvfp4")
    for words in (
        "add_to_main_grad",
        "write_16_bit_main_grad__cached_weights",
        "add_to_main_grad__quantized_weights",
        "add_to_main_grad__delayed_wgrad__cached_weights",
    )
] + ["grouped_mlp__fp8_delayed__scaled_bias__add_to_main_grad__reduced_amax__debug"]
"""What takes the most tensors of all that can be chosen together."""


def cells_with_options(module: str) -> list[Cell]:
    """A module under every recipe: plain, and with each option by itself."""
    words = (word for option in OPTIONS for word in option.further)
    choices = ((), *((word,) for word in words))
    return [Cell(module, recipe, options) for recipe in SPECS.recipes for options in choices]


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
    return {cell: width for cell, width in widths.items() if width > most_of(cell)}


def most_of(cell: str) -> int:
    """How many tensors an op of a cell may take."""
    ops = {*SPECS.modules[Cell.parse(cell).module].ops}
    shared = {"linear", "grouped_linear"} <= ops
    return MOST + OF_A_ROUTER * ("router" in ops) + OF_SHARED_EXPERTS * shared


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["cpu", "sm_90a"])
@pytest.mark.parametrize("module", SPECS.modules)
def test_no_op_takes_many_tensors(module: str, arch: str) -> None:
    assert not too_wide(arch, cells_with_options(module))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["cpu", "sm_90a"])
def test_nor_do_combinations_of_options(arch: str) -> None:
    assert not too_wide(arch, combined())


@pytest.mark.parametrize("arch", ["cpu", "sm_90a"])
def test_nor_do_the_widest_of_all(arch: str) -> None:
    assert not too_wide(arch, [Cell.parse(cell) for cell in WIDEST])


def parts_of(plan: ModulePlan, name: str) -> dict[str, str]:
    tensor = plan.joined_tensor(name)
    assert tensor is not None
    return {part: str(begin) for part, begin in plan.places(tensor)}


def test_scales_go_into_one_where_an_op_would_take_more() -> None:
    plan = plan_of("grouped_mlp__nvfp4__add_to_main_grad__quantized_weights")
    assert [each.buffer for each in plan.joined] == ["saved_scales"]
    first, second = "align((T // 16 + E) * F, 16)", "align((T // 16 + E) * H, 16)"
    assert parts_of(plan, "saved_scales") == {
        "a_columnwise_scale": "0",
        "x_columnwise_scale": first,
        "a_columnwise_amax": f"{first} + {second}",
        "x_columnwise_amax": f"{first} + {second} + 4 * E",
    }
    assert str(plan.buffer("saved_scales").shape) == f"[{first} + {second} + 4 * E + 4 * E]"
    assert {"a_columnwise", "x_columnwise"} <= {*plan.backward.takes}
    assert not {*parts_of(plan, "saved_scales")} & {*plan.backward.takes}


def test_codes_follow_where_scales_are_not_enough() -> None:
    plan = plan_of("grouped_mlp__nvfp4__scaled_bias__add_to_main_grad__cached_weights__debug")
    assert "saved_copies" in plan.backward.takes and "saved_scales" not in plan.backward.takes
    assert {"a_columnwise", "x_columnwise"} <= {*parts_of(plan, "saved_copies")}
    (left,) = [each for each in plan.saved if each.buffer == "saved_copies"]
    assert left.when == ("need_dfc1_weight", "need_dfc2_weight")


def test_an_op_before_a_collective_gives_one() -> None:
    plan = plan_of("grouped_mlp__fp8_delayed__scaled_bias__add_to_main_grad__reduced_amax__debug")
    first, *_ = plan.directions[0].programs
    assert "saved_scales" in {result.buffer for result in first.results}
