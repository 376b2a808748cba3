"""Ranks that have parts of a module's weights: what they exchange, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from plans import SPECS, plan_of

from fusegen.checks.load import load
from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan
from fusegen.ir.program import CheckKind, Program
from fusegen.ir.segments import Start, Wait
from fusegen.ir.shapes import Sym
from fusegen.options.tensor_parallel import PARALLEL, Parallel, Split
from fusegen.passes.draft import EMPTY, Draft, NotPossible
from fusegen.passes.pipeline import PASSES, context_of, resolve_module
from fusegen.passes.tensor_parallel import split_over_ranks
from fusegen.publish.paths import builtin_specs
from fusegen.spec.cells import product
from fusegen.spec.offers import not_offered


def segments(plan: ModulePlan, name: str) -> list[str]:
    """Each segment of a direction, by what it does and gives."""
    direction = plan.direction(name)
    assert direction is not None
    kinds = {Program: "op", Start: "start"}
    return [" ".join((kinds.get(type(each), "wait"), *each.gives)) for each in direction.segments]


def drafted(module: str) -> Draft:
    """A module before anything is quantised."""
    context, draft = context_of(SPECS, Cell(module, "bf16"), "cpu"), EMPTY
    for each in PASSES:
        if each.name == "recompute":
            return draft
        draft = each.run(draft, context) if each.applies(context) else draft
    raise AssertionError("no such pass")


def test_gradients_of_inputs_move_while_those_of_weights_are_computed() -> None:
    plan = plan_of("cpu", Cell("linear", "bf16", ("column_sequence_parallel",)))
    assert segments(plan, "forward") == [
        "start forward_x_all_pending",
        "wait x_all",
        "op y",
    ]
    assert segments(plan, "backward") == [
        "start backward_x_all_pending",
        "op dx_part",
        "start backward_dx_part_pending",
        "wait x_all",
        "op dweight dbias",
        "wait dx",
    ]
    assert [result.buffer for result in plan.saved] == ["x", "weight"]  # not what was gathered
    assert plan.arguments[0] == "x" and plan.split == ("N",)


@pytest.mark.parametrize(
    ("module", "word", "forward", "backward"),
    [
        ("linear", "column_parallel", [], ["all_reduce dx_part"]),
        ("linear", "row_parallel", ["share bias", "all_reduce y_part"], []),
        (
            "linear",
            "row_sequence_parallel",
            ["share bias", "reduce_scatter y_part"],
            ["all_gather dy"],
        ),
        (
            "grouped_mlp",
            "tensor_parallel",
            ["share fc2_bias", "all_reduce y_part"],
            ["all_reduce dx_part", "all_reduce dprobs_part"],
        ),
        (
            "moe_layer",
            "tensor_sequence_parallel",
            [
                *("all_gather probs", "all_gather ids", "all_reduce counts", "share fc2_bias"),
                *("all_gather x", "reduce_scatter y_part"),
            ],
            [
                *("all_gather dy", "all_gather x"),
                *("reduce_scatter dx_part", "reduce_scatter dprobs_part"),
            ],
        ),
        (
            "moe_layer",
            "expert_parallel",
            [
                *("all_gather probs", "gather_numbers ids", "reduce_scatter counts"),
                *("all_gather x", "reduce_scatter y_part"),
            ],
            [
                *("all_gather dy", "all_gather x"),
                *("reduce_scatter dx_part", "reduce_scatter dprobs_part"),
            ],
        ),
        (
            "moe_layer",
            "expert_parallel_all_to_all",
            [
                *("all_to_all probs", "all_to_all_numbers ids", "reduce_scatter counts"),
                *("all_to_all x", "all_to_all y_part"),
            ],
            [
                *("all_to_all dy", "all_to_all x"),
                *("all_to_all dx_part", "all_to_all dprobs_part"),
            ],
        ),
    ],
)
def test_what_ranks_exchange(
    module: str, word: str, forward: list[str], backward: list[str]
) -> None:
    plan = plan_of("cpu", Cell(module, "bf16", (word,)))
    for name, wanted in (("forward", forward), ("backward", backward)):
        direction = plan.direction(name)
        assert direction is not None
        assert [f"{s.kind} {' '.join(s.operands)}" for s in direction.starts] == wanted


@pytest.mark.parametrize(
    ("word", "inside"),
    [
        ("tensor_sequence_parallel", "all"),
        ("expert_parallel", "all"),
        ("expert_parallel_all_to_all", "received"),
    ],
)
def test_rows_move_back_while_the_first_weights_have_their_gradients(
    word: str, inside: str
) -> None:
    """The gradient of x waits for no gradient of weights but those that come before it anyway."""
    assert segments(plan_of("cpu", Cell("moe_layer", "bf16", (word,))), "backward") == [
        f"start backward_dy_{inside}_pending",
        f"start backward_x_{inside}_pending",
        f"wait dy_{inside}",
        "op dfc2_weight dfc2_bias dh drow_probs",
        "op dx_part dprobs_part",
        "start backward_dx_part_pending",
        "start backward_dprobs_part_pending",
        f"wait x_{inside}",
        "op dfc1_weight dfc1_bias",
        "wait dx",
        "wait dprobs",
    ]


def test_rows_of_experts_are_planned_while_tokens_travel() -> None:
    """What is small goes first; sums are made for one rank at a time, and ask for no more."""
    plan = plan_of("sm_90a", Cell("moe_layer", "bf16", ("expert_parallel",)))
    assert segments(plan, "forward") == [
        "start forward_probs_all_pending",
        "start forward_ids_own_pending",
        "start forward_counts_own_pending",
        "start forward_x_all_pending",
        "wait probs_all",
        "wait ids_own",
        "wait counts_own",
        "op split_sizes row_slot slot_row row_probs",
        "wait x_all",
        "op h experts",
        "op y_part",
        "start forward_y_part_pending",
        "wait y",
    ]
    forward = plan.direction("forward")
    assert forward is not None
    adds = forward.programs[-1]
    assert [argument.buffer for argument in adds.arguments] == ["experts", "slot_row"]
    assert {symbol for check in adds.checks for symbol in check.symbols} == {"H"}
    assert forward.starts[-1].by_rows == ("slot_row",)


@pytest.mark.parametrize(
    ("word", "kind"),
    [("expert_parallel", "gather_numbers"), ("expert_parallel_all_to_all", "all_to_all_numbers")],
)
def test_experts_are_counted_from_the_first_of_a_rank(word: str, kind: str) -> None:
    plan = plan_of("cpu", Cell("moe_layer", "bf16", (word,)))
    (ids,) = (s for s in plan.direction("forward").starts if s.kind == kind)
    assert ids.sizes == (("own", Sym("E")),) and ids.group.name == "expert_group"
    assert plan.split == ("E",)


def test_an_input_that_comes_quantised_is_gathered_as_its_copies() -> None:
    """Each where it is read; what lies behind the rows of a copy is there once in what is given."""
    cell = Cell("linear", "fp8_block", ("quantized_input", "column_sequence_parallel"))
    plan = plan_of("sm_90a", cell)
    found = {
        each.name: [(s.kind, s.operands[0], dict(s.attributes)) for s in each.starts]
        for each in plan.directions
    }
    assert found["forward"] == [
        ("placeholder", "x", {"rows": "128"}),
        ("gather_copy", "x_rowwise", {"dim": "0", "tail": "0"}),
        ("gather_copy", "x_rowwise_scale", {"dim": "1", "tail": "32"}),
    ]
    assert found["backward"] == [
        ("gather_copy", "x_columnwise", {"dim": "1", "tail": "0"}),
        ("gather_copy", "x_columnwise_scale", {"dim": "0", "tail": "0"}),
        ("reduce_scatter", "dx_part", {}),
    ]
    assert not found["quantize_input"]
    assert {"x_columnwise", "x_columnwise_scale"} <= {each.buffer for each in plan.saved}
    told = [check for op in plan.direction("forward").programs for check in op.checks]
    assert told and not [c for c in told if c.tensor.startswith("x_columnwise") and c.symbols]


@pytest.mark.parametrize("recipe", ["fp8_block", "fp8_delayed", "mxfp8"])
@pytest.mark.parametrize(
    ("module", "word"),
    [("linear", "column_sequence_parallel"), ("mlp", "tensor_sequence_parallel")],
)
def test_ops_look_at_all_that_they_are_given(module: str, word: str, recipe: str) -> None:
    """Compilers refuse what no line of an op reads: what the forward keeps is checked there."""
    plan = plan_of("sm_90a", Cell(module, recipe, ("quantized_input", word)))
    ops = [op for direction in plan.directions for op in direction.programs]
    for op in ops:
        checked = {name for check in op.checks for name in (check.tensor, check.reference)}
        read = {name for step in op.steps for name in (*step.reads, *step.mutates)}
        assert {argument.buffer for argument in op.arguments} <= checked | read, op.name
    of_kept = [check for op in ops for check in op.checks if check.tensor == "x_columnwise"]
    assert {check.kind.value for check in of_kept} == {"device", "dtype", "rank"}


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_rowwise", "nvfp4"])
def test_copies_that_span_the_tokens_of_all_ranks_are_refused(recipe: str) -> None:
    words = ("quantized_input", "column_sequence_parallel")
    with pytest.raises(NotPossible, match="is of the tokens of all ranks together"):
        resolve_module(SPECS, Cell("linear", recipe, words), "sm_90a")


def test_kernels_and_ops_are_those_of_the_whole_module() -> None:
    for arch, recipe in (("sm_90a", "fp8_block"), ("sm_100a", "mxfp8")):
        plain, split = (
            plan_of(arch, Cell("mlp_swiglu", recipe, words)) for words in ((), ("tensor_parallel",))
        )
        assert {each.name for each in split.kernel_sets} == {
            each.name for each in plain.kernel_sets
        }


@pytest.mark.parametrize("word", PARALLEL)
def test_what_is_offered_can_be_made(word: str) -> None:
    offering = [n for n, m in SPECS.modules.items() if not_offered(word, m, SPECS.ops) is None]
    assert offering
    for cell in product(offering, ("bf16", "nvfp4")):
        plan = resolve_module(SPECS, Cell(cell.module, cell.recipe, (word,)), "cpu")
        assert plan.process_groups and plan.split and not plan.shardings


@pytest.mark.parametrize(
    ("module", "split", "sequence", "reason"),
    [
        (
            "norm_mlp",
            Split.BETWEEN,
            False,
            "pointwise reads all of 'z', of which a rank has a part",
        ),
        ("rms_norm_linear", Split.INPUTS, False, "norm rms reads all of 'x'"),
        ("routed_moe_layer", Split.BETWEEN, False, "route_grad reads all of 'dprobs'"),
        ("grouped_linear", Split.OUTPUTS, True, "'split_sizes' is not of tokens"),
        ("silu", Split.OUTPUTS, False, "no dimension of its outputs"),
        ("silu", Split.GROUPS, True, "no dimension of its groups"),
        ("shared_moe_layer", Split.GROUPS, True, "combine_rows reads a partial sum of 'shared"),
        ("routed_moe_layer", Split.GROUPS, True, "gemm fprop reads all of 'router_weight'"),
        ("grouped_linear", Split.GROUPS, True, "every rank has all of 'y', not its own tokens"),
    ],
)
def test_a_step_that_needs_more_is_named(
    module: str, split: Split, sequence: bool, reason: str
) -> None:
    with pytest.raises(NotPossible, match=reason):
        split_over_ranks(drafted(module), Parallel(split, sequence))


def test_names_that_are_taken_are_left_alone(tmp_path: Path) -> None:
    """A tensor of the module's own may be called what another would be inside."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "taken.yaml").write_text(
        "edition: 2\nmodule: taken\nclass: Taken\nsummary: taken\n"
        "dims: {T: tokens, K: inner, N: outer}\n"
        "inputs:\n  x: {shape: [T..., K], role: input}\n"
        "  x_all: {shape: [T..., N]}\n"
        "chain:\n  - {op: linear, as: fc, out: h, dims: {K: K, N: N}}\n"
        "  - {op: add_extra_input, as: sum, with: {extra: x_all}, dims: {D: N}}\n",
        encoding="utf-8",
    )
    specs = load([builtin_specs(), tmp_path])
    plan = resolve_module(specs, Cell("taken", "bf16", ("column_sequence_parallel",)), "cpu")
    assert segments(plan, "forward")[:2] == ["start forward_x_all__pending", "wait x_all_"]
    assert plan.inputs == ("x", "x_all")


