"""Gradients that are other gradients: plans have no step that copies them, and no result."""

from __future__ import annotations

from pathlib import Path

import pytest
from plans import SPECS, plan_of

from fusegen.checks.load import load
from fusegen.emit.text.explain import explain
from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan
from fusegen.ir.program import Program
from fusegen.passes.pipeline import resolve_module
from fusegen.passes.verify import verify_pass
from fusegen.publish.paths import builtin_specs

OP = """\
edition: 2
op: toy
summary: a test
dims: {{T: rows, D: width}}
inputs:
{inputs}
outputs:
{outputs}
pointwise:
{formulas}
"""
MODULE = """\
edition: 2
module: toy
class: Toy
op: toy
"""
GROUPED = """\
edition: 2
module: toy
class: Toy
summary: a test
dims: {T: tokens, H: hidden, E: num_groups}
inputs:
  x: {shape: [T, H], role: input}
  residual: {shape: [T, H]}
  sizes: {shape: [E], dtype: int64}
chain:
"""
FC = "  - {op: grouped_linear, as: fc, dims: {K: H, N: H}, with: {split_sizes: sizes}}\n"
SUM = "  - {op: add_extra_input, as: sum, with: {extra: residual}, dims: {D: H}}\n"


def plan_with(folder: Path, arch: str = "cpu", /, **files: str) -> ModulePlan:
    for name, text in files.items():
        (folder / name).mkdir()
        (folder / name / "toy.yaml").write_text(text)
    specs = load([builtin_specs(), folder])
    return resolve_module(specs, Cell("toy", "bf16"), arch, observe=verify_pass)


def op(*inputs: str, **formulas: str) -> str:
    return OP.format(
        inputs="\n".join(f"  {name}: {{shape: [T, D]}}" for name in inputs),
        outputs="\n".join(f"  {name}: {{shape: [T, D]}}" for name in formulas),
        formulas="\n".join(f"  {name}: {formula}" for name, formula in formulas.items()),
    )


def shown(program: Program) -> list[str]:
    return [f"{s.primitive}: {', '.join(s.reads)} -> {', '.join(s.writes)}" for s in program.steps]


def line(plan: ModulePlan, start: str) -> str:
    return next(text for text in explain(plan) if text.lstrip().startswith(start))


@pytest.mark.parametrize("options", [(), ("delayed_wgrad",), ("add_to_main_grad",)], ids=str)
@pytest.mark.parametrize("recipe", ["bf16", "fp8_block", "fp8_delayed"])
def test_what_comes_in_is_the_residuals(recipe: str, options: tuple[str, ...]) -> None:
    plan = plan_of("sm_90a", Cell("linear_residual", recipe, options))
    assert dict(plan.gradients)["residual"] == "dy" and plan.passed_on == ("residual",)
    assert not [step for step in plan.backward.steps if step.pointwise]
    assert "need_dresidual" not in plan.backward.flags
    assert {r.buffer for r in plan.backward.results}.isdisjoint({"dresidual", "dy"})
    assert all("need_dresidual" not in result.when and result.when for result in plan.saved)
    assert line(plan, "dy ").endswith("gradient in, and of residual")


@pytest.mark.parametrize("arch", ["cpu", "sm_80", "sm_90a"])
def test_one_gradient_of_a_sum_is_that_of_both(arch: str) -> None:
    plan = plan_of(arch, Cell("residual_rms_norm", "bf16"))
    assert dict(plan.gradients) == {"x": "dx", "norm_weight": "dnorm_weight", "residual": "dx"}
    (step,) = plan.backward.steps
    assert step.primitive == "norm_grad" and step.out == "dx"
    found = {result.buffer: result.when for result in plan.backward.results}
    assert found == {"dx": ("need_dx", "need_dresidual"), "dnorm_weight": ("need_dnorm_weight",)}
    assert line(plan, "dx ").endswith("gradient of x and residual")
    assert any("8 T D + 4 T + 4 D" in text for text in explain(plan))


