"""Ops of this bundle on DTensors: which placements they run under, shard by shard.

    from <this package>.sharding import register_shardings
    register_shardings()

Each cell's file states the ways in which its ops may be split, derived from its plan.  An op is
given to DTensor as a twin, `<op>_dtensor`, whose rules `register_sharding` takes: DTensor picks the
cheapest way and redistributes what lies otherwise.  The twin packs flags into an integer and
returns a tensor for every result, because DTensor's cache of decisions knows integers, not flags,
and it wraps no op whose first result is optional.

Nothing here is imported before it is asked for: `torch.distributed.tensor` takes its time.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from .. import _library

WHOLE, PARTIAL = "whole", "partial"

Lies = int | str
"""Dimension that is split, from the end where it is negative; WHOLE; or PARTIAL, to be summed."""


@dataclass(frozen=True)
class Way:
    """One way to split an op.

    Attributes:
        arguments: how each tensor argument lies.
        results: how each result lies.
        sizes: (argument, start, stop, unit): the product of these dimensions, of the first of the
            arguments that is there, is a multiple of unit on every rank.
        gradients: whether it holds where flags ask for something.
        elementwise: whether the dimension may be any that all tensors have.
    """

    arguments: tuple[Lies, ...]
    results: tuple[Lies, ...]
    sizes: tuple[tuple[int, int, int | None, int], ...] = ()
    gradients: bool = True
    elementwise: bool = False


@dataclass(frozen=True)
class Op:
    """An op and the ways to split it.

    Attributes:
        name: without the namespace.
        schema: of the twin.
        tensors: names of the tensor arguments.
        flags: how many flags follow them.
        mutated: how many of the tensors, the last ones, the op changes in place.
        saved: arguments that an op of the forward made; they stay where they are.
        asked: of each result, the flags that ask for it, as bits; 0 is always.
        ways: besides every tensor whole on every rank.
        refusal: why it takes no DTensors; empty where it does.
    """

    name: str
    schema: str
    tensors: tuple[str, ...]
    flags: int
    mutated: int
    saved: tuple[int, ...]
    asked: tuple[int, ...]
    ways: tuple[Way, ...]
    refusal: str = ""

    def ways_for(self, rank: int) -> tuple[Way, ...]:
        """Every way for a first argument of so many dimensions, the unsplit one first."""
        ways = [Way((WHOLE,) * len(self.tensors), (WHOLE,) * len(self.asked))]
        for way in self.ways:
            ways += _everywhere(way, rank) if way.elementwise else [way]
        return tuple(ways)


def register_shardings(*cells: str) -> None:
    """Let modules of this bundle run on DTensors; once per process, calls after that do nothing.

    Args:
        cells: names of their files, such as `linear__bf16`; all of the bundle by default.

    Raises:
        ModuleNotFoundError: a cell has no ops, or this bundle does not have it.
    """
    found = (path.stem for path in Path(__file__).parent.glob("*__*.py"))
    for cell in cells or sorted(name for name in found if name != "__init__"):
        importlib.import_module(f"{_library.__package__}.{cell}")
        for op in importlib.import_module(f"{__name__}.{cell}").OPS:
            _register(op)


def _register(op: Op) -> None:
    ops, library = _library.registered()
    twin = f"{op.name}_dtensor"
    if twin in ops:
        return
    plain = ops[op.name]
    library.define(f"{twin}{op.schema}")
    library.impl(twin, _on_shards(op, plain), "CompositeExplicitAutograd")
    ops[twin] = getattr(getattr(torch.ops, _library.NAMESPACE), twin).default
    register_sharding(ops[twin])(_rules(op))
    torch.library.register_torch_dispatch(plain, DTensor, _on_dtensors(op, ops[twin]), lib=library)


def _on_shards(op: Op, plain: Callable[..., Any]) -> Callable[..., Any]:
    """The twin: the op itself, on what a rank has."""
    count = len(op.tensors)

    def run(*args: Any) -> Any:
        tensors = [None if t is None else t.contiguous() for t in args[:count]]
        flags = (bool(args[count] >> bit & 1) for bit in range(op.flags))
        results = plain(*tensors, *flags, *args[count + 2 :])
        if results is None or isinstance(results, torch.Tensor):
            return results
        return tuple(args[0].new_empty(0) if each is None else each for each in results)

    return run


def _rules(op: Op) -> Callable[..., Sequence[tuple[list[Any], list[Any]]]]:
    """What `register_sharding` takes: placements of the ways that the call may be split in."""
    count = len(op.tensors)

    def rules(*args: Any) -> Sequence[tuple[list[Any], list[Any]]]:
        tensors, (flags, allowed) = args[:count], args[count : count + 2]
        rank = tensors[0].ndim
        rest: list[Any] = [None] * (len(args) - count)
        found: list[tuple[list[Any], list[Any]]] = []
        for index, way in enumerate(op.ways_for(rank)):
            if allowed >> index & 1:
                results = [
                    _placement(lies, rank) if not asked or flags & asked else Replicate()
                    for lies, asked in zip(way.results, op.asked, strict=True)
                ]
                arguments: list[Any] = [
                    None if tensor is None else _placement(lies, tensor.ndim)
                    for lies, tensor in zip(way.arguments, tensors, strict=True)
                ]
                found.append((results, arguments + rest))
        return found

    return rules


def _on_dtensors(op: Op, twin: Callable[..., Any]) -> Callable[..., Any]:
    """What the op does where DTensors are among its arguments."""
    count = len(op.tensors)

    def run(_cls: type, _op: Any, _types: Any, args: Sequence[Any], kwargs: Any = None) -> Any:
        tensors, flags = args[:count], args[count : count + op.flags]
        _check(op, tensors)
        bits = sum(1 << bit for bit, flag in enumerate(flags) if flag)
        allowed = sum(
            1 << index
            for index, way in enumerate(op.ways_for(tensors[0].ndim))
            if _may_be_split(op, way, tensors, bits)
        )
        results = twin(*tensors, bits, allowed, *args[count + op.flags :])
        if op.mutated or not op.asked:  # what nobody asked for is empty, as without DTensors
            return results
        wanted = [not asked or bits & asked for asked in op.asked]
        if len(wanted) == 1:
            return results if wanted[0] else None
        return tuple(each if keep else None for each, keep in zip(results, wanted, strict=True))

    return run


def _check(op: Op, tensors: Sequence[Any]) -> None:
    """Raise where an argument is no DTensor, or changes in place and is not whole everywhere."""
    if op.refusal:
        raise RuntimeError(f"{op.name}: expected plain tensors, got DTensors: {op.refusal}")
    for index, (name, tensor) in enumerate(zip(op.tensors, tensors, strict=True)):
        if tensor is not None and not isinstance(tensor, DTensor):
            raise RuntimeError(
                f"{op.name}: {name}: expected a DTensor, like the other tensors of the call, got a "
                "plain tensor; make it one (distribute_tensor, distribute_module) where all ranks "
                "have the same values, or call the module in local_map where each has its own"
            )
        changes = index >= len(tensors) - op.mutated
        if tensor is not None and changes and not all(p.is_replicate() for p in tensor.placements):
            raise RuntimeError(
                f"{op.name}: {name}: expected Replicate(), as it is changed in place, got "
                f"{tensor.placements}; redistribute it before the module is called"
            )


def _may_be_split(op: Op, way: Way, tensors: Sequence[Any], flags: int) -> bool:
    """Whether a call may be split so: blocks stay whole, and nothing saved has to move."""
    if flags and not way.gradients:
        return False
    shards = tensors[0].device_mesh.size()
    sizes = ((tensors[a], start, stop, unit) for a, start, stop, unit in way.sizes)
    size = next((each for each in sizes if each[0] is not None), None)
    if way.sizes and (size is None or not _divides(*size, shards)):
        return False
    saved = [
        (_placement(way.arguments[index], tensors[index].ndim), tensors[index].placements)
        for index in op.saved
        if tensors[index] is not None
    ]
    dims = range(tensors[0].device_mesh.ndim)
    return any(
        all(lies[dim].is_replicate() or lies[dim] == wanted for wanted, lies in saved)
        for dim in dims
    )


def _divides(tensor: DTensor, start: int, stop: int | None, unit: int, shards: int) -> bool:
    extent = tensor.shape[start:stop]
    return bool(extent) and extent[0] % shards == 0 and math.prod(extent) % (shards * unit) == 0


def _everywhere(way: Way, rank: int) -> list[Way]:
    """An elementwise way along each dimension."""

    def along(dim: int, lies: tuple[Lies, ...]) -> tuple[Lies, ...]:
        return tuple(dim if isinstance(each, int) else each for each in lies)

    return [
        Way(
            along(dim, way.arguments),
            along(dim, way.results),
            tuple((argument, dim, dim + 1, unit) for argument, _, _, unit in way.sizes),
            way.gradients,
        )
        for dim in range(rank)
    ]


def _placement(lies: Lies, rank: int) -> Placement:
    if isinstance(lies, int):
        return Shard(lies if lies >= 0 else lies + rank)
    return Replicate() if lies == WHOLE else Partial()