def test_sums_that_no_thread_has_registers_for_are_not_fused() -> None:
    rowwise, block = (
        plan_of("sm_80", Cell("linear_residual", r)) for r in ("fp8_rowwise", "fp8_block")
    )
    assert [s.primitive for s in rowwise.forward.steps][-2:] == ["gemm", "pointwise"]
    assert block.forward.steps[-1].primitive == "gemm_pointwise"


@pytest.mark.parametrize(
    ("word", "inside"),
    [
        ("expert_parallel", "all"),
        ("expert_parallel_all_to_all", "received"),
        ("tensor_sequence_parallel", "all"),
    ],
)
def test_ops_begin_early_whose_gemms_gather_rows(word: str, inside: str) -> None:
    """In each direction the first of what comes in and is multiplied row by row, and no other."""

    def arriving(arch: str, recipe: str) -> list[str]:
        plan = plan_of(arch, Cell("moe_layer", recipe, (word,)))
        ops = (op for each in plan.directions for op in each.programs)
        return [op.arriving for op in ops if op.arriving]

    assert arriving("sm_90a", "bf16") == [f"x_{inside}", f"dy_{inside}"]
    assert arriving("cpu", "bf16") == arriving("sm_90a", "fp8_block") == []


@pytest.mark.parametrize("word", ["tensor_sequence_parallel", "tensor_parallel"])
@pytest.mark.parametrize("module", ["mlp", "mlp_swiglu"])
def test_checks_of_parameters_name_what_a_caller_has(module: str, word: str) -> None:
    """Not what another op of the same direction made."""
    plan = plan_of("cpu", Cell(module, "bf16", (word,)))
    parameters = {each.buffer for each in plan.parameters}
    named = {
        check.names
        for op in plan.direction("forward").programs
        for check in op.checks
        if check.kind is CheckKind.SAME_DTYPE and check.tensor.removesuffix("_share") in parameters
    }
    assert named == {(name, "x") for name in parameters} and len(named) == 4


