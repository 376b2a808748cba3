"""Plans of every module on every arch: straight-line, typed, and saving exactly what is read."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import plans
import pytest
from plans import SPECS

from fusegen.checks.load import load
from fusegen.emit.text.explain import explain
from fusegen.ir.buffers import size_in_bytes
from fusegen.ir.dtypes import DType
from fusegen.ir.naming import Cell, gradient, need
from fusegen.ir.plan import ModulePlan, Status
from fusegen.ir.program import Argument, CheckKind, Program
from fusegen.ir.quantization import Role
from fusegen.ir.shapes import symbols, to_python
from fusegen.ir.step import LIKE
from fusegen.options.weight_cache import WEIGHT_CACHE
from fusegen.passes.pipeline import resolve, resolve_module
from fusegen.publish.paths import builtin_specs
from fusegen.spec.kinds import SpecKind
from fusegen.spec.load import SpecSet, parse_spec
from fusegen.spec.module import ModuleSpec
from fusegen.spec.offers import options_of
from fusegen.steps import copies_memory, decodes, quantizes, reads_decoded, sums_rows
from fusegen.steps.quantize import SUMMED

RECIPE = "bf16"


PLACES = plans.offered(
    SPECS.archs,
    [
        Cell(module, recipe, options)
        for module in SPECS.modules
        for recipe in SPECS.recipes
        for options in ((), ("recompute_activations",))
    ],
)
every_plan = plans.every(PLACES)


def in_steps(plan: ModulePlan, names: Iterable[str]) -> set[str]:
    """Buffers as steps know them: each by its own name where several lie in one tensor."""
    found = ((name, plan.joined_tensor(name)) for name in names)
    return {part for name, tensor in found for part in (tensor.parts if tensor else (name,))}


def program_is_straight_line(plan: ModulePlan, program: Program) -> None:
    assert len(set(program.takes)) == len(program.takes)
    known = in_steps(plan, program.takes)
    for step in program.steps:
        assert set(step.reads) <= known, (program.name, step)
        assert not set(step.writes) & known, "written twice"
        known |= set(step.writes)
    results = in_steps(plan, program.gives)
    assert results <= known
    for name in known:
        assert plan.buffer(name).name == name
    written = {name for step in program.steps for name in step.writes}
    assert set(program.workspace) - set(plan.given_in(program)) == written - results
    assert len(set(program.workspace)) == len(program.workspace)


@every_plan
def test_programs_write_once_and_read_what_is_there(plan: ModulePlan) -> None:
    program_is_straight_line(plan, plan.forward)
    program_is_straight_line(plan, plan.backward)


@every_plan
def test_every_step_is_read(plan: ModulePlan) -> None:
    for program in (plan.forward, plan.backward):
        used = {result.buffer for result in program.results}
        used |= {name for step in program.steps for name in step.reads}
        for step in program.steps:
            assert set(step.writes) & used, f"{step.primitive} is for nothing"


@every_plan
def test_saved_is_what_the_backward_reads_once(plan: ModulePlan) -> None:
    names = [result.buffer for result in plan.saved]
    assert len(set(names)) == len(names)
    read = {name for step in plan.backward.steps for name in step.reads}
    written = {name for step in plan.backward.steps for name in step.writes}
    incoming = plan.incoming
    states = plan.backward.mutated
    assert in_steps(plan, names) == read - written - in_steps(plan, (*incoming, *states))
    assert [a.buffer for a in plan.backward.arguments] == [*incoming, *names, *states]
    assert set(states) <= set(plan.kept)
    reachable = {*plan.arguments, *(result.buffer for result in plan.forward.results)}
    assert set(names) <= reachable, "the forward does not hand it out"


@every_plan
def test_the_forward_returns_outputs_and_then_what_only_it_has(plan: ModulePlan) -> None:
    results = [result.buffer for result in plan.forward.results]
    had = {*plan.arguments, *plan.outputs}
    extra = [r.buffer for r in plan.saved if r.buffer not in had]
    assert results == [*plan.outputs, *extra]
    for result in plan.forward.results[len(plan.outputs) :]:
        assert result.when, "a call without gradients saves nothing"


def needed_by(plan: ModulePlan, flags: set[str]) -> tuple[set[int], set[str]]:
    """Backward steps that a set of flags needs, and what they read; found by walking backwards."""
    wanted = {r.buffer for r in plan.backward.results if not r.when or set(r.when) & flags}
    steps: set[int] = set()
    for index in reversed(range(len(plan.backward.steps))):
        step = plan.backward.steps[index]
        if wanted & {*step.writes, *step.mutates}:  # or a later one draws other random numbers
            steps.add(index)
            asking = {name: set(step.asking(name)) for name in step.reads}
            wanted |= {name for name, when in asking.items() if not when or when & flags}
    return steps, wanted


@every_plan
def test_flags_run_and_save_no_more_than_they_need(plan: ModulePlan) -> None:
    """A weight that tells a length is there under every flag: it costs nothing to keep."""
    weights = {parameter.buffer for parameter in plan.parameters}
    telling = {step.input(LIKE) for step in plan.backward.steps} & weights
    flags = tuple(map(need, plan.differentiated))
    for count in range(1, len(flags) + 1):
        for chosen in itertools.combinations(flags, count):
            called = not {*chosen} <= {*map(need, plan.passed_on)}
            steps, wanted = needed_by(plan, set(chosen)) if called else (set(), set())
            for index, step in enumerate(plan.backward.steps):
                runs = called and (not step.when or bool(set(step.when) & set(chosen)))
                assert runs == (index in steps), (chosen, step)
            for result in plan.saved:
                kept = not result.when or bool(set(result.when) & set(chosen))
                used = result.buffer in telling or bool(in_steps(plan, [result.buffer]) & wanted)
                assert kept == used, (chosen, result.buffer)


@every_plan
def test_flags_are_the_gradients(plan: ModulePlan) -> None:
    computed = {leaf: name for leaf, name in plan.gradients if leaf not in plan.passed_on}
    leaves = [*plan.differentiated]
    assert leaves == [leaf for leaf in plan.arguments if leaf in leaves]
    assert {computed[leaf] for leaf in computed} <= {gradient(leaf) for leaf in leaves}
    results = dict.fromkeys(computed.values())
    assert [result.buffer for result in plan.backward.results] == [*results]
    if len(computed) > 1:
        assert plan.backward.flags == tuple(map(need, computed))
        for result in plan.backward.results:
            asking = tuple(need(leaf) for leaf in computed if computed[leaf] == result.buffer)
            assert result.when == (asking if len(asking) < len(computed) else ())
    if not plan.backward.steps:
        return
    assert set(plan.forward.flags) <= {need(leaf) for leaf in leaves}
    asked = {flag for result in plan.forward.results for flag in result.when}
    if plan.forward.mutated:  # state that every gradient lets move on
        asked |= {need(leaf) for leaf in leaves}
    assert asked == set(plan.forward.flags)


@every_plan
def test_every_dimension_is_told_by_an_argument(plan: ModulePlan) -> None:
    for view, program in plan.ops:
        bound = {binding.symbol for binding in program.bindings}
        known = {argument.buffer: argument for argument in program.arguments}
        for binding in program.bindings:
            assert binding.candidates
            assert {name for name, _, _ in binding.candidates} <= set(known)
            last = known[binding.candidates[-1][0]]
            if len(binding.candidates) == 1 and program is plan.forward:
                assert not last.optional
        used = {
            symbol for step in program.steps for _, size in step.sizes for symbol in symbols(size)
        }
        used |= {s for n in program.workspace for s in view.buffer(n).shape.symbols()}
        used |= {s for r in program.results for s in view.buffer(r.buffer).shape.symbols()}
        assert used <= bound


@every_plan
def test_every_argument_is_checked(plan: ModulePlan) -> None:
    for _, program in plan.ops:
        first, *rest = program.arguments
        kinds = {(check.tensor, check.kind) for check in program.checks}
        assert (plan.own_type_argument(program), CheckKind.IO_DTYPE) in kinds
        assert {(first.buffer, kind) for kind in (CheckKind.IO_DTYPE, CheckKind.DTYPE)} & kinds
        for argument in rest:
            assert (argument.buffer, CheckKind.DEVICE) in kinds
            assert (argument.buffer, CheckKind.RANK) in kinds


@every_plan
def test_kernels_are_named_where_they_are_compiled(plan: ModulePlan) -> None:
    sets = {kernels.name for kernels in plan.kernel_sets}
    steps = [step for _, program in plan.ops for step in program.steps]
    loops = [step for step in steps if step.chunks]
    steps = [step for step in steps if step not in loops]
    steps += [part for loop in loops for part in (*loop.parts, *loop.chunks.adding)]
    named = {step.kernels for step in steps if not copies_memory(step)}
    assert named - {None} == sets
    assert (None in named) == (plan.arch == "cpu" and not plan.is_identity)
    for kernels in plan.kernel_sets:
        assert not kernels.rules[-1].predicate.conditions
        assert all(rule.predicate.conditions for rule in kernels.rules[:-1])
        chosen = {
            name for rule in kernels.rules for each in rule.candidates for _, name in each.kernels
        }
        assert chosen == {kernel.name for kernel in kernels.kernels}


@cache
def written_modules() -> tuple[ModuleSpec, ...]:
    """Modules as files have them, those with variants once."""
    found = (
        parse_spec(SpecKind.MODULES, path, path.name)[0]
        for path in sorted((builtin_specs() / "modules").iterdir())
    )
    return tuple(each for each in found if isinstance(each, ModuleSpec))


@every_plan
def test_a_plan_says_what_it_was_made_from(plan: ModulePlan) -> None:
    decoded = any(reads_decoded(step) for _, program in plan.ops for step in program.steps)
    assert plan.status is (Status.EMULATED if decoded else Status.NATIVE)
    root = builtin_specs().parent
    assert all((root / source).is_file() for source in plan.sources)
    variants = {name: spec.name for spec in written_modules() for name in spec.variants}
    written = variants.get(plan.module, plan.module)
    assert f"specs/modules/{written}.yaml" in plan.sources
    assert f"specs/archs/{plan.arch}.yaml" in plan.sources
    assert len(set(plan.sources)) == len(plan.sources)


@pytest.mark.slow
def test_plans_are_pure() -> None:
    places = [(arch, cell) for arch, cell in PLACES if cell.module in plans.stand_for_others()]
    for arch, cell in places[::7]:  # passes know no cell: what one keeps, it keeps of any
        assert resolve_module(SPECS, cell, arch) == plans.plan_of(arch, cell)


def test_what_a_linear_layer_saves() -> None:
    plan = plans.plan_of("cpu", Cell("linear", RECIPE))
    assert [(r.buffer, r.when) for r in plan.saved] == [
        ("x", ("need_dweight",)),
        ("weight", ("need_dx",)),
    ]
    assert plan.forward.flags == ()
    assert plan.arguments == ("x", "weight", "bias")
    assert [(step.primitive, step.kind, step.when) for step in plan.backward.steps] == [
        ("gemm", "dgrad", ("need_dx",)),
        ("gemm", "wgrad", ("need_dweight",)),
        ("column_sum", None, ("need_dbias",)),
    ]


def test_sizes_and_operation_counts() -> None:
    plan = plans.plan_of("cpu", Cell("linear", RECIPE))
    sizes = {(s.kind or "sum"): dict(s.sizes) for s in (*plan.forward.steps, *plan.backward.steps)}
    assert {name: str(size) for name, size in sizes["fprop"].items()} == {
        "tokens": "T", "groups": "1", "n": "N", "k": "K"
    }  # fmt: skip
    for kind in ("dgrad", "wgrad"):
        assert sizes[kind] == sizes["fprop"]
    flops = [s.flops for s in (*plan.forward.steps, *plan.backward.steps[:2])]
    assert all(f is not None and symbols(f) == {"T", "N", "K"} for f in flops)
    assert flops[0] is not None and to_python(flops[0]).startswith("2 * ")


def test_a_module_that_only_quantises_has_nothing_to_run() -> None:
    plan = plans.plan_of("cpu", Cell("quantize", RECIPE))
    assert plan.is_identity
    assert plan.outputs == plan.inputs
    assert plan.saved == ()


def test_a_quantised_role_goes_through_its_copy_and_back() -> None:
    plan = plans.plan_of("cpu", Cell("quantize", "fp8_delayed"))
    assert [step.primitive for step in plan.forward.steps] == ["quantize", "dequantize"]
    assert plan.forward.steps[1].reads == ("x_rowwise", "x_rowwise_scale")
    assert plan.forward.flags == ("need_dx",), "a forward without grad leaves the state alone"
    assert plan.backward.steps == () and plan.differentiated == ("x",)
    assert (plan.exact, plan.exact_outputs) == ((), ("x",))


def test_every_role_and_form_has_its_conversion() -> None:
    plan = plans.plan_of("cpu", Cell("quantize", "nvfp4"))
    results = {
        each.program.name: [r.buffer for r in each.program.results] for each in plan.conversions
    }
    assert list(results) == [
        "input_dense", "input_grouped", "weight_dense", "weight_stack", "grad_output_dense",
        "grad_output_grouped",
    ]  # fmt: skip
    parts = ("", "_scale", "_amax")
    expected = [f"x_{way}{part}" for way in ("rowwise", "columnwise") for part in parts]
    assert all(names == expected for names in results.values())
    mutated = {each.program.name: each.program.mutated for each in plan.conversions}
    assert {name for name, state in mutated.items() if state} == {
        "grad_output_dense", "grad_output_grouped"
    }  # fmt: skip
    current = plans.plan_of("sm_90a", Cell("quantize", "fp8_current")).conversions[0]
    assert current.amax == current.program.results[-1].buffer == "x_amax"


def test_scales_that_no_gemm_reads_are_in_logical_order() -> None:
    block = plans.plan_of("sm_90a", Cell("quantize", "fp8_block")).conversions[1]
    linear = plans.plan_of("sm_90a", Cell("grouped_linear", "fp8_block"))
    shapes = {buffer.name: str(buffer.shape) for buffer in block.buffers}
    assert shapes["x_rowwise_scale"] == "[T, ceildiv(K, 128)]"
    assert str(linear.buffer("x_rowwise_scale").shape) == "[ceildiv(K, 128), 32 * (T // 32 + E)]"


def test_gemms_without_an_instruction_read_decoded_operands() -> None:
    plan = plans.plan_of("sm_90a", Cell("grouped_linear", "nvfp4"))
    assert plan.status is Status.EMULATED
    assert plan.reason == (
        "sm_90a has no kernels for grouped_gemm of e2m1_e2m1_nv_1x16_nv_16x16_fp32;"
        " operands are decoded to bfloat16"
    )
    wgrad = next(step for step in plan.backward.steps if step.kind == "wgrad")
    assert wgrad.reads == (
        "dy_columnwise_decoded", "x_columnwise_decoded", "dy_columnwise_amax",
        "x_columnwise_amax", "dy_padded_sizes",
    )  # fmt: skip
    decoding = [step for step in plan.backward.steps if decodes(step)]
    assert [step.primitive for step in decoding] == ["dequantize"] * 2 + ["dequantize_groups"] * 2
    assert {step.when for step in decoding} == {("need_dx",), ("need_dweight",)}
    assert dict(wgrad.sizes)["tokens"] == plan.buffer("dy_columnwise_decoded").shape.dims[0]
    lines = list(explain(plan))
    assert lines[0].startswith("grouped_linear__nvfp4 on sm_90a: emulated (sm_90a has no kernels")
    assert any(line.startswith("emulation moves ") for line in lines[1:6])
    native = plans.plan_of("sm_90a", Cell("grouped_linear", "fp8_block"))
    assert native.status is Status.NATIVE


@pytest.mark.parametrize("arch", ["cpu", "sm_90a"])
def test_a_bias_gradient_rides_along_with_quantisation(arch: str) -> None:
    plan = plans.plan_of(arch, Cell("grouped_mlp", "fp8_block"))
    host = {
        operand.buffer: step
        for step in plan.backward.unmerged.steps
        for operand in step.outputs
        if operand.slot == SUMMED
    }
    assert list(host) == ["dfc2_bias", "dfc1_bias"]
    for bias, step in host.items():
        assert quantizes(step)
        assert step.wanted(bias) == (f"need_{bias}",)
        assert not step.when or f"need_{bias}" in step.when
    assert not [step for step in plan.backward.steps if sums_rows(step)]
    plain = plans.plan_of(arch, Cell("grouped_mlp", RECIPE))
    assert [step.primitive for step in plain.backward.steps].count("group_sum") == 2


@pytest.mark.parametrize("recipe", [RECIPE, "fp8_block", "nvfp4"])
@pytest.mark.parametrize("option", ["add_to_main_grad", "write_main_grad"])
def test_gradients_of_weights_go_to_the_callers_buffers(recipe: str, option: str) -> None:
    plan = plans.plan_of("sm_90a", Cell("grouped_mlp", recipe, (option,)))
    own = {"fc1_weight": "fc1_weight_main_grad", "fc2_weight": "fc2_weight_main_grad"}
    assert dict(plan.main_grads) == own
    assert dict(plan.gradients).items() >= {**own, "x": "dx"}.items()
    assert not {result.buffer for result in plan.backward.results} & set(own.values())
    arguments = {a.buffer: a for a in plan.backward.arguments}
    for leaf, name in own.items():
        assert arguments[name].mutated and arguments[name].optional
        assert plan.buffer(name).dtype is DType.FLOAT32
        assert name not in {result.buffer for result in plan.saved}
        (step,) = [each for each in plan.backward.steps if name in each.writes]
        assert (step.kind, step.when) == ("wgrad", (need(leaf),))
        assert (step.input("accumulate") == name) == (option == "add_to_main_grad")
        assert step.kernels and step.kernels.endswith("add" if "add" in option else "fp32")
    plain = plans.plan_of("sm_90a", Cell("grouped_mlp", recipe))
    assert plain.main_grads == ()
    assert {k.name for k in plain.kernel_sets if "wgrad" not in k.name} == {
        k.name for k in plan.kernel_sets if "wgrad" not in k.name
    }


@pytest.mark.parametrize("arch", ["cpu", "sm_90a"])
def test_e8m0_is_bytes_next_to_what_an_op_changes(arch: str) -> None:
    """And nowhere else: inductor calls other ops as they are."""

    def scales(*options: str) -> dict[str, DType]:
        plan = plans.plan_of(arch, Cell("linear", "mxfp8", options))
        crossing = {a.buffer for p in (plan.backward, plan.wgrad) if p for a in p.arguments}
        found = {buffer.name: buffer.dtype for buffer in plan.buffers if "scale" in buffer.name}
        inside = {dtype for name, dtype in found.items() if name not in crossing}
        assert inside == {DType.E8M0} or "cached_weights" in options
        return {name: dtype for name, dtype in found.items() if name in crossing}

    x, weight = "x_columnwise_scale", "weight_columnwise_scale"
    assert scales() == {x: DType.E8M0}
    assert scales("held_weights") == {x: DType.E8M0, weight: DType.E8M0}
    assert scales("add_to_main_grad", "held_weights") == {x: DType.UINT8, weight: DType.UINT8}
    assert scales("cached_weights") == {x: DType.E8M0, weight: DType.UINT8}
    delayed = scales("write_main_grad", "delayed_wgrad", "held_weights")
    assert delayed.pop("dy_columnwise_scale") is DType.UINT8
    assert delayed == {x: DType.UINT8, weight: DType.E8M0}


def test_choices_that_lead_nowhere_say_why() -> None:
    specs = SPECS
    cells = [Cell("silu", RECIPE, ("add_to_main_grad",)), Cell("linear", RECIPE, ("reduced_amax",))]
    assert {cell.reason for cell in resolve(specs, "cpu", cells).unsupported} == {
        "module 'silu' offers no option 'add_to_main_grad': no GEMM gives the gradient of a weight",
        "recipe 'bf16' keeps no amaxes that ranks could share",
    }
    plain = Cell("linear", RECIPE, ("high_precision_backward",))
    (found,) = resolve(specs, "cpu", [plain]).unsupported
    assert found.reason == "recipe 'bf16' quantises nothing, forward or backward"
    cached = [
        Cell("linear", RECIPE, ("cached_weights",)),
        Cell("linear", "fp8_delayed", ("cached_weights", "reduced_amax")),
    ]
    assert [cell.reason for cell in resolve(specs, "cpu", cached).unsupported] == [
        "recipe 'bf16' quantises no weight whose copies could be kept",
        "amaxes of cached weights are not shared between ranks",
    ]


def test_a_backward_of_high_precision_saves_what_it_reads() -> None:
    cell = Cell("grouped_linear", "nvfp4", ("high_precision_backward",))
    plan = plans.plan_of("sm_90a", cell)
    assert [result.buffer for result in plan.saved] == ["x", "split_sizes", "weight"]
    assert not [s for s in plan.backward.steps if s.copies] and plan.states == ()
    assert [s.kernels for s in plan.backward.steps] == [
        "gemm_sm90_dgrad", "gemm_sm90_wgrad", "group_sum"
    ]  # fmt: skip


DEQUANTIZED = ("dequantized_backward",)


def test_a_backward_of_the_forwards_values_saves_its_copies() -> None:
    plan = plans.plan_of("sm_90a", Cell("grouped_mlp", "fp8_current", DEQUANTIZED))
    kept = {result.buffer for result in plan.saved}
    copies = {f"{name}_rowwise{part}" for name in ("x", "a") for part in ("", "_scale")}
    assert copies <= kept and not {"x", "a"} & kept
    assert not [s for s in plan.backward.steps if s.kind and s.copies]
    read = {s.out: s.reads for s in plan.backward.steps if s.primitive == "dequantize"}
    weights = {"fc1_weight_dequantized", "fc2_weight_dequantized"}
    assert read.keys() == {"x_dequantized", "a_dequantized"} | weights
    # dy tells H; F is in h, which not every gradient needs.
    assert "fc2_weight" in read["a_dequantized"] and "fc1_weight" not in read["x_dequantized"]


def test_rows_that_are_padded_take_a_weight_of_their_length_along() -> None:
    plan = plans.plan_of("cpu", Cell("linear", "nvfp4", DEQUANTIZED))
    steps = [s for s in plan.backward.steps if s.primitive == "dequantize"]
    told = {s.input("a"): s.input("like") for s in steps}
    assert sorted(told.values(), key=str) == [None, "weight"]


@pytest.mark.parametrize("kept", ["cached_weights", "quantized_weights"])
def test_what_binds_lengths_is_there_under_every_flag(kept: str) -> None:
    """The copies that a module keeps are arguments of every backward, and are checked."""
    for recipe in ("nvfp4", "fp8_block"):
        plan = plans.plan_of("cpu", Cell("linear", recipe, (*DEQUANTIZED, kept)))
        (weight,) = (a for a in plan.backward.arguments if a.buffer == "weight")
        assert not weight.optional and not weight.when


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "module"), [("cpu", "linear"), ("sm_90a", "grouped_mlp")])
def test_sizes_of_what_is_there_are_known(arch: str, module: str) -> None:
    """Whatever two choices are made: no check compares with a dimension that nothing told."""
    specs, cells = SPECS, []
    offered = options_of(specs.modules[module], specs.ops)
    chosen = [(option.name, word) for option in offered for word in option.further]
    for (first, one), (second, other) in itertools.combinations(chosen, 2):
        if first != second:
            cells += [Cell(module, recipe, (one, other)) for recipe in ("fp8_block", "nvfp4")]
    plans = resolve(specs, arch, cells).modules
    assert len(plans) > 50
    for plan in plans:
        for _, program in plan.ops:
            there = {a.buffer: present(a, program) for a in program.arguments}
            whenever = [{"always"}, *([{*program.when}] if program.when else [])]
            told = {
                b.symbol: set().union(*(there[name] for name, *_ in b.candidates))
                for b in program.bindings
            }
            for check in program.checks:
                if check.kind is CheckKind.SIZE:
                    assert check.expr is not None
                    for symbol in symbols(check.expr):
                        covering = [*whenever, there[check.tensor]]
                        known = any(flags <= told[symbol] for flags in covering)
                        assert known, (plan.cell, check, told[symbol])


def present(argument: Argument, program: Program) -> set[str]:
    """Flags under which an argument is there, or that its caller gave it."""
    if argument.optional and not argument.when:
        return {"given"}
    return {*argument.when} or {"given", "always", *program.flags}


def test_main_grads_of_16_bits_have_the_weights_type() -> None:
    def stores(option: str) -> tuple[DType, str | None]:
        cell = Cell("grouped_linear", "fp8_block", (option,))
        plan = plans.plan_of("sm_90a", cell)
        (step,) = (s for s in plan.backward.steps if s.kind == "wgrad")
        return plan.buffer("weight_main_grad").dtype, step.kernels

    name = "gemm_fp8_block_sm90_wgrad_e4m3_e4m3_block_1x128_split_128"
    assert stores("write_16_bit_main_grad") == (DType.IO, name)
    assert stores("add_to_16_bit_main_grad") == (DType.IO, f"{name}_add_io")
    assert stores("add_to_main_grad") == (DType.FLOAT32, f"{name}_add")


CACHED = plans.offered(
    SPECS.archs,
    [
        Cell(module, recipe, ("cached_weights",))
        for module in SPECS.modules
        for recipe in SPECS.recipes
    ],
)
every_cached_plan = plans.every(CACHED)


def test_every_quantised_gemm_can_have_its_weights_cached() -> None:
    made = {(arch, cell.module, cell.recipe) for arch, cell in CACHED}
    offering = {n for n, m in SPECS.modules.items() if WEIGHT_CACHE in options_of(m, SPECS.ops)}
    assert offering >= {"linear", "grouped_linear", "grouped_mlp"}
    assert made == {
        (arch, cell.module, cell.recipe)
        for arch, cell in PLACES
        if cell.module in offering and cell.recipe != RECIPE
    }


@every_cached_plan
def test_cached_weights_are_quantised_by_the_refresh_alone(plan: ModulePlan) -> None:
    held = Cell(plan.module, plan.recipe, ("held_weights",))
    plan, plain = plan.unmerged, plans.plan_of(plan.arch, held).unmerged
    weights = {p.buffer for p in plan.parameters if plan.buffer(p.buffer).role is Role.WEIGHT}
    assert plan.refresh is not None and plain.refresh is None
    assert {step.reads[0] for step in plan.refresh.steps} == weights
    for step in (*plan.forward.steps, *plan.backward.steps):
        assert not (quantizes(step) and step.reads[0] in weights)
    forward = [step for step in plain.forward.steps if step.reads[0] not in weights]
    # What needs least memory, and so their order, depends on which copies are there before.
    assert sorted((s.primitive, s.reads, s.writes) for s in plan.forward.steps) == sorted(
        (s.primitive, s.reads, s.writes) for s in forward
    )
    assert {step.kernels for step in plan.steps} == {step.kernels for step in plain.steps}


@every_cached_plan
def test_copies_of_weights_are_arguments_and_never_saved(plan: ModulePlan) -> None:
    assert plan.refresh is not None
    copied = {b for s in plan.refresh.steps for c in s.copies for b in c.buffers}
    assert set(plan.caches) == copied
    assert not copied & {result.buffer for result in plan.saved}
    for program in (plan.forward, plan.backward):
        assert not copied & {*program.mutated, *program.workspace}
        assert not copied & {result.buffer for result in program.results}
        read = {name for step in program.steps for name in step.reads}
        assert copied & read == copied & {a.buffer for a in program.arguments} != set()
    assert copied <= set(plan.refresh.mutated) and plan.refresh.results == ()
    history = {name for name in plan.refresh.mutated if name not in copied}
    assert bool(history) == (plan.recipe == "fp8_delayed") == (plan.refresh.flags != ())
    assert not history & {a.buffer for p in (plan.forward, plan.backward) for a in p.arguments}


@pytest.mark.parametrize("recipe", sorted({cell.recipe for _, cell in CACHED}))
@pytest.mark.parametrize("module", ["linear", "grouped_mlp"])
def test_quantised_weights_run_the_programs_of_cached_ones(module: str, recipe: str) -> None:
    """What differs is a module's parameters, which no program reads."""
    alone, cached = (
        plans.plan_of("sm_90a", Cell(module, recipe, (option,)))
        for option in ("quantized_weights", "cached_weights")
    )
    assert alone.programs == cached.programs and alone.buffers == cached.buffers
    assert alone.kernel_sets == cached.kernel_sets and alone.states == cached.states
    weights = {p.buffer for p in alone.parameters if not alone.buffer(p.buffer).optional}
    assert {p.buffer for p in alone.quantized} == weights and cached.quantized == ()
    for program in (alone.forward, alone.backward):
        assert not weights & {name for step in program.steps for name in step.reads}
    text = "\n".join(explain(alone))
    assert all(f"parameter {p.path}, without memory" in text for p in alone.quantized)


