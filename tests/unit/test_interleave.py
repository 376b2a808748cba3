"""Plans whose gate and up alternate in blocks of 32 columns."""

from __future__ import annotations

import pytest
from plans import SPECS

from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan
from fusegen.ir.program import CheckKind
from fusegen.ir.step import HALVES, Access, Step
from fusegen.passes.draft import NotPossible
from fusegen.passes.pipeline import resolve_module
from fusegen.spec.offers import modules_with

INTERLEAVED = "interleaved_32"
ALTERNATING = (Access.FIRST_OF_32, Access.SECOND_OF_32)
GATED = {name for name, op in SPECS.ops.items() if any(t.halves for t in op.tensors.values())}
MODULES = tuple(
    name
    for name, module in SPECS.modules.items()
    if GATED & {module.op, *(item.op for item in module.chain)}
)
every_arch = pytest.mark.parametrize("arch", ("cpu", "sm_90a"))
every_module = pytest.mark.parametrize("module", MODULES)


def plan_of(module: str, recipe: str, arch: str, *options: str) -> ModulePlan:
    """Its expressions as steps of their own: fewer can merge with what quantises their results."""
    return resolve_module(SPECS, Cell(module, recipe, options), arch).unmerged


def pointwise(plan: ModulePlan) -> list[Step]:
    """Expressions by what they give: a backward of other fusions may run in another order."""
    return sorted((step for step in plan.steps if step.pointwise), key=lambda step: step.writes)


def accesses(step: Step) -> list[Access]:
    math = step.pointwise
    assert math is not None
    return [each.access for each in (*math.operands, *math.results)]


def test_every_module_with_a_gated_activation_offers_it() -> None:
    offering = {*modules_with(INTERLEAVED, SPECS)}
    assert offering == {*MODULES}
    assert len(GATED) == 11


@every_arch
@every_module
def test_halves_alternate_and_nothing_else_changes(module: str, arch: str) -> None:
    for recipe in SPECS.recipes:
        check_halves(module, recipe, arch)


def joined(plan: ModulePlan) -> int:
    """How many activations are made again beside their gradients, which halves that alternate
    refuse."""
    return sum("_with_" in step.pointwise.kernel for step in pointwise(plan) if step.pointwise)


def check_halves(module: str, recipe: str, arch: str) -> None:
    plain, alternating = plan_of(module, recipe, arch), plan_of(module, recipe, arch, INTERLEAVED)
    assert plain.parameters == alternating.parameters
    assert len(plain.steps) + joined(plain) == len(alternating.steps)
    assert not joined(alternating)
    if joined(plain):
        return
    for one, other in zip(pointwise(plain), pointwise(alternating), strict=True):
        assert [a in HALVES for a in accesses(one)] == [a in ALTERNATING for a in accesses(other)]
        assert one.pointwise and other.pointwise
        assert one.pointwise.cuda == other.pointwise.cuda
        has_halves = not set(HALVES).isdisjoint(accesses(one))
        assert (one.pointwise.kernel != other.pointwise.kernel) == has_halves


@every_arch
@every_module
def test_widths_are_multiples_of_32(module: str, arch: str) -> None:
    plan = plan_of(module, "bf16", arch, INTERLEAVED)
    widths = {*"FSD"} & SPECS.modules[module].dims.keys() or {"D"}
    read = set()
    for _, program in plan.ops:
        checks = {str(c.expr): c.number for c in program.checks if c.kind is CheckKind.MULTIPLE}
        for math in (step.pointwise for step in program.steps):
            if math and {*ALTERNATING} & {each.access for each in (*math.operands, *math.results)}:
                assert checks[str(math.columns)] == 32
                read.add((program.name, str(math.columns)))
    assert read == {(name, width) for name in ("forward", "backward") for width in widths}


@pytest.mark.parametrize("module", ("silu", "grouped_mlp_srelu"))
def test_refused_without_a_gate(module: str) -> None:
    reason = (
        f"module '{module}' offers no option '{INTERLEAVED}': of .* no op is a gated activation"
    )
    with pytest.raises(NotPossible, match=reason):
        plan_of(module, "bf16", "cpu", INTERLEAVED)
