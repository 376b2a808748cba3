"""Functions of plain PyTorch that are a kernel or two on a GPU, not one for each operation."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils._triton import has_triton

_CAPABILITY = (8, 9)  # from which Triton converts to E4M3


def runs_alone(on: Tensor) -> bool:
    """Whether what is done with a tensor is a kernel each, on a GPU that Triton knows: it is traced
    by no compiler.
    """
    return on.is_cuda and not torch.compiler.is_compiling() and has_triton()


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled where it runs by itself on a GPU that Triton has all its types for.

    Its first argument is a tensor.  The first calls take seconds: with a type, and with a second
    size of a dimension, which is any from then on.  They come before a capture.
    """

    @cache
    def compiled() -> Callable[..., Any]:
        return torch.compile(function, fullgraph=True)

    @wraps(function)
    def called(on: Tensor, *others: Any) -> Any:
        if runs_alone(on) and torch.cuda.get_device_capability(on.device) >= _CAPABILITY:
            return compiled()(on, *others)
        return function(on, *others)

    return called