def test_explain_tells_of_cached_weights() -> None:
    cell = Cell("grouped_mlp", "fp8_block", ("cached_weights",))
    text = "\n".join(explain(plans.plan_of("sm_90a", cell)))
    assert "buffer fc1.weight_rowwise_scale, filled by refresh" in text
    changes = "-> nothing, changes fc1_weight_rowwise, fc1_weight_rowwise_scale, "
    assert changes in " ".join(text.split())
    assert text.count("quantize_several: fc1_weight, fc2_weight ->") == 1
    forward, _, refresh = text.partition("\nrefresh (fc1_weight, fc2_weight, ")
    joined = "quantize_several: fc1_weight"
    assert joined not in forward and joined in refresh


def test_two_codes_of_four_bits_are_one_byte() -> None:
    plan = plans.plan_of("sm_90a", Cell("linear", "nvfp4"))
    assert to_python(size_in_bytes(plan.buffer("x_rowwise"))) == "T * (align(K, 32) // 2)"


@pytest.mark.slow
def test_order_of_cells_does_not_matter() -> None:
    specs = SPECS
    cells = [Cell(module, RECIPE) for module in specs.modules]
    assert resolve(specs, "cpu", cells) == resolve(specs, "cpu", [*reversed(cells), cells[0]])


def test_unknown_names_are_key_errors() -> None:
    names = (("no", RECIPE, "cpu"), ("silu", "no", "cpu"), ("silu", RECIPE, "no"))
    for module, recipe, arch in names:
        with pytest.raises(KeyError):
            plans.plan_of(arch, Cell(module, recipe))


