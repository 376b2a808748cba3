"""FP8 products whose epilogue gives the codes of an activation, and why others do not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from plans import SPECS

from fusegen.checks.load import load
from fusegen.emit.launcher.program import launcher_context
from fusegen.emit.reference.cell import reference_context
from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan
from fusegen.ir.quantization import Orientation
from fusegen.ir.step import Step
from fusegen.ir.text import parse, text
from fusegen.passes.pipeline import resolve_module
from fusegen.passes.verify import verify_pass
from fusegen.publish.paths import builtin_specs
from fusegen.spec.load import SpecSet
from fusegen.steps import made_copies, read_copies
from fusegen.steps.gemm_pointwise import AUX
from fusegen.steps.verify_directions import verify_plan

GROUPED, DENSE = "grouped_linear_activation_codes", "linear_activation_codes"
CODED = (
    "moe_layer__fp8_delayed",
    "moe_layer__fp8_delayed__cached_weights",
    "routed_moe_layer__fp8_delayed",
    "grouped_mlp__fp8_delayed__recompute_activations",
    "mlp_swiglu__fp8_delayed__recompute_activations",
    "grouped_mlp__fp8_delayed",
    "mlp_swiglu__fp8_delayed",
)


def plan_of(cell: str, arch: str = "sm_90a", of: SpecSet = SPECS) -> ModulePlan:
    return resolve_module(of, Cell.parse(cell), arch, observe=verify_pass)


def apart() -> SpecSet:
    fusions = {n: each for n, each in SPECS.fusions.items() if n not in (GROUPED, DENSE)}
    return replace(SPECS, fusions=fusions)


def coded(plan: ModulePlan) -> list[Step]:
    return [step for step in plan.steps if step.rule in (GROUPED, DENSE)]


def reason(plan: ModulePlan) -> str:
    (found,) = {each.reason for each in plan.rewrites if each.rule == GROUPED}
    return found


@pytest.mark.parametrize("cell", CODED)
def test_one_step_gives_the_codes(cell: str) -> None:
    plan = plan_of(cell)
    (step,) = coded(plan)
    assert step.kernels and step.kernels.startswith("gemm_codes_sm90_fprop_e4m3_e4m3")
    assert [each.primitive for each in step.parts][1:] == ["pointwise", "quantize"]
    assert len(read_copies(step)) == 2
    made = made_copies(step)
    again = cell.startswith("moe_layer") or "routed" in cell or "recompute" in cell
    assert tuple(copy.orientation for copy in made) == tuple(Orientation)[: 1 if again else 2]
    assert {name for copy in made for name in (copy.data, copy.scale)} <= {*step.writes}
    assert "h" in step.writes and step.outputs[-1].slot == AUX
    assert "a" not in {name for each in plan.steps for name in (*each.reads, *each.writes)}
    verify_plan(plan)
    assert parse(text(plan)) == plan


@pytest.mark.parametrize("cell", CODED)
def test_all_else_is_as_without(cell: str) -> None:
    plan, other = plan_of(cell), plan_of(cell, of=apart())
    assert not coded(other)
    assert (plan.saved, plan.states, plan.shardings) == (other.saved, other.states, other.shardings)
    assert reference_context(plan) == reference_context(other)


def said_of(cell: str) -> str:
    """How the launcher of a plan launches the step that gives codes."""
    plan = plan_of(cell)
    (step,) = coded(plan)
    context = launcher_context(plan, SPECS.archs["sm_90a"], "namespace")
    lines = [line for p in context.programs for launch in p.steps for line in launch.lines]
    begin = next(i for i, line in enumerate(lines) if "GatedCodesArguments" in line)
    end = next(i for i, line in enumerate(lines) if str(step.kernels) in line)
    return "\n".join(lines[begin : end + 1])


def test_the_launch_says_both() -> None:
    said = said_of("moe_layer__fp8_delayed")
    for words in ("Fp8GemmArguments{", "state.history = fc2_input_amax_history", "writable(h)"):
        assert words in said
    assert "quantize.columnwise" not in said
    assert "quantize.columnwise" in said_of("grouped_mlp__fp8_delayed")


def test_the_columnwise_copy_is_for_a_gradient() -> None:
    """Who asks for no gradient of the second weight has no copy for it."""
    (step,) = coded(plan_of("grouped_mlp__fp8_delayed"))
    rowwise, columnwise = made_copies(step)
    assert step.wanted(columnwise.data) == step.wanted(columnwise.scale) == ("need_dfc2_weight",)
    assert not step.wanted(rowwise.data)


@pytest.mark.parametrize(
    ("cell", "arch", "words"),
    [
        ("moe_layer__fp8_current", "sm_90a", "scales of a follow from a"),
        ("moe_layer__fp8_block", "sm_90a", "scales of blocks of a take an epilogue as long"),
        ("moe_layer__fp8_delayed", "cpu", "cpu has no kernels"),
        ("moe_layer__fp8_delayed", "sm_89", "sm_89 has no kernels for grouped_gemm_pointwise_quan"),
        ("moe_layer_srelu__fp8_delayed", "sm_90a", "no expression of halves of h"),
        ("moe_layer__fp8_delayed__interleaved_32", "sm_90a", "alternate in blocks of 32 columns"),
        ("moe_layer__bf16", "sm_90a", "the forward has no quantize"),
    ],
)
def test_why_not(cell: str, arch: str, words: str) -> None:
    plan = plan_of(cell, arch)
    assert not coded(plan)
    assert words in reason(plan)


def test_explain_says_what_the_gradient_is_declined_for() -> None:
    """It was built and measured; its pattern stands in the backward all the same."""
    fusion = SPECS.fusions["gated_activation_gradient"]
    assert fusion.declined
    for cell in ("moe_layer__bf16", "grouped_mlp__bf16"):
        (found,) = (r for r in plan_of(cell).rewrites if r.rule == fusion.name)
        assert found.place and found.reason == fusion.declined
    (found,) = (r for r in plan_of("moe_layer__fp8_block").rewrites if r.rule == fusion.name)
    assert not found.place and found.reason != fusion.declined


def test_a_history_that_no_kernel_keeps(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    delayed = (builtin_specs() / "recipes" / "fp8_delayed.yaml").read_text()
    assert "history: 1024" in delayed and "recipe: fp8_delayed" in delayed
    longer = delayed.replace("history: 1024", "history: 2048")
    longer = longer.replace("recipe: fp8_delayed", "recipe: longer")
    (tmp_path / "recipes" / "longer.yaml").write_text(longer)
    specs = load([builtin_specs(), tmp_path])
    with pytest.raises(Exception, match="a history of 2048 amaxes"):
        plan_of("moe_layer__longer", of=specs)
