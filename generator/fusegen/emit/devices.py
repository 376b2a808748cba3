"""Fat bundles: the reference's files, whose calls on a GPU go to the bundle of its architecture.

One module then runs on several devices with one set of parameters and buffers, so whatever its
class and its functions state has to be the same on all architectures.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from ..ir.plan import ModulePlan, Unsupported
from ..passes.pipeline import Plan
from ..spec.arch import ArchSpec
from .fileset import FileSet
from .python.cell import cell_context
from .python.choice import ChoiceText, choice_text
from .python.conversions import quantize_context
from .python.states import StateText
from .text.escape import markdown

_DIGEST = re.compile(r'^DIGEST = "([0-9a-f]{64})"$', re.MULTILINE)

_OF_ONE_ARCH = frozenset(
    [
        "arch",
        "quantized_input",
        "quantized_output",
        "status",
        "reason",
        "description",
        "choice",
        "autograd",
        "programs",
        "directions",
        "forward",
        "backward",
        "uses_math",
    ]
)
"""What a cell states of how its results come about, which each architecture has its own of."""


@dataclass(frozen=True, slots=True)
class Inner:
    """A bundle in a fat one.

    Attributes:
        arch: that it is for.
        plan: of its cells.
        digests: of those that have ops, by name.
        inputs: specs and templates that it is made from.
    """

    arch: ArchSpec
    plan: Plan
    digests: Mapping[str, str]
    inputs: frozenset[str]

    @classmethod
    def of(cls, arch: ArchSpec, plan: Plan, files: FileSet) -> Inner:
        """From its rendered files, which state the digests."""
        found = {
            each.cell: match[1]
            for each in plan.modules
            if (match := _DIGEST.search(files[f"{each.cell}.py"].text))
        }
        return cls(arch, plan, found, files.inputs)

    def reason_for(self, cell: str) -> str | None:
        """Why it does not have a cell; None where it does."""
        return next((each.reason for each in self.plan.unsupported if each.cell == cell), None)


@dataclass(frozen=True, slots=True)
class ArchText:
    """An architecture of a fat bundle: on which GPUs its code runs."""

    name: str
    summary: str
    major: int
    minor: int
    reach: str


@dataclass(frozen=True, slots=True)
class DevicesText:
    """What the files that speak of a whole fat bundle say of those in it.

    Attributes:
        names: of all that its cells run on.
        archs: of GPUs; of those that run on one, the first is its own.
        statuses: of every cell on each of them, as rows of a table with its head.
    """

    names: str
    archs: tuple[ArchText, ...]
    statuses: tuple[tuple[str, ...], ...]


def devices_text(plans: Sequence[ModulePlan], inner: Sequence[Inner]) -> DevicesText | None:
    """Of the bundles in one; None where it is not a fat one."""
    if not inner:
        return None
    latest = sorted(inner, key=lambda each: (each.arch.capability, len(each.arch.name)))[::-1]
    head = ("module", *(each.arch.name for each in latest))
    rows = ((f"`{p.cell}`", *(_status(p.cell, each) for each in latest)) for p in plans)
    return DevicesText(
        names=", ".join(("cpu", *(each.arch.name for each in inner))),
        archs=tuple(_arch_text(each.arch) for each in latest),
        statuses=(head, ("---",) * len(head), *rows),
    )


def _arch_text(arch: ArchSpec) -> ArchText:
    assert arch.capability is not None, "bundles in a fat one have kernels"
    return ArchText(arch.name, markdown(arch.summary), *arch.capability, arch.reach.value)


def _status(cell: str, inner: Inner) -> str:
    found = (each.status.value for each in inner.plan.modules if each.cell == cell)
    return next(found, "unsupported")


def choice_of(cell: str, inner: Sequence[Inner]) -> ChoiceText | None:
    """Where the calls of a cell may go; None where there is nothing to choose."""
    if not inner:
        return None
    lines = []
    for each in inner:
        status, reason = _status(cell, each), each.reason_for(cell)
        own = next((plan.reason for plan in each.plan.modules if plan.cell == cell), reason)
        lines.append(f"{each.arch.name}: {status}, {own}")
    return choice_text(
        lines,
        [(each.arch.name, each.digests[cell]) for each in inner if cell in each.digests],
        [(each.arch.name, why) for each in inner if (why := each.reason_for(cell)) is not None],
    )


def one_interface(plans: Sequence[Plan]) -> list[Plan]:
    """The plans of a fat bundle, where each cell is one module on all architectures that have it.

    Args:
        plans: of the bundles in it, then its own.

    Returns:
        The same; an architecture whose cell is another module than the reference's lacks it.
    """
    *inner, own = plans
    interfaces = {plan.cell: _interface(plan) for plan in own.modules}
    return [*(_fitting(plan, interfaces) for plan in inner), own]


def _fitting(plan: Plan, interfaces: Mapping[str, Mapping[str, object]]) -> Plan:
    """A plan with those of its cells that are the modules of these interfaces."""
    present = [each for each in plan.modules if each.cell in interfaces]
    reasons = {each.cell: _difference(each, interfaces[each.cell]) for each in present}
    refused = (
        Unsupported(each.cell, each.module, each.recipe, each.arch, why)
        for each in present
        if (why := reasons[each.cell])
    )
    return Plan(
        tuple(each for each in present if not reasons[each.cell]), (*plan.unsupported, *refused)
    )


def _difference(plan: ModulePlan, interface: Mapping[str, object]) -> str:
    """Why a plan is not of the module with this interface; empty where it is."""
    own = _interface(plan)
    name = next((name for name in own if own[name] != interface[name]), None)
    if name is None:
        return ""
    return (
        f"{_words(interface[name], own[name], name)} is not that of the reference, and both would "
        f"be of one module; make it with --arch {plan.arch}"
    )


def _interface(plan: ModulePlan) -> dict[str, object]:
    """All that the class and the functions of a cell state, whatever runs them."""
    context = quantize_context(plan, ()) if plan.conversions else cell_context(plan, ())
    names = [field.name for field in fields(context) if field.name not in _OF_ONE_ARCH]
    found = {name: getattr(context, name) for name in names}
    found["layouts"] = tuple(conversion.layout for conversion in plan.conversions)
    if plan.refresh:  # copies of weights are buffers, which have no tokens
        found["layouts"] = replace(plan.layout, token_alignment=1, token_major=False)
    return found


_FIELDS = {"wgrad": "room for gradients that wait", "layouts": "layout of copies"}
"""What of a module a field stands for, where its name does not say so."""


def _words(here: object, there: object, name: str) -> str:
    """What differs: a buffer, if there is one to name."""
    if isinstance(here, tuple) and isinstance(there, tuple):
        states = [each for each in there if each not in here and isinstance(each, StateText)]
        if states:
            state = states[0]
            return f"its buffer {state.path} [{state.extents}] {state.dtype}"
    return f"its {_FIELDS.get(name, name.replace('_', ' '))}"
