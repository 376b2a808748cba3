"""FSDP2 that gathers weights as codes and scales instead of in 16 bits.

    from <this package>.integrations import fsdp

    fully_shard(layer)
    fsdp.gather_quantized(layer)
    for step in range(steps):
        ...
        optimizer.step()
        layer.refresh_weights()

Every rank quantises its own shard, once for each step of the optimiser, and the all-gathers of
forward and backward move what it made, so nothing is quantised twice and no rank has copies of a
whole weight between them.  Where the columnwise copy is the rowwise one transposed, as with one
scale for a group or for square blocks, the rowwise copy alone is sent, half the bytes of 16 bits,
and a backward transposes what it reads.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_map_only

from .. import _library
from ._transposed import fill_transposed

__all__ = ["gather_quantized"]

_PACKAGE = __name__.rpartition(".integrations.")[0]
_ATOM_ROWS = 128


def gather_quantized(layer: nn.Module, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Let FSDP2 gather a layer's weights quantised.

    From here on `layer.refresh_weights()` quantises this rank's shards; all ranks call it after
    each step of the optimiser, and after anything else that changes weights.  Results are bit for
    bit those of the layer without FSDP whose `refresh_weights()` is called as often.

    Stacks of weights are split by groups, so a shard has scales of its own under every recipe.  The
    one weight of a linear layer is split by rows; it has to have scales of blocks, none of which
    two ranks share.

    Args:
        layer: of this bundle, with the option `cached_weights`.  `fully_shard` was called on it, on
            its parts or on a module around it, and nothing of that has run yet: FSDP looks for
            hooks when it first runs, and fails on later ones.
        dtype: of products, where parameters are float32: `param_dtype` of FSDP's policy.

    Returns:
        The layer.

    Raises:
        TypeError: it is another layer.
        RuntimeError: its weights are not split like that, or are gathered so already; the message
            says how they are.
    """
    own: Any = layer
    if "refresh_weights" in vars(own):
        raise RuntimeError(
            f"gather_quantized: {type(layer).__name__}: its weights are gathered quantised already"
        )
    shards = _Shards(layer, dtype)
    shards.attach()
    own._copied = ()
    own.refresh_weights = shards.refresh
    own.forward = torch.compiler.disable(own.forward)  # tensors without values are not traced
    return layer


class Gathered(torch.Tensor):
    """What FSDP gathers: a weight's shape and type without its values, and its quantised copies.

    The ops of this bundle take it; whatever else reads it is refused.

    Attributes:
        placeholder: one NaN of its shape and type, which ops are given in its place.
        copies: by the names of buffers that they stand in while a forward runs.
    """

    placeholder: Tensor
    copies: dict[str, Tensor]

    @staticmethod
    def __new__(cls, placeholder: Tensor, copies: dict[str, Tensor]) -> Gathered:
        make: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        dtype, device = placeholder.dtype, placeholder.device
        made: Gathered = make(cls, placeholder.shape, dtype=dtype, device=device)
        made.placeholder, made.copies = placeholder, copies
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Gathered({[*self.shape]}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.as_strided.default):
            return Gathered(args[0].placeholder, args[0].copies)
        if func.namespace == _library.NAMESPACE:
            return func(*map(_without_values, args), **(kwargs or {}))
        raise RuntimeError(
            f"{func}: a weight that FSDP gathered quantised has no values to read; call "
            "full_tensor() of the layer's parameter while no forward runs, or do without "
            "gather_quantized"
        )


def _without_values(argument: Any) -> Any:
    """What stands in the place of a weight."""
    return argument.placeholder if isinstance(argument, Gathered) else argument


@dataclass
class _Late:
    """Memory that is filled once it is read.

    Attributes:
        values: the memory; what pads rows is left alone.
        source: what to fill it with; None once that is done.
    """

    values: Tensor
    source: Tensor | None = None

    def read(self) -> Tensor:
        if self.source is not None:
            fill_transposed(self.values[..., : self.source.shape[-1]], self.source.mT)
            self.source = None
        return self.values


