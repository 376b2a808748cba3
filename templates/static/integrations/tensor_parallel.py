"""State dicts of whole layers as those of a rank that has a part of one, and back; overlap.

    from <this package>.integrations import tensor_parallel

    prefix = "model.layers.0.mlp."
    layer.load_state_dict(tensor_parallel.read(layer, state, prefix))
    state |= tensor_parallel.write(layer, prefix)

A whole layer is the module without an option for tensor or expert parallelism, in this bundle's own
layout; `checkpoints` gives that of other libraries'.  Values are only moved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .. import _collectives
from .._collectives import overlap
from ._parameters import PARAMETERS, cell_of

__all__ = ["overlap", "read", "write"]


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
    split, ranks = _split(layer), _ranks(layer)
    found = layer.state_dict()
    for path, parameter in layer.named_parameters():
        key = prefix + path
        if key not in state:
            raise RuntimeError(f"tensor_parallel: {key}: missing in the state dict")
        found[path] = state[key]
        if path in split:
            found[path] = _part(key, state[key], *split[path], ranks)
        if found[path].shape != parameter.shape:
            raise RuntimeError(
                f"tensor_parallel: {key}: expected {tuple(parameter.shape)} for each of "
                f"{ranks.size()} ranks, got {tuple(found[path].shape)} of {tuple(state[key].shape)}"
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
    split, ranks = _split(layer), _ranks(layer)
    state = {}
    for path, parameter in layer.named_parameters():
        value = parameter.detach()
        state[prefix + path] = _joined(value, *split[path], ranks) if path in split else value
    return state


def _split(layer: nn.Module) -> dict[str, tuple[int, int]]:
    """The dimension of each parameter that ranks have parts of, and its halves.

    Parameters of one group each, `weight0` and so on, have all dimensions but that of groups.
    """
    cell = cell_of(layer)
    split = PARAMETERS[cell].split if cell else ()
    if not split:
        raise TypeError(
            f"tensor_parallel: {type(layer).__name__} of {type(layer).__module__}: expected a "
            "module of this bundle of whose weights each rank has a part"
        )
    found = {path: (axis, halves) for path, axis, halves in split}
    names = {name for name, _ in layer.named_parameters()}
    for name in names - found.keys():
        whole = name.rstrip("0123456789")
        if whole in found and whole not in names:
            axis, halves = found[whole]
            found[name] = (axis - 1, halves)
    return found


def _ranks(layer: nn.Module) -> Any:
    keyword = PARAMETERS[cell_of(layer)].group
    return _collectives.Place(type(layer).__name__, "", keyword, getattr(layer, keyword)).ranks


def _part(key: str, value: Tensor, axis: int, halves: int, ranks: Any) -> Tensor:
    """This rank's part of each half."""
    count, rank = ranks.size(), torch.distributed.get_rank(ranks)
    if value.dim() <= axis or value.shape[axis] % (halves * count):
        raise RuntimeError(
            f"tensor_parallel: {key}: expected a multiple of {halves * count} in dimension {axis} "
            f"for {count} ranks, got {tuple(value.shape)}"
        )
    return torch.cat([half.chunk(count, axis)[rank] for half in value.chunk(halves, axis)], axis)


def _joined(value: Tensor, axis: int, halves: int, ranks: Any) -> Tensor:
    """The parts of all ranks, half by half."""
    every = [torch.empty_like(value) for _ in range(ranks.size())]
    torch.distributed.all_gather(every, value.contiguous(), group=ranks)
    return torch.cat([*_halves(every, axis, halves)], axis)


def _halves(every: list[Tensor], axis: int, halves: int) -> Iterator[Tensor]:
    """The first halves of all ranks, then the second ones."""
    parts = [value.chunk(halves, axis) for value in every]
    for half in range(halves):
        yield from (part[half] for part in parts)
