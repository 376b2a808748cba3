"""Statistics of quantised copies: one step behind each that makes one, and nothing else changes."""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import replace

import pytest
from plans import SPECS, name_of, plan_of

from fusegen.emit.launcher.program import launcher_context
from fusegen.ir.buffers import StateFill
from fusegen.ir.dtypes import DType
from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan
from fusegen.ir.program import Program
from fusegen.ir.step import Step
from fusegen.passes.draft import NotPossible
from fusegen.publish.paths import builtin_templates
from fusegen.spec.offers import modules_with
from fusegen.steps import observes, quantizes

QUANTIZED = [name for name, recipe in SPECS.recipes.items() if recipe.roles]
OFFERING = modules_with("debug", SPECS)
MODULES = ("linear", "grouped_linear", "grouped_mlp")
ARCHS = ("cpu", "sm_90a")
CHOICES = (
    (),
    ("delayed_wgrad", "cached_weights"),
    ("add_to_main_grad",),
    ("high_precision_backward",),
)


PLACES = [
    (arch, Cell(module, recipe, (*options, "debug")))
    for module in MODULES
    for recipe in QUANTIZED
    for arch in ARCHS
    for options in CHOICES
]
every_pair = pytest.mark.parametrize("pair", PLACES, ids=name_of, indirect=True)


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> tuple[ModulePlan, ModulePlan]:
    """Plans without and with statistics."""
    arch, cell = request.param
    plain = replace(cell, options=tuple(word for word in cell.options if word != "debug"))
    return plan_of(arch, plain), plan_of(arch, cell)


def test_who_offers_it() -> None:
    quantising = {"linear", "grouped_linear", "quantize", "linear_cross_entropy"}
    offering = {name for name, module in SPECS.modules.items() if quantising & {*module.ops}}
    assert {*OFFERING} == offering and len(offering) > 5


@every_pair
def test_one_step_behind_each_copy(pair: tuple[ModulePlan, ModulePlan]) -> None:
    _, plan = pair
    seen = []
    for program in plan.programs:
        for index, step in enumerate(program.unmerged.steps):
            behind = [each for each in program.unmerged.steps[index + 1 :] if observes(each)]
            for copy in step.copies if quantizes(step) else ():
                (follower,) = (each for each in behind if each.copies == (copy,))
                assert follower.reads[0] == copy.original
                assert follower.when == (step.wanted(copy.data) or step.when)
                seen.append(copy.data)
    assert len({*seen}) == len(seen) == sum(map(observes, plan.steps))
    assert {*plan.records} == {f"{name}_statistics" for name in seen}


@every_pair
def test_all_else_is_as_without(pair: tuple[ModulePlan, ModulePlan]) -> None:
    plain, plan = pair
    assert left_by(plan) == left_by(plain)
    wider = plan.joined_tensor("saved_scales") or plan.joined_tensor("saved_copies")
    assert wider or plan.saved == plain.saved
    for one, other in zip(plain.programs, plan.programs, strict=True):
        several = len(plan.direction(one.name).programs) > 1  # of which each has its own checks
        steps = tuple(step for step in other.unmerged.steps if not observes(step))
        assert Counter(steps) == Counter(one.unmerged.steps)
        if ops(plan, one.name) == ops(plain, one.name):  # else it is cut elsewhere
            assert wider or without_statistics(other, several) == without_statistics(one, several)


def ops(plan: ModulePlan, name: str) -> list[tuple[Step, ...]]:
    """The steps of each op of a direction, without what leaves numbers for people."""
    direction = plan.direction(name)
    programs = direction.programs if direction else ()
    return [tuple(s for s in each.unmerged.steps if not observes(s)) for each in programs]


def left_by(plan: ModulePlan) -> set[str]:
    """What the forward leaves, whatever tensors it lies in."""
    whole = {each.buffer: each.parts for each in plan.joined}
    return {n for each in plan.saved for n in whole.get(each.buffer, (each.buffer,))}


def without_statistics(program: Program, several: bool) -> Program:
    """The rest; E8M0 scales count as the bytes that ops which change something take them for.

    Of a direction that is several ops, what goes in, in no order, and what comes out: statistics
    read what others let go of, so that the direction may be cut elsewhere.
    """
    kept = replace(
        program,
        steps=(),
        arguments=tuple(a for a in program.arguments if "_statistics" not in a.buffer),
        checks=tuple(
            replace(check, dtype=DType.UINT8 if check.dtype is DType.E8M0 else check.dtype)
            for check in program.checks
            if "_statistics" not in check.tensor
        ),
    )
    if several:
        arguments = tuple(sorted(kept.arguments, key=lambda each: each.buffer))
        return replace(kept, arguments=arguments, bindings=(), checks=())
    return replace(kept, bindings=tuple(sorted(kept.bindings, key=lambda each: each.symbol)))


def test_a_copy_that_is_made_again_has_one_record() -> None:
    """On sm_100a the backward makes the very copy of a weight that the forward made."""
    plan = plan_of("sm_100a", Cell("grouped_mlp", "fp8_delayed", ("debug",)))
    made = [copy.data for step in plan.unmerged.steps if quantizes(step) for copy in step.copies]
    assert made.count("fc1_weight_rowwise") == 2
    assert len({*plan.records}) == len(plan.records) == sum(map(observes, plan.steps))


def test_the_buffer_holds_the_fields() -> None:
    path = builtin_templates() / "static" / "reference" / "_statistics.py"
    (fields,) = [
        [line.target.id for line in node.body if isinstance(line, ast.AnnAssign)]
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == "Statistics"
    ]
    plan = plan_of(*PLACES[0])
    assert str(plan.buffer(plan.records[0]).shape) == f"[{len(fields)}]"
    assert plan.state(plan.records[0]).fill is StateFill.RECORD
    header = builtin_templates() / "static" / "csrc" / "fusegen" / "quantize" / "statistics.h"
    assert f"[{len(fields)}]: amax" in header.read_text(encoding="utf-8")


def test_the_launcher_says_how_the_copy_lies() -> None:
    plan = plan_of("sm_90a", Cell("grouped_linear", "fp8_block", ("debug",)))
    context = launcher_context(plan, SPECS.archs["sm_90a"], "namespace")
    launches = {
        match[1]: text
        for program in context.programs
        for text in ("\n".join(step.lines) for step in program.steps)
        if (match := re.search(r"data = pointer\((\w+)\);", text))
    }
    assert {*launches} == {name.removesuffix("_statistics") for name in plan.records}
    for name, text in launches.items():
        assert f"output = floats(writable({name}_statistics));" in text
        tokens = not name.startswith("weight")
        assert ("group_sizes = integers(pointer(split_sizes_dense));" in text) == tokens
        assert ("token_pitch" in text) == (tokens and name.endswith("rowwise")), name
    plan = plan_of("sm_90a", Cell("linear", "nvfp4", ("debug",)))
    assert "statistics_e2m1_nv_1x16_columnwise_hadamard" in {
        kernels.name for kernels in plan.kernel_sets
    }


def test_a_recipe_without_copies_is_refused() -> None:
    with pytest.raises(NotPossible, match="recipe 'bf16' quantises nothing to take statistics of"):
        plan_of("cpu", Cell("linear", "bf16", ("debug",)))
