"""Plans in which one launch quantises several tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plans import SPECS

from fusegen.emit.launcher.program import launcher_context
from fusegen.emit.reference.cell import reference_context
from fusegen.emit.text.explain import explain
from fusegen.families.registry import known_family
from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan
from fusegen.ir.program import Program
from fusegen.passes import join_quantize
from fusegen.passes.pipeline import resolve_module
from fusegen.spec.load import SpecSet
from fusegen.steps import copies_memory, quantizes
from fusegen.steps.quantize import needs_amaxes

SEVERAL = "quantize_several"
HOPPER = "sm_90a"


def plan_of(
    recipe: str,
    *options: str,
    module: str = "grouped_mlp",
    arch: str = HOPPER,
    specs: SpecSet = SPECS,
) -> ModulePlan:
    return resolve_module(specs, Cell(module, recipe, options), arch)


def without_the_family(arch: str) -> SpecSet:
    spec = SPECS.archs[arch]
    kernels = {name: family for name, family in spec.kernels.items() if name != SEVERAL}
    return replace(SPECS, archs={**SPECS.archs, arch: replace(spec, kernels=kernels)})


def joined(program: Program) -> list[list[str]]:
    """The tensors of every launch of several, in order."""
    steps = (step for step in program.steps if step.primitive == SEVERAL)
    return [[part.input("a") or "" for part in step.parts] for step in steps]


HELD = "held_weights"  # whose forward begins with the launch
ALL = [["x", "fc1_weight", "fc2_weight"]]
WEIGHTS = [["fc1_weight", "fc2_weight"]]


@pytest.mark.parametrize("arch", [HOPPER, "sm_80"])
@pytest.mark.parametrize(
    ("recipe", "tensors"),
    [
        ("fp8_delayed", ALL),
        ("mxfp8", ALL),
        ("fp8_block", WEIGHTS),  # x in other blocks: by another kernel
        ("fp8_current", []),  # amaxes come first
        ("fp8_rowwise", []),
        ("nvfp4", []),
        ("bf16", []),
    ],
)
def test_a_forward_quantises_by_one_launch(
    arch: str, recipe: str, tensors: list[list[str]]
) -> None:
    plan = plan_of(recipe, arch=arch)
    assert joined(plan.forward) == tensors
    assert joined(plan.backward) == []
    used = {step.kernels for step in plan.steps if not copies_memory(step)}
    assert used == {kernels.name for kernels in plan.kernel_sets}


@pytest.mark.parametrize("module", ["linear", "grouped_linear"])
@pytest.mark.parametrize("recipe", ["fp8_delayed", "mxfp8"])
def test_a_linear_quantises_both_operands_by_one_launch(module: str, recipe: str) -> None:
    assert joined(plan_of(recipe, module=module).forward) == [["x", "weight"]]


@pytest.mark.parametrize("option", ["cached_weights", "quantized_weights"])
@pytest.mark.parametrize("recipe", ["fp8_delayed", "mxfp8", "fp8_block"])
def test_a_refresh_quantises_the_weights_by_one_launch(recipe: str, option: str) -> None:
    plan = plan_of(recipe, option)
    assert plan.refresh is not None
    assert joined(plan.refresh) == WEIGHTS
    assert joined(plan.forward) == []


def test_nothing_joins_without_kernels() -> None:
    assert joined(plan_of("mxfp8", arch="cpu").forward) == []


@pytest.mark.parametrize("arch", [HOPPER, "sm_80"])
def test_an_architecture_without_the_kernels_keeps_the_steps(arch: str) -> None:
    plan, apart = (
        plan_of("mxfp8", arch=arch),
        plan_of("mxfp8", arch=arch, specs=without_the_family(arch)),
    )
    assert joined(apart.forward) == []
    assert {*plan.unmerged.forward.steps} == {*apart.unmerged.forward.steps}
    assert (plan.saved, plan.states, plan.shardings) == (apart.saved, apart.states, apart.shardings)


@pytest.mark.parametrize(
    "options",
    [(), ("reduced_amax",), ("debug",), ("recompute_activations",), ("delayed_wgrad",)],
    ids="_".join,
)
def test_parts_stay_what_they_were(options: tuple[str, ...]) -> None:
    """The same steps, their flags and state; only their places differ."""
    plan = plan_of("fp8_delayed", *options)
    apart = plan_of("fp8_delayed", *options, specs=without_the_family(HOPPER))
    assert any(joined(program) for _, program in plan.ops)
    for (_, one), (_, other) in zip(plan.unmerged.ops, apart.unmerged.ops, strict=True):
        assert sorted(map(repr, one.steps)) == sorted(map(repr, other.steps))
        assert (one.arguments, one.flags) == (other.arguments, other.flags)
        assert {*one.results} == {*other.results}, "ops that are cut give them in their order"
    for (_, program), (_, own) in zip(plan.ops, plan.unmerged.ops, strict=True):
        for step in (each for each in program.steps if each.primitive == SEVERAL):
            assert {*step.writes} == {name for part in step.parts for name in part.writes}
            assert {*step.reads} == {name for part in step.parts for name in part.reads}
            assert {*step.mutates} == {name for part in step.parts for name in part.mutates}
            for part in step.parts:
                assert part in own.steps
                for name in part.writes:
                    assert step.wanted(name) == part.wanted(name)


def test_the_step_stands_where_the_first_part_did() -> None:
    """A statistic between the parts stays behind its own tensor."""
    plan = plan_of("fp8_block", "debug")
    kinds = [step.primitive for step in plan.forward.steps]
    assert kinds[:4] == ["quantize", "statistics", "statistics", SEVERAL]


QUANTIZED = plan_of("mxfp8", specs=without_the_family(HOPPER)).forward.steps


def test_only_what_touches_nothing_before_it_moves() -> None:
    """A step that reads, writes or changes what another one makes or reads stays behind that."""
    x, weight, gemm = QUANTIZED[0], QUANTIZED[1], QUANTIZED[-1]
    assert quantizes(x) and quantizes(weight) and not quantizes(gemm)
    may = join_quantize._may_move
    assert may((x, gemm, weight), 2, 0)
    makes = replace(gemm, outputs=weight.inputs[:1])
    assert not may((x, makes, weight), 2, 0)
    assert may((makes, x, weight), 2, 1), "what stands before the place is of no matter"
    reads = replace(gemm, inputs=weight.outputs[:1])
    assert not may((x, reads, weight), 2, 0)
    changes = replace(gemm, mutates=(weight.reads[0],))
    assert not may((x, changes, weight), 2, 0)
    snapshot = replace(gemm, inputs=x.inputs[:1])
    moving = replace(weight, mutates=(x.reads[0],))
    assert not may((snapshot, moving), 1, 0), "it changes what the step before it reads"


@pytest.mark.parametrize("count", range(2, 11))
def test_a_launch_takes_so_many_and_no_more(count: int) -> None:
    family = known_family(SEVERAL)
    assert family is not None
    steps = [QUANTIZED[1]] * count
    independent = [replace(s, inputs=(), outputs=(), mutates=()) for s in steps]
    groups = join_quantize._groups(independent, lambda _: family.most_parts)
    assert [i for group in groups for i in group] == list(range(count - (count % 4 == 1)))
    assert {len(group) for group in groups[:-1]} <= {family.most_parts}


def test_flags_and_kernels_keep_steps_apart() -> None:
    one = replace(QUANTIZED[1], inputs=(), outputs=(), mutates=())
    for other in (replace(one, when=("need_dx",)), replace(one, kernels="another")):
        assert join_quantize._groups((one, other), lambda _: 4) == []
        assert join_quantize._groups((one, other, one), lambda _: 4) == [[0, 2]]


@pytest.mark.parametrize("recipe", SPECS.recipes)
def test_what_needs_amaxes_first(recipe: str) -> None:
    plan = plan_of(recipe, specs=without_the_family(HOPPER))
    steps = [step for step in plan.unmerged.steps if quantizes(step)]
    first = recipe in ("fp8_current", "fp8_rowwise", "nvfp4")
    assert {needs_amaxes(step) for step in steps} <= {first}


# ---- what is printed


def test_launchers_fill_in_the_arguments_of_each_part() -> None:
    """As they do for a launch of its own; the last step with a history moves all states on."""
    plan = plan_of("fp8_delayed", HELD)
    apart = plan_of("fp8_delayed", HELD, specs=without_the_family(HOPPER))
    forward, separate = (
        launcher_context(each, SPECS.archs[HOPPER], "ns").programs[0] for each in (plan, apart)
    )
    lines = [line.strip() for line in forward.steps[0].lines]
    assert lines[1] == "QuantizeSeveralArguments arguments{};"
    assert lines[-2:] == ["check(kCell, quantize_several_e4m3_tensor(io, arguments, stream));", "}"]
    assert "arguments.count = 3;" in lines
    moves = "moves_states"
    for place, step in enumerate((separate.steps[0], separate.steps[1], separate.steps[3])):
        own = {line.strip() for line in step.lines if "arguments." in line and moves not in line}
        prefix = f"arguments.steps[{place}]."
        assert own == {
            line.replace(prefix, "arguments.") for line in lines if line.startswith(prefix)
        }
    moving = [any(moves in line for line in step.lines) for step in forward.steps]
    assert moving == [False, True, False]


def test_the_last_part_moves_states_where_none_comes_later() -> None:
    plan = plan_of("fp8_delayed", HELD, module="linear")
    lines = launcher_context(plan, SPECS.archs[HOPPER], "ns").programs[0].steps[0].lines
    assert [line.strip() for line in lines if "moves_states" in line] == [
        "arguments.steps[1].moves_states = true;"
    ]


def test_people_and_ranges_see_one_step() -> None:
    plan = plan_of("mxfp8", "nvtx_ranges")
    assert "  1. quantize_several: x, split_sizes, fc1_weight, fc2_weight" in "\n".join(
        explain(plan)
    )
    first = launcher_context(plan, SPECS.archs[HOPPER], "ns").programs[0].steps[0]
    assert any(f'"{plan.cell} forward 1. quantize_several"' in line for line in first.lines)
    forward = reference_context(plan).programs[0].scoped[0]
    (scope,) = forward.scopes
    assert f'"{plan.cell} forward 1. quantize_several"' in scope
    assert len(forward.steps) == 3