# Cells that cannot be made


def layer(tmp_path: Path, **files: str) -> SpecSet:
    """The built-in specs and some more, given as ``kind__name``."""
    for key, text in files.items():
        kind, _, name = key.partition("__")
        path = tmp_path / "mine" / kind / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return load([builtin_specs(), tmp_path / "mine"])


def reasons(specs: SpecSet, module: str, *, recipe: str = RECIPE, arch: str = "cpu") -> list[str]:
    return [cell.reason for cell in resolve(specs, arch, [Cell(module, recipe)]).unsupported]


OP = """edition: 2
op: {name}
summary: toy
dims: {{T: rows, D: width}}
inputs: {{x: {{shape: [T..., D]}}}}
outputs: {{y: {{shape: [T..., D]}}}}
"""
MODULE = "edition: 2\nmodule: {name}\nclass: Toy\nop: {name}\n"
CHAIN = """edition: 2
module: {name}
class: Toy
summary: toy
dims: {{T: tokens, H: hidden}}
inputs: {inputs}
chain:
"""


def test_no_derivative(tmp_path: Path) -> None:
    text = OP.format(name="toy") + "pointwise: {y: x / (x - x)}\n"
    specs = layer(tmp_path, ops__toy=text, modules__toy=MODULE.format(name="toy"))
    assert reasons(specs, "toy") == [
        "op 'toy': the expression divides by an expression that is always 0"
    ]