class Transposed(torch.Tensor):
    """A columnwise copy that no rank sends: the rowwise one, transposed when an op reads it.

    A forward hands it on to its backward and reads nothing of it.
    """

    late: _Late

    @staticmethod
    def __new__(cls, late: _Late) -> Transposed:
        make: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        values = late.values
        made: Transposed = make(cls, values.shape, dtype=values.dtype, device=values.device)
        made.late = late
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Transposed({[*self.shape]}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return Transposed(args[0].late)
        args, kwargs = tree_map_only(cls, lambda each: each.late.read(), (args, kwargs or {}))
        return func(*args, **kwargs)


@dataclass(frozen=True)
class _Copy:
    """A buffer of a quantised weight.

    Attributes:
        name: of the buffer.
        shape: for the whole weight.
        axis: along which the ranks' parts lie side by side.
        source: the buffer that it follows from; itself where ranks send it.
        elements: rows and columns of the weight, where it is the source transposed.
    """

    name: str
    shape: torch.Size
    axis: int
    source: str
    elements: tuple[int, int] | None = None

    @property
    def sent(self) -> bool:
        return self.source == self.name

    def part(self, ranks: int) -> list[int]:
        """The shape for the weight of one of the ranks."""
        return [size // (ranks if axis == self.axis else 1) for axis, size in enumerate(self.shape)]

    def view(self, gathered: Tensor, ranks: int) -> Tensor:
        """It, perhaps without the padding of its rows, as a view of what ranks sent."""
        if self.elements is not None:
            rows, columns = self.elements
            return gathered.view(*self.shape[:-2], rows, -1)[..., :columns].mT
        if self.axis:
            first, part, *rest = self.part(ranks)
            return gathered.view(ranks, first, part, *rest).transpose(0, 1)
        return gathered.view(self.shape)


@dataclass
class _Weight:
    """A weight that ranks share, and the copies of this rank's shard.

    Attributes:
        place: cell and path, for messages.
        owner, name: the module that has the parameter, and its name there.
        parameter: FSDP's.
        dtype: of products.
        ranks, rank: how many share it, and which one this is.
        copies: of the whole.
        parts: of the shard, by name of the copy.
        absent: buffers without memory, which stand in for the whole while no forward runs.
        gathered: copies of the whole, while FSDP keeps memory for them.
    """

    place: str
    owner: nn.Module
    name: str
    parameter: DTensor
    dtype: torch.dtype
    ranks: int
    rank: int
    copies: tuple[_Copy, ...]
    parts: dict[str, Tensor] = field(default_factory=dict)
    absent: dict[str, Tensor] = field(default_factory=dict)
    gathered: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for copy in self.copies:
            whole = self.owner.get_buffer(copy.name).to(self.local.device)
            self.parts[copy.name] = whole.chunk(self.ranks, copy.axis)[self.rank].clone()
            self.absent[copy.name] = whole.new_zeros(()).expand(copy.shape)

    @property
    def local(self) -> Tensor:
        """The shard, on which FSDP looks for hooks when it first runs."""
        local: Tensor = self.parameter._local_tensor
        return local

    @property
    def versioned(self) -> tuple[Tensor, ...]:
        """What is gathered, unless that was first done in inference mode."""
        return tuple(each for each in self.gathered.values() if not each.is_inference())

    def attach(self) -> None:
        """Give FSDP the hooks around its all-gather."""
        local: Any = self.local
        local.fsdp_pre_all_gather = self.send
        local.fsdp_post_all_gather = self.receive

    def send(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        """What this rank sends of each copy."""
        return tuple(self.parts[copy.name] for copy in self.copies if copy.sent), None

    def receive(
        self,
        outputs: tuple[Tensor, ...],
        metadata: None,
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Any:
        """The gathered weight, and memory for FSDP to free beside what it received.

        Later all-gathers fill the same memory, which backwards refer to.
        """
        if dtype != self.dtype:
            raise RuntimeError(
                f"{self.place}: FSDP gathers it as {dtype}, but its copies were made of "
                f"{self.dtype}; pass dtype={dtype} to gather_quantized"
            )
        received = self.parts  # of one rank FSDP gathers nothing and passes the first part on alone
        if self.ranks > 1:
            sent = (copy.name for copy in self.copies if copy.sent)
            received = dict(zip(sent, outputs, strict=True))
        own: list[Tensor] = []
        with torch.autograd._unsafe_preserve_version_counter(self.versioned):
            for copy in self.copies:
                view = copy.view(received[copy.source], self.ranks)
                if copy.elements is not None:
                    if copy.name not in self.gathered:
                        with torch.inference_mode(False):  # what follows may be trained
                            own.append(view.new_zeros(copy.shape))
                            self.gathered[copy.name] = Transposed(_Late(own[-1]))
                    held: Any = self.gathered[copy.name]
                    held.late.source = view
                    continue
                if view.shape == copy.shape and view.is_contiguous():
                    before = self.gathered.setdefault(copy.name, view)
                    if before.data_ptr() != view.data_ptr():
                        raise RuntimeError(
                            f"{self.place}: FSDP gathered into other memory than before, as it does"
                            " under compiled autograd, which gather_quantized cannot be used with"
                        )
                    continue
                if copy.name not in self.gathered:
                    self.gathered[copy.name] = view.new_zeros(copy.shape)
                    own.append(self.gathered[copy.name])
                self.gathered[copy.name].view(view.shape).copy_(view)
        if out is not None:
            return None
        nan = torch.full((), math.nan, dtype=dtype, device=self.local.device)
        return Gathered(nan.expand(self.parameter.shape), self.gathered), own

    def enter(self) -> Gathered:
        """Put the gathered copies into the buffers that a forward reads.

        Raises:
            RuntimeError: FSDP gathered the weight itself.
        """
        parameter: Any = self.owner._parameters[self.name]
        if not isinstance(parameter, Gathered):
            raise RuntimeError(
                f"{self.place}: expected a weight that FSDP gathered quantised, got its values; "
                "make, move and load the layer first, then call fully_shard and gather_quantized, "
                "and run it after that"
            )
        self.owner._buffers.update(self.gathered)
        return parameter

    def leave(self, *_: Any) -> None:
        """Put buffers without memory in their place."""
        self.owner._buffers.update(self.absent)


class _Shards:
    """A layer's weights, of which each rank has a shard.

    Attributes:
        layer: that has them.
        order: paths of weights, as a forward compares them with those that were copied.
    """

    def __init__(self, layer: nn.Module, dtype: torch.dtype) -> None:
        self.layer = layer
        cell, self._class = _cell_of(layer)
        self._weights: dict[str, _Weight] = {}
        self._entered: dict[str, Gathered] = {}
        for path, owner in layer.named_modules():
            prefix = f"{path}." if path else ""
            for name in [*owner._parameters]:
                if f"{name}_rowwise" in owner._buffers:
                    self._weights[prefix + name] = _weight(cell, prefix + name, owner, name, dtype)
        first = next(iter(self._weights.values()))
        single = [path for path, each in self._weights.items() if each.parameter.dim() == 2]
        if single and len(self._weights) > 1:
            raise RuntimeError(
                f"{cell}: {single[0]}: expected stacks of weights, or one weight alone: parts of "
                f"{', '.join(self._weights)} by rows are of no module, so none can be quantised"
            )
        self._ranks, self._rank, self._group = _shard_of(first.place, first.parameter)
        function = importlib.import_module(self._class.__module__).refresh_weights
        paths = {path.replace(".", "_"): path for path in self._weights}
        self.order = tuple(paths[name] for name in signature(function).parameters if name in paths)

    def refresh(self, *args: Any, **more: Any) -> None:
        """Quantise this rank's shards as they are now; see the layer's own `refresh_weights`."""
        tensors: dict[str, Any] = {}
        for path, weight in self._weights.items():
            tensors[path] = weight.local.detach().to(weight.dtype)
            prefix = path.removesuffix(weight.name)
            tensors |= {prefix + name: part for name, part in weight.parts.items()}
            torch.autograd.graph.increment_version(weight.versioned)
        state = self.layer._buffers.get("refresh_state")
        if state is not None:
            tensors["refresh_state"] = state.chunk(self._ranks, -1)[self._rank].contiguous()
        self._class.refresh_weights(_Stand(self.layer, tensors), *args, **more)
        if state is not None:
            every = [torch.empty_like(tensors["refresh_state"]) for _ in range(self._ranks)]
            torch.distributed.all_gather(every, tensors["refresh_state"], group=self._group)
            state.copy_(torch.cat(every, -1))

    def attach(self) -> None:
        """Let FSDP and the layer's forward call these weights' hooks."""
        for path, weight in self._weights.items():
            weight.attach()
            weight.owner.register_forward_pre_hook(self._entering(path))
            weight.owner.register_forward_hook(weight.leave, always_call=True)
            weight.leave()

    def _entering(self, path: str) -> Callable[..., None]:
        """What goes before the forward of a weight's owner."""

        def enter(*_: Any) -> None:
            self._entered[path] = self._weights[path].enter()
            own: Any = self.layer
            own._copied = tuple(self._entered.get(each) for each in self.order)

        return enter


class _Stand:
    """A module, some of whose tensors are others."""

    def __init__(self, module: nn.Module, tensors: Mapping[str, Any]) -> None:
        own = {name: tensor for name, tensor in tensors.items() if "." not in name}
        for child in {name.partition(".")[0] for name in tensors.keys() - own.keys()}:
            of_it = [name for name in tensors if name.startswith(f"{child}.")]
            inner = {name.partition(".")[2]: tensors[name] for name in of_it}
            own[child] = _Stand(module.get_submodule(child), inner)
        self.__dict__.update(own, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _cell_of(layer: nn.Module) -> tuple[str, Any]:
    """The layer's cell, and its class without what FSDP makes of it."""
    wanted = f"gather_quantized: {type(layer).__name__}: expected a module of {_PACKAGE} with the"
    for each in type(layer).__mro__:
        package, _, cell = each.__module__.rpartition(".")
        if package != _PACKAGE or "cached_weights" not in cell.split("__"):
            continue
        if "high_precision_backward" in cell:
            raise TypeError(f"{wanted} copies of weights for its backward, got {cell}")
        return cell, each
    raise TypeError(f"{wanted} option cached_weights")


def _shard_of(place: str, parameter: Tensor) -> tuple[int, int, Any]:
    """How many ranks share a parameter, which one this is, and their group.

    Raises:
        RuntimeError: it is not split along its first dimension, and in no other way.
    """
    if not isinstance(parameter, DTensor):
        raise RuntimeError(
            f"{place}: expected a parameter that FSDP2 has split, got "
            f"{type(parameter).__name__}; call fully_shard first"
        )
    split = [i for i, each in enumerate(parameter.placements) if type(each) is not Replicate]
    if [parameter.placements[i] for i in split] != [Shard(0)]:
        raise RuntimeError(
            f"{place}: expected placements of one Shard(0), got {parameter.placements}"
        )
    mesh = parameter.device_mesh
    return mesh.size(split[0]), mesh.get_local_rank(split[0]), mesh.get_group(split[0])


def _weight(cell: str, path: str, owner: nn.Module, name: str, dtype: torch.dtype) -> _Weight:
    place = f"{cell}: {path}"
    parameter: Any = owner._parameters[name]
    ranks, rank, _ = _shard_of(place, parameter)
    if parameter.is_meta:
        raise RuntimeError(f"{place}: it is on meta; call to_empty() first, and load a state after")
    if parameter.device_mesh.device_type != parameter._local_tensor.device.type:
        raise RuntimeError(f"{place}: shards that FSDP offloads cannot be gathered quantised")
    own: torch.dtype = parameter.dtype
    formats = importlib.import_module(f"{_PACKAGE}.reference.{cell}")
    _check_split(place, parameter.shape, ranks, formats.WEIGHT, formats.LAYOUT)
    copies = (*_copies(owner, name, parameter.shape, formats.WEIGHT, formats.LAYOUT),)
    made = dtype if own is torch.float32 else own
    return _Weight(place, owner, name, parameter, made, ranks, rank, copies)


def _copies(
    owner: nn.Module, name: str, shape: torch.Size, weight: Any, layout: Any
) -> Iterator[_Copy]:
    """The buffers of a weight's copies, the rowwise ones first.

    Ranks need not send a columnwise copy whose blocks and codes are those of the rowwise one.
    """
    names = [each for each in owner._buffers if each.startswith((f"{name}_row", f"{name}_col"))]
    square = weight.block[0] == weight.block[1] and not layout.atoms and weight.hadamard is None
    follows = square and weight.format != "e2m1" and weight.rounding == "nearest"
    stacked, rowwise, columnwise = len(shape) == 3, f"{name}_rowwise", f"{name}_columnwise"
    for each in sorted(names, key=lambda each: each.startswith(columnwise)):
        size = owner.get_buffer(each).shape
        beside = layout.transposed if each == columnwise else layout.atoms
        axis = int(beside and not stacked and each.startswith(columnwise))
        if each.startswith(rowwise) or not follows:
            yield _Copy(each, size, axis, each)
        else:
            flipped = each == columnwise and layout.transposed
            elements = (shape[-2], shape[-1]) if flipped else None
            yield _Copy(each, size, axis, each.replace(columnwise, rowwise), elements)


def _check_split(place: str, shape: torch.Size, ranks: int, weight: Any, layout: Any) -> None:
    """Every rank has whole groups, or whole blocks of rows.

    Raises:
        RuntimeError: it has not; the message says what it would have.
    """
    if len(shape) == 2 and (weight.tensor_scale or None in weight.block):
        raise RuntimeError(
            f"{place}: a scale spans rows of all {ranks} ranks, so none can quantise its own; "
            "leave gather_quantized out, and generate the module without cached_weights"
        )
    atom = _ATOM_ROWS if layout.atoms else 1
    unit = 1 if len(shape) == 3 else math.lcm(*weight.block, layout.pitch, atom)
    if shape[0] % (ranks * unit):
        raise RuntimeError(
            f"{place}: expected a multiple of {ranks * unit} in its first dimension for {ranks} "
            f"ranks, got {tuple(shape)}"
        )
