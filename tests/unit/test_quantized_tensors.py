"""Modules that take and give quantised tensors: plans, and what they give beside plain modules."""

from __future__ import annotations

import pytest
from plans import SPECS

from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan
from fusegen.passes.draft import NotPossible
from fusegen.passes.pipeline import resolve_module
from fusegen.passes.verify import verify_pass

ARCHS = ("cpu", "sm_80", "sm_90a", "sm_100a")
QUANTIZED = tuple(name for name, recipe in SPECS.recipes.items() if recipe.roles)

every_arch = pytest.mark.parametrize("arch", ARCHS)
every_recipe = pytest.mark.parametrize("recipe", QUANTIZED)


def plan_of(arch: str, module: str, recipe: str, *options: str) -> ModulePlan:
    return resolve_module(SPECS, Cell(module, recipe, options), arch, observe=verify_pass)


@every_arch
@every_recipe
@pytest.mark.parametrize("module", ["linear", "grouped_mlp"])
def test_an_input_is_quantised_by_an_op_of_its_own(arch: str, recipe: str, module: str) -> None:
    plan = plan_of(arch, module, recipe, "quantized_input")
    assert plan.quantize_input is not None
    made = [result.buffer for result in plan.quantize_input.results]
    assert tuple(made) == plan.input_copies
    assert not any("x" in step.reads for step in plan.forward.steps)
    assert not {*plan.input_copies} & {name for s in plan.forward.steps for name in s.writes}
    plain = plan_of(arch, module, recipe)
    assert [step.primitive for step in plan.backward.unmerged.steps] == [
        step.primitive for step in plain.backward.unmerged.steps
    ]
    assert {*plan.buffers} >= {b for b in plain.buffers if b.name.startswith("x_")}


@pytest.mark.parametrize(
    ("module", "kernel"),
    [
        ("rms_norm", "norm_quantize"),
        ("layer_norm", "norm_quantize"),
        ("swiglu", "pointwise_quantize"),
        ("gather", "gather_quantize"),
        ("mlp_swiglu", "quantize"),
    ],
)
def test_what_gives_an_output_quantises_it(module: str, kernel: str) -> None:
    plan = plan_of("sm_90a", module, "fp8_block", "quantized_output")
    assert plan.forward.steps[-1].primitive == kernel
    assert plan.results == plan.output_copies != plan.outputs
    assert [r.buffer for r in plan.forward.results][: len(plan.results)] == [*plan.results]


@every_arch
@every_recipe
def test_a_norm_gives_what_a_linear_takes(arch: str, recipe: str) -> None:
    """Layouts and scales, on architectures of which some have scales in atoms."""
    given = plan_of(arch, "rms_norm", recipe, "quantized_output")
    taken = plan_of(arch, "linear", recipe, "quantized_input")
    names = {"y": "x", "D": "K"}
    for ours, theirs in zip(given.output_copies, taken.input_copies, strict=True):
        one, other = given.buffer(ours), taken.buffer(theirs)
        assert str(one.shape).replace("D", names["D"]) == str(other.shape)
        assert one.dtype == other.dtype
    assert given.layout == taken.layout


def test_what_cannot_be_has_its_reason() -> None:
    cases = {
        ("moe_layer", "fp8_block", "quantized_input"): "not read by a GEMM alone",
        ("softmax", "fp8_block", "quantized_output"): "its backward reads that again",
        ("lm_head_loss", "fp8_block", "quantized_output"): "something else than one tensor of rows",
        ("linear", "bf16", "quantized_input"): "quantises no input that could come quantised",
        ("linear", "bf16", "quantized_output"): "quantises no input, which the output would be",
    }
    for (module, recipe, word), reason in cases.items():
        with pytest.raises(NotPossible, match=reason):
            plan_of("cpu", module, recipe, word)
    excluded = ("quantized_input", "high_precision_backward")
    with pytest.raises(NotPossible, match="the backward reads the input in high precision"):
        plan_of("cpu", "linear", "fp8_block", *excluded)
