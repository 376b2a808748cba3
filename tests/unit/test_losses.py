"""Plans of losses: fp32 results of modules whose own type is another, and who tells that type."""

from __future__ import annotations

from pathlib import Path

import pytest
from plans import SPECS

from fusegen.checks.load import load
from fusegen.emit.python.words import program_text
from fusegen.ir.dtypes import DType
from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan
from fusegen.ir.program import CheckKind
from fusegen.passes.draft import NotPossible
from fusegen.passes.pipeline import resolve_module
from fusegen.publish.paths import builtin_specs
from fusegen.steps import BY_NAME
from fusegen.steps.definition import Reference, StepDef

OP = """\
edition: 2
op: toy
summary: y = x in fp32
dims: {T: rows, D: width}
inputs: {x: {shape: [T, D]}}
outputs: {y: {shape: [T, D], dtype: float32}}
forward:
  - {step: spread, a: x, out: y}
backward:
  - {step: spread, a: dy, out: dx}
"""


def planned(module: str, recipe: str = "bf16", *options: str, arch: str = "sm_90a") -> ModulePlan:
    return resolve_module(SPECS, Cell(module, recipe, options), arch)


@pytest.mark.parametrize(
    ("module", "recipe", "own"),
    [
        ("cross_entropy", "bf16", "x"),
        ("lm_head_loss", "bf16", "logits"),
        ("lm_head_loss", "fp8_block", "logits"),
    ],
)
def test_a_gradient_of_losses_takes_its_type_from_the_logits(
    module: str, recipe: str, own: str
) -> None:
    """The first argument of the backward is fp32."""
    plan = planned(module, recipe)
    backward = plan.backward
    assert backward.arguments[0].buffer == "dloss"
    assert plan.own_type_argument(backward) == own
    assert [c.tensor for c in backward.checks if c.kind is CheckKind.IO_DTYPE] == [own]
    assert {c.reference for c in backward.checks if c.kind is CheckKind.SAME_DTYPE} <= {own}
    text = program_text(plan, backward)
    assert text.first == own
    assert {result.dtype for result in text.results} == {""}
    assert all("dloss" not in result.absent for result in text.results)
    (loss, *_) = program_text(plan, plan.forward).results
    assert loss.dtype == ", dtype=torch.float32"


@pytest.mark.parametrize("recipe", ["bf16", "fp8_delayed"])
def test_a_weight_tells_the_type_of_its_gradient_where_nothing_else_does(recipe: str) -> None:
    """Gradients of weights that wait read codes and the gradient of the output, which is fp32."""
    plan = planned("lm_head_loss", recipe, "delayed_wgrad")
    assert plan.wgrad is not None
    taken = [argument.buffer for argument in plan.wgrad.arguments]
    assert taken[0] == "dloss"
    assert ("head_weight" in taken) is (recipe != "bf16")
    assert plan.own_type_argument(plan.wgrad) == ("x" if recipe == "bf16" else "head_weight")


def test_an_op_that_nothing_tells_the_type_of_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = StepDef(
        "spread",
        operands=("a",),
        shapes={None: {"a": "T D", "out": "T D"}},
        dtypes={"a": (DType.FLOAT32, DType.IO), "out": (DType.FLOAT32, DType.IO)},
        reference=Reference("steps.spread", frozenset(("a",))),
    )
    monkeypatch.setitem(BY_NAME, kind.name, kind)
    for folder, text in (
        ("ops", OP),
        ("modules", "edition: 2\nmodule: toy\nclass: Toy\nop: toy\n"),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "toy.yaml").write_text(text, encoding="utf-8")
    specs = load([builtin_specs(), tmp_path])
    with pytest.raises(NotPossible, match="no argument of the backward tells the type of dx"):
        resolve_module(specs, Cell("toy", "bf16"), "cpu")


@pytest.mark.parametrize(
    ("module", "kept"),
    [
        ("softmax", ["y"]),
        ("causal_softmax", ["y"]),
        ("masked_softmax", ["y"]),
        ("biased_softmax", ["y"]),
        ("cross_entropy", ["x", "targets", "lse"]),
    ],
)
def test_what_is_saved(module: str, kept: list[str]) -> None:
    """A softmax saves its result alone: neither what it was made of, nor a mask."""
    assert [result.buffer for result in planned(module).saved] == kept


def test_rows_of_other_lengths_are_refused() -> None:
    for module, label in (("softmax", "D (width)"), ("cross_entropy", "V (vocabulary)")):
        checks = planned(module).forward.checks
        (multiple,) = (check for check in checks if check.kind is CheckKind.MULTIPLE)
        assert (multiple.label, multiple.number) == (label, 8)


GROUPED = """\
edition: 2
module: mixed
class: Mixed
summary: Experts and a softmax of what they give
dims: {T: tokens, E: num_groups, H: hidden, F: wide}
inputs:
  x: {shape: [T, H], role: input}
  split_sizes: {shape: [E], dtype: int64}
chain:
  - {op: grouped_linear, as: fc, dims: {K: H, N: F}}
  - {op: softmax, as: probs, dims: {D: F}}
"""


def test_a_softmax_behind_groups_is_refused(tmp_path: Path) -> None:
    """Of the zeros past them it would give 1 / D."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "mixed.yaml").write_text(GROUPED, encoding="utf-8")
    specs = load([builtin_specs(), tmp_path])
    with pytest.raises(NotPossible, match=r"'probs': rows past split_sizes are to be zero in y"):
        resolve_module(specs, Cell("mixed", "bf16"), "cpu")
