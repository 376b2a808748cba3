"""Which copies have their scales in atoms, and which GEMMs read them there."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plans import SPECS, plan_of

from fusegen.ir.dtypes import DType
from fusegen.ir.kernel import ATOM_ROWS
from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan, Status
from fusegen.ir.quantization import Role, ScaleRounding
from fusegen.passes.pipeline import resolve_module
from fusegen.spec.load import SpecSet
from fusegen.steps import is_gemm, reads_decoded

ARCH = "sm_120a"
NATIVE = {"mxfp8": "gemm_mx_mma", "nvfp4": "gemm_nv_mma", "fp8_block": "gemm_pow2_mma"}
"""Recipes whose scales the instruction reads, and the family that has it."""


def gemms(plan: ModulePlan) -> list[str]:
    """Templates of the kernels of the GEMMs."""
    sets = {each.name: each for each in plan.kernel_sets}
    return [sets[step.kernels].name for step in plan.steps if is_gemm(step)]


@pytest.mark.parametrize("module", ["linear", "grouped_linear", "grouped_mlp"])
@pytest.mark.parametrize("recipe", NATIVE)
def test_recipes_whose_scales_the_instruction_reads(recipe: str, module: str) -> None:
    plan = plan_of(ARCH, Cell(module, recipe))
    assert plan.status is Status.NATIVE and plan.layout.token_alignment == ATOM_ROWS
    assert all(name.startswith(NATIVE[recipe]) for name in gemms(plan))
    copies = {copy for step in plan.steps for copy in step.copies}
    assert copies and all(copy.atoms for copy in copies)
    for copy in copies:
        assert [dim.value for dim in plan.buffer(copy.scale).shape.dims[-3:]] == [32, 4, 4]


@pytest.mark.parametrize("recipe", ["bf16", "fp8_current", "fp8_delayed", "fp8_rowwise"])
def test_other_recipes_have_scales_in_logical_order(recipe: str) -> None:
    plan = plan_of(ARCH, Cell("grouped_linear", recipe))
    assert plan.status is Status.NATIVE and plan.layout.token_alignment == 32
    assert not any(copy.atoms for step in plan.steps for copy in step.copies)


def test_powers_of_two_are_stored_as_exponents() -> None:
    plan = plan_of(ARCH, Cell("linear", "fp8_block"))
    assert {spec.scale.dtype for _, spec in plan.quantizations} == {DType.E8M0}
    quantize = plan_of(ARCH, Cell("quantize", "fp8_block"))  # read by no GEMM
    assert {spec.scale.dtype for _, spec in quantize.quantizations} == {DType.FLOAT32}
    assert not any(copy.atoms for each in quantize.conversions for copy in each.copies)


def changed(recipe: str, role: Role, **scale: object) -> SpecSet:
    """The specs, one role of a recipe with other scales."""
    spec = SPECS.recipes[recipe]
    other = replace(spec.roles[role], scale=replace(spec.roles[role].scale, **scale))
    recipes = {**SPECS.recipes, recipe: replace(spec, roles={**spec.roles, role: other})}
    return replace(SPECS, recipes=recipes)


def test_one_role_that_does_not_fit_keeps_all_scales_in_logical_order() -> None:
    """Else groups of one copy would begin elsewhere than those of the other."""
    specs = changed("fp8_block", Role.GRAD_OUTPUT, round=ScaleRounding.NONE)
    plan = resolve_module(specs, Cell("grouped_linear", "fp8_block"), ARCH)
    assert not any(copy.atoms for step in plan.steps for copy in step.copies)
    assert plan.layout.token_alignment == 32
    assert all(name.startswith("gemm_fp8_split_mma") for name in gemms(plan))


def test_scales_in_logical_order_are_read_by_no_such_gemm() -> None:
    """An architecture that has the families and lists not all scalings decodes instead."""
    arch = SPECS.archs[ARCH]
    layout = replace(arch.layout, scale_atoms=("mx_32x32",))
    specs = replace(SPECS, archs={ARCH: replace(arch, layout=layout)})
    plan = resolve_module(specs, Cell("grouped_linear", "mxfp8"), ARCH)
    assert plan.status is Status.EMULATED
    assert "gemm_mx_mma reads scales in atoms" in plan.reason
    assert all(reads_decoded(step) for step in plan.steps if is_gemm(step))


def test_atoms_are_decoded_where_no_gemm_reads_them() -> None:
    arch = SPECS.archs[ARCH]
    kernels = {name: each for name, each in arch.kernels.items() if name != "gemm_nv_mma"}
    specs = replace(SPECS, archs={ARCH: replace(arch, kernels=kernels)})
    plan = resolve_module(specs, Cell("grouped_linear", "nvfp4"), ARCH)
    assert plan.status is Status.EMULATED
    decoded = [each.name for each in plan.kernel_sets if each.name.startswith("dequantize")]
    assert decoded and all("atoms" in name for name in decoded)
