"""Norms in plans: what runs under which flags, in which memory, and in chains."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from plans import SPECS

from fusegen.checks.load import load
from fusegen.emit.launcher.program import launcher_context
from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan
from fusegen.ir.program import CheckKind
from fusegen.ir.shapes import Const
from fusegen.ir.step import Step
from fusegen.ir.words import Init
from fusegen.passes.draft import NotPossible
from fusegen.passes.pipeline import resolve_module
from fusegen.publish.paths import builtin_specs, builtin_templates
from fusegen.steps import copies_memory
from fusegen.steps.norm import PARTIALS

OPS = ("rms_norm", "layer_norm", "l2_normalization")
GPUS = ("sm_90a", "sm_80")
CHAIN = """\
edition: 2
module: norm_linear
class: NormLinear
summary: A norm and the linear layer behind it
dims: {{T: tokens, H: hidden, F: wide}}
inputs:
  x: {{shape: [T, H], role: input}}
chain:
  - {{op: {op}, as: norm, dims: {{D: H}}{attributes}}}
  - {{op: linear, as: fc, dims: {{K: H, N: F}}}}
"""


def plan(module: str, arch: str) -> ModulePlan:
    return resolve_module(SPECS, Cell(module, "bf16"), arch)


def chained(folder: Path, op: str, recipe: str, arch: str, *, attributes: str = "") -> ModulePlan:
    (folder / "modules").mkdir(exist_ok=True)
    text = CHAIN.format(op=op, attributes=attributes)
    (folder / "modules" / "norm_linear.yaml").write_text(text, encoding="utf-8")
    return resolve_module(load([builtin_specs(), folder]), Cell("norm_linear", recipe), arch)


def partials(plan: ModulePlan) -> tuple[Step, str] | None:
    """The step of the backward that has partial sums, and their buffer."""
    found = [(s, o.buffer) for s in plan.backward.steps for o in s.outputs if o.slot == PARTIALS]
    return found[0] if found else None


@pytest.mark.parametrize("arch", GPUS)
def test_partial_sums_are_there_for_what_is_added_up(arch: str) -> None:
    """One of a part for each sum, in the workspace, where one of them is asked for."""
    for module, sums, when in (
        ("rms_norm", 1, ("need_dweight",)),
        ("layer_norm", 2, ("need_dweight", "need_dbias")),
    ):
        made = plan(module, arch)
        found = partials(made)
        assert found
        step, buffer = found
        assert step.wanted(buffer) == when
        assert made.buffer(buffer).shape.dims[1] == Const(sums)
        assert buffer in made.backward.workspace
    assert partials(plan("l2_normalization", arch)) is None


def test_references_need_no_memory_beside_results() -> None:
    assert all(partials(plan(module, "cpu")) is None for module in OPS)


def test_there_are_as_many_parts_as_the_kernel_leaves_sums_of() -> None:
    header = builtin_templates() / "static" / "csrc" / "fusegen" / "norm" / "norm_grad.h"
    (stated,) = re.findall(r"kNormParts = (\d+);", header.read_text(encoding="utf-8"))
    made = plan("layer_norm", "sm_90a")
    found = partials(made)
    assert found
    assert made.buffer(found[1]).shape.dims[0] == Const(int(stated))


def test_a_launch_is_told_scalars_and_the_kind() -> None:
    """What a call says as the argument that it is, what was chosen before as it is written."""

    def launches(module: str) -> list[str]:
        context = launcher_context(plan(module, "sm_90a"), SPECS.archs["sm_90a"], "fusegen")
        return [line.strip() for p in context.programs for step in p.steps for line in step.lines]

    layer = launches("layer_norm")
    assert layer.count("arguments.eps = static_cast<float>(eps);") == 1  # of the forward alone
    assert layer.count("arguments.zero_centered = false;") == 2
    assert layer.count("arguments.kind = NormKind::layer;") == 2
    assert "arguments.parts = 132;" in layer
    length = launches("l2_normalization")
    assert not any(word in line for line in length for word in ("zero_centered", "parts", "mean"))
    assert length.count("arguments.kind = NormKind::l2;") == 2


@pytest.mark.parametrize("module", OPS)
def test_statistics_are_saved_beside_what_the_caller_has(module: str) -> None:
    made = plan(module, "cpu")
    internal = {name for name in ("mean", "rstd") if name in {b.name for b in made.buffers}}
    assert {r.buffer for r in made.saved} - {*made.arguments} == internal
    assert "rstd" in internal
    assert ("mean" in internal) == (module == "layer_norm")


SEQUENCES = """\
edition: 2
op: toy
summary: y = x * rsqrt(sum(x squared) + 1e-6) of each token
dims: {B: batch, S: sequence, D: width}
inputs: {x: {shape: [B, S, D]}}
internal: {rstd: {shape: [B, S], dtype: float32, differentiable: false}}
outputs: {y: {shape: [B, S, D]}}
forward:
  - {step: norm, kind: l2, a: x, eps: 1.0e-6, out: y, rstd: rstd}
