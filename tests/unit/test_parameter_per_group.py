"""A parameter for each group: the class is another, the programs are the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from plans import SPECS, plan_of

from fusegen.checks.load import load
from fusegen.emit.python.checkpoints import LayoutText, checkpoints_context
from fusegen.ir.naming import Cell
from fusegen.passes.draft import NotPossible
from fusegen.passes.pipeline import resolve_module
from fusegen.publish.paths import builtin_specs
from fusegen.spec.offers import modules_with

OPTION = "parameter_per_group"


def stated(*cells: str) -> tuple[LayoutText, ...]:
    context = checkpoints_context(plan_of("cpu", Cell.parse(cell)) for cell in cells)
    return context.cells if context else ()


def test_modules_with_grouped_weights_offer_it() -> None:
    grouped = {
        name
        for name, module in SPECS.modules.items()
        if "grouped_linear" in (module.op, *(item.op for item in module.chain))
    }
    assert {*modules_with(OPTION, SPECS)} == grouped


@pytest.mark.parametrize("recipe", SPECS.recipes)
def test_only_parameters_differ(recipe: str) -> None:
    plain = plan_of("sm_90a", Cell("grouped_mlp", recipe))
    parted = plan_of("sm_90a", Cell("grouped_mlp", recipe, (OPTION,)))
    assert all(parameter.per_group for parameter in parted.parameters)
    parameters = tuple(replace(parameter, per_group=False) for parameter in parted.parameters)
    assert replace(parted, cell=plain.cell, parameters=parameters) == plain


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    """Registered one after the other, one would take the other's place."""
    op = (builtin_specs() / "ops" / "grouped_linear.yaml").read_text(encoding="utf-8")
    op = op.replace("op: grouped_linear", "op: clash").replace("bias", "weight1")
    module = "edition: 2\nmodule: clash\nclass: C\nop: clash\n"
    for folder, text in (("ops", op), ("modules", module)):
        (tmp_path / "mine" / folder).mkdir(parents=True)
        (tmp_path / "mine" / folder / "clash.yaml").write_text(text, encoding="utf-8")
    specs = load([builtin_specs(), tmp_path / "mine"])
    assert resolve_module(specs, Cell("clash", "bf16"), "cpu").parameters[1].path == "weight1"
    with pytest.raises(NotPossible, match="own part of 'weight' would be called 'weight1', as an"):
        resolve_module(specs, Cell("clash", "bf16", (OPTION,)), "cpu")


def test_how_parameters_are_laid_out_is_read_off_the_forward() -> None:
    fc1, fc2 = "'fc1.weight', 'fc1.bias'", "'fc2.weight', 'fc2.bias'"
    cells = ("grouped_mlp__fp8_block", "grouped_mlp_srelu__bf16", "mlp_swiglu__bf16")
    turns = "grouped_mlp__bf16__interleaved_32__parameter_per_group"
    assert [(each.grouped, each.gated, each.block) for each in stated(*cells, turns)] == [
        (f"({fc1}, {fc2})", f"({fc1})", 0),
        (f"({fc1}, {fc2})", "()", 0),
        ("()", f"({fc1})", 0),
        (f"({fc1}, {fc2})", f"({fc1})", 32),
    ]
    assert not stated("swiglu__bf16", "quantize__fp8_block")
