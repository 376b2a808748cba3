"""What a direction consists of besides ops: collectives, each a start and a wait.

A direction, such as the forward, is a tuple of segments.  An op is one of them, with a ``Program``
of its own; between ops lie collectives, which no op runs.  A collective that has been started gives
a *future*, and its wait gives the results; what stands between the two overlaps with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from .shapes import Expr


@dataclass(frozen=True, slots=True)
class Group:
    """A process group that a module is given.

    Attributes:
        name: keyword of the module and its function.
        summary: what its ranks do together, for people.
    """

    name: str
    summary: str


TENSOR_GROUP = Group("tensor_group", "ranks that have the parts of its weights")
"""The group of modules of whose weights each rank has a part."""

EXPERT_GROUP = Group("expert_group", "ranks that have experts of their own, and tokens")
"""The group of modules of whose experts each rank has some."""

OF_PARTS = (TENSOR_GROUP, EXPERT_GROUP)
"""Groups whose ranks have to have the same module."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """What ranks do with a tensor that enters or leaves a direction, around all of its ops.

    Attributes:
        kind: name of one in ``steps.collectives``.
        buffer: as the module's caller, or the other direction, has it.
        entering: whether it is done to what comes in; else to what goes out.
        group: the ranks.
        attributes, sizes: scalars, and a rank's sizes of dimensions, by the names that its kind has
            for them.
    """

    kind: str
    buffer: str
    entering: bool
    group: Group
    attributes: tuple[tuple[str, str], ...] = ()
    sizes: tuple[tuple[str, Expr], ...] = ()


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of a direction that is not cut into segments yet.

    Attributes:
        kind: name of one in ``steps.collectives``.
        direction: name of the program that it belongs to.
        operands: buffers that it reads, in the order in which their parts are sent.
        results: buffers that it gives, one for each operand.
        future: what stands for it between start and wait.
        group: the ranks.
        attributes, sizes: scalars, and a rank's sizes of dimensions, by the names that its kind has
            for them.
        outside: whether it gives an argument of the ops, or reads a result of theirs.
    """

    kind: str
    direction: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    future: str
    group: Group
    attributes: tuple[tuple[str, str], ...]
    sizes: tuple[tuple[str, Expr], ...] = ()
    outside: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """Starts a collective, without waiting for it.

    Attributes:
        kind: name of one in ``steps.collectives``.
        operands: buffers that it reads; one that is absent in a call is left out, on every rank.
        future: what it gives; its ``Wait`` alone reads it.
        group: the ranks.
        when: it runs if any of these flags is set; empty is always.
        attributes, sizes: scalars, and a rank's sizes of dimensions, by the names that its kind has
            for them.
        by_rows: arguments of the op behind it, or before it, which may take the rows of one rank
            while others' are on their way; empty where it needs all at once.
        ahead: whether this rank's rows take their place among all when it starts, as what waits
            for it begins with these.
    """

    kind: str
    operands: tuple[str, ...]
    future: str
    group: Group
    when: tuple[str, ...] = ()
    attributes: tuple[tuple[str, str], ...] = ()
    sizes: tuple[tuple[str, Expr], ...] = ()
    by_rows: tuple[str, ...] = ()
    ahead: bool = False

    @property
    def takes(self) -> tuple[str, ...]:
        """What it reads."""
        return self.operands

    @property
    def gives(self) -> tuple[str, ...]:
        """What it makes."""
        return (self.future,)


@dataclass(frozen=True, slots=True)
class Wait:
    """Waits for a collective, in the order of the caller's stream.

    Attributes:
        future: of a ``Start`` before it.
        results: what it gives, one buffer for each source, absent where that is.
        when: as of the start.
        by_rows: as of the start, where others read all rows, too.
    """

    future: str
    results: tuple[str, ...]
    when: tuple[str, ...] = ()
    by_rows: tuple[str, ...] = ()

    @property
    def takes(self) -> tuple[str, ...]:
        """What it reads."""
        return (self.future,)

    @property
    def gives(self) -> tuple[str, ...]:
        """What it makes."""
        return self.results