def test_a_recipe_that_quantises_half_a_gemm(tmp_path: Path) -> None:
    recipe = (builtin_specs() / "recipes" / "bf16.yaml").read_text(encoding="utf-8")
    role = "{format: e4m3, block: [1, all], scale: {dtype: float32, rule: max_over_amax}}"
    recipe = f"{recipe.replace('recipe: bf16', 'recipe: toy')}roles: {{input: {role}}}\n"
    specs = layer(tmp_path, recipes__toy=recipe)
    assert reasons(specs, "linear", recipe="toy") == [
        "recipe 'toy' quantises one operand of fprop only"
    ]


def test_an_arch_without_the_kernels(tmp_path: Path) -> None:
    arch = (
        "edition: 2\narch: sm_100\nsummary: toy\n"
        'gencode: "arch=compute_100,code=sm_100"\ntoolkit: "12.9"\nkernels:\n'
        "  pointwise: {implements: [pointwise, pointwise_grad]}\n"
        "  gemms: {implements: [grouped_gemm]}\n"
    )
    specs = layer(tmp_path, archs__sm_100=arch)
    assert reasons(specs, "linear", arch="sm_100") == [
        "sm_100 has no kernels for gemm; it has grouped_gemm, pointwise, pointwise_grad"
    ]
    assert reasons(specs, "grouped_linear", arch="sm_100") == [
        "sm_100: kernel family gemms has no fprop"
    ]
    assert reasons(specs, "silu", arch="sm_100") == []


