"""Collectives between the ops of a module: each is started, and waited for when it is needed.

They are PyTorch's functional ones, which compilers trace and CUDA graphs capture.  No op has a
process group in its schema; groups are attributes of modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as functional


class Pending(NamedTuple):
    """A collective that was started.

    Attributes:
        value: what it gives, once it is waited for; None where no source was there.
        shapes: of its results; None for those whose source was absent.
    """

    value: Tensor | None
    shapes: tuple[torch.Size | None, ...]


def start_all_reduce(
    cell: str,
    keyword: str,
    group: ProcessGroup | None,
    sources: Sequence[Tensor | None],
    *,
    op: str,
) -> Pending:
    """Start to reduce tensors elementwise over ranks: one collective for all of them.

    Args:
        cell: for messages.
        keyword: of the group in the module.
        group: the ranks; None for all.
        sources: of one type; absent ones are the same on every rank.
        op: such as `max`.

    Raises:
        RuntimeError: there are no ranks; the message says how to form a group.
    """
    present = [source.flatten() for source in sources if source is not None]
    shapes = tuple(None if source is None else source.shape for source in sources)
    if not present:
        return Pending(None, shapes)
    name = _group_name(cell, keyword, group)
    return Pending(torch.ops._c10d_functional.all_reduce(torch.cat(present), op, name), shapes)


def wait(pending: Pending) -> tuple[Tensor | None, ...]:
    """The results of a collective, one for each source, in the order of the current stream."""
    if pending.value is None:
        return (None,) * len(pending.shapes)
    given = functional.wait_tensor(pending.value)
    sizes = [shape.numel() for shape in pending.shapes if shape is not None]
    parts = iter(given.split(sizes))
    return tuple(None if shape is None else next(parts).view(shape) for shape in pending.shapes)


def _group_name(cell: str, keyword: str, group: ProcessGroup | None) -> str:
    """What functional collectives know a group by."""
    if group is None and not torch.distributed.is_initialized():
        raise RuntimeError(
            f"{cell}: {keyword}: expected a process group, got none; call "
            f"torch.distributed.init_process_group() before the first step, or set {keyword}"
        )
    ranks: Any = torch.distributed.group.WORLD if group is None else group
    return ranks.group_name
