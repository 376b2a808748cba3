"""Plans of experts behind a router: what they hold between forward and backward, and options."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
from plans import SPECS

from fusegen.emit.launcher.program import launcher_context
from fusegen.emit.text.explain import explain
from fusegen.ir.buffers import size_in_bytes
from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan
from fusegen.ir.shapes import evaluate
from fusegen.passes.pipeline import resolve_module
from fusegen.spec.offers import not_offered

MODULES = tuple(name for name in SPECS.modules if name.startswith("moe_layer"))
SIZES = {"T": 8192, "K": 8, "E": 256, "H": 7168, "F": 2048}


@cache
def plan(
    module: str, recipe: str, arch: str = "sm_90a", options: tuple[str, ...] = ()
) -> ModulePlan:
    return resolve_module(SPECS, Cell(module, recipe, options), arch)


def held(of: ModulePlan) -> dict[str, int]:
    """Bytes of what is saved, but for weights and copies of them."""
    parameters = {parameter.buffer for parameter in of.parameters}
    found = {r.buffer: size_in_bytes(of.buffer(r.buffer)) for r in of.saved}
    return {
        name: evaluate(size, SIZES)
        for name, size in found.items()
        if not any(name.startswith(parameter) for parameter in parameters)
    }


@pytest.mark.parametrize("recipe", SPECS.recipes)
@pytest.mark.parametrize("module", MODULES)
def test_rows_hold_h_their_weight_and_their_places(module: str, recipe: str) -> None:
    """Under every recipe, of a row 2 H / K + 4 F + 12 bytes where activations are gated."""
    found = held(plan(module, recipe))
    rows, gated = SIZES["T"] * SIZES["K"], "srelu" not in module
    small = 4 * 8 * SIZES["E"]  # sizes of groups, and scales or amaxes of groups
    row = 2 * SIZES["H"] // SIZES["K"] + (4 if gated else 2) * SIZES["F"] + 12
    assert rows * row <= sum(found.values()) <= rows * row + small
    assert {"x", "h", "row_slot", "slot_row", "row_probs", "split_sizes"} <= {*found}


@pytest.mark.parametrize("module", MODULES)
def test_what_is_made_again_has_no_option(module: str) -> None:
    """Nothing is left that the option could spare."""
    reason = not_offered("recompute_activations", SPECS.modules[module], SPECS.ops)
    assert reason and "neither expression nor norm" in reason
    assert not_offered("recompute_activations", SPECS.modules["grouped_mlp"], SPECS.ops) is None


@pytest.mark.parametrize("recipe", SPECS.recipes)
def test_rows_of_x_and_activations_stand_in_both_programs(recipe: str) -> None:
    of = plan("moe_layer", recipe, "cpu")
    again = {name for step in of.forward.unmerged.steps for name in step.writes}
    again &= {name for step in of.backward.unmerged.steps for name in step.writes}
    assert {"rows", "a"} <= again or recipe != "bf16"
    gathered = [s for s in of.backward.unmerged.steps if s.primitive == "gather_rows"]
    assert {step.out for step in gathered} == {"dexperts", "rows"}
    asked = next(step for step in gathered if step.out == "rows")
    assert asked.when == ("need_dfc1_weight",)


@pytest.mark.parametrize("recipe", SPECS.recipes)
def test_explain_says_what_a_token_holds(recipe: str) -> None:
    lines = "\n".join(explain(plan("moe_layer", recipe)))
    assert "  2 H + 12 K + 4 K F bytes for each token, 12 K + 4 K F of the forward's, none" in lines
    lines = "\n".join(explain(plan("grouped_mlp", "bf16")))
    assert "  2 H + 4 + 6 F bytes for each token, 6 F of the forward's, none for" in lines


@pytest.mark.slow
def test_launchers_have_a_function_of_the_least_of_two_sizes() -> None:
    """How many parts a plan has is one; chains without such sizes include nothing for it."""
    arch = SPECS.archs["sm_90a"]
    layer = launcher_context(plan("moe_layer", "bf16"), arch, "namespace")
    assert "fusegen/host/chunks.h" in layer.headers
    assert any("min(ceildiv(T * K, 2048), 256)" in line for line in layer.programs[0].workspace)
    experts = launcher_context(plan("grouped_mlp", "bf16"), arch, "namespace")
    assert "fusegen/host/chunks.h" not in experts.headers


@pytest.mark.parametrize("recipe", SPECS.recipes)
def test_recipes_leave_the_choice_of_experts_alone(recipe: str) -> None:
    """A router's op has no roles, so its GEMMs read what is there; those of experts do not."""
    routed = plan("routed_moe_layer", recipe)
    steps = [step for step in routed.steps if step.primitive == "gemm"]
    assert {step.item for step in steps} == {"router"}
    assert not any(step.copies or step.input("a_scale") for step in steps)
    experts = [step for step in routed.steps if step.primitive == "grouped_gemm"]
    assert experts
    assert all(step.copies for step in experts) == bool(SPECS.recipes[recipe].roles)


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block", "nvfp4"])
@pytest.mark.parametrize("module", ["moe_layer", "shared_moe_layer"])
def test_what_waits_is_told_how_many_rows_a_token_has(module: str, recipe: str) -> None:
    """By the map of slots, whenever a GEMM of rows is asked for."""
    delayed = plan(module, recipe, options=("delayed_wgrad",))
    wgrad = delayed.direction("wgrad")
    assert wgrad is not None
    (program,) = wgrad.programs
    (told,) = (each for each in program.arguments if each.buffer == "slot_row")
    asking = {flag for s in program.unmerged.steps if "split_sizes" in s.reads for flag in s.when}
    assert not told.when or asking <= {*told.when}
    assert not any("slot_row" in step.reads for step in program.unmerged.steps)


def test_random_numbers_do_not_depend_on_what_else_is_asked_for() -> None:
    """Whenever a step draws, those before it do."""
    program = plan("shared_moe_layer", "nvfp4", "cpu").backward
    drawing = [step for step in program.unmerged.steps if "rng_state" in step.mutates]
    assert len(drawing) == 4
    flags = {*program.flags}
    for before, step in pairwise(drawing):
        assert {*(step.when or flags)} <= {*(before.when or flags)}, before
