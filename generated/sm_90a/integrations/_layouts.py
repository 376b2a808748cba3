"""Where the parameters of a rank lie in those of the whole layer, of which ranks have parts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.tensor import DTensor, Shard

from .. import _collectives
from ._parameters import PARAMETERS, Parameters, cell_of

_DIGITS = "0123456789"


class Lies(NamedTuple):
    """A parameter of this rank.

    Attributes:
        paths: of it in the whole layer, for each rank in their order: the same one, but where every
            expert has a parameter of its own.
        axis: dimension that each rank has a part of; None where it has all of the parameter.
        halves: how many of these parts there are, one behind the other.
        gates: dimension along which gate is before up; None where neither is, or they alternate.
    """

    paths: tuple[str, ...]
    axis: int | None
    halves: int
    gates: int | None


class Layout(NamedTuple):
    """A layer, or this rank's part of one.

    Attributes:
        ranks: the group; None where the layer is whole.
        lies: where each parameter lies, by its path.
    """

    ranks: Any
    lies: Mapping[str, Lies]

    @property
    def rank(self) -> int:
        """This one, in the group."""
        return 0 if self.ranks is None else torch.distributed.get_rank(self.ranks)


def layout_of(layer: nn.Module) -> Layout:
    """Of a module of this bundle, with an option for ranks or without.

    Raises:
        TypeError: it is none, or has no parameters.
        RuntimeError: it is of ranks, and there are none.
    """
    known = _known(layer)
    split = {path: (axis, halves) for path, axis, halves in known.split}
    return _layout(layer, split, getattr(layer, known.group) if split else None, known.group)


def layout_of_experts(layer: nn.Module, group: ProcessGroup | None) -> Layout:
    """Of a module of this rank's experts, which does not communicate by itself.

    Raises:
        TypeError: it is none of this bundle.
    """
    return _layout(layer, dict.fromkeys(_known(layer).grouped, (0, 1)), group, "group")


def _known(layer: nn.Module) -> Parameters:
    cell = cell_of(layer)
    if not cell:
        raise TypeError(
            f"{type(layer).__name__} of {type(layer).__module__}: expected a module of this bundle "
            "that has parameters"
        )
    return PARAMETERS[cell]


def _layout(
    layer: nn.Module, split: Mapping[str, tuple[int, int]], group: ProcessGroup | None, keyword: str
) -> Layout:
    ranks: Any = None
    if split:
        ranks = _collectives.Place(type(layer).__name__, "", keyword, group).ranks
    names, known = [name for name, _ in layer.named_parameters()], _known(layer)
    count = ranks.size() if split else 1
    return Layout(ranks, {name: _lies(name, names, split, known, count) for name in names})


def _lies(
    name: str,
    names: list[str],
    split: Mapping[str, tuple[int, int]],
    known: Parameters,
    count: int,
) -> Lies:
    """Parameters of one group each, `weight0` and so on, have all dimensions but that of groups."""
    whole = name.rstrip(_DIGITS)
    alone = name not in known.grouped and whole in known.grouped and whole not in names
    path = whole if alone else name
    axis, halves = split.get(path, (None, 1))
    paths = (name,) * count
    if alone and axis == 0:
        own = sum(each.rstrip(_DIGITS) == whole for each in names)
        number = int(name[len(whole) :])
        paths, axis = tuple(f"{whole}{rank * own + number}" for rank in range(count)), None
    elif alone and axis is not None:
        axis -= 1
    gated = path in known.gated and not known.block
    gates = int(path in known.grouped and not alone) if gated else None
    return Lies(paths, axis, halves, gates)


def sharded(layout: Layout, tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Tensors like a rank's parameters as parts of those of the whole layer, in the same memory.

    Args:
        layout: of the layer.
        tensors: by the paths of its parameters.
        prefix: of the keys, with its last dot.

    Raises:
        TypeError: one is a DTensor already.
    """
    state: dict[str, Tensor] = {}
    mesh_on = cache(partial(DeviceMesh.from_group, layout.ranks))
    for path, given in tensors.items():
        lies, value = layout.lies[path], given.detach()
        if isinstance(value, DTensor):
            raise TypeError(
                f"{prefix}{path}: expected a plain tensor, got a DTensor over {value.device_mesh}: "
                "its shards are of this rank's part alone; take `write` of whole tensors"
            )
        axis = lies.axis
        if lies.gates is not None:
            value = value.unflatten(lies.gates, (2, -1))
            axis = axis if axis is None or axis < lies.gates else axis + 1
        if axis is not None:
            mesh = mesh_on(value.device.type)
            value = DTensor.from_local(value, mesh, [Shard(axis)], run_check=False)
        state[prefix + lies.paths[layout.rank]] = value
    return state
