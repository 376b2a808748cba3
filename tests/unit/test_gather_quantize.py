"""Rows of experts that are quantised where the tokens lie: where, and what it saves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from plans import SPECS

from fusegen.checks.load import load
from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan
from fusegen.passes.pipeline import resolve_module
from fusegen.passes.verify import verify_pass
from fusegen.publish.paths import builtin_specs
from fusegen.spec.load import SpecSet

RULES = ("gather_quantize", "gathered_gradient_quantize")
QUANTIZED = sorted({*SPECS.recipes} - {"bf16"})


def plan_of(module: str, recipe: str, arch: str, specs: SpecSet = SPECS) -> ModulePlan:
    return resolve_module(specs, Cell(module, recipe, ()), arch, observe=verify_pass)


def primitives(plan: ModulePlan) -> list[list[str]]:
    """Of the forward, and of the backward."""
    return [[step.primitive for step in program.steps] for program in (plan.forward, plan.backward)]


@pytest.mark.parametrize("arch", ("sm_80", "sm_90a", "sm_100a"))
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_no_row_is_copied_before_it_is_quantised(recipe: str, arch: str) -> None:
    plan = plan_of("moe_layer", recipe, arch)
    forward, backward = primitives(plan)
    assert "gather_rows" not in forward and "rows" not in plan.forward.workspace
    assert forward.count("gather_quantize") == 1
    # The copy of x for fc1's wgrad, which reads columns, and those of dy.
    assert backward.count("gather_quantize") >= 1 and "gather_rows" not in backward
    assert {step.rule for step in plan.backward.steps if step.primitive == "gather_quantize"} == {
        "gathered_gradient_quantize"
    }


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_without_the_fusions_rows_are_copied_and_the_same_is_saved(recipe: str) -> None:
    fused = plan_of("moe_layer", recipe, "sm_90a")
    fusions = {name: each for name, each in SPECS.fusions.items() if name not in RULES}
    apart = plan_of("moe_layer", recipe, "sm_90a", replace(SPECS, fusions=fusions))
    for ours, others in zip(primitives(fused), primitives(apart), strict=True):
        assert "gather_quantize" not in others
        assert ours.count("gather_quantize") == others.count("gather_rows")
    assert (fused.saved, fused.states) == (apart.saved, apart.states)


@pytest.mark.parametrize("arch", ("cpu", "sm_80"))
def test_rows_of_16_bits_are_copied(arch: str) -> None:
    forward, backward = primitives(plan_of("moe_layer", "bf16", arch))
    assert "gather_rows" in forward and "gather_rows" in backward
    assert "gather_quantize" not in {*forward, *backward}


GIVES_ROWS = """\
edition: 2
module: toy
class: Toy
summary: rows of experts, and what a layer makes of them
dims: {T: tokens, K: experts_per_token, E: num_experts, H: hidden, N: features}
inputs:
  x: {shape: [T, H], role: input}
  ids: {shape: [T, K], dtype: int32}
  counts: {shape: [E], dtype: int64}
outputs: [rows, y]
chain:
  - op: routing_plan
    as: plan
    with: {ids: ids}
    out: {split_sizes: split_sizes, row_slot: row_slot, slot_row: slot_row}
  - {op: gather, as: gather, with: {x: x}, out: rows}
  - {op: grouped_linear, as: fc, out: y, dims: {T: T * K, K: H, N: N}}
"""


def test_rows_that_somebody_else_reads_are_written(tmp_path: Path) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "toy.yaml").write_text(GIVES_ROWS, encoding="utf-8")
    plan = plan_of("toy", "fp8_block", "sm_90a", load([builtin_specs(), tmp_path]))
    forward, _ = primitives(plan)
    assert "gather_rows" in forward and "gather_quantize" not in forward
    (reason,) = {each.reason for each in plan.rewrites if each.rule == RULES[0]}
    assert "rows" in reason
