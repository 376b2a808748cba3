"""What is planned for sm_100a: which GEMMs multiply in tensor memory, and as what."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plans import SPECS

from fusegen.ir.dtypes import DType
from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan, Status
from fusegen.ir.quantization import Orientation, Role, ScaleRounding
from fusegen.ir.shapes import Shape
from fusegen.passes.pipeline import resolve_module
from fusegen.steps import is_gemm

ARCH = "sm_100a"
FAMILIES = {
    "bf16": "gemm_tcgen05",
    "fp8_block": "gemm_pow2_tcgen05",
    "fp8_current": "gemm_fp8_tcgen05",
    "fp8_delayed": "gemm_fp8_tcgen05",
    "fp8_rowwise": "gemm_fp8_tcgen05",
    "mxfp8": "gemm_mx_tcgen05",
    "nvfp4": "gemm_nv_tcgen05",
}


def kernels_of(plan: ModulePlan) -> list[str]:
    """Of the GEMMs of both directions."""
    programs = (plan.forward, plan.backward)
    return [step.kernels or "" for each in programs if each for step in each.steps if is_gemm(step)]


def test_every_recipe_is_here() -> None:
    assert {*FAMILIES} == {*SPECS.recipes}


@pytest.mark.parametrize("recipe", FAMILIES)
def test_every_recipe_is_native(recipe: str) -> None:
    plan = resolve_module(SPECS, Cell("grouped_linear", recipe), ARCH)
    kernels = kernels_of(plan)
    assert plan.status is Status.NATIVE
    assert len(kernels) == 3 and all(each.startswith(FAMILIES[recipe]) for each in kernels)


AS_THEY_LIE = {
    "x_columnwise": "T align(K, 16)",
    "dy_columnwise": "T align(N, 16)",
    "weight_columnwise": "E N align(K, 16)",
}


def shapes_of(plan: ModulePlan) -> dict[str, Shape]:
    return {buffer.name: buffer.shape for buffer in plan.buffers}


@pytest.mark.parametrize("recipe", ["fp8_block", "fp8_rowwise", "mxfp8"])
def test_codes_of_8_bits_are_not_transposed(recipe: str) -> None:
    shapes = shapes_of(resolve_module(SPECS, Cell("grouped_linear", recipe), ARCH))
    for name, dims in AS_THEY_LIE.items():
        *rows, columns = dims.split(" ", 2 if name.startswith("weight") else 1)
        assert shapes[name] == Shape.parse((*rows, columns)), name


def test_codes_of_4_bits_are_transposed() -> None:
    plan = resolve_module(SPECS, Cell("grouped_linear", "nvfp4"), ARCH)
    shapes = shapes_of(plan)
    assert plan.layout.transposed is True
    assert str(shapes["weight_columnwise"].dims[1]) == "K"
    assert str(shapes["x_columnwise"].dims[0]) == "K"


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed"])
@pytest.mark.parametrize("module", ["grouped_linear", "linear", "grouped_mlp"])
def test_one_copy_serves_every_gemm_where_a_scale_spans_all(recipe: str, module: str) -> None:
    """Codes lie alike and are the same, so that a columnwise copy would be the rowwise one."""
    plan = resolve_module(SPECS, Cell(module, recipe), ARCH)
    steps = [step for each in (plan.forward, plan.backward) for step in each.steps]
    copies = {copy for step in steps for copy in step.copies}
    assert {copy.orientation for copy in copies} == {Orientation.ROWWISE}
    assert not any("columnwise" in buffer.name for buffer in plan.buffers)


def test_a_recipe_of_both_has_all_of_its_copies_transposed() -> None:
    """Its GEMMs along tokens read both, and tokens begin in one way."""
    fp4 = SPECS.recipes["nvfp4"].roles[Role.GRAD_OUTPUT]
    fp8 = SPECS.recipes["mxfp8"]
    plain = replace(fp4, hadamard=None)
    roles = {**fp8.roles, Role.GRAD_OUTPUT: plain}
    specs = replace(SPECS, recipes={**SPECS.recipes, "mxfp8": replace(fp8, roles=roles)})
    plan = resolve_module(specs, Cell("grouped_linear", "mxfp8"), ARCH)
    assert {spec.format for _, spec in plan.quantizations} == {DType.E4M3, DType.E2M1}
    assert plan.layout.transposed is True and plan.status is Status.EMULATED
    assert not any(copy.untransposed for step in plan.backward.steps for copy in step.copies)


def test_scales_of_blocks_that_are_no_powers_of_two_are_decoded() -> None:
    """Sums are scaled by what the instruction reads, which has no fp32 scales."""
    block = SPECS.recipes["fp8_block"]
    free = {
        role: replace(spec, scale=replace(spec.scale, round=ScaleRounding.NONE))
        for role, spec in block.roles.items()
    }
    specs = replace(SPECS, recipes={**SPECS.recipes, "fp8_block": replace(block, roles=free)})
    plan = resolve_module(specs, Cell("grouped_linear", "fp8_block"), ARCH)
    assert plan.status is Status.EMULATED
    assert "operands are decoded to bfloat16" in plan.reason
    assert all(each.startswith("gemm_decoded_tcgen05") for each in kernels_of(plan))
    shapes = shapes_of(plan)
    assert shapes["x_columnwise_decoded"] == Shape.parse(("T", "K"))  # no padded groups
    assert "weight_columnwise" not in shapes  # squares are the same ones either way
