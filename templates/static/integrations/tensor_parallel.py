"""State dicts of whole layers as those of a rank that has a part of one, and back; overlap.

    from <this package>.integrations import tensor_parallel

    prefix = "model.layers.0.mlp."
    layer.load_state_dict(tensor_parallel.read(layer, state, prefix))
    state |= tensor_parallel.write(layer, prefix)

    torch.distributed.checkpoint.save(tensor_parallel.sharded(layer, prefix=prefix), ...)

A whole layer is the module without an option for tensor or expert parallelism, in this bundle's own
layout; `checkpoints` gives that of other libraries'.  Values are only moved.

A rank's own state dict has the whole layer's keys and a part of its values: distributed checkpoints
would take those of one rank for all.  `sharded` says what part each is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._alike import check
from .._asked import overlap, watch
from ._layouts import Layout, layout_of
from ._layouts import sharded as _sharded

__all__ = ["check", "overlap", "read", "sharded", "watch", "write"]


def read(layer: nn.Module, state: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """What `layer.load_state_dict` takes on this rank, from the state dict of a whole layer.

    What a recipe keeps between steps is the layer's own: it goes on, or starts anew in a new layer.

    Args:
        layer: a tensor or expert parallel module of this bundle; its parameters may be on ``meta``.
        state: has every parameter of the whole layer under the prefix.
        prefix: of the keys, with its last dot.

    Raises:
        TypeError: the layer is no such module of this bundle.
        RuntimeError: a key is missing, or ranks cannot have equal parts; the message says which.
    """
    layout = _parts_of(layer)
    found = layer.state_dict()
    for path, parameter in layer.named_parameters():
        lies = layout.lies[path]
        key = prefix + lies.paths[layout.rank]
        if key not in state:
            raise RuntimeError(f"tensor_parallel: {key}: missing in the state dict")
        found[path] = state[key]
        if lies.axis is not None:
            found[path] = _part(key, state[key], lies.axis, lies.halves, layout)
        if found[path].shape != parameter.shape:
            raise RuntimeError(
                f"tensor_parallel: {key}: expected {tuple(parameter.shape)} for each of "
                f"{layout.ranks.size()} ranks, got {tuple(found[path].shape)} of "
                f"{tuple(state[key].shape)}"
            )
    return found


def write(layer: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """The parameters of the whole layer, on every rank.  All ranks call it alike.

    Args:
        layer: as for `read`.
        prefix: of the keys, with its last dot.

    Raises:
        TypeError: as `read`.
    """
    layout = _parts_of(layer)
    state = {}
    for path, parameter in layer.named_parameters():
        lies, value = layout.lies[path], parameter.detach()
        if lies.axis is not None:
            joined = torch.cat(
                [*_halves(_every(value, layout.ranks), lies.axis, lies.halves)], lies.axis
            )
            state[prefix + path] = joined
        elif len({*lies.paths}) > 1:
            every = zip(lies.paths, _every(value, layout.ranks), strict=True)
            state |= {prefix + of_rank: each for of_rank, each in every}
        else:
            state[prefix + path] = value
    return state


def sharded(
    layer: nn.Module, tensors: Mapping[str, Tensor] | None = None, prefix: str = ""
) -> dict[str, Tensor]:
    """Parameters as `torch.distributed.checkpoint` has to know them, in the memory that they have.

    Saved, they are those of the whole layer, once each; loaded, they are in the layer, whatever
    number of ranks saved them, with this option or another, or whole.  Those that ranks have parts
    of are DTensors over the group.  Gate and up are a dimension of their own, [..., 2, F, ...].

    Args:
        layer: as for `read`, or a whole one; what wraps it must not have sharded its parameters.
        tensors: like its parameters, by their paths, such as the moments of an optimiser; None for
            the parameters.
        prefix: of the keys, with its last dot.

    Raises:
        TypeError: as `read`; or something has sharded them already, such as FSDP.
    """
    if tensors is None:
        tensors = dict(layer.named_parameters())
    return _sharded(layout_of(layer), tensors, prefix)


def _parts_of(layer: nn.Module) -> Layout:
    layout = layout_of(layer)
    if layout.ranks is None:
        raise TypeError(
            f"tensor_parallel: {type(layer).__name__} of {type(layer).__module__}: expected a "
            "module of this bundle of whose weights each rank has a part"
        )
    return layout


def _part(key: str, value: Tensor, axis: int, halves: int, layout: Layout) -> Tensor:
    """This rank's part of each half."""
    count = layout.ranks.size()
    if value.dim() <= axis or value.shape[axis] % (halves * count):
        raise RuntimeError(
            f"tensor_parallel: {key}: expected a multiple of {halves * count} in dimension {axis} "
            f"for {count} ranks, got {tuple(value.shape)}"
        )
    parts = [half.chunk(count, axis)[layout.rank] for half in value.chunk(halves, axis)]
    return torch.cat(parts, axis)


def _every(value: Tensor, ranks: Any) -> list[Tensor]:
    """Those of all ranks."""
    every = [torch.empty_like(value) for _ in range(ranks.size())]
    torch.distributed.all_gather(every, value.contiguous(), group=ranks)
    return every


def _halves(every: list[Tensor], axis: int, halves: int) -> Iterator[Tensor]:
    """The first halves of all ranks, then the second ones."""
    parts = [value.chunk(halves, axis) for value in every]
    for half in range(halves):
        yield from (part[half] for part in parts)
