"""Fusions on toy programs: what matches, what must not, and in which order they apply."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fusegen.checks.load import load
from fusegen.ir.naming import Cell
from fusegen.ir.step import Operand, Step
from fusegen.math import Derivations
from fusegen.passes.backward import write_backward
from fusegen.passes.draft import Draft, NotPossible
from fusegen.passes.expand import expand
from fusegen.passes.fusions import rules_of
from fusegen.passes.liveness import add_conditions, saved
from fusegen.passes.math import derive_math
from fusegen.passes.pipeline import resolve_module
from fusegen.passes.rewrite import Bound, Facts, Match, Replacement, Rewrite, Stage, rewrite
from fusegen.publish.paths import builtin_specs
from fusegen.spec.diagnostics import SpecError
from fusegen.spec.fusion import FusionPass, FusionSpec
from fusegen.spec.kinds import SpecKind
from fusegen.spec.load import SpecSet, parse_spec
from fusegen.steps.snapshot import SNAPSHOT

MLP = """edition: 2
module: toy
class: Toy
summary: two GEMMs and an activation
dims: {T: tokens, H: hidden, F: wide}
inputs: {x: {shape: [T, H]}}
chain:
  - {op: linear, as: fc1, out: h, dims: {K: H, N: 2 * F}}
  - {op: swiglu, as: act, out: a, dims: {D: F}}
  - {op: linear, as: fc2, dims: {K: F, N: H}}
