"""What has to be the same on all ranks: modules, and, on request, the shape of what they send.

Ranks compare it where it costs no step anything: when a module is made, or before its first
collective.  Nothing here is traced by compilers, nor captured in graphs.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import _disable_current_modes

from ._place import Place

_CHECKED: set[str] = set()
"""Names of groups whose ranks compare what they send."""
_LATE: WeakKeyDictionary[nn.Module, list[tuple[str, dict[str, str]]]] = WeakKeyDictionary()
"""What has to be the same of modules that were made before there were ranks, by their keywords."""


def check(group: ProcessGroup | None = None, *, on: bool = True) -> None:
    """Let ranks compare what each is about to send, and refuse what differs, to find an error.

    For modules of this bundle whose group it is, in eager mode; compiled code and captured graphs
    go on as before.  Nothing else notices ranks with another number of tokens: a result has another
    size then, or what was in memory.  The host waits for all ranks before each collective.  All
    ranks call this alike.

    Args:
        group: the ranks; None for all.
        on: whether they do from here on.

    Raises:
        RuntimeError: there are no ranks.
    """
    (_CHECKED.add if on else _CHECKED.discard)(Place("check", "", "group", group).ranks.group_name)


def compare(module: nn.Module, cell: str, keyword: str, **facts: str) -> None:
    """Refuse a module that is not the same on all ranks, before any of them communicates.

    Before there are ranks nothing is compared: it is when the first module of that group sends
    something, in eager mode.  Nor is it where ranks are pretended (backend `fake`).

    Args:
        module: the module, which every rank of the group makes.
        cell: of it.
        keyword: attribute of it that is the group; None there for all ranks.
        facts: what has to be the same.

    Raises:
        ValueError: on all ranks, something is not; the message says what, and where.
    """
    if torch.distributed.is_initialized():
        compare_facts(keyword, getattr(module, keyword), [{"module": cell, **facts}])
    else:
        _LATE.setdefault(module, []).append((keyword, {"module": cell, **facts}))


def require_alike(place: Place, sources: tuple[Tensor | None, ...]) -> None:
    """Compare, before something is sent, what is still to be: modules that were made before there
    were ranks, and shapes and types of what is sent, where ranks `check` them.

    Args:
        place: where.
        sources: what is sent; None for what is absent.

    Raises:
        ValueError: as `compare`.
        RuntimeError: there are no ranks.
    """
    if torch.compiler.is_compiling() or not (_LATE or _CHECKED) or is_captured():
        return
    ranks = place.ranks
    _compare_late(place)
    if ranks.group_name in _CHECKED:
        own = [None if each is None else (*each.shape, str(each.dtype)) for each in sources]
        compare_facts(place.keyword, place.group, [{"module": place.cell, place.step: str(own)}])


def _compare_late(place: Place) -> None:
    """Modules of one group that were made before there were ranks."""
    late: list[dict[str, str]] = []
    for module, waiting in list(_LATE.items()):
        for each in list(waiting):
            keyword, facts = each
            if keyword == place.keyword and getattr(module, keyword) is place.group:
                late.append(facts)
                waiting.remove(each)
        if not waiting:
            del _LATE[module]
    if late:
        compare_facts(place.keyword, place.group, late)


def compare_facts(keyword: str, group: ProcessGroup | None, own: list[dict[str, str]]) -> None:
    """Refuse what is not the same on all ranks.

    Args:
        keyword: that the group has in messages.
        group: the ranks; None for all.
        own: facts of this rank, in an order that all have; "module" is in each.

    Raises:
        ValueError: as `compare`.
    """
    if torch.distributed.get_backend(group) == "fake":
        return
    every: list[Any] = [None] * torch.distributed.get_world_size(group)
    with _disable_current_modes():
        torch.distributed.all_gather_object(every, own, group)
    here = torch.distributed.get_rank(group)
    for rank, others in enumerate(every):
        for mine, other in zip_longest(own, others, fillvalue={"module": "no more of them"}):
            for key in dict.fromkeys((*mine, *other)):
                if mine.get(key) != other.get(key):
                    raise ValueError(
                        f"{own[0]['module']}: {keyword}: {key}: {mine.get(key)} on rank {here}, "
                        f"{other.get(key)} on rank {rank}; all ranks need the same"
                    )


def is_captured() -> bool:
    """Whether the current stream's work goes into a graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
