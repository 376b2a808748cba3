"""Pass 5, quantise: put a product's operands into the recipe's formats.

A role that the recipe does not name stays in the module's own type: an explicit ``quantize`` step of
such a role is the identity, and disappears by renaming its result to its operand.
"""

from __future__ import annotations

from dataclasses import replace

from ..model.plan import Operand, Step
from ..model.primitives import Primitive
from ..model.specs import RecipeSpec
from .draft import Draft, NotPossible


def quantize(draft: Draft, recipe: RecipeSpec) -> Draft:
    """Insert quantisation where the recipe asks for it.

    Raises:
        NotPossible: the recipe quantises a role; no kernel family writes quantised operands.
    """
    if recipe.roles:
        roles = ", ".join(role.value for role in recipe.roles)
        raise NotPossible(f"recipe {recipe.name!r} quantises {roles}; no kernel family does")
    forward, outputs = _drop_identities(draft.forward, draft.outputs)
    results = tuple(gradient for _, gradient in draft.gradients)
    backward, renamed = _drop_identities(draft.backward, results)
    leaves = (leaf for leaf, _ in draft.gradients)
    return replace(
        draft,
        forward=forward,
        outputs=outputs,
        backward=backward,
        gradients=tuple(zip(leaves, renamed, strict=True)),
    )


def _drop_identities(
    steps: tuple[Step, ...], results: tuple[str, ...]
) -> tuple[tuple[Step, ...], tuple[str, ...]]:
    """Copy propagation: readers of an identity's result read its operand."""
    alias: dict[str, str] = {}
    kept = []
    for step in steps:
        inputs = tuple(Operand(o.slot, alias.get(o.buffer, o.buffer)) for o in step.inputs)
        if step.primitive is Primitive.QUANTIZE:
            alias[step.out] = inputs[0].buffer
        else:
            kept.append(replace(step, inputs=inputs))
    return tuple(kept), tuple(alias.get(name, name) for name in results)