@pytest.mark.parametrize(
    ("option", "ahead"),
    [
        ("expert_parallel", ["x", "dy"]),
        ("expert_parallel_all_to_all", ["x", "dy"]),
        ("tensor_sequence_parallel", ["x", "dy"]),
    ],
)
def test_own_rows_take_their_place_before_what_begins_with_them(
    option: str, ahead: list[str]
) -> None:
    """Not where they are waited for behind other ops: memory for all would be held so long."""
    plan = plan_of("sm_90a", Cell("moe_layer", "bf16", (option,)))
    starts = [start for each in plan.directions for start in each.starts]
    assert [name for start in starts if start.ahead for name in start.operands] == ahead
    again = [s for s in plan.direction("backward").starts if s.operands == ("x",)]
    assert again and not any(start.ahead for start in again)


def starts(module: str, recipe: str, *options: str, arch: str = "cpu") -> list[tuple[str, ...]]:
    """What each collective of a forward says of rows."""
    plan = plan_of(arch, Cell(module, recipe, options))
    return [start.by_rows for start in plan.directions[0].starts]


def test_what_one_product_reads_may_come_by_rank() -> None:
    """Not what is quantised before; sums may leave so, and one direction has both."""
    assert starts("linear", "bf16", "column_sequence_parallel") == [("x_all",)]
    assert starts("linear", "bf16", "row_sequence_parallel") == [(), ("x",)]
    assert starts("linear", "fp8_block", "column_sequence_parallel") == [()]
    assert starts("mlp", "bf16", "tensor_sequence_parallel") == [(), ("x_all",), ("a",)]


