"""What is planned for sm_100a: which GEMMs multiply in tensor memory, and as what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusegen.checks.load import load
from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan, Status
from fusegen.ir.quantization import ScaleRounding
from fusegen.passes.pipeline import resolve_module
from fusegen.publish.paths import builtin_specs
from fusegen.steps import is_gemm

ARCH = "sm_100a"
SPECS = load([builtin_specs()])
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
