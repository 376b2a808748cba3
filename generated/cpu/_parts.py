"""Parts of a fused module: submodules that hold parameters and state around the one op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook


class KeepsBuffers(nn.Module):
    """A module whose own buffers keep their types: what a recipe keeps, and copies of weights.

    `.half()`, `.to(dtype)` and the like change parameters; fp32 scales in 16 bits would be wrong.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        own = {id(buffer): buffer for buffer in self._buffers.values()}  # alive, so ids are theirs

        def move(tensor: Tensor) -> Tensor:
            return _move(tensor, fn) if id(tensor) in own else fn(tensor)

        return super()._apply(move, recurse)


def _move(buffer: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """What moves a module, shown bytes, which casts of floating point leave alone."""
    moved = fn(buffer.view(torch.uint8))
    if moved.dtype is not torch.uint8:  # `Module.type` casts integers, too
        return buffer.to(moved.device)
    return moved.view(buffer.dtype)


class Part(KeepsBuffers):
    """Parameters and state of one layer of a fused module.

    A part is called around the op that reads its tensors, so wrappers of a part, its hooks and
    parametrisations have their effect while the op runs.  The op is that of the whole module: what
    goes into a part and comes out of it are the module's own x and y, not those of its layer.
    """

    def forward(self, x: Tensor, run: Callable[..., Tensor]) -> Tensor:
        """What `run` gives for x and this part."""
        return run(x, self)


def call(run: Callable[..., Tensor], x: Tensor, *parts: nn.Module) -> Tensor:
    """`run(x, *parts)` inside the forward of each part, the first one outermost.

    Args:
        run: given x and for each part the innermost one, below all wrappers.
        x: of the module.
        parts: submodules, perhaps wrapped.
    """
    wrapped = _has_any_global_hook()
    for part in parts:
        own = part.__dict__
        wrapped = (
            wrapped
            or type(part) is not Part
            or own["_forward_pre_hooks"]
            or own["_forward_hooks"]
            or own["_backward_pre_hooks"]
            or own["_backward_hooks"]
            or "forward" in own
        )
    # Where nothing has its effect in a forward, none need run: most calls, in half a microsecond.
    return _enter(run, x, parts) if wrapped else run(x, *parts)


def _enter(
    run: Callable[..., Tensor], x: Tensor, parts: tuple[nn.Module, ...], *entered: nn.Module
) -> Tensor:
    if not parts:
        return run(x, *entered)
    return parts[0](x, lambda x, part: _enter(run, x, parts[1:], *entered, part))
