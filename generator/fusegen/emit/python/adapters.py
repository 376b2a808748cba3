"""Context of a bundle's list of cells that take adapters: linear layers, and experts of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ...ir.plan import ModulePlan
from ...ir.step import AttributeRef, Step
from ...steps import is_gemm
from ..text.escape import docstring
from .experts import expert_chain
from .words import pieces

_FEATURES = ("in_features", "out_features")
"""Keywords of sizes, by which adapters know theirs."""


@dataclass(frozen=True, slots=True)
class LinearText:
    """A cell that is one GEMM of x and a weight, by groups or not.

    Attributes:
        cell: its name.
        function, class_name: what it is called by.
        grouped: whether rows are of groups.
        held_quantized: whether the weight is there as quantised copies alone.
    """

    cell: str
    function: str
    class_name: str
    grouped: bool
    held_quantized: bool


@dataclass(frozen=True, slots=True)
class FusedText:
    """A cell of experts, and the cells that are its parts.

    Attributes:
        cell: its name.
        parts: paths of a linear layer, the activation and the other layer.
        linear: the cell of either layer by itself; empty where the bundle has none.
        activation: likewise, of the activation.
        activation_class: of its module.
        scalars: keywords of the activation, and attributes of the experts with their values.
        recipe: of the linear cell.
        formula: of the activation, for people, cut into pieces.
    """

    cell: str
    parts: tuple[str, str, str]
    linear: str
    activation: str
    activation_class: str
    scalars: tuple[tuple[str, str], ...]
    recipe: str
    formula: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AdaptersContext:
    """Everything ``integrations/_adapters.py`` states.

    Attributes:
        linears: cells whose module gets adapters.
        fused: cells that have to run as their parts for it.
        products: the cell that multiplies by adapters of groups, exact; empty where there is none.
        example: a cell for the README.
    """

    linears: tuple[LinearText, ...]
    fused: tuple[FusedText, ...]
    products: str
    example: str


def adapters_context(plans: Iterable[ModulePlan]) -> AdaptersContext | None:
    """What the file states; None where no cell is a linear layer."""
    plans = tuple(plans)
    linears = tuple(_linear(plan) for plan in plans if _is_linear(plan))
    if not linears:
        return None
    exact = {plan.cell for plan in plans if not plan.quantizations and not plan.options}
    products = next((each.cell for each in linears if each.grouped and each.cell in exact), "")
    fused = tuple(text for plan in plans if (text := _fused(plan, plans)))
    return AdaptersContext(linears, fused, products, linears[0].cell)


def _is_linear(plan: ModulePlan) -> bool:
    """Whether its interface and its chain are those of one linear layer."""
    if len(plan.exact) != 1 or not is_gemm(plan.exact[0]) or plan.process_groups:
        return False
    if _has_many_weights(plan):
        return False
    gemm = plan.exact[0]
    operands = (gemm.input("a"), gemm.input("b"), plan.groups, gemm.input("add"))
    keywords = tuple(dim.keyword for dim in plan.dims if dim.constructor)
    return (
        plan.arguments == tuple(filter(None, operands))
        and plan.outputs == plan.exact_outputs == (gemm.out,)
        and keywords[-2:] == _FEATURES
        and len(keywords) == (3 if plan.groups else 2)
    )


def _has_many_weights(plan: ModulePlan) -> bool:
    """Whether a layer has a parameter of each group, so that there is no weight to merge into."""
    return any(parameter.per_group for parameter in plan.parameters)


def _linear(plan: ModulePlan) -> LinearText:
    return LinearText(
        cell=plan.cell,
        function=plan.module,
        class_name=plan.class_name,
        grouped=plan.groups is not None,
        held_quantized=bool(plan.quantized),
    )


def _fused(plan: ModulePlan, others: tuple[ModulePlan, ...]) -> FusedText | None:
    """Experts whose last bias is added as it is, as a linear layer adds it."""
    chain = expert_chain(plan)
    if chain is None or chain[2].input("add_scales") is not None or _has_many_weights(plan):
        return None
    first, act, last = chain
    assert act.pointwise is not None, act
    linear = next(_linears_of(plan, others), None)
    activation, scalars = next(_activations_of(act, others), (None, ()))
    return FusedText(
        cell=plan.cell,
        parts=(first.item, act.item, last.item),
        linear=linear.cell if linear else "",
        activation=activation.cell if activation else "",
        activation_class=activation.class_name if activation else "",
        scalars=scalars,
        recipe=plan.recipe,
        formula=pieces(docstring(act.pointwise.formula), " ", 72),
    )


def _linears_of(plan: ModulePlan, others: tuple[ModulePlan, ...]) -> Iterator[ModulePlan]:
    """Plain cells of one grouped GEMM, of the same recipe."""
    for each in others:
        if each.recipe == plan.recipe and each.groups and not each.options and _is_linear(each):
            yield each


def _activations_of(
    act: Step, others: tuple[ModulePlan, ...]
) -> Iterator[tuple[ModulePlan, tuple[tuple[str, str], ...]]]:
    """Cells that compute a step by itself, with their scalars' keywords and what they are there."""
    given = dict(act.attributes)
    for plan in others:
        own = plan.exact[0] if len(plan.exact) == 1 else None
        if own is None or own.pointwise is None or plan.options or plan.quantizations:
            continue
        assert act.pointwise is not None, act
        if own.pointwise.kernel != act.pointwise.kernel:
            continue
        pairs = [(value, given[symbol]) for symbol, value in own.attributes]
        references = tuple(
            (mine.name, theirs.name)
            for mine, theirs in pairs
            if isinstance(mine, AttributeRef) and isinstance(theirs, AttributeRef)
        )
        if len(references) + sum(mine == theirs for mine, theirs in pairs) >= len(pairs):
            yield plan, references
