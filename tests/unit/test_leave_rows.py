"""Rows past the groups of which no step reads anything: who leaves them, and who may not."""

from __future__ import annotations

import re

import pytest
from plans import SPECS, plan_of

from fusegen.emit.launcher.program import launcher_context
from fusegen.emit.text.explain import explain
from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan
from fusegen.ir.step import Step

WORD = "expert_parallel"
RECIPES = ("bf16", "fp8_block", "fp8_current", "fp8_delayed", "fp8_rowwise")
OPTIONS = ((), ("one_backward_call",), ("debug",), ("cached_weights",))
BY_A_MAP = {"combine_rows", "take"}
IN_GROUPS = {"grouped_gemm", "group_sum", "group_row_dot"}


def layer(arch: str, recipe: str, *options: str) -> ModulePlan:
    return plan_of(arch, Cell("moe_layer", recipe, options))


def parts_of(step: Step) -> tuple[Step, ...]:
    return step.parts or (step,)


def leaving(plan: ModulePlan) -> list[Step]:
    return [step for step in plan.steps if step.leaves]


def test_products_and_expressions_of_experts_leave_rows_of_other_ranks() -> None:
    """Two products write the activation's operands, two what tokens are added up from."""
    found = leaving(layer("sm_90a", "bf16", WORD))
    assert [step.writes for step in found] == [
        ("a", "h"),
        ("experts",),
        ("da",),
        ("dh", "drow_probs", "a"),
        ("drows",),
    ]
    (expression,) = (step for step in found if step.pointwise)
    assert expression.input("row groups") == "split_sizes"
    assert expression.kernels == "grouped_pointwise_scaled_swiglu_with_y_backward"


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe != "bf16"])
def test_what_is_quantised_is_whole(recipe: str) -> None:
    """Quantising reads all rows; what goes to tokens alone is left."""
    found = leaving(layer("sm_90a", recipe, WORD))
    assert [step.out for step in found] == ["experts", "drows"]


@pytest.mark.parametrize(
    ("recipe", "further"),
    [
        (recipe, further)
        for recipe in RECIPES
        for further in OPTIONS
        if recipe != "bf16" or further[:1] not in (("debug",), ("cached_weights",))
    ],
    ids=str,
)
@pytest.mark.parametrize("arch", ("sm_80", "sm_90a", "sm_100a"))
def test_nobody_reads_rows_that_are_left(arch: str, recipe: str, further: tuple[str, ...]) -> None:
    plan = layer(arch, recipe, WORD, *further)
    left = {name for step in leaving(plan) for name in step.writes}
    assert "experts" in left and "y" not in left and "dx" not in left
    read = set()
    for step in plan.steps:
        for part in parts_of(step):
            for operand in part.inputs:
                if operand.buffer in left - {*step.writes}:
                    read.add(operand.buffer)
                    within = part.primitive in (BY_A_MAP if operand.slot == "a" else ())
                    within |= part.primitive in IN_GROUPS and operand.slot in ("a", "b")
                    within |= bool(part.pointwise and part.pointwise.grouped)
                    assert within, (part.primitive, operand)
    assert read == left


def test_a_layer_of_one_rank_writes_all_rows() -> None:
    assert not leaving(layer("sm_90a", "bf16"))


def test_the_reference_writes_all_rows() -> None:
    assert not leaving(layer("cpu", "bf16", WORD))


def test_kernels_are_told() -> None:
    plan = layer("sm_90a", "bf16", WORD)
    programs = launcher_context(plan, SPECS.archs[plan.arch], "namespace").programs
    text = "\n".join(line for each in programs for step in each.steps for line in step.lines)
    assert len(re.findall(r"/\*clears=\*/false", text)) == len(leaving(plan)) == 5
    assert "/*clears=*/true" not in text
    said = " ".join("\n".join(explain(plan)).split())
    assert said.count("of rows that a group has") == 5
