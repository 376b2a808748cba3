"""Scales of emulated GEMMs that are constant along the contraction: left for their end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from fusegen.checks.load import load
from fusegen.emit.launcher.program import launcher_context
from fusegen.emit.text.explain import explain
from fusegen.families.family import Demand
from fusegen.families.registry import known_family
from fusegen.ir.dtypes import DType
from fusegen.ir.kernel import EndScale, GemmKind
from fusegen.ir.kernel_set import Variant
from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan, Status
from fusegen.ir.quantization import OPERANDS, Extent, QuantizationSpec, Role, ScaleRule, ScaleSpec
from fusegen.ir.step import Operand, Step
from fusegen.passes.kernels import DECODED
from fusegen.passes.pipeline import resolve_module
from fusegen.publish.paths import builtin_specs
from fusegen.spec.load import SpecSet
from fusegen.steps import decodes, is_gemm
from fusegen.steps.verify import VerifyError
from fusegen.steps.verify_directions import verify_plan

from . import gpu_files

selection = gpu_files.load("selection")

ARCH = "sm_90a"
BLOCKS = {EndScale.NONE: "[64, 64]", EndScale.TENSOR: "[all, all]", EndScale.ROW: "[1, all]"}
ROLES = (Role.INPUT, Role.WEIGHT, Role.GRAD_OUTPUT)
DRAWN = "drawn"


def plan_of(folder: Path, ends: dict[Role, EndScale], module: str = "grouped_linear") -> ModulePlan:
    """The plan of a recipe whose roles have these scales, in fp32 sums, which no FP8 kernel has."""
    lines = [
        f"edition: 2\nrecipe: {DRAWN}\nsummary: drawn\nsource: none",
        "gemm: {fprop: fp32, dgrad: fp32, wgrad: fp32}",
        "tolerance: {gemm: 2.0e-2, end_to_end: 1.5e-1, float32: 1.0e-3}\nroles:",
    ]
    scale = "scale: {dtype: float32, rule: max_over_amax}"
    lines += [f"  {r.value}: {{format: e4m3, block: {BLOCKS[ends[r]]}, {scale}}}" for r in ROLES]
    recipes = folder / "recipes"
    recipes.mkdir(exist_ok=True)
    (recipes / f"{DRAWN}.yaml").write_text("\n".join(lines) + "\n")
    return resolve_module(specs(folder), Cell(module, DRAWN), ARCH)


def specs(folder: Path) -> SpecSet:
    return load([builtin_specs(), folder])


def gemms(plan: ModulePlan) -> Iterator[tuple[Step, tuple[EndScale, ...]]]:
    """Every GEMM, and what a recipe leaves of its operands' scales."""
    ends = {role: spec.end_scale for role, spec in plan.quantizations}
    for step in plan.steps:
        if is_gemm(step):
            roles = (OPERANDS[GemmKind(step.kind), slot][0] for slot in "ab")
            yield step, tuple(ends[role] for role in roles)


EVERY = [dict(zip(ROLES, each, strict=True)) for each in product(EndScale, repeat=3)]


@pytest.mark.parametrize("module", ["linear", "grouped_linear"])
@pytest.mark.parametrize("ends", EVERY, ids=lambda ends: "-".join(e.value for e in ends.values()))
def test_either_operand_keeps_its_scales_for_the_end(
    tmp_path: Path, ends: dict[Role, EndScale], module: str
) -> None:
    plan = plan_of(tmp_path, ends, module)
    assert plan.status is Status.EMULATED
    verify_plan(plan)
    of_buffer = {step.out: step for step in plan.steps if decodes(step)}
    for step, found in gemms(plan):
        for slot, copy, end in zip("ab", step.copies, found, strict=True):
            left = end is not EndScale.NONE
            assert step.input(f"{slot}_scale") == (copy.scale if left else None)
            decoding = of_buffer[step.input(slot) or ""]
            assert (copy.scale in decoding.reads) is not left
            assert (decoding.kernels or "").split("_e4m3_")[1].startswith("codes") is left
        words = "_".join(end.value for end in found)
        kept = any(end is not EndScale.NONE for end in found)
        assert step.kernels == f"gemm_decoded_sm90_{step.kind}" + (f"_{words}" if kept else "")


