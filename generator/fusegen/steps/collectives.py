"""Kinds of collectives: what ranks exchange between the ops of a direction."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class CollectiveDef:
    """A kind of collective.

    Its results have the dimensions of its operands; where rows are gathered or scattered, there are
    others in those, whose number is called the same.

    Attributes:
        name: in plans; `start_<name>` of the bundle's `_collectives.py` starts it.
        suffix: of what it gives for the ops, behind the name of what their caller gives.
        attributes: names of its scalars, and the values that each may have; None for any number.
        moves_rows: whether there are others in its results.
        brings_rows: whether these are as many of each rank, in the order of ranks.
        sizes: names of a rank's sizes of dimensions.
    """

    name: str
    suffix: str
    attributes: tuple[tuple[str, tuple[str, ...] | None], ...] = ()
    moves_rows: bool = False
    brings_rows: bool = False
    sizes: tuple[str, ...] = ()


ALL_REDUCE = CollectiveDef("all_reduce", "sum", (("op", ("max", "sum")),))
"""Every rank has the sum, or the largest."""

ALL_GATHER = CollectiveDef("all_gather", "all", moves_rows=True, brings_rows=True)
"""Every rank has the rows of all, in the order of ranks."""

GATHER_NUMBERS = CollectiveDef("gather_numbers", "own", moves_rows=True, sizes=("own",))
"""Every rank has the numbers of all, counted from its own first, where each has ``own`` of what is
numbered."""

GATHER_COPY = CollectiveDef("gather_copy", "all", (("dim", None), ("tail", None)))
"""Every rank has a copy, its codes or its scales, of the rows of all, which run along ``dim``; what
lies behind them there, ``tail`` elements, is there once."""

PLACEHOLDER = CollectiveDef("placeholder", "all", (("rows", None),), moves_rows=True)
"""Every rank has what stands for the rows of all, without memory; nothing is sent.  Of each rank's
there are a multiple of ``rows``."""

REDUCE_SCATTER = CollectiveDef("reduce_scatter", "own", moves_rows=True)
"""Every rank has its own rows of the sum."""

ALL_TO_ALL = CollectiveDef("all_to_all", "received", moves_rows=True, brings_rows=True)
"""Every rank has what each has for it, in the order of ranks; it is its own dual."""

ALL_TO_ALL_NUMBERS = CollectiveDef(
    "all_to_all_numbers", "received", moves_rows=True, sizes=("own",)
)
"""The same of numbers, each counted from this rank's first as those of `GATHER_NUMBERS` are."""

SHARE = CollectiveDef("share", "share")
"""Every rank has an equal share, so that the sum is what there was; nothing is sent."""

COLLECTIVES: tuple[CollectiveDef, ...] = (
    ALL_REDUCE,
    ALL_GATHER,
    GATHER_NUMBERS,
    GATHER_COPY,
    PLACEHOLDER,
    REDUCE_SCATTER,
    ALL_TO_ALL,
    ALL_TO_ALL_NUMBERS,
    SHARE,
)
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
