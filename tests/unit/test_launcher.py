"""C++ launchers: a result that nobody asked for has no address that a kernel could write to."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest
from plans import SPECS, every, offered, plan_of

from fusegen.emit.launcher.memory import allocated
from fusegen.emit.launcher.program import LaunchProgram, launcher_context
from fusegen.emit.python.conditions import CPP
from fusegen.emit.text.explain import explain
from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan
from fusegen.passes.pipeline import resolve

HOPPER = "sm_90a"
OPTIONS = ("cached_weights", "recompute_activations", "delayed_wgrad", "debug")
CELLS = [
    Cell(module, recipe, options)
    for module in SPECS.modules
    for recipe in SPECS.recipes
    for options in ((), *((word,) for word in OPTIONS))
]
every_plan = every(
    offered((arch for arch, spec in SPECS.archs.items() if spec.capability is not None), CELLS)
)


def spelled_out(launched: LaunchProgram, lines: Iterable[str]) -> str:
    """Lines of a launcher with every condition in place of its name."""
    text = "\n".join(lines)
    for line in launched.conditions:
        name, _, value = line.removeprefix("const bool ").removesuffix(";").partition(" = ")
        text = re.sub(rf"\b{name}\b", value, text)
    return text


REGION = r"    region\((\w+), /\*before=\*/(\d+)\),"


@pytest.mark.slow
@every_plan
def test_buffers_of_a_call_live_from_step_to_step(plan: ModulePlan) -> None:
    """What nobody asked for has no bytes and no address: a write there would hit another tensor."""
    context = launcher_context(plan, SPECS.archs[plan.arch], "namespace")
    assert bool(context.programs) == bool(plan.kernel_sets)
    for (view, program), launched in zip(plan.ops, context.programs, strict=True):
        text = spelled_out(launched, launched.workspace)
        given = view.given_in(program)
        lives = re.findall(r"\{(.*), (\d+), (\d+)\},  // (\w+)", text)
        kept = {
            r.buffer: CPP.any_of(r.when) for r in program.results if f"({r.buffer}_kept)" in text
        }
        there = {name for *_, name in lives}
        kept |= {n: CPP.any_of(result.when) for n, result in given.items() if n in there}
        own = [name for name in program.workspace if name not in given]
        assert [name for *_, name in lives] == [*own, *kept]
        joined = "|".join(each.buffer for each in plan.joined)
        for name in given.keys() - there:
            assert re.search(rf"void\* const {name} = .* \? .*({joined}).* : nullptr;", text)
        for index, (size, first, last, name) in enumerate(lives):
            touching = [i for i, s in enumerate(program.steps, 1) if name in (*s.reads, *s.writes)]
            assert (int(first), int(last)) == (touching[0], touching[-1]), name
            writer = program.steps[int(first) - 1]
            assert name in writer.writes, name
            when = CPP.any_of(writer.wanted(name) or writer.when)
            value = (
                re.escape(f"{when} ? ") + r"padded\(.*\) : kUnwanted" if when else r"padded\(.*\)"
            )
            address = f"workspace[{index}]"
            if name in kept:
                value = re.escape(f"{kept[name]} ? kUnwanted : ") + (
                    rf"\({value}\)" if when else value
                )
                place = rf"{re.escape(kept[name])} \? .*\(({name}_kept|{joined})\).*"
                address = rf"{place} : {re.escape(address)}"
            else:
                address = re.escape(address)
            assert re.fullmatch(value, size), name
            assert re.search(rf"void\* const {name} = {address};", text), name


@pytest.mark.slow
@every_plan
def test_no_step_touches_a_result_while_it_is_a_region(plan: ModulePlan) -> None:
    """Nor is memory of the caller's one, or a result that no buffer can use."""
    context = launcher_context(plan, SPECS.archs[plan.arch], "namespace")
    for (_, program), launched in zip(plan.ops, context.programs, strict=True):
        text = "\n".join(launched.workspace)
        regions = [(name, int(step)) for name, step in re.findall(REGION, text)]
        assert (
            ("lives, " in text and ", regions);" in text) == bool(regions) == ("regions{" in text)
        )
        assert [step for _, step in regions] == sorted(step for _, step in regions)
        lasts = [int(last) for last in re.findall(r"\d+, (\d+)\},  // ", text)]
        made = {allocated(program, result): result.buffer for result in program.results}
        for name, before in regions:
            *earlier, writer = program.steps[:before]
            assert made[name] in writer.writes and made[name] not in writer.reads
            assert all(made[name] not in (*step.reads, *step.writes) for step in earlier)
            assert made[name] not in {argument.buffer for argument in program.arguments}
            assert any(re.search(rf"\b{name} = .*\bempty", line) for line in launched.results)
            assert min(lasts) < before


@pytest.mark.parametrize(
    ("cell", "regions"),
    [
        (
            "grouped_mlp__bf16__one_backward_call",
            {"dx": 3, "dfc1_weight": 4, "dfc1_bias": 5, "dfc2_weight": 6, "dfc2_bias": 7},
        ),
        ("grouped_mlp__bf16__delayed_wgrad__one_backward_call", {"dx": 4, "dfc1_bias": 5}),
        (
            "grouped_mlp__fp8_delayed__one_backward_call",
            {"dfc1_bias": 4, "dx": 6, "dfc1_weight": 7, "dfc2_weight": 8},
        ),
        ("linear__fp8_current", {"dweight": 2, "dx": 4}),
    ],
)
def test_gradients_have_room_before_they_are_written(cell: str, regions: dict[str, int]) -> None:
    plan = plan_of(HOPPER, Cell.parse(cell))
    context = launcher_context(plan, SPECS.archs[plan.arch], "namespace")
    backward = next(program for program in context.programs if program.name == "backward")
    text = "\n".join(backward.workspace)
    assert [(name, int(step)) for name, step in re.findall(REGION, text)] == [*regions.items()]
    assert "const Workspace workspace(lives, dy, regions);" in backward.workspace