def test_codes_of_groups_are_decoded_without_looking_for_them(tmp_path: Path) -> None:
    """Scales of rowwise tokens depend on the group; their codes do not."""
    plan = plan_of(tmp_path, dict.fromkeys(ROLES, EndScale.TENSOR))
    first = next(step for step in plan.forward.steps if decodes(step))
    assert [operand.slot for operand in first.inputs] == ["a"]


def test_a_missing_scale_before_another_one_is_null(tmp_path: Path) -> None:
    """Fields of an argument struct are given in order."""
    ends = {**dict.fromkeys(ROLES, EndScale.NONE), Role.WEIGHT: EndScale.ROW}
    plan = plan_of(tmp_path, ends)
    context = launcher_context(plan, specs(tmp_path).archs[ARCH], "namespace")
    forward = "\n".join(line for each in context.programs[0].steps for line in each.lines)
    assert "/*scale_a=*/nullptr,\n" in forward
    assert "/*scale_b=*/floats(pointer(weight_rowwise_scale))" in forward
    backward = "\n".join(line for each in context.programs[1].steps for line in each.lines)
    wgrad = backward[backward.index("gemm_decoded_sm90_wgrad") :]
    assert "scale_a" not in wgrad


def test_a_scale_that_nobody_applies_is_refused(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, dict.fromkeys(ROLES, EndScale.ROW))
    steps = tuple(map(without_scale, plan.forward.steps))
    forward, backward = plan.directions
    program = replace(plan.forward, steps=steps)
    with pytest.raises(VerifyError, match="weight_rowwise_scale is of a copy, but the step reads"):
        verify_plan(replace(plan, directions=(replace(forward, segments=(program,)), backward)))


def without_scale(step: Step) -> Step:
    kept: tuple[Operand, ...] = tuple(each for each in step.inputs if each.slot != "b_scale")
    return replace(step, inputs=kept)


@pytest.mark.slow
def test_plans_say_whether_gemms_are_of_codes(tmp_path: Path) -> None:
    """By which the GPU run knows how near to the reference they have to be."""

    def of_codes(plan: ModulePlan) -> bool:
        found: bool = selection.multiplies_codes("\n".join(explain(plan)))
        return found

    rows = dict.fromkeys(ROLES, EndScale.ROW)
    assert of_codes(plan_of(tmp_path, rows))
    assert of_codes(plan_of(tmp_path, {**rows, Role.WEIGHT: EndScale.TENSOR}))
    assert not of_codes(plan_of(tmp_path, {**rows, Role.INPUT: EndScale.NONE}))
    for cell in ("linear__fp8_rowwise", "linear__mxfp8", "quantize__fp8_current"):
        assert not of_codes(resolve_module(specs(tmp_path), Cell.parse(cell), ARCH))


def test_a_family_without_them_is_not_chosen() -> None:
    family = known_family("gemm_decoded_sm90")
    assert family is not None
    ends = (EndScale.ROW, EndScale.NONE)
    demand = Demand("gemm", GemmKind.FPROP, Variant((DType.BFLOAT16,), (), (), ends=ends))
    assert family.accepts(demand) is None
    assert replace(family, ends=()).accepts(demand) == "gemm of bfloat16_row_none"
    assert replace(family, ends=()).accepts(replace(demand, variant=DECODED)) is None


def test_what_a_quantisation_leaves() -> None:
    def left(*block: int | Extent, rule: ScaleRule = ScaleRule.MAX_OVER_AMAX) -> EndScale:
        dtype = DType.FLOAT32 if rule is ScaleRule.MAX_OVER_AMAX else DType.E8M0
        rows, columns = block
        return QuantizationSpec(DType.E4M3, (rows, columns), ScaleSpec(dtype, rule)).end_scale

    assert left(Extent.ALL, Extent.ALL) is EndScale.TENSOR
    assert left(1, Extent.ALL) is EndScale.ROW
    assert left(1, 128) is left(64, 64) is EndScale.NONE
    assert left(1, Extent.ALL, rule=ScaleRule.MX) is EndScale.NONE