@pytest.mark.parametrize("arch", ["cpu", "sm_90a", "sm_100a"])
def test_codes_may_come_and_leave_by_rank(arch: str) -> None:
    """With scales of their rows, and what tells how many there are; one for all rows stays."""
    gathered = ("quantized_input", "column_sequence_parallel")
    assert starts("linear", "fp8_delayed", *gathered, arch=arch) == [(), ("x_rowwise_all",)]
    with_scales = [(), ("x_rowwise_all",), ("x_rowwise_scale_all",)]
    assert starts("linear", "fp8_block", *gathered, arch=arch) == with_scales
    row = ("row_sequence_parallel",)
    assert starts("linear", "fp8_current", *row, arch=arch) == [(), ("x", "x_rowwise")]
    found = starts("linear", "fp8_block", *row, arch=arch)
    assert found == [(), ("x", "x_rowwise", "x_rowwise_scale")]
    both = starts(
        "mlp_swiglu", "fp8_block", "quantized_input", "tensor_sequence_parallel", arch=arch
    )
    assert both == [(), *with_scales, ("x_all", "a_rowwise", "a_rowwise_scale")]


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_what_is_decoded_first_is_one_of_all_ranks(recipe: str) -> None:
    assert any(starts("linear", recipe, "row_sequence_parallel", arch="sm_100a"))
    assert not any(starts("linear", recipe, "row_sequence_parallel", arch="sm_90a"))


