"""A parameter for each group, side by side in one tensor, which ops read as it is.

Whatever parts them from it (a wrapper that shards, `parameter.data = ...`, `functional_call`) costs
a copy in each call, never a wrong result: a call reads the tensor only where it finds every
parameter in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import _library, _transforms


class PerGroup(nn.Module):
    """A module with parameters `weight0`, `weight1`, ... in the place of `weight`, or parts of it.

    They are views of one tensor, which is no attribute that state dicts, optimisers or wrappers
    see.  After moves, casts, copies, pickles and `load_state_dict(assign=True)` they are so again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[str, tuple[str, ...]] = {}
        self._whole: dict[str, Tensor] = {}

    def join_groups(self) -> None:
        """Let the parameters lie side by side again, after `parameter.data = ...` or a new one.

        Parameters keep their identity and values.  Those that lie apart are copied; where they are
        on several devices, of several types, or no plain parameters, as under FSDP, they stay.
        """
        for module in self.modules():
            if isinstance(module, PerGroup):
                _join(module)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        for joined, names in self.__dict__.get("_names", {}).items():
            if name in names:  # what FSDP replaces has to be freed
                self._whole.pop(joined, None)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_whole": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _join(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        _join(self)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        _join(self)


def register(module: PerGroup, name: str, whole: Tensor | None, groups: int) -> None:
    """Give a module a parameter for each group; None for each where there is no tensor.

    Args:
        module: that has them.
        name: of them all, before the number of the group.
        whole: `[groups, ...]`.
        groups: how many there are.

    Raises:
        ValueError: there is none.
    """
    if groups < 1:
        raise ValueError(f"{type(module).__name__}: expected at least one group, got {groups}")
    module._names[name] = tuple(f"{name}{group}" for group in range(groups))
    for group, own in enumerate(module._names[name]):
        module.register_parameter(own, None if whole is None else nn.Parameter(whole[group]))
    if whole is not None:
        module._whole[name] = whole


def each(module: PerGroup, name: str) -> Iterator[Tensor]:
    """The parameters of a name, if there are any."""
    return (part for part in _parts(module, name) if part is not None)


def joined(module: Any, name: str) -> Any:
    """One tensor of the parameters of a name, `[groups, ...]`; None where the module has none.

    Its gradient is not copied: those of the parameters are views of it.

    Args:
        module: a `PerGroup`.
        name: that was registered.
    """
    parts = _parts(module, name)
    if parts[0] is None:
        return None
    whole = _read_as_it_is(module, name, parts)
    if whole is None:
        return _stacked(module, name, parts)
    if torch.is_grad_enabled() and any(part.requires_grad for part in parts):
        return _Join.apply(whole, *parts)
    return whole


def checked(cell: str, sizes: Tensor, *modules: Any) -> Tensor:
    """The sizes of groups; in compiled code after a check that all parameters are in their places.

    What is traced holds for later calls, too, and a tensor's place is no guard of theirs.
    """
    if not torch.compiler.is_compiling():
        return sizes
    for module in modules:
        for name in module._names:
            parts = _parts(module, name)
            whole = None if parts[0] is None else _read_as_it_is(module, name, parts)
            if whole is not None:
                sizes = _check(sizes, whole, parts, f"{cell}: {name}")
    return sizes


def _parts(module: PerGroup, name: str) -> list[Any]:
    own = module._parameters
    names = module._names[name]
    return [own[each] if each in own else getattr(module, each) for each in names]


def _read_as_it_is(module: PerGroup, name: str, parts: Sequence[Any]) -> Tensor | None:
    """The tensor that all parts lie in; None where they have to be copied into one."""
    whole = module._whole.get(name)
    if whole is None or _transforms.active() or not _are_plain(parts):
        return None
    if torch.compiler.is_compiling():  # asked when it runs; what is exported has to stand alone
        return None if torch.compiler.is_exporting() else whole
    if _first_elsewhere(whole, parts) is not None:
        module._whole.pop(name, None)
        return None
    return whole


