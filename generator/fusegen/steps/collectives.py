"""Kinds of collectives: what ranks exchange between the ops of a direction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..ir.shapes import Shape


@dataclass(frozen=True, slots=True, eq=False)
class CollectiveDef:
    """A kind of collective.

    Attributes:
        name: in plans; `start_<name>` of the bundle's `_collectives.py` starts it.
        attributes: names of its scalars, and the values that each may have.
        infer: the shape of a result, of that of its operand.
    """

    name: str
    attributes: tuple[tuple[str, tuple[str, ...]], ...]
    infer: Callable[[Shape], Shape]


ALL_REDUCE = CollectiveDef("all_reduce", (("op", ("max",)),), lambda shape: shape)

COLLECTIVES: tuple[CollectiveDef, ...] = (ALL_REDUCE,)
"""Every kind of collective."""


def collective(name: str) -> CollectiveDef:
    """The kind of collective of a name.

    Raises:
        KeyError: there is none; the message lists what there is.
    """
    found = {each.name: each for each in COLLECTIVES}
    if name not in found:
        raise KeyError(f"no collective {name!r}; there are {', '.join(found)}")
    return found[name]
