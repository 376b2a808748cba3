"""What ranks have asked of a group's collectives: copy engines, and waits that end.

A compiler traces neither copies nor what streams tell the host.  A direction of a module that has
them is one op to it, which runs as in eager mode, and is captured in graphs as there.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ProcessGroup, distributed_c10d

from . import _exchanges
from ._alike import compare_facts
from ._place import Place

_OVERLAPPING: set[str] = set()
"""Names of groups whose rows copy engines move."""
_WATCHED: set[str] = set()
"""Names of groups whose waits for NCCL end by a time limit."""


def overlap(
    group: ProcessGroup | None = None, *, on: bool = True, timeout: timedelta | None = None
) -> None:
    """Let copy engines move what modules gather and scatter, while products run.

    For modules of this bundle whose group it is, in eager mode or captured; linear layers and MLPs
    multiply the rows of one rank at a time, too, where tokens are gathered as they are multiplied
    and where sums are scattered, and GEMMs that gather rows of tokens multiply those of this rank's
    first.  To a compiler a direction of a module is one op then, which does all of that.
    Copies go through PyTorch's symmetric memory, so that the GPUs have to reach each other's; all
    ranks call this alike.

    Args:
        group: the ranks; None for all.
        on: whether they do from here on.
        timeout: how long the device waits for another rank from here on; None for as long as
            before, 10 minutes at first.  Then the process ends, by SIGABRT, with a message that
            names module, step and ranks: what its stream waits for will not come.

    Raises:
        RuntimeError: there are no ranks.
        ValueError: a timeout of no time; or ranks do not call it alike.
    """
    ranks = _limited("overlap", group, timeout)
    compare_facts("group", group, [{"module": "overlap", "on": str(on), "timeout": str(timeout)}])
    (_OVERLAPPING.add if on else _OVERLAPPING.discard)(ranks.group_name)


def watch(
    group: ProcessGroup | None = None, *, on: bool = True, timeout: timedelta | None = None
) -> None:
    """Let waits for what NCCL brings end by a time limit, in replayed graphs, too.

    For modules of this bundle whose group it is, in eager mode or captured from here on.  A stream
    tells the host that it waits, and that it goes on, which takes it some 10 us for each
    collective; once a wait takes too long the process ends, by SIGABRT, with a message that names
    module, step and rank.  NCCL's own watchdog names neither of the first two, and sees nothing of
    replayed graphs.  To a compiler a direction of a module is one op then, which is watched; what
    it traces around modules is left to NCCL's.  What copy engines bring (`overlap`) is
    watched in any case.

    Args:
        group: the ranks; None for all.
        on: whether they do from here on.
        timeout: how long; as of `overlap`, and for both.

    Raises:
        RuntimeError: there are no ranks.
        ValueError: a timeout of no time.
    """
    ranks = _limited("watch", group, timeout)
    if on and torch.cuda.is_available():
        _exchanges.waits_of(ranks)
    (_WATCHED.add if on else _WATCHED.discard)(ranks.group_name)


def _limited(name: str, group: ProcessGroup | None, timeout: timedelta | None) -> Any:
    """The ranks of a group, whose streams wait so long from here on."""
    if timeout is not None and timeout <= timedelta(0):
        raise ValueError(f"{name}: timeout: expected some time, got {timeout}")
    ranks = Place(name, "", "group", group).ranks
    if timeout is not None:
        _exchanges.limit(ranks, timeout)
    return ranks


def overlaps(place: Place, source: Tensor) -> bool:
    """Whether copy engines move this tensor."""
    return source.is_cuda and _asks(_OVERLAPPING, place, source)


def watches(place: Place, sent: Tensor) -> bool:
    """Whether streams tell the host that they wait for what NCCL brings."""
    return sent.is_cuda and _asks(_WATCHED, place, sent)


def _asks(groups: set[str], place: Place, tensor: Tensor) -> bool:
    """What is traced has neither: there `as_one_op` does, if it may."""
    if not groups or torch.compiler.is_compiling() or isinstance(tensor, FakeTensor):
        return False
    ranks = place.ranks
    return ranks.size() > 1 and ranks.group_name in groups


def as_one_op(first: Tensor, *groups: ProcessGroup | None) -> bool:
    """Whether a direction is one op here: a compiler traces it, and ranks asked for what it cannot.

    Args:
        first: a tensor that it takes.
        groups: that it communicates over; None for all ranks.
    """
    if not torch.compiler.is_compiling() or isinstance(first, FakeTensor):
        return False
    if not torch.distributed.is_initialized():
        return False
    every = [Place("", "", "", group).ranks for group in groups]
    names = [each.group_name for each in every if each.size() > 1]
    return any(name in _OVERLAPPING or name in _WATCHED for name in names)


def count(group: ProcessGroup | None) -> int:
    """How many ranks there are; 1 before there are any."""
    initialized = torch.distributed.is_initialized()
    return torch.distributed.get_world_size(group) if initialized else 1


def name_of(group: ProcessGroup | None) -> str:
    """What stands for a group in the schema of an op: ``2:name``, without a name for all ranks.

    How many ranks there are is in it because shapes of results depend on it: caches of compiled
    code would give that of another number.
    """
    return f"{count(group)}:{'' if group is None else group.group_name}"


def _group_of(text: str) -> ProcessGroup | None:
    name: Any = text.partition(":")[2]
    return distributed_c10d._resolve_process_group(name) if name else None


def of_names(
    run: Callable[..., Any], *, groups: int, left: slice | None = None, empty: bool = False
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What an op does, and what stands for it where compilers ask for shapes alone: a direction.

    Args:
        run: the direction's function, which takes process groups.
        groups: how many, its last arguments; the op takes their names (`name_of`).
        left: those of the op's arguments that the function takes as a list, and empties.
        empty: whether a result that nobody asked for is an empty tensor, not None: an op that
            changes its arguments has no optional results.
    """

    def op(*args: Any) -> Any:
        given: list[Any] = [*args[:-groups]]
        if left is not None:
            given[left] = [given[left]]
        results = run(*given, *map(_group_of, args[-groups:]))
        if not empty:
            return results
        every = results if isinstance(results, tuple) else (results,)
        there = tuple(args[0].new_empty(0) if each is None else each for each in every)
        return there if isinstance(results, tuple) else there[0]

    return op, op