def _are_plain(parts: Sequence[Any]) -> bool:
    """Whether they are parameters as PyTorch has them: no DTensors, nothing made by a wrapper."""
    return all(type(part) is nn.Parameter for part in parts)


def _first_elsewhere(whole: Tensor, parts: Sequence[Tensor]) -> int | None:
    """The first of the parts that is not where the tensor has it; None where each is."""
    shape, dtype, place = whole.shape[1:], whole.dtype, whole.data_ptr()
    step = shape.numel() * dtype.itemsize
    for group, part in enumerate(parts):
        same = part.data_ptr() == place and part.dtype is dtype and part.shape == shape
        if not (same and part.is_contiguous()):
            return group
        place += step
    return None


def _stacked(module: PerGroup, name: str, parts: Sequence[Tensor]) -> Tensor:
    """A copy.

    Raises:
        RuntimeError: the parts differ in shape, type or device.
    """
    first = _form(parts[0])
    for group, part in enumerate(parts):
        if _form(part) != first:
            raise RuntimeError(
                f"{type(module).__name__}: {name}{group}: expected {_in_words(*first)} like "
                f"{name}0, got {_in_words(*_form(part))}; all groups have the same"
            )
    return torch.stack([*parts])


def _form(part: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return part.shape, part.dtype, part.device


def _in_words(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> str:
    return f"{[*shape]} {str(dtype).removeprefix('torch.')} on {device}"


@torch.no_grad()
def _join(module: PerGroup) -> None:
    for name in module._names:
        parts = _parts_that_fit(module, name)
        if not parts:
            continue
        whole = module._whole.get(name)
        if whole is None:
            whole = _around(parts)
        if _first_elsewhere(whole, parts) is not None:
            whole = torch.stack(parts)
            for part, own in zip(parts, whole, strict=True):
                part.data = own
        module._whole[name] = whole


def _parts_that_fit(module: PerGroup, name: str) -> list[Tensor]:
    """The parameters of a name, where one tensor can hold them all."""
    parts: list[Tensor | None] = [module._parameters.get(own) for own in module._names[name]]
    if not _are_plain(parts):
        return []
    found = [part for part in parts if part is not None and not part.is_meta]
    same = len({_form(part) for part in found}) == 1 and len(found) == len(parts)
    return found if same else []


def _around(parts: Sequence[Tensor]) -> Tensor:
    """The tensor that the parts would lie in, as where a checkpoint kept them side by side."""
    first, elements = parts[0], len(parts) * parts[0].numel()
    storages = {part.untyped_storage().data_ptr() for part in parts}
    held = first.untyped_storage()
    if len(storages) > 1 or held.nbytes() < (first.storage_offset() + elements) * first.itemsize:
        return torch.stack([*parts])
    shape, stride = (len(parts), *first.shape), (first.numel(), *first.stride())
    return first.new_empty(0).set_(held, first.storage_offset(), shape, stride)


class _Join(torch.autograd.Function):
    """The tensor that parameters lie in, as a function of them."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, *parts: Tensor) -> Tensor:
        ctx.before = _library.held(*parts)
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        before = None if torch.compiler.is_compiling() else ctx.before
        if before is not None and _library.held(*before[0]) != before:
            raise RuntimeError(
                "a parameter of a group was changed in place between a forward and its backward; "
                "step the optimiser after the backward"
            )
        pairs = zip(grads[0], ctx.needs_input_grad[1:], strict=True)
        return None, *(grad if needed else None for grad, needed in pairs)


def _check_places(sizes: Tensor, whole: Tensor, parts: Sequence[Tensor], place: str) -> Tensor:
    group = _first_elsewhere(whole, parts)
    if group is not None:
        raise RuntimeError(
            f"{place}{group}: expected a parameter in the memory that compiled code reads, got one "
            "elsewhere, as after `parameter.data = ...`; copy values with `parameter.copy_(...)`, "
            "or call join_groups() of the module"
        )
    return sizes.clone()


_check = _library.define(
    "parameters_in_place",
    "(Tensor sizes, Tensor whole, Tensor[] parts, str place) -> Tensor",
    _check_places,
    lambda sizes, whole, parts, place: torch.empty_like(sizes),
)