backward:
  - {step: norm_grad, kind: l2, a: x, grad: dy, rstd: rstd, out: dx}
"""


def test_a_statistic_has_no_rows_that_must_be_aligned(tmp_path: Path) -> None:
    """Of a batch of sequences it has a number for each token, however long the sequences are."""
    for folder, text in (
        ("ops", SEQUENCES),
        ("modules", "edition: 2\nmodule: toy\nclass: Toy\nop: toy\n"),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "toy.yaml").write_text(text, encoding="utf-8")
    made = resolve_module(load([builtin_specs(), tmp_path]), Cell("toy", "bf16"), "sm_90a")
    for program in made.programs:
        wanted = {str(c.expr) for c in program.checks if c.kind is CheckKind.MULTIPLE}
        assert wanted == {"D"}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("recipe", SPECS.recipes)
@pytest.mark.parametrize("arch", ("cpu", *GPUS))
def test_a_linear_layer_behind_a_norm_has_every_recipe(
    op: str, recipe: str, arch: str, tmp_path: Path
) -> None:
    made = chained(tmp_path, op, recipe, arch)
    first = next(step for step in made.unmerged.forward.steps if not copies_memory(step))
    assert first.primitive == "norm"
    (last,) = (step for step in made.backward.steps if step.out == "dx")
    assert last.primitive == "norm_grad"


@pytest.mark.parametrize(("centered", "init"), [("false", Init.ONES), ("true", Init.ZEROS)])
def test_a_norm_starts_with_a_gain_of_one(centered: str, init: Init, tmp_path: Path) -> None:
    attributes = f", attributes: {{zero_centered_gamma: {centered}}}"
    made = chained(tmp_path, "rms_norm", "bf16", "cpu", attributes=attributes)
    fills = {parameter.path: parameter.init for parameter in made.parameters}
    assert fills["norm.weight"] is init
    scalars = [dict(s.attributes).get("zero_centered_gamma") for s in made.forward.steps]
    assert scalars[0] is (centered == "true")


GROUPED = """\
edition: 2
module: experts
class: Experts
summary: A norm and the experts behind it
dims: {T: tokens, E: num_groups, H: hidden, F: wide}
inputs:
  x: {shape: [T, H], role: input}
  split_sizes: {shape: [E], dtype: int64}
chain:
  - {op: rms_norm, as: norm, dims: {D: H}}
  - {op: grouped_linear, as: fc, dims: {K: H, N: F}}
"""


def test_rows_past_the_groups_are_not_normed(tmp_path: Path) -> None:
    """They may hold NaN, which a sum over all rows would spread."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "experts.yaml").write_text(GROUPED, encoding="utf-8")
    specs = load([builtin_specs(), tmp_path])
    with pytest.raises(NotPossible, match=r"'norm': rows past split_sizes are to be zero in"):
        resolve_module(specs, Cell("experts", "bf16"), "cpu")
