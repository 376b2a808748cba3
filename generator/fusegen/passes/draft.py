"""What the passes hand to each other: a module's programs before they are complete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..ir.plan import Attribute, Buffer, Parameter, Reduction, Rewriting, State, Step
from ..ir.shapes import Expr
from ..spec.op import OpSpec


class NotPossible(Exception):
    """This cell cannot be made; the message is the reason people read."""


@dataclass(frozen=True, slots=True)
class Instance:
    """An op within a module.

    Attributes:
        item: its prefix; empty for a module of one op.
        op: its spec.
        tensors: the op's tensor names -> the module's buffers.
        dims: the op's symbols -> expressions in the module's symbols.
        attributes: the op's scalars -> the module's.
    """

    item: str
    op: OpSpec
    tensors: Mapping[str, str]
    dims: Mapping[str, Expr]
    attributes: Mapping[str, str]

    @property
    def label(self) -> str:
        """How people see it: its prefix, or the op's name."""
        return self.item or self.op.name


@dataclass(frozen=True, slots=True)
class Draft:
    """A module on its way to a plan.

    Attributes:
        instances: ops in order.
        buffers: by name, in order of first use.
        inputs, outputs: buffers of the module.
        constants: inputs without a gradient.
        emulated: why products of quantised copies read them decoded; empty where none does.
        parameters: of all ops in order.
        attributes: scalar keywords.
        forward, backward: steps.
        refresh: steps that quantise weights which the module keeps so.
        wgrad: steps that give gradients of weights after the backward.
        states: tensors that steps change in place.
        main_grads: parameters and the buffers of the caller's that their gradients go to.
        reductions: amaxes that leave the ops, to change state between them.
        gradients: (leaf, gradient) buffers that the backward can be asked for.
        rewrites: where rules applied, and why not elsewhere.
    """

    instances: tuple[Instance, ...]
    buffers: Mapping[str, Buffer]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    attributes: tuple[Attribute, ...]
    forward: tuple[Step, ...] = ()
    backward: tuple[Step, ...] = ()
    refresh: tuple[Step, ...] = ()
    wgrad: tuple[Step, ...] = ()
    states: tuple[State, ...] = ()
    main_grads: tuple[tuple[str, str], ...] = ()
    reductions: tuple[Reduction, ...] = ()
    gradients: tuple[tuple[str, str], ...] = ()
    constants: frozenset[str] = frozenset()
    emulated: str = ""
    rewrites: tuple[Rewriting, ...] = ()

    def with_buffers(self, new: Mapping[str, Buffer]) -> Draft:
        """The draft with more buffers."""
        return replace(self, buffers={**self.buffers, **new})

    @property
    def arguments(self) -> tuple[str, ...]:
        """The function's tensors: first input, required parameters, other inputs, optional ones."""
        parameters = [parameter.buffer for parameter in self.parameters]
        required = [name for name in parameters if not self.buffers[name].optional]
        optional = [name for name in parameters if self.buffers[name].optional]
        return (self.inputs[0], *required, *self.inputs[1:], *optional)
