"""Backwards that are cut where memory goes: where, what it spares, and where not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

import pytest
from plans import SPECS

from fusegen.emit.python.directions import direction_texts
from fusegen.emit.text.explain import explain
from fusegen.ir.dtypes import DType
from fusegen.ir.naming import Cell, need
from fusegen.ir.plan import ModulePlan
from fusegen.ir.program import Program
from fusegen.ir.step import Operand, Step
from fusegen.ir.text import parse, text
from fusegen.passes.freeing import RARITY
from fusegen.passes.order import WORTH
from fusegen.passes.pipeline import resolve_module
from fusegen.steps.footprint import (
    Peaks,
    Stretch,
    backward_peak,
    bytes_of,
    for_each_parameter,
    for_each_token,
    held,
    needed_inside,
    stretches,
    typical_sizes,
)
from fusegen.steps.verify_directions import verify_plan

ONE = "one_backward_call"
MODELS = (
    {"E": 8, "T": 32768, "H": 4096, "F": 14336},
    {"E": 32, "T": 65536, "H": 7168, "F": 2048},
    {"E": 128, "T": 65536, "H": 2048, "F": 768},
)
"""Experts of Mixtral, DeepSeek-V3 and Qwen3, on a rank."""


def plan_of(cell: str, arch: str = "sm_90a") -> ModulePlan:
    return resolve_module(SPECS, Cell.parse(cell), arch)


def ops(plan: ModulePlan) -> tuple[Program, ...]:
    direction = plan.direction("backward")
    assert direction is not None
    return direction.programs


def kinds(plan: ModulePlan) -> list[list[str]]:
    return [[step.kind or step.primitive for step in program.steps] for program in ops(plan)]


def test_each_op_ends_where_much_is_read_for_the_last_time() -> None:
    """The gradient of h; then of x and fc1's weight; that of fc2's weight waits, small as it is."""
    assert kinds(plan_of("grouped_mlp__fp8_delayed")) == [
        ["quantize", "quantize", "dgrad", "pointwise_grad_quantize"],
        ["quantize", "dgrad", "wgrad"],
        ["wgrad"],
    ]
    assert [len(each) for each in kinds(plan_of("grouped_mlp__bf16"))] == [2, 3, 2]


@pytest.mark.parametrize(
    "cell",
    [
        "linear__fp8_delayed",
        "grouped_linear__bf16",
        "norm_qkv__fp8_block",
        "grouped_mlp__bf16__delayed_wgrad",
        "grouped_mlp__fp8_delayed__delayed_wgrad",
        "grouped_mlp__fp8_delayed__one_backward_call",
    ],
)
def test_one_op_stays_where_nothing_goes_or_nothing_may(cell: str) -> None:
    plan = plan_of(cell)
    assert len(ops(plan)) == 1 and ops(plan)[0].part == 0
    assert not direction_texts(plan)


@pytest.mark.parametrize("lengths", MODELS, ids=("mixtral", "dsv3", "qwen3"))
@pytest.mark.parametrize("recipe", ["bf16", "fp8_current", "fp8_delayed", "fp8_block"])
def test_the_peak_falls(recipe: str, lengths: dict[str, int]) -> None:
    several, one = (plan_of(f"grouped_mlp__{recipe}{word}") for word in ("", f"__{ONE}"))
    assert held(several) == held(one)
    assert backward_peak(several, lengths) < 0.97 * backward_peak(one, lengths)


@pytest.mark.parametrize("arch", ["cpu", "sm_90a"])
@pytest.mark.parametrize(
    "cell",
    [
        "grouped_mlp__nvfp4",
        "grouped_mlp__mxfp8__add_to_main_grad",
        "grouped_mlp__fp8_delayed__held_weights__debug",
        "grouped_mlp__fp8_block__cached_weights",
        "mlp_swiglu__bf16",
    ],
)
def test_plans_keep_their_rules(cell: str, arch: str) -> None:
    plan = plan_of(cell, arch)
    verify_plan(plan)
    assert parse(text(plan)) == plan
    for program in ops(plan):
        crossing = {each.buffer for each in (*program.arguments, *program.results)}
        given = {*held(plan)}
        scales = {n for n in crossing - given if plan.buffer(n).dtype is DType.E8M0}
        assert not scales or not any(each.mutated for each in ops(plan))


def test_a_function_empties_what_it_is_handed() -> None:
    (each,) = direction_texts(plan_of("grouped_mlp__bf16"))
    assert each.parameters[:2] == ("dy: Tensor", "left: list")
    dropped = [line.strip() for line in each.body if line.strip().startswith("del ")]
    assert dropped == ["del probs, h, fc2_weight", "del x, fc1_weight, dh"]
    assert "left.clear()" in each.body


# ---- the order inside an op


def test_gradients_of_rows_never_lie_beside_gathered_rows() -> None:
    """Of T K H elements, both: the one is gone where the other is made."""
    *_, gradients = ops(plan_of("moe_layer__bf16", "sm_80"))
    (gathered,) = (i for i, s in enumerate(gradients.steps) if s.primitive == "gather_rows")
    (product,) = (i for i, s in enumerate(gradients.steps) if s.out == "drows")
    added = next(i for i, s in enumerate(gradients.steps) if "drows" in s.reads)
    assert product < added < gathered


def test_what_is_made_again_is_made_before_a_cut() -> None:
    """The activation reads h, which goes with the op that has the gradient of it."""
    first, *others = ops(plan_of("moe_layer__fp8_current"))
    of_h = [step.primitive for step in first.steps if "h" in step.reads]
    assert of_h == ["pointwise_grad", "pointwise"]
    assert all("h" not in step.reads for call in others for step in call.steps)


CELLS = ("moe_layer__bf16", "moe_layer__nvfp4", "routed_moe_layer__bf16", "norm_mlp_swiglu__bf16")


@pytest.mark.parametrize("cell", CELLS)
def test_no_order_of_an_op_needs_less(cell: str) -> None:
    """By trying all that are allowed, at the sizes that it was chosen for."""
    plan = plan_of(cell)
    calls = [Stretch(each.steps, frozenset(r.buffer for r in each.results)) for each in ops(plan)]
    sizes = [counted(plan, each) for each in typical_sizes(plan)]
    tried = 0
    for call in calls:
        own = [needed_inside(call, size) for size in sizes]
        for steps in allowed_orders(call.steps):
            peaks = [needed_inside(Stretch(steps, call.results), size) for size in sizes]
            share = sum(peak / now for peak, now in zip(peaks, own, strict=True)) / len(sizes)
            assert share > 1 - WORTH - 1 / 32, [each.primitive for each in steps]
            tried += 1
    assert tried > len(calls)


def counted(plan: ModulePlan, lengths: Mapping[str, int]) -> dict[str, int]:
    """Bytes, of what few layers make that part which counts."""
    optional = {need(p.buffer) for p in plan.parameters if plan.buffer(p.buffer).optional}
    steps = (step for op in ops(plan) for step in op.steps if step.when)
    rare = {name for step in steps if optional.issuperset(step.when) for name in step.writes}
    rare -= {result.buffer for op in ops(plan) for result in op.results}
    sizes = bytes_of({b.name: b for b in plan.buffers}, lengths)
    return {name: size // RARITY if name in rare else size for name, size in sizes.items()}


def allowed_orders(steps: tuple[Step, ...], most: int = 3000) -> Iterator[tuple[Step, ...]]:
    """Orders in which every step still reads what it read: all, or so many of them."""

    def orders(left: tuple[Step, ...]) -> Iterator[tuple[Step, ...]]:
        if not left:
            yield ()
        for index, each in enumerate(left):
            touched = {*each.reads, *each.writes, *each.mutates}
            earlier = left[:index]
            if any(touched & {*e.writes, *e.mutates} for e in earlier):
                continue
            if any({*each.writes, *each.mutates} & {*e.reads} for e in earlier):
                continue
            yield from ((each, *rest) for rest in orders((*left[:index], *left[index + 1 :])))

    yield from islice(orders(steps), most)


# ---- bytes


def step(reads: str, writes: str) -> Step:
    inputs = tuple(Operand(f"in{i}", name) for i, name in enumerate(reads))
    outputs = tuple(Operand(f"out{i}", name) for i, name in enumerate(writes))
    return Step("toy", None, "", inputs, outputs)


def test_the_worst_moment_of_one_op_and_of_two() -> None:
    """s is saved, t lives inside, in part where the result q will be; r is the other result."""
    size = {"s": 100, "t": 30, "r": 7, "q": 20}
    steps = [step("s", "t"), step("t", "r"), step("r", "q")]
    leaving, outside = frozenset("rq"), frozenset("s")
    assert stretches(steps, (), leaving, outside) == (Stretch(tuple(steps), leaving),)
    first, second = stretches(steps, (1,), leaving, outside)
    assert (first.results, second.results) == (frozenset("t"), leaving)
    peaks = Peaks.of(steps, outside, leaving, size)
    assert peaks.of_calls(()) == 100 + 27 + 30 - 20
    assert peaks.of_calls((1,)) == 100 + 30
    assert peaks.of_calls((1, 2)) == peaks.of_calls((1,))
    assert needed_inside(second, size) == 20 + 7


def test_what_is_held_is_told_for_each_token_and_parameter() -> None:
    plain, holding = (
        plan_of("grouped_mlp__fp8_block"),
        plan_of("grouped_mlp__fp8_block__held_weights"),
    )
    for each in (plain, holding):
        assert for_each_token(each, held(each)) == "161 F / 32 + 33 H / 32"
    assert for_each_token(plan_of("grouped_mlp__bf16"), ["h", "a"]) == "6 F"
    assert for_each_parameter(plain) == 0
    assert for_each_parameter(holding) == pytest.approx(1, rel=1e-3)
    lines = "\n".join(explain(holding))
    told = ", 161 F / 32 + 33 H / 32 of the forward's, 1 for each parameter of a GEMM"
    assert told in " ".join(lines.split())
    assert "peak of the backward, with all gradients: " in lines