def test_a_size_that_no_argument_tells(tmp_path: Path) -> None:
    text = OP.format(name="toy").replace("D]", "D + 1]") + "pointwise: {y: x}\n"
    specs = layer(tmp_path, ops__toy=text, modules__toy=MODULE.format(name="toy"))
    assert reasons(specs, "toy") == ["no argument of the forward tells dimension D"]


# Chains


def chain(tmp_path: Path, *items: str, inputs: str = "{x: {shape: [T, H]}}") -> ModulePlan:
    text = CHAIN.format(name="toy", inputs=inputs) + "".join(f"  - {{{item}}}\n" for item in items)
    return resolve_module(layer(tmp_path, modules__toy=text), Cell("toy", RECIPE), "cpu")


LINEAR = "op: linear, as: fc, dims: {K: H, N: H}"
QUANTIZE = "op: quantize, as: q, dims: {K: H}"


@pytest.mark.parametrize("items", [(QUANTIZE, LINEAR), (LINEAR, QUANTIZE)])
def test_an_identity_disappears_on_either_side(tmp_path: Path, items: tuple[str, str]) -> None:
    plan = chain(tmp_path, *items)
    assert [step.primitive for step in plan.forward.steps] == ["gemm"]
    assert plan.outputs == ("y",)
    program_is_straight_line(plan, plan.forward)
    program_is_straight_line(plan, plan.backward)
    assert [r.buffer for r in plan.saved] == ["x", "fc_weight"]
    assert [r.buffer for r in plan.backward.results] == ["dx", "dfc_weight", "dfc_bias"]
    assert plan.backward.arguments[0].buffer == "dy"