"""
FUSION = """edition: 2
fusion: {name}
pass: {stage}
summary: toy
match:
{match}
rewrite:
{rewrite}
"""
GEMM = "{step: gemm, kind: fprop, in: [x, w, b], out: [h]}"
ACTIVATION = "{step: pointwise, in: [h], out: [a]}"
FUSED = "{step: gemm, kind: fprop, in: [x, w, b], out: [a]}"


def section(**steps: list[str]) -> str:
    return "\n".join(f"  {key}: [{', '.join(value)}]" for key, value in steps.items())


SAME = ("forward", section(forward=[ACTIVATION]), section(forward=[ACTIVATION]))


def specs_with(tmp_path: Path, **fusions: tuple[str, str, str]) -> SpecSet:
    """The built-in specs, the toy module, and fusions as (pass, match, rewrite).

    Those are only read: the pass does what they say, whether or not somebody can run what it gives.
    """
    mine = tmp_path / "mine"
    (mine / "modules").mkdir(parents=True)
    (mine / "modules" / "toy.yaml").write_text(MLP, encoding="utf-8")
    specs = load([builtin_specs(), mine])
    for path in written(tmp_path, **fusions):
        fusion, source = parse_spec(SpecKind.FUSIONS, path, f"mine/fusions/{path.name}")
        assert isinstance(fusion, FusionSpec)
        specs = replace(
            specs,
            fusions={**specs.fusions, fusion.name: fusion},
            sources={**specs.sources, (SpecKind.FUSIONS, fusion.name): source},
        )
    return specs


def written(tmp_path: Path, **fusions: tuple[str, str, str]) -> list[Path]:
    folder = tmp_path / "mine" / "fusions"
    folder.mkdir(parents=True)
    for name, (stage, match, instead) in fusions.items():
        text = FUSION.format(name=name, stage=stage, match=match, rewrite=instead)
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return sorted(folder.iterdir())


CHOICES = {"save": "save_activations"}


def fused(specs: SpecSet, arch: str = "cpu", fuel: int | None = None) -> Draft:
    draft = write_backward(expand(specs.modules["toy"], specs.ops))
    draft = derive_math(draft, Derivations())
    fusions = {name: f for name, f in specs.fusions.items() if f.name.startswith("toy_")}
    facts = Facts(specs.archs[arch], specs.recipes["bf16"], CHOICES)
    return rewrite(draft, rules_of(fusions), Stage.OPS, facts, fuel)


def shown(steps: tuple[Step, ...]) -> list[str]:
    return [
        f"{step.primitive}{f' {step.kind}' if step.kind else ''}"
        f" {', '.join(f'{o.slot}={o.buffer}' for o in step.inputs)} -> {', '.join(step.writes)}"
        for step in steps
    ]


BEFORE = [
    "gemm fprop a=x, b=fc1_weight, add=fc1_bias -> h",
    "pointwise x=h -> a",
    "gemm fprop a=a, b=fc2_weight, add=fc2_bias -> y",
]
GRADIENTS = [
    "gemm dgrad a=dy, b=fc2_weight -> da",
    "gemm wgrad a=dy, b=a -> dfc2_weight",
    "column_sum a=dy -> dfc2_bias",
    "pointwise_grad dy=da, x=h -> dh",
    "gemm dgrad a=dh, b=fc1_weight -> dx",
    "gemm wgrad a=dh, b=x -> dfc1_weight",
    "column_sum a=dh -> dfc1_bias",
]


def test_nothing_to_fuse(tmp_path: Path) -> None:
    draft = fused(specs_with(tmp_path))
    assert shown(draft.forward) == BEFORE
    assert shown(draft.backward) == GRADIENTS


def test_a_pattern_whose_result_is_read_elsewhere_stays(tmp_path: Path) -> None:
    """The backward of the activation reads h, so the GEMM cannot swallow it."""
    toy = ("forward", section(forward=[GEMM, ACTIVATION]), section(forward=[FUSED]))
    assert shown(fused(specs_with(tmp_path, toy_epilogue=toy)).forward) == BEFORE


def test_a_joint_pattern_may_rebuild_it(tmp_path: Path) -> None:
    grad = "{step: pointwise_grad, in: [da, h], out: [dh]}"
    again = "{step: gemm, kind: fprop, in: [x, w, b], out: [h]}"
    toy = (
        "joint",
        section(forward=[GEMM, ACTIVATION], backward=[grad]),
        section(forward=[FUSED], backward=[again, grad]) + "\nkeep: [x, w]\ndrop: [h]",
    )
    draft = fused(specs_with(tmp_path, toy_recompute=toy))
    assert shown(draft.forward) == [
        "gemm fprop a=x, b=fc1_weight, add=fc1_bias -> a",
        "gemm fprop a=a, b=fc2_weight, add=fc2_bias -> y",
    ]
    assert shown(draft.backward)[3:5] == [
        "gemm fprop a=x, b=fc1_weight, add=fc1_bias -> h",
        "pointwise_grad dy=da, x=h -> dh",
    ]
    assert draft.forward[0].rule == "toy_recompute"
    names = [result.buffer for result in saved(add_conditions(draft))]
    assert names == ["x", "fc1_weight", "fc1_bias", "a", "fc2_weight"]


def test_what_a_replacement_rebuilds_comes_before_its_readers(tmp_path: Path) -> None:
    """Rebuilding a in the gradient of the activation moves the wgrad that reads it behind."""
    forward = "{step: pointwise, in: [h], out: [a]}"
    grad = "{step: pointwise_grad, in: [da, h], out: [dh]}"
    both = "{step: pointwise_grad, in: [da, h], out: [dh, a]}"
    toy = (
        "joint",
        section(forward=[forward], backward=[grad]),
        section(forward=[forward], backward=[both]) + "\nkeep: [h]\ndrop: [a]",
    )
    specs = specs_with(tmp_path, toy_rebuild=toy)
    draft = fused(specs)
    assert shown(draft.forward) == BEFORE
    lines = shown(draft.backward)
    assert lines.index("pointwise_grad dy=da, x=h -> dh, a") < lines.index(
        "gemm wgrad a=dy, b=a -> dfc2_weight"
    )
    assert sorted(line.split(" -> ")[0] for line in lines) == sorted(
        line.split(" -> ")[0] for line in GRADIENTS
    )
    assert "a" not in [result.buffer for result in saved(add_conditions(draft))]
    with pytest.raises(NotPossible, match=r"no expression computes dh, a .*toy_rebuild"):
        resolve_module(specs, Cell("toy", "bf16"), "cpu")


def test_a_forward_result_may_not_move_to_the_backward(tmp_path: Path) -> None:
    """A buffer that the forward itself still reads must stay there."""
    toy = (
        "joint",
        section(forward=[ACTIVATION], backward=["{step: pointwise_grad, in: [da, h], out: [dh]}"]),
        section(backward=["{step: pointwise_grad, in: [da, h], out: [dh, a]}"]),
    )
    assert shown(fused(specs_with(tmp_path, toy_move=toy)).forward) == BEFORE


def test_every_operand_must_be_named(tmp_path: Path) -> None:
    """A GEMM with a bias is no GEMM without one: nothing is dropped silently."""
    step = "{step: gemm, kind: fprop, in: [x, w], out: [h]}"
    toy = ("forward", section(forward=[step]), section(forward=[step]))
    draft = fused(specs_with(tmp_path, toy_plain=toy))
    assert [step.rule for step in draft.forward] == [None, None, None]


def test_a_pattern_in_its_own_replacement_ends(tmp_path: Path) -> None:
    toy = ("forward", section(forward=[GEMM]), section(forward=[GEMM]))
    draft = fused(specs_with(tmp_path, toy_same=toy))
    assert shown(draft.forward) == BEFORE
    assert [step.rule for step in draft.forward] == ["toy_same", None, "toy_same"]


def test_joint_then_forward_then_backward(tmp_path: Path) -> None:
    """All three want the same step; their names sort the other way round."""
    grad = "{step: pointwise_grad, in: [da, h], out: [dh]}"
    joint = section(forward=[ACTIVATION], backward=[grad])
    forward, backward = section(forward=[ACTIVATION]), section(backward=[grad])
    fusions = {
        "toy_c": ("joint", joint, joint),
        "toy_b": ("forward", forward, forward),
        "toy_a": ("backward", backward, backward),
    }
    draft = fused(specs_with(tmp_path, **fusions))
    assert draft.forward[1].rule == "toy_b"
    assert next(s for s in draft.backward if s.primitive == "pointwise_grad").rule == "toy_a"
    history = []
    for stage in ("toy_c", "toy_b", "toy_a"):
        only = {name: f for name, f in fusions.items() if name == stage}
        path = tmp_path / stage
        path.mkdir()
        history.append(fused(specs_with(path, **only)).forward[1].rule)
    assert history == ["toy_c", "toy_b", None]


def test_a_step_of_another_op_does_not_match(tmp_path: Path) -> None:
    named = "{step: pointwise, op: silu, in: [h], out: [a]}"
    toy = ("forward", section(forward=[named]), section(forward=[ACTIVATION]))
    assert fused(specs_with(tmp_path, toy_silu=toy)).forward[1].rule is None
    other = tmp_path / "other"
    other.mkdir()
    right = (
        "forward",
        section(forward=[named.replace("silu", "swiglu")]),
        section(forward=[ACTIVATION]),
    )
    step = fused(specs_with(other, toy_swiglu=right)).forward[1]
    assert step.rule == "toy_swiglu"
    assert step.pointwise is None, "the replacement computes the named op by itself"


@pytest.mark.slow
def test_conditions(tmp_path: Path) -> None:
    for index, (condition, applies) in enumerate(
        [
            ("{}", True),
            ("{archs: [cpu]}", True),
            ("{archs: [sm_90a]}", False),
            ("{recipes: [bf16]}", True),
            ("{quantized: false}", True),
            ("{quantized: true}", False),
            ("{options: {save: save_activations}}", True),
            ("{options: {save: recompute_activations}}", False),
            ("{options: {debug: debug}}", False),
        ]
    ):
        folder = tmp_path / str(index)
        folder.mkdir()
        instead = section(forward=[ACTIVATION]) + f"\nwhen: {condition}"
        toy = ("forward", section(forward=[ACTIVATION]), instead)
        rule = fused(specs_with(folder, toy_when=toy)).forward[1].rule
        assert (rule == "toy_when") == applies, condition


def test_a_fused_plan_names_the_fusion_among_its_sources(tmp_path: Path) -> None:
    toy = ("forward", section(forward=[ACTIVATION]), section(forward=[ACTIVATION]))
    specs = specs_with(tmp_path, toy_same=toy)
    plan = resolve_module(specs, Cell("toy", "bf16"), "cpu")
    assert "mine/fusions/toy_same.yaml" in plan.sources
    assert (
        "mine/fusions/toy_same.yaml"
        not in resolve_module(specs, Cell("linear", "bf16"), "cpu").sources
    )


def test_a_fusion_whose_steps_another_replaced_is_among_the_sources_too(tmp_path: Path) -> None:
    specs = specs_with(tmp_path, toy_a=SAME, toy_b=SAME)
    plan = resolve_module(specs, Cell("toy", "bf16"), "cpu")
    assert [step.rule for step in plan.forward.steps] == [None, "toy_b", None]
    assert {f"mine/fusions/toy_{name}.yaml" for name in "ab"} <= {*plan.sources}


def test_steps_that_no_kernel_has_are_told_with_their_fusion(tmp_path: Path) -> None:
    gemm = "{step: gemm, kind: fprop, in: [x, w, b], with: {accumulate: b}, out: [h]}"
    toy = ("forward", section(forward=[GEMM]), section(forward=[gemm]))
    with pytest.raises(
        NotPossible, match=r"no gemm with 'accumulate' \(made by fusion 'toy_add'\)"
    ):
        resolve_module(specs_with(tmp_path, toy_add=toy), Cell("toy", "bf16"), "cpu")


# What is on record


def test_every_rule_says_where_it_fired_or_why_not(tmp_path: Path) -> None:
    epilogue = ("forward", section(forward=[GEMM, ACTIVATION]), section(forward=[FUSED]))
    sums = ("forward", section(forward=["{step: column_sum, in: [x], out: [s]}"]), "  {}")
    plain = "{step: gemm, kind: fprop, in: [x, w], out: [h]}"
    fusions = {
        "toy_epilogue": epilogue,
        "toy_plain": ("forward", section(forward=[plain]), section(forward=[plain])),
        "toy_same": SAME,
        "toy_sums": sums,
        "toy_when": (*SAME[:2], SAME[2] + "\nwhen: {quantized: true, archs: [cpu]}"),
    }
    draft = fused(specs_with(tmp_path, **fusions))
    assert [(each.rule, each.place, each.reason) for each in draft.rewrites] == [
        (
            "toy_epilogue",
            "forward: fc1: gemm fprop -> h, act: pointwise -> a",
            "h is read by act: pointwise_grad -> dh of the backward, too",
        ),
        (
            "toy_plain",
            "",
            "no step of the forward is gemm fprop with 2 operands and 1 result",
        ),
        ("toy_same", "forward: act: pointwise -> a", ""),
        ("toy_sums", "", "the forward has no column_sum"),
        ("toy_when", "forward: act: pointwise -> a", "recipe 'bf16' quantises nothing"),
    ]


def test_a_result_of_the_module_stays(tmp_path: Path) -> None:
    last = "{step: gemm, kind: fprop, in: [a, w, b], out: [y]}"
    draft = fused(specs_with(tmp_path, toy_gone=("forward", section(forward=[last]), "  {}")))
    assert {each.place: each.reason for each in draft.rewrites} == {
        "forward: fc1: gemm fprop -> h": "h is read by act: pointwise -> a of the forward, too",
        "forward: fc2: gemm fprop -> y": "y is a result of the forward",
    }


def test_steps_of_a_pattern_may_stand_in_any_order(tmp_path: Path) -> None:
    wgrad = "{step: gemm, kind: wgrad, in: [dy, a], out: [dw]}"
    dgrad = "{step: gemm, kind: dgrad, in: [dy, w], out: [da]}"
    steps = section(backward=[wgrad, dgrad])
    draft = fused(specs_with(tmp_path, toy_pair=("backward", steps, steps)))
    assert [step.rule for step in draft.backward].count("toy_pair") == 4
    assert sorted(shown(draft.backward)) == sorted(GRADIENTS)


def test_larger_patterns_come_first(tmp_path: Path) -> None:
    """A small one would take the step that the large one needs."""
    both = section(forward=[GEMM, ACTIVATION])
    fusions = {"toy_a": ("forward", section(forward=[GEMM]), section(forward=[GEMM])),
               "toy_b": ("forward", both, both)}  # fmt: skip
    draft = fused(specs_with(tmp_path, **fusions))
    assert [each.rule for each in draft.rewrites] == ["toy_b", "toy_a", "toy_a"]


@pytest.mark.parametrize("fuel", [0, 1, 2, 3])
def test_fuel_lets_the_first_rewrites_happen(tmp_path: Path, fuel: int) -> None:
    gemm = ("forward", section(forward=[GEMM]), section(forward=[GEMM]))
    specs = specs_with(tmp_path, toy_a=gemm, toy_b=SAME)
    draft = fused(specs, fuel=fuel)
    rules = [step.rule for step in draft.forward]
    assert rules == [
        "toy_a" if fuel > 0 else None,
        "toy_b" if fuel > 2 else None,
        "toy_a" if fuel > 1 else None,
    ]
    plan = resolve_module(specs, Cell("toy", "bf16"), "cpu", fuel=fuel)
    assert [step.rule for step in plan.forward.steps] == rules
    stopped = [each.reason for each in draft.rewrites if each.reason]
    assert set(stopped) <= {"no fuel is left"} and len(stopped) == 3 - fuel


def test_a_rule_that_loses_something_is_found_out(tmp_path: Path) -> None:
    """No fusion that loads does; the engine looks all the same."""
    plain = GEMM.replace("[x, w, b]", "[x, w]")
    toy = ("forward", section(forward=[GEMM]), section(forward=[plain]))
    with pytest.raises(AssertionError, match=r"'toy_lossy' loses what it reads: \{'fc1_bias'\}"):
        fused(specs_with(tmp_path, toy_lossy=toy))


def test_what_changes_in_place_is_not_passed() -> None:
    """A step that reads state stays on its side of the one that moves it on."""
    reads, changes, last = (
        Step(SNAPSHOT.name, None, "", (Operand("a", a),), (Operand("out", out),))
        for a, out in (("state", "copy"), ("x", "y"), ("copy", "z"))
    )
    changes = replace(changes, mutates=("state",))
    empty = Draft((), {}, (), ("y", "z"), (), (), forward=(reads, changes, last))

    def matched(a: str, out: str, *gone: str) -> Match:
        kind = SNAPSHOT.name
        return Match("forward", kind, None, {"a": a}, {"out": out}, frozenset(gone), further=True)

    def both(bound: Bound) -> Replacement:
        first, second = bound.forward
        return Replacement(forward=(replace(first, outputs=second.outputs, rule="both"),))

    rule = Rewrite(
        "both",
        FusionPass.FORWARD,
        Stage.OPS,
        (matched("s", "c", "c"), matched("c", "z")),
        lambda bound, facts: None,
        both,
    )
    specs = load([builtin_specs()])
    facts = Facts(specs.archs["cpu"], specs.recipes["bf16"], {})
    draft = rewrite(empty, [rule], Stage.OPS, facts)
    assert draft.forward == empty.forward
    assert [each.reason for each in draft.rewrites] == [
        "steps of the forward would wait for each other"
    ]
    (fine,) = (replace(empty, forward=(changes, reads, last)),)
    draft = rewrite(fine, [rule], Stage.OPS, facts)
    assert [step.rule for step in draft.forward] == [None, "both"]


# What a user's folder may have

RECOMPUTED = (
    "joint",
    section(
        forward=[GEMM, ACTIVATION], backward=["{step: pointwise_grad, in: [da, h], out: [dh]}"]
    ),
    section(
        forward=[GEMM, ACTIVATION],
        backward=[
            "{step: gemm, kind: fprop, in: [x, w, b], out: [h]}",
            "{step: pointwise_grad, in: [da, h], out: [dh]}",
        ],
    )
    + "\nkeep: [x, w]\ndrop: [h]",
)


@pytest.mark.parametrize("arch", ["cpu", "sm_90a"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
def test_a_fusion_that_makes_a_gemm_again_in_the_backward(
    tmp_path: Path, recipe: str, arch: str
) -> None:
    """It loads, applies, and the GEMM's result is saved no more."""
    (mine,) = written(tmp_path, toy_recompute=RECOMPUTED)
    (tmp_path / "mine" / "modules").mkdir()
    (tmp_path / "mine" / "modules" / "toy.yaml").write_text(MLP, encoding="utf-8")
    specs = load([builtin_specs(), mine.parents[1]])
    plan = resolve_module(specs, Cell("toy", recipe), arch)
    plain = resolve_module(replace(specs, fusions={}), Cell("toy", recipe), arch)
    assert "h" in [result.buffer for result in plain.saved]
    assert "h" not in [result.buffer for result in plan.saved]
    made = [step for step in plan.backward.steps if step.kind == "fprop"]
    assert [(step.out, step.rule) for step in made] == [("h", "toy_recompute")]


