"""Plans and drafts as text: what is printed reads back as what it was."""

from __future__ import annotations

import pytest
from plans import SLOW, SPECS

from fusegen.ir.buffers import Attribute, Buffer
from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan
from fusegen.ir.step import Operand, Step
from fusegen.ir.text import parse, text
from fusegen.ir.words import AttributeType
from fusegen.passes.contract import Pass
from fusegen.passes.draft import Draft
from fusegen.passes.pipeline import resolve, resolve_module
from fusegen.publish.inputs import derivations
from fusegen.spec.cells import target_cells
from fusegen.spec.offers import words_of

TARGETS = {
    arch: cells.every
    for arch, cells in target_cells(SPECS, SPECS.targets).items()
    if arch in SPECS.archs
}
MANY = 150


def plan_of(cell: str, arch: str) -> ModulePlan:
    return resolve_module(SPECS, Cell.parse(cell), arch, derivations())


# Where most cells are kept as digests, there are hundreds.
@pytest.mark.slow
@pytest.mark.parametrize(
    "arch", [pytest.param(a, marks=SLOW if len(TARGETS[a]) > MANY else ()) for a in TARGETS]
)
def test_plans_of_every_target_read_back(arch: str) -> None:
    for plan in resolve(SPECS, arch, TARGETS[arch], derivations()).modules:
        assert parse(text(plan)) == plan, plan.cell


@pytest.mark.slow
@pytest.mark.parametrize("module", SPECS.modules)
def test_plans_of_every_module_read_back_with_each_option(module: str) -> None:
    words = words_of(SPECS.modules[module], SPECS.ops)
    cells = [Cell(module, "fp8_delayed", (word,)) for word in words]
    for plan in resolve(SPECS, "sm_90a", cells, derivations()).modules:
        assert parse(text(plan)) == plan, plan.cell


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell",
    ["grouped_mlp__fp8_delayed__reduced_amax", "grouped_mlp__mxfp8", "grouped_mlp__fp8_delayed"],
)
def test_drafts_read_back_after_every_pass(cell: str) -> None:
    def check(done: Pass, _: Draft, draft: Draft) -> None:
        assert parse(text(draft), Draft) == draft, done.name

    resolve(SPECS, "sm_90a", [Cell.parse(cell)], derivations(), check)


def test_small_objects_have_a_line_each() -> None:
    lines = text(plan_of("linear__bf16", "cpu")).splitlines()
    assert lines[0].startswith("{linear__bf16 module=linear recipe=bf16 arch=cpu")
    assert "    {x dtype=io shape=[T..., K] role=input}" in lines
    assert any(
        line.strip().startswith('{gemm kind=dgrad item="" inputs=(a:dy b:weight) outputs=(out:dx)')
        for line in lines
    )


def test_lines_are_short() -> None:
    lines = text(plan_of("linear__bf16", "cpu")).splitlines()
    closing = 4  # brackets that close there
    assert all(len(line.rstrip("})")) <= 100 and len(line) <= 100 + closing for line in lines)


@pytest.mark.parametrize(
    "value", [True, False, 0, 3, -1.5, 1e-20, "none", "true", "3", "1e5", "", "a b", 'say "so"']
)
def test_scalars_keep_their_type(value: float | int | bool | str) -> None:
    attribute = Attribute("limit", AttributeType.FLOAT, value)
    again = parse(text(attribute), Attribute)
    assert again == attribute
    assert type(again.default) is type(value)


BUFFER = "{x dtype=io shape=[T, K]}"


@pytest.mark.parametrize(
    ("of", "broken", "says"),
    [
        (Buffer, "{x dtype=io}", "line 1: Buffer lacks shape"),
        (Buffer, "{x dtype=io\n shape=[T, 2 ** K]}", r"line 2: '2 \*\* K'"),
        (Buffer, "{x dtype=oi shape=[T]}", "line 1: oi is no DType"),
        (
            Buffer,
            "{x dtype=io shape=[T] rôle=input}",
            "Buffer has no field rôle=input; known: name",
        ),
        (Buffer, "{x dtype=io shape=[T] optional=maybe}", "maybe is no bool"),
        (Buffer, "x", "expected a Buffer, got x"),
        (Buffer, "{x dtype=(io) shape=[T]}", r"expected a word or a number, got \(io\)"),
        (Buffer, f"{BUFFER} {BUFFER}", "expected the end"),
        (Buffer, "{x dtype=io", "the text ends, but a value or bracket is open"),
        (Buffer, '{x dtype="io', "a quote or a bracket stays open"),
        (Buffer, "{x dtype=}", "expected a value, got '}'"),
        (Operand, "a", "expected a pair, got a"),
        (Step, '{gemm kind=none item="" inputs=a outputs=()}', "expected values in brackets"),
        (Step, '{gemm kind=none item="" inputs=() outputs=() flops="2 *"}', "line 1: '2 \\*'"),
    ],
)
def test_text_that_is_wrong_is_refused_with_its_line(of: type, broken: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse(broken, of)
