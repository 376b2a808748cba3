"""Rotary embeddings in plans: which cells there are, what they save, and which sizes fit."""

from __future__ import annotations

import pytest
from plans import SPECS

from fusegen.ir.buffers import StateFill
from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan
from fusegen.ir.program import CheckKind
from fusegen.passes.pipeline import resolve_module
from fusegen.passes.verify import verify_pass
from fusegen.steps import is_gemm

ARCHS = ("cpu", "sm_80", "sm_90a")
MODULES = {
    "norm_qkv": (1, False),
    "norm_qkv_interleaved": (1, True),
    "norm_qkv_gqa_4": (4, False),
    "norm_qkv_gqa_8": (8, False),
}
"""Heads of queries for each head of keys, and whether pairs are interleaved."""


def plan_of(module: str, recipe: str, arch: str, *options: str) -> ModulePlan:
    return resolve_module(SPECS, Cell(module, recipe, options), arch, observe=verify_pass)


def in_v(times: int) -> str:
    return "V" if times == 1 else f"{times} * V"


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("recipe", SPECS.recipes)
@pytest.mark.parametrize("module", MODULES)
def test_queries_keys_and_values_come_from_one_gemm(module: str, recipe: str, arch: str) -> None:
    """One step parts its rows, one puts their gradients together; nothing else touches either."""
    plan = plan_of(module, recipe, arch).unmerged
    ratio, interleaved = MODULES[module]
    assert plan.outputs == ("q", "k", "v")
    assert [str(plan.buffer(name).shape) for name in plan.outputs] == [
        f"[T..., {in_v(times)}]" for times in (ratio, 1, 1)
    ]
    assert str(plan.buffer("qkv_weight").shape) == f"[{ratio + 2} * V, H]"
    kinds = [step.kind for step in plan.steps if is_gemm(step)]
    assert sorted(kinds) == ["dgrad", "fprop", "wgrad"]
    (part,) = (step for step in plan.forward.steps if step.primitive == "rotary_qkv")
    (pack,) = (step for step in plan.backward.steps if step.primitive == "rotary_qkv_grad")
    assert (part.reads, part.writes) == (("qkv_y", "cos", "sin"), ("q", "k", "v"))
    assert (pack.reads, pack.writes) == (("dq", "dk", "dv", "cos", "sin"), ("dqkv_y",))
    told = {"queries_per_key": ratio, "interleaved": interleaved}
    assert dict(part.attributes) == dict(pack.attributes) == told
    assert str(part.flops) == f"{3 * (ratio + 1)} * T * V"


@pytest.mark.parametrize("word", ("cached_weights", "quantized_weights"))
@pytest.mark.parametrize("recipe", [name for name in SPECS.recipes if name != "bf16"])
def test_its_weight_is_kept_quantised(recipe: str, word: str) -> None:
    plan = plan_of("norm_qkv_gqa_4", recipe, "sm_90a", word)
    assert plan.refresh is not None
    assert all(len(program.arguments) <= 16 for program in plan.programs)
    kept = {state.path for state in plan.states if state.fill is StateFill.COPY}
    assert kept and all(path.startswith("qkv.weight_") for path in kept)


def test_the_tables_alone_are_saved() -> None:
    for module in ("rotary", "rotary_qkv"):
        plan = plan_of(module, "bf16", "sm_90a")
        assert [each.buffer for each in plan.saved] == ["cos", "sin"]
        assert plan.differentiated == ("x",)


def test_what_was_rotated_is_not_saved() -> None:
    plan = plan_of("norm_qkv", "fp8_block", "sm_90a").unmerged
    made = {c.data for s in plan.forward.steps for c in s.copies if c.original == "n"}
    assert made == {"n_rowwise", "n_columnwise"}
    assert {each.buffer for each in plan.saved}.isdisjoint({"n", "qkv_y", "q", "k", "v"})


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("module", ("norm_qkv_gqa_4", "rotary_qkv"))
def test_a_row_is_a_whole_number_of_heads(module: str, arch: str) -> None:
    """In every op that has rows of heads; others know no heads."""
    plan = plan_of(module, "bf16", arch)
    for program in plan.programs:
        checks = [c for c in program.checks if c.kind is CheckKind.MULTIPLE and c.divisor]
        assert {(str(c.expr), str(c.divisor)) for c in checks} == {("V", "2 * P")}


def test_a_number_that_shapes_hold_is_in_no_signature() -> None:
    """It is fixed when the module is generated, as other static attributes are."""
    plan = plan_of("norm_qkv_gqa_8", "bf16", "sm_90a")
    assert [each.name for each in plan.attributes] == ["norm_eps"]
    assert {dim.keyword for dim in plan.dims if dim.constructor} == {"hidden", "key_value_width"}