QUANTIZED = "{step: quantize, in: [a], out: [q]}"
MERGED = "{step: pointwise_quantize, in: [h], out: [q]}"
COPY = "{step: snapshot, in: [x], out: [h]}"


@pytest.mark.parametrize(
    ("match", "instead"),
    [
        ([GEMM, ACTIVATION], [FUSED]),
        ([GEMM], [GEMM.replace("out", "with: {accumulate: h}, out")]),
        ([COPY], [COPY]),
        ([ACTIVATION.replace("in:", "op: silu, in:")], [ACTIVATION]),
        ([ACTIVATION], ["{step: pointwise, in: [a], out: [h]}"]),
        ([ACTIVATION, QUANTIZED], [ACTIVATION]),
        ([GEMM.replace("[h]", "[a]"), QUANTIZED], [MERGED.replace("h", "w")]),
        ([ACTIVATION, QUANTIZED], [MERGED.replace("[q]", "[a]")]),
        ([ACTIVATION, QUANTIZED, QUANTIZED], [MERGED]),
        ([ACTIVATION, QUANTIZED], [MERGED, MERGED]),
    ],
)
def test_a_fusion_that_no_pass_can_apply_is_refused(
    tmp_path: Path, match: list[str], instead: list[str]
) -> None:
    toy = ("forward", section(forward=match), section(forward=instead))
    (path,) = written(tmp_path, toy=toy)
    with pytest.raises(SpecError) as caught:
        load([builtin_specs(), path.parents[1]])
    assert all(problem.loc.file == "mine/fusions/toy.yaml" for problem in caught.value.problems)
