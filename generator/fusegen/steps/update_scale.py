"""The state of delayed scaling moves on by an amax that was found elsewhere."""

from __future__ import annotations

from ..ir.quantization import Role
from ..ir.step import AttributeValue, Step
from ..ir.words import AttributeType
from .definition import AttributeDef, Reference, StepDef, Trait
from .launch import Field, Launch, Origin

_ROLE = AttributeDef("role", AttributeType.STRING)

LAUNCH = Launch(
    "UpdateScaleArguments",
    "quantize/update_scale.h",
    (Field("state.amax", Origin.FLOAT_OPERAND, "amax"), Field("", Origin.DELAYED_STATE)),
    assigned=True,
)

UPDATE_SCALE = StepDef(
    "update_scale",
    results=(),
    attributes=(_ROLE,),
    traits=frozenset((Trait.MOVES_STATE,)),
    reference=Reference("quantized.delayed_update", frozenset(("amax", "amax_history", "scale"))),
    launch=lambda _: LAUNCH,
)


def role_attribute(role: Role) -> tuple[tuple[str, AttributeValue], ...]:
    """The attributes of a step that moves the scale of a role on."""
    return ((_ROLE.name, role.value),)


def role_of(step: Step) -> Role:
    """The role whose scale a step moves on."""
    return Role(dict(step.attributes)[_ROLE.name])
