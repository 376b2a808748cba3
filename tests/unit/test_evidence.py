"""The plan of the GPU run leaves out no option, no activation and nothing that is new."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusegen import api, options
from fusegen.ir.naming import Cell
from fusegen.options import OPTIONS, Choice, Option
from fusegen.passes.pipeline import resolve_module
from fusegen.spec import offers
from fusegen.spec.load import SpecSet

from .gpu_files import load

ARCH = "sm_90a"

NOT_IN_EXPERTS = {
    "add_extra_input",
    "bias",
    "identity",
    "make_extra_output",
    "sigmoid_gate",
    "silu",
}
"""Ops with a second tensor, a parameter or a second result, without math, or of any shape."""

evidence = load("evidence")


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> SpecSet:
    """The built-in specs and those of further expert MLPs."""
    folder = tmp_path_factory.mktemp("specs")
    evidence.write_further_specs(folder)
    return api.load_specs(api.Folders(specs=(folder,)))


@pytest.fixture(scope="module")
def cells(specs: SpecSet) -> tuple[Cell, ...]:
    found: tuple[Cell, ...] = evidence.cells(specs, ARCH)
    return found


def test_every_option_runs_alone_under_every_recipe_that_knows_it(
    specs: SpecSet, cells: tuple[Cell, ...]
) -> None:
    offered = {word for option in OPTIONS for word in option.further}
    alone = {(cell.options[0], cell.module) for cell in cells if len(cell.options) == 1}
    assert {word for word, _ in alone} == offered
    names, whole = {str(cell) for cell in cells}, set()
    for word, module in sorted(alone):
        possible = {
            str(cell)
            for recipe in specs.recipes
            if evidence.further.plan_of(specs, ARCH, cell := Cell(module, recipe, (word,)))
        }
        if possible and possible <= names:
            whole.add(word)
    assert whole == offered, "some module has each of them under every recipe"


def test_every_activation_runs_alone_among_gemms_and_merged(
    specs: SpecSet, cells: tuple[Cell, ...]
) -> None:
    for name, op in specs.ops.items():
        if not op.pointwise:
            continue
        own = [cell for cell in cells if specs.modules[cell.module].op == name]
        assert Cell(own[0].module, "bf16") in own, name
        chains = [
            cell for cell in cells if any(i.op == name for i in specs.modules[cell.module].chain)
        ]
        if name in NOT_IN_EXPERTS:
            assert name not in evidence.expert_mlps(specs)
            continue
        plans = [resolve_module(specs, cell, ARCH) for cell in chains if not cell.options]
        assert {plan.recipe for plan in plans if evidence.merges(plan)} >= {"fp8_block", "mxfp8"}
        assert "bf16" in {plan.recipe for plan in plans}, name


def test_norms_merge_with_quantisation_in_both_programs(
    specs: SpecSet, cells: tuple[Cell, ...]
) -> None:
    for module in ("rms_norm_linear", "layer_norm_linear"):
        found = {cell.recipe for cell in cells if cell.module == module}
        assert found >= {"fp8_block", "fp8_delayed", "mxfp8"}
    plans = [resolve_module(specs, c, ARCH) for c in cells if c.module.endswith("norm_mlp")]
    rules = {step.rule for plan in plans for step in plan.backward.steps}
    assert {"recomputed_norm_quantize", "add_rms_norm", "add_layer_norm"} <= rules


def test_combinations_are_planned(cells: tuple[Cell, ...]) -> None:
    for module, recipes, words in evidence.TOGETHER:
        for recipe in recipes:
            found = [c for c in cells if (c.module, c.recipe) == (module, recipe)]
            assert any(set(cell.options) == set(words) for cell in found), (module, recipe, words)


def changed(specs: SpecSet, kind: str, name: str, spec: Any) -> SpecSet:
    return dataclasses.replace(specs, **{kind: {**getattr(specs, kind), name: spec}})


def test_a_new_option_is_asked_for_or_refused(
    specs: SpecSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = (Choice("no_mine", "None"), Choice("brand_new", "No recipe has it"))
    mine = Option("mine", "toy", choices, applies_under=lambda facts: "not yet")
    for module in (evidence, offers, options):
        monkeypatch.setattr(module, "OPTIONS", (*OPTIONS, mine))
    with pytest.raises(evidence.LedgerError, match="option brand_new: no recipe can be generated"):
        evidence.cells(specs, ARCH)


def test_an_activation_without_a_module_is_refused(specs: SpecSet) -> None:
    op = dataclasses.replace(specs.ops["gelu"], op="brand_new")
    more = changed(specs, "ops", "brand_new", op)
    with pytest.raises(evidence.LedgerError, match="op brand_new: no module has it alone"):
        evidence.cells(more, ARCH)


def test_an_edited_bundle_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    edited = SimpleNamespace(refused=[SimpleNamespace(bundle="build/evidence/sm_90a")])
    monkeypatch.setattr(evidence.further.api, "generate", lambda request: edited)
    with pytest.raises(evidence.LedgerError, match="build/evidence/sm_90a: edited by hand"):
        evidence.further.generate(tmp_path, {}, ())
