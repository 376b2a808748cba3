"""A parameter for each group in the place of one for all: for optimisers and checkpoints.

Ops take one tensor as ever, so programs stay as they are; the class alone is another.
"""

from __future__ import annotations

from dataclasses import replace

from ..steps import is_gemm
from .draft import Draft, NotPossible


def part_by_group(draft: Draft) -> Draft:
    """Mark every parameter that a grouped GEMM has a part of for each group.

    Raises:
        NotPossible: there is none, or another parameter has the name that one of a group gets.
    """
    grouped = [step for step in draft.forward if is_gemm(step) and step.input("groups")]
    read = {step.input(slot) for step in grouped for slot in ("b", "add")}
    parameters = tuple(
        replace(parameter, per_group=parameter.buffer in read) for parameter in draft.parameters
    )
    if parameters == draft.parameters:
        raise NotPossible("no grouped GEMM reads a parameter of each group")
    for each in parameters:
        taken = (other.path for other in parameters if _is_of_a_group(other.path, each.path))
        if each.per_group and (path := next(taken, None)):
            raise NotPossible(
                f"a group's own part of {each.path!r} would be called {path!r}, as another"
                " parameter is; rename that one"
            )
    return replace(draft, parameters=parameters)


def _is_of_a_group(name: str, path: str) -> bool:
    return name.startswith(path) and name[len(path) :].isdecimal()
