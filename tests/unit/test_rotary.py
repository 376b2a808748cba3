"""Rotary embeddings in plans: which cells there are, what they save, and which sizes fit."""

from __future__ import annotations

import pytest

from fusegen.checks.load import load
from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan
from fusegen.ir.program import CheckKind
from fusegen.passes.pipeline import resolve_module
from fusegen.passes.verify import verify_pass
from fusegen.publish.paths import builtin_specs

SPECS = load([builtin_specs()])
ARCHS = ("cpu", "sm_80", "sm_90a")
MODULES = {"norm_qkv": False, "norm_qkv_interleaved": True}


def plan_of(module: str, recipe: str, arch: str, *options: str) -> ModulePlan:
    return resolve_module(SPECS, Cell(module, recipe, options), arch, observe=verify_pass)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("recipe", SPECS.recipes)
@pytest.mark.parametrize("module", MODULES)
def test_queries_and_keys_are_rotated(module: str, recipe: str, arch: str) -> None:
    """And values are not; pairs as the module says."""
    plan = plan_of(module, recipe, arch)
    assert plan.outputs == ("q", "k", "v")
    rotated = [step for step in plan.forward.steps if step.primitive == "rotary"]
    assert [(step.kind, step.out) for step in rotated] == [("forward", "q"), ("forward", "k")]
    assert {dict(step.attributes)["interleaved"] for step in rotated} == {MODULES[module]}
    back = [step for step in plan.backward.steps if step.primitive == "rotary"]
    assert [(step.kind, step.reads[0]) for step in back] == [("inverse", "dk"), ("inverse", "dq")]


def test_the_tables_alone_are_saved() -> None:
    plan = plan_of("rotary", "bf16", "sm_90a")
    assert [each.buffer for each in plan.saved] == ["cos", "sin"]
    assert plan.differentiated == ("x",)


def test_three_layers_read_one_copy_of_the_norms_result() -> None:
    """Its backward reads one, too, and what was rotated is not saved."""
    plan = plan_of("norm_qkv", "fp8_block", "sm_90a").unmerged
    made = [c.data for s in plan.forward.steps for c in s.copies if c.original == "n"]
    assert {*made} == {"n_rowwise", "n_columnwise"}
    saved = {each.buffer for each in plan.saved}
    assert saved.isdisjoint({"n", "query_y", "key_y", "q", "k", "v"})


@pytest.mark.parametrize("arch", ARCHS)
def test_a_row_is_a_whole_number_of_heads(arch: str) -> None:
    plan = plan_of("norm_qkv", "bf16", arch)
    for program in plan.programs:
        checks = [c for c in program.checks if c.kind is CheckKind.MULTIPLE and c.divisor]
        assert {(str(c.expr), str(c.divisor)) for c in checks} == {("Q", "2 * P"), ("V", "2 * P")}