def test_numbers_for_rows_and_groups_are_no_regions() -> None:
    """An amax pass has sums before y is written, which are not worth a line."""
    plan = plan_of(HOPPER, Cell.parse("linear__fp8_current"))
    context = launcher_context(plan, SPECS.archs[plan.arch], "namespace")
    forward = next(program for program in context.programs if program.name == "forward")
    assert "const Workspace workspace(lives, x);" in forward.workspace


def test_a_main_grad_holds_values_before_its_step() -> None:
    cell = Cell("grouped_mlp", "bf16", ("add_to_main_grad", "one_backward_call"))
    (plan,) = resolve(SPECS, HOPPER, [cell]).modules
    context = launcher_context(plan, SPECS.archs[HOPPER], "namespace")
    backward = next(program for program in context.programs if program.name == "backward")
    regions = re.findall(REGION, "\n".join(backward.workspace))
    assert [name for name, _ in regions] == ["dx", "dfc1_bias"]


def test_what_only_steps_want_takes_no_tensor() -> None:
    """Without gradients, an expert MLP's activations share memory with what else it needs."""
    plan = plan_of(HOPPER, Cell.parse("grouped_mlp__bf16"))
    context = launcher_context(plan, SPECS.archs[plan.arch], "namespace")
    forward = next(program for program in context.programs if program.name == "forward")
    assert "if (need_dfc2_weight) a_kept = empty({T, F}, io, x);" in forward.results
    assert (
        "    {need_dfc2_weight ? kUnwanted : padded(2 * T * F), 1, 2},  // a" in forward.workspace
    )
    assert forward.returned == "{y, h, a_kept}"


def test_a_refresh_returns_nothing_and_writes_to_its_arguments() -> None:
    plan = plan_of(HOPPER, Cell.parse("linear__fp8_current__cached_weights"))
    context = launcher_context(plan, SPECS.archs[plan.arch], "namespace")
    refresh = next(program for program in context.programs if program.name == "refresh")
    assert (refresh.returns, refresh.returned, refresh.results) == ("void", "", ())
    assert refresh.operands == ("const auto weight_dense = dense(weight);",)
    text = "\n".join(line for step in refresh.steps for line in step.lines)
    assert "quantize.rowwise.data = writable(weight_rowwise);" in text
    assert "quantize.columnwise.scale = writable(weight_columnwise_scale);" in text
    assert any("weight_amax" in line for line in refresh.workspace)


def test_a_chain_has_such_buffers() -> None:
    plan = plan_of(HOPPER, Cell.parse("grouped_mlp__bf16__one_backward_call"))
    context = launcher_context(plan, SPECS.archs[plan.arch], "namespace")
    backward = next(program for program in context.programs if program.name == "backward")
    assert any("kUnwanted" in line for line in backward.workspace)


@pytest.mark.parametrize("module", ["linear", "grouped_mlp"])
@pytest.mark.parametrize("options", [(), ("delayed_wgrad", "cached_weights")])
def test_every_step_runs_in_a_range_of_its_name(module: str, options: tuple[str, ...]) -> None:
    """The words that ``explain`` prints, in the block that the step's condition opens."""
    cell = Cell(module, "mxfp8", (*options, "nvtx_ranges"))
    plan = resolve(SPECS, HOPPER, [cell]).modules[0]
    context = launcher_context(plan, SPECS.archs[plan.arch], "namespace")
    text = "\n".join(explain(plan))
    assert "fusegen/host/range.h" in context.headers
    directions = {program.name.partition("_")[0] for program in context.programs}
    assert len(directions) == 2 + len(options)
    for (_, program), launched in zip(plan.ops, context.programs, strict=True):
        for step, launch in zip(program.steps, launched.steps, strict=True):
            range_, words = f"{cell} {launched.name} ", launch.comment.partition(":")[0]
            assert launch.lines[0] == f'const Range range("{range_}{words}");'
            assert f"  {words}: " in text
            opening = f"if ({CPP.any_of(step.when)}) {{" if step.when else "{"
            assert spelled_out(launched, [launch.opening]) == opening


@pytest.mark.parametrize("recipe", ["fp8_block", "nvfp4"])
def test_what_binds_lengths_alone_is_not_copied(recipe: str) -> None:
    """A weight without memory is one element, expanded: packed, it would be as large as it says."""
    cell = Cell("linear", recipe, ("quantized_weights", "dequantized_backward"))
    (plan,) = resolve(SPECS, HOPPER, [cell]).modules
    assert "weight" in {a.buffer for a in plan.backward.arguments}
    context = launcher_context(plan, SPECS.archs[HOPPER], "namespace")
    packed = {program.name: "\n".join(program.operands) for program in context.programs}
    assert "dense(weight);" not in packed["backward"] and "dense(weight)" not in packed["forward"]
    assert "dense(weight);" in packed["refresh"]