def test_a_constant_input_has_no_gradient_and_no_step_for_it(tmp_path: Path) -> None:
    plan = chain(tmp_path, LINEAR, inputs="{x: {shape: [T, H], differentiable: false}}")
    assert [r.buffer for r in plan.backward.results] == ["dfc_weight", "dfc_bias"]
    assert [step.kind for step in plan.backward.steps] == ["wgrad", None]
    assert [r.buffer for r in plan.saved] == ["x"]


def test_a_chain_names_its_tensors(tmp_path: Path) -> None:
    linear = "op: linear, as: fc, dims: {K: H, N: 2 * H}"
    plan = chain(tmp_path, linear, "op: swiglu, as: act, dims: {D: H}")
    assert [p.path for p in plan.parameters] == ["fc.weight", "fc.bias"]
    assert [b.name for b in plan.buffers][:4] == ["x", "fc_weight", "fc_bias", "fc_y"]
    assert str(plan.buffer("fc_y").shape) == "[T, 2 * H]"
    assert plan.forward.workspace == ()
    assert [r.buffer for r in plan.forward.results] == ["y", "fc_y"]


@pytest.mark.parametrize(
    ("shape", "inner"), [("[T, H]", "[T, 2 * H]"), ("[T..., H]", "[T..., 2 * H]")]
)
def test_leading_dimensions_come_from_the_first_input(
    tmp_path: Path, shape: str, inner: str
) -> None:
    linear = "op: linear, as: fc, dims: {K: H, N: 2 * H}"
    swiglu = "op: swiglu, as: act, dims: {D: H}"
    plan = chain(tmp_path, linear, swiglu, inputs=f"{{x: {{shape: {shape}}}}}")
    assert str(plan.buffer("x").shape) == str(plan.buffer("y").shape) == shape
    assert str(plan.buffer("fc_y").shape) == str(plan.buffer("dfc_y").shape) == inner


