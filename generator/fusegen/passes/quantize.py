"""Pass 5, quantise: put a product's operands into the recipe's formats.

A role that the recipe does not name stays in the module's own type: an explicit ``quantize`` step of
such a role is the identity, and disappears by renaming its result to its operand.
"""

from __future__ import annotations

from collections.abc import Callable
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
    return _drop_identities(draft)


def _drop_identities(draft: Draft) -> Draft:
    """Copy propagation in both programs: an identity's result and its operand become one buffer.

    A result of the module keeps its name where a step writes the operand; otherwise the readers of
    the identity's result read its operand.
    """
    steps = (*draft.forward, *draft.backward)
    written = {name for step in steps if not _is_identity(step) for name in step.writes}
    ends = {*draft.outputs, *(name for _, name in draft.gradients)}
    renamed: dict[str, str] = {}

    def final(name: str) -> str:
        while name in renamed:
            name = renamed[name]
        return name

    for step in filter(_is_identity, steps):
        operand, result = final(step.reads[0]), final(step.out)
        if result in ends and operand in written and operand not in ends:
            renamed[operand] = result
            written.add(result)
        else:
            renamed[result] = operand

    def kept(program: tuple[Step, ...]) -> tuple[Step, ...]:
        return tuple(_rename(step, final) for step in program if not _is_identity(step))

    outputs = tuple(final(name) for name in draft.outputs)
    gradients = tuple((leaf, final(name)) for leaf, name in draft.gradients)
    return replace(
        draft,
        forward=kept(draft.forward),
        backward=kept(draft.backward),
        outputs=outputs,
        gradients=gradients,
    )


def _is_identity(step: Step) -> bool:
    return step.primitive is Primitive.QUANTIZE


def _rename(step: Step, final: Callable[[str], str]) -> Step:
    def renamed(operands: tuple[Operand, ...]) -> tuple[Operand, ...]:
        return tuple(Operand(operand.slot, final(operand.buffer)) for operand in operands)

    math = step.pointwise
    if math:
        math = replace(
            math,
            operands=tuple(replace(each, buffer=final(each.buffer)) for each in math.operands),
            results=tuple(replace(each, buffer=final(each.buffer)) for each in math.results),
        )
    return replace(
        step, inputs=renamed(step.inputs), outputs=renamed(step.outputs), pointwise=math
    )