def test_ops_that_multiply_codes_are_told_sizes_by_what_these_are_of() -> None:
    """Each is given what has as many rows, and no other tokens; a place in front makes weights."""
    cell = Cell("linear", "fp8_block", ("quantized_input", "column_sequence_parallel"))
    for arch in ("cpu", "sm_90a"):
        weights, product = plan_of(arch, cell).direction("forward").programs
        assert {"weight_rowwise", "weight_rowwise_scale"} == {
            each.buffer for each in weights.results
        }
        assert product.arguments[0].buffer == "x_all" and product.filled == ("y",)
        tokens = {a.buffer for a in product.arguments if a.buffer.startswith("x_")}
        assert tokens == {"x_all", "x_rowwise_all", "x_rowwise_scale_all"}


@pytest.mark.parametrize("arch", ["cpu", "sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize(
    ("module", "option", "made"),
    [
        ("linear", "row_sequence_parallel", "dx"),
        ("mlp", "tensor_sequence_parallel", "da"),
        ("mlp_swiglu", "tensor_sequence_parallel", "da"),
    ],
)
def test_a_backward_begins_with_the_rows_of_a_rank(
    arch: str, module: str, option: str, made: str
) -> None:
    """Of a gradient that other steps read, too; where nobody asks for it, they wait for all."""
    plan = plan_of(arch, Cell(module, "bf16", (option,)))
    backward = plan.direction("backward")
    (place,) = (i for i, s in enumerate(backward.segments) if isinstance(s, Wait) and s.by_rows)
    wait, op = backward.segments[place : place + 2]
    assert isinstance(wait, Wait) and isinstance(op, Program)
    assert wait.results == wait.by_rows == ("dy_all",) and not wait.when
    assert op.arguments[0].buffer == "dy_all" and op.filled == (made,) and op.when
    assert not op.results and backward.made[made] == op.when
    assert any("dy_all" in each.takes for each in backward.segments[place + 2 :])


def test_what_is_gathered_for_gradients_of_weights_alone_is_waited_for() -> None:
    plan = plan_of("sm_90a", Cell("linear", "bf16", ("column_sequence_parallel",)))
    waits = [s for s in plan.direction("backward").segments if isinstance(s, Wait)]
    assert waits and not any(each.by_rows for each in waits)


@pytest.mark.parametrize("arch", ["cpu", "sm_80", "sm_90a"])
def test_an_op_that_fills_an_argument_checks_what_one_does_that_gives_a_result(arch: str) -> None:
    whole, part = (
        plan_of(arch, Cell("linear", "bf16", options)).direction("forward").programs[0]
        for options in ((), ("column_sequence_parallel",))
    )
    assert part.filled == ("y",) and len(part.checks) == len({*part.checks})
    alike = [
        {(each.kind, each.expr, each.label) for each in op.checks if each.tensor != "y"}
        for op in (whole, part)
    ]
    assert alike[0] == alike[1]
