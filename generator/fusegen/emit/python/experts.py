"""Context of a bundle's list of cells that can run experts of other libraries' models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ...ir.plan import ModulePlan
from ...ir.shapes import Const, Sym, mul, symbols
from ...ir.step import Access, AttributeRef, Pointwise, Step
from ...steps import is_gemm
from ...steps.collectives import ALL_TO_ALL
from ..reference.pointwise import function_name
from ..text.escape import docstring
from .states import StateText, called_states, state_texts
from .words import pieces


@dataclass(frozen=True, slots=True)
class ScalarText:
    """A scalar of an activation.

    Attributes:
        symbol: in the expression, also the argument of the reference's function.
        keyword: of the module's function; empty where it always has its default.
        default: Python source.
    """

    symbol: str
    keyword: str
    default: str


@dataclass(frozen=True, slots=True)
class ExpertsText:
    """A cell that experts of a model can run: ``fc2(act(fc1(x)) * probs)`` by groups.

    Attributes:
        cell: its name.
        function: what it is called by: x, both weights, sizes of groups, probs, both biases.
        class_name: of the module, which makes states.
        formula: of the activation, for people, cut into pieces.
        activation: its function in the cell's reference: rows of ``fc1``, probs, scalars.
        scalars: of the activation, in that order.
        gated: whether the activation reads two halves of its rows.
        biased: whether it takes biases.
        weighted_bias: whether the last bias is multiplied by probs.
        states: what the function takes besides, and the class keeps.
        groups: keyword of the constructor for the number of groups.
        sizes: the other keywords of sizes, which no state's shape depends on.
    """

    cell: str
    function: str
    class_name: str
    formula: tuple[str, ...]
    activation: str
    scalars: tuple[ScalarText, ...]
    gated: bool
    biased: bool
    weighted_bias: bool
    states: tuple[StateText, ...]
    groups: str
    sizes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ExpertsContext:
    """Everything ``integrations/_experts.py`` states.

    Attributes:
        example: a cell that keeps no state, or the first one.
        cells: those that experts can run.
    """

    example: str
    cells: tuple[ExpertsText, ...]


def experts_context(plans: Iterable[ModulePlan]) -> ExpertsContext | None:
    """What the file states; None where no cell is one of experts."""
    cells = tuple(text for plan in plans if (text := _experts(plan)))
    if not cells:
        return None
    return ExpertsContext(next((c.cell for c in cells if not c.states), cells[0].cell), cells)


def _experts(plan: ModulePlan) -> ExpertsText | None:
    """The cell, where its interface and its chain are those of experts."""
    steps = expert_chain(plan)
    if steps is None:
        return None
    first, act, last = steps
    math = act.pointwise
    assert math is not None, act
    groups = plan.group_axis
    keywords = {dim.symbol: dim.keyword for dim in plan.dims if dim.constructor}
    if not isinstance(groups, Sym) or not _sized_by(plan, groups):
        return None
    called = called_states(plan)
    return ExpertsText(
        cell=plan.cell,
        function=plan.module,
        class_name=plan.class_name,
        formula=pieces(docstring(math.formula), " ", 72),
        activation=function_name(act),
        scalars=tuple(_scalars(plan, act)),
        gated=_is_gated(plan, first, act),
        biased=first.input("add") is not None,
        weighted_bias=last.input("add_scales") is not None,
        states=tuple(each for each in state_texts(plan) if each.argument in called),
        groups=keywords[groups.name],
        sizes=tuple(word for symbol, word in keywords.items() if symbol != groups.name),
    )


def spreads_over_ranks(plan: ModulePlan) -> bool:
    """Whether a cell takes tokens and what a router chose for them, and has nothing but experts, so
    that ranks may have some of these each; by itself it exchanges slots, or nothing.
    """
    counts = next((b for b in plan.buffers if b.name == "counts"), None)
    own = {parameter.buffer for parameter in plan.parameters}
    stacks = [buffer.shape.dims[0] for buffer in plan.buffers if buffer.name in own]
    return (
        plan.inputs == ("x", "probs", "ids", "counts")
        and counts is not None
        and all(experts == counts.shape.dims[0] for experts in stacks)
        and (takes_slots(plan) or not {*plan.split} & counts.shape.symbols())
    )


def takes_slots(plan: ModulePlan) -> bool:
    """Whether tokens come in slots for each rank, which are exchanged all to all."""
    starts = (start for each in plan.directions for start in each.starts)
    return any(start.kind == ALL_TO_ALL.name for start in starts)


def expert_chain(plan: ModulePlan) -> tuple[Step, Step, Step] | None:
    """Two grouped GEMMs and the activation between them, which the rows' scales are part of.

    None where the chain is another one, or a call takes what a caller would have to bring.
    """
    if len(plan.exact) != 3 or len(plan.outputs) != 1 or not _needs_nothing_else(plan):
        return None
    first, act, last = plan.exact
    math = act.pointwise
    if math is None or math.interleaved or not all(_is_grouped(g) for g in (first, last)):
        return None
    joined = (first.out, act.out) == (act.inputs[0].buffer, last.input("a"))
    weights = (first.input("b"), last.input("b"))
    biases = tuple(name for g in (first, last) if (name := g.input("add")))
    arguments = (first.input("a"), *weights, plan.groups, _row_scales(math), *biases)
    fits = joined and plan.arguments == arguments and plan.exact_outputs == (last.out,)
    return (first, act, last) if fits and len(biases) in (0, 2) else None


def _is_grouped(step: Step) -> bool:
    return is_gemm(step) and step.input("groups") is not None


def _row_scales(math: Pointwise) -> str | None:
    """The tensor of scales of rows, where there is one."""
    found = [each.buffer for each in math.operands if each.access is Access.ROW]
    return found[0] if len(found) == 1 else None


def _needs_nothing_else(plan: ModulePlan) -> bool:
    """Whether parameters are plain ones and a call takes no buffer or group of the caller's."""
    held = plan.main_grads or plan.wgrad or plan.caches or plan.quantized
    return not (held or plan.process_groups or plan.drawn)


def _sized_by(plan: ModulePlan, groups: Sym) -> bool:
    """Whether shapes of states depend on nothing but the number of groups."""
    dims = (dim for name in plan.kept for dim in plan.buffer(name).shape.dims)
    return all(symbols(dim) <= {groups.name} for dim in dims)


def _is_gated(plan: ModulePlan, first: Step, act: Step) -> bool:
    rows, width = (plan.buffer(name).shape.flat[-1] for name in (first.out, act.out))
    return rows == mul(Const(2), width)


def _scalars(plan: ModulePlan, act: Step) -> Iterator[ScalarText]:
    assert act.pointwise is not None, act
    given, defaults = dict(act.attributes), {a.name: a.default for a in plan.attributes}
    for symbol in act.pointwise.attributes:
        value = given[symbol]
        if isinstance(value, AttributeRef):
            yield ScalarText(symbol, value.name, repr(defaults[value.name]))
        else:
            yield ScalarText(symbol, "", repr(value))
