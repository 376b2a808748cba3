"""Plans of routers whose weight is in fp32: its parts are multiplied, its gradient is in fp32."""

from __future__ import annotations

import pytest
from plans import SPECS

from fusegen.ir.dtypes import DType
from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan
from fusegen.passes.draft import NotPossible
from fusegen.passes.pipeline import resolve_module
from fusegen.spec.offers import modules_with

FP32 = "fp32_router_weight"


def plan_of(module: str, *options: str, arch: str = "sm_90a") -> ModulePlan:
    return resolve_module(SPECS, Cell(module, "bf16", options), arch)


def test_modules_with_a_router_offer_it() -> None:
    routers = {name for name, each in SPECS.modules.items() if "router" in each.ops}
    assert {*modules_with(FP32, SPECS)} == routers and "routed_moe_layer" in routers


@pytest.mark.parametrize("arch", list(SPECS.archs))
def test_a_gemm_multiplies_the_parts(arch: str) -> None:
    plan = plan_of("router_gpt_oss", FP32, arch=arch)
    split, product, added, route = plan.forward.steps
    assert [each.primitive for each in (split, product, added)] == [
        "split_weight",
        "gemm",
        "add_products",
    ]
    assert product.input("b") == split.out and not product.input("add")
    assert added.input("a") == product.out and added.input("add") == "bias"
    assert route.input("a") == added.out == "logits"
    assert str(plan.buffer(split.out).shape) == "[3 * E, H]"


def test_types_are_those_of_the_weight() -> None:
    plan = plan_of("router", FP32)
    types = {each.name: each.dtype for each in plan.buffers}
    wide = {"weight", "dweight", "logits", "logits_parts"}
    assert all(types[name] is DType.FLOAT32 for name in wide)
    assert all(types[name] is DType.IO for name in ("x", "dx", "weight_parts", "weight_rounded"))
    (dgrad,) = [each for each in plan.backward.steps if each.kind == "dgrad"]
    assert dgrad.input("b") == "weight_rounded"


def test_experts_of_a_layer_keep_theirs() -> None:
    plan = plan_of("routed_moe_layer", FP32)
    types = {each.buffer: plan.buffer(each.buffer).dtype for each in plan.parameters}
    wide = [name for name, dtype in types.items() if dtype is DType.FLOAT32]
    assert wide == ["router_weight"] and len(types) > 1


def test_its_main_grad_is_in_fp32() -> None:
    plan = plan_of("router", FP32, "add_to_main_grad")
    assert plan.buffer("weight_main_grad").dtype is DType.FLOAT32
    with pytest.raises(NotPossible, match="no main_grad of 16 bits"):
        plan_of("router", FP32, "add_to_16_bit_main_grad")