def test_a_sum_alone_has_no_backward_to_run() -> None:
    plan = plan_of("sm_90a", Cell("add_extra_input", "bf16"))
    assert plan.gradients == (("x", "dy"), ("extra", "dy")) and plan.passed_on == ("x", "extra")
    assert [program.name for _, program in plan.ops] == ["forward"]
    assert plan.backward.steps == plan.backward.results == plan.backward.flags == ()
    assert [kernels.name for kernels in plan.kernel_sets] == ["pointwise_add_extra_input_forward"]
    assert line(plan, "backward") == "backward (dy) -> dy"


def test_the_other_results_of_a_step_stay(tmp_path: Path) -> None:
    formulas = op("x", "extra", "gate", y="x + extra * gate")
    plan = plan_with(tmp_path, "sm_90a", ops=formulas, modules=MODULE)
    assert dict(plan.gradients) == {"x": "dy", "extra": "dextra", "gate": "dgate"}
    (step,) = plan.backward.steps
    assert step.kernels == "pointwise_toy_without_dx_backward"
    assert {*step.reads} == {"dy", "extra", "gate"} and step.writes == ("dextra", "dgate")
    assert [(r.buffer, r.when) for r in plan.backward.results] == [
        ("dextra", ("need_dextra",)),
        ("dgate", ("need_dgate",)),
    ]


def test_what_only_a_dropped_result_read_is_not_read(tmp_path: Path) -> None:
    plan = plan_with(tmp_path, "sm_90a", ops=op("x", "e", y="x * x", z="e"), modules=MODULE)
    assert shown(plan.backward) == ["pointwise_grad: dy, x -> dx"]
    assert dict(plan.gradients)["e"] == "dz"
    (step,) = plan.backward.steps
    assert step.pointwise and [o.symbol for o in step.pointwise.operands] == ["dy", "x"]


def test_another_value_is_made(tmp_path: Path) -> None:
    """Once for each leaf: only what no step computes is passed on."""
    plan = plan_with(tmp_path, ops=op("x", "e", y="x - e"), modules=MODULE)
    assert dict(plan.gradients) == {"x": "dy", "e": "de"}
    assert shown(plan.backward) == ["pointwise_grad: dy -> de"]


def test_rows_past_the_groups_end_in_zeros(tmp_path: Path) -> None:
    """What comes in may hold anything there; a GEMM's result is zero, whoever has it."""
    behind, before = tmp_path / "behind", tmp_path / "before"
    behind.mkdir()
    before.mkdir()
    plan = plan_with(behind, modules=GROUPED + FC + SUM)
    assert dict(plan.gradients)["residual"] == "dresidual" and not plan.passed_on
    (step,) = [step for step in plan.backward.steps if step.pointwise]
    assert step.pointwise and step.pointwise.grouped and step.writes == ("dresidual",)
    plan = plan_with(before, modules=GROUPED + SUM + FC)
    gradients = dict(plan.gradients)
    assert gradients["x"] == gradients["residual"] == "dx"
    assert not [step for step in plan.backward.steps if step.pointwise]


def test_modules_are_returned_what_they_had() -> None:
    """A module whose recipe quantises nothing, and one that a gradient passes straight through."""
    for recipe in ("bf16", "mxfp8"):
        plan = plan_of("cpu", Cell("quantize", recipe))
        assert plan.passed_on == ("x",) and plan.backward.steps == ()


@pytest.mark.slow
def test_every_leaf_has_a_buffer() -> None:
    """Of its own type and shape, which a result gives or the caller."""
    for module in sorted(SPECS.modules):
        plan = plan_of("cpu", Cell(module, "bf16"))
        there = {*plan.incoming, *(result.buffer for result in plan.backward.results)}
        for leaf, name in plan.gradients:
            assert name in there, module
            one, other = plan.buffer(leaf), plan.buffer(name)
            assert (one.dtype, one.shape) == (other.dtype, other.shape), module
