"""Parts of a fused module: submodules that hold parameters and state around the one op."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook


@dataclass(frozen=True)
class _Rows:
    """A state that lies in a tensor of several.

    Attributes:
        buffers: of the module that has the tensor.
        tensor: its name there.
        index: the state's rows.
    """

    buffers: dict[str, Any]
    tensor: str
    index: int | slice

    def view(self) -> Tensor:
        view: Tensor = self.buffers[self.tensor][self.index]
        return view


class KeepsBuffers(nn.Module):
    """A module whose own buffers keep their types: what a recipe keeps, and copies of weights.

    `.half()`, `.to(dtype)` and the like change parameters; fp32 scales in 16 bits would be wrong.

    States of a recipe lie in one tensor, the buffer that ops take.  Each is an attribute all the
    same, a view made when it is asked for, so that nothing that moves or replaces buffers can part
    it from its tensor.  State dicts have the states and not the tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self._states: dict[str, _Rows] = {}

    def __getattr__(self, name: str) -> Any:
        states = self.__dict__.get("_states", {})
        return states[name].view() if name in states else super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        state = self.__dict__.get("_states", {}).get(name)
        if state is None or name in self._buffers:  # a buffer while a state dict is loaded
            super().__setattr__(name, value)
        else:
            _take(state, value)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """As of any module; asked for its own alone, the states by their names in state dicts, too.

        That is how `torch.distributed.checkpoint` finds what state dicts have.
        """
        yield from super().named_buffers(prefix, recurse, remove_duplicate)
        for name in () if recurse else self._states:
            yield f"{prefix}.{name}" if prefix else name, self._states[name].view()

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, state in self._states.items():
            destination[prefix + name] = _by_itself(state.view())

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *rest: Any, **more: Any
    ) -> None:
        """PyTorch's own, shown the states as buffers, whose new values go to their tensors."""
        self._buffers.update({name: state.view() for name, state in self._states.items()})
        try:
            super()._load_from_state_dict(state_dict, prefix, *rest, **more)
        finally:
            loaded: dict[str, Any] = {name: self._buffers.pop(name) for name in self._states}
        for name, value in loaded.items():
            _take(self._states[name], value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        own = {id(buffer): buffer for buffer in self._buffers.values()}  # alive, so ids are theirs

        def move(tensor: Tensor) -> Tensor:
            return _move(tensor, fn) if id(tensor) in own else fn(tensor)

        return super()._apply(move, recurse)


def _by_itself(view: Tensor) -> Tensor:
    """The same memory as a storage of its own.

    Who writes safetensors, as accelerate does, drops all but one of the tensors that share storage.
    """
    plain = type(view) is Tensor and not view.is_meta
    return torch.from_dlpack(view) if plain else view


def _move(buffer: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """What moves a module, shown bytes, which casts of floating point leave alone."""
    moved = fn(buffer.view(torch.uint8))
    if moved.dtype is not torch.uint8:  # `Module.type` casts integers, too
        return buffer.to(moved.device)
    return moved.view(buffer.dtype)


@torch.no_grad()
def _take(state: _Rows, value: Tensor) -> None:
    """Load a state; one that was assigned decides on the device of its tensor."""
    whole = state.buffers[state.tensor]
    device = value.device
    if whole.device != device:
        moved = torch.empty_like(whole, device=device) if whole.is_meta else whole.to(device)
        state.buffers[state.tensor] = moved
    state.view().copy_(value)


def keep_state(
    module: KeepsBuffers, name: str, tensor: Tensor, *states: tuple[str, int | slice]
) -> None:
    """Register a tensor of several states, which state dicts have in its place.

    Args:
        module: that has the tensor.
        name: of the buffer.
        tensor: fp32 ``[rows, E]``.
        states: path of each in the state dict, and its rows.
    """
    module.register_buffer(name, tensor, persistent=False)
    for path, index in states:
        holder, _, own = path.rpartition(".")
        part: Any = module.get_submodule(holder)
        part._states[own] = _Rows(module._buffers, name, index)


def states_in(module: nn.Module, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Views of the states that lie in a tensor like the module's buffer of this name, by path."""
    return {
        f"{prefix}.{own}" if prefix else own: tensor[state.index]
        for prefix, part in module.named_modules()
        if isinstance(part, KeepsBuffers)
        for own, state in part._states.items()
        if state.tensor == name
    }


class Part(KeepsBuffers):
    """Parameters and state of one layer of a fused module.

    A part is called around the op that reads its tensors, so wrappers of a part, its hooks and
    parametrisations have their effect while the op runs.  The op is that of the whole module: what
    goes into a part and comes out of it are the module's own x and y, not those of its layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made_as = type(self)  # wrappers may put a class of theirs in its place

    def forward(self, x: Tensor, run: Callable[..., Tensor]) -> Tensor:
        """What `run` gives for x and this part."""
        return run(x, self)


def call(run: Callable[..., Any], x: Any, *parts: Any) -> Any:
    """`run(x, *parts)` inside the forward of each part, the first one outermost.

    Args:
        run: given x and for each part the innermost one, below all wrappers.
        x: of the module, a tensor or its copies.
        parts: submodules, perhaps wrapped.
    """
    wrapped = _has_any_global_hook()
    for part in parts:
        own = part.__dict__
        wrapped = (
            wrapped
            or type(part) is not own.get("_made_as")
            or own["_forward_pre_hooks"]
            or own["_forward_hooks"]
            or own["_backward_pre_hooks"]
            or own["_backward_hooks"]
            or "forward" in own
        )
    # Where nothing has its effect in a forward, none need run: most calls, in half a microsecond.
    return _enter(run, x, parts) if wrapped else run(x, *parts)


def _enter(
    run: Callable[..., Any], x: Tensor, parts: tuple[nn.Module, ...], *entered: nn.Module
) -> Any:
    if not parts:
        return run(x, *entered)
    return parts[0](x, lambda x, part: _enter(run, x, parts[1:], *entered, part))