def test_values_replace_an_ops_defaults(tmp_path: Path) -> None:
    op = OP.format(name="times") + (
        "attributes: {factor: {type: float, default: 2.0}}\npointwise: {y: x * factor}\n"
    )
    items = "".join(
        f"  - {{op: times, as: {name}, dims: {{D: H}}{extra}}}\n"
        for name, extra in (("a", ""), ("b", ", attributes: {factor: 0.5}"))
    )
    text = CHAIN.format(name="toy", inputs="{x: {shape: [T, H]}}") + items
    specs = layer(tmp_path, ops__times=op, modules__toy=text)
    plan = resolve_module(specs, Cell("toy", RECIPE), "cpu")
    assert [(a.name, a.default) for a in plan.attributes] == [("a_factor", 2.0), ("b_factor", 0.5)]


def test_an_expression_of_scales_alone_is_no_kernel(tmp_path: Path) -> None:
    scales = "s: {shape: [T], dtype: float32, broadcast: row}"
    text = OP.format(name="toy").replace("T...", "T").replace("]}}", f"]}}, {scales}}}", 1)
    text += "pointwise: {y: x * 0 + s}\n"
    specs = layer(tmp_path, ops__toy=text, modules__toy=MODULE.format(name="toy"))
    assert reasons(specs, "toy") == [
        "op 'toy': its forward reads no tensor of the module's own type"
    ]


OF_FP8 = {"fp8_block", "fp8_current", "fp8_delayed", "fp8_rowwise"}
MULTIPLIES = {"sm_80": set[str](), "sm_89": OF_FP8, "sm_90a": OF_FP8}
"""Recipes whose operands an architecture has matrix instructions for, beside 16 bits."""


@pytest.mark.parametrize("arch", MULTIPLIES)
@pytest.mark.parametrize("module", ["linear", "grouped_linear", "grouped_mlp", "mlp"])
def test_what_has_an_instruction_is_native_and_the_rest_emulated(arch: str, module: str) -> None:
    for recipe in SPECS.recipes:
        native = recipe == "bf16" or recipe in MULTIPLIES[arch]
        expected = Status.NATIVE if native else Status.EMULATED
        assert plans.plan_of(arch, Cell(module, recipe)).status is expected, recipe
