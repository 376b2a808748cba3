"""SonicMoE, where it is installed: the experts of a layer in bf16, a peer of `moe_layer`.

Its plan of the routing, products whose loaders gather, and the sum over a token's experts; QuACK
tunes the tiles of each shape by itself, before anything is timed (`QUACK_CACHE_DIR` keeps what it
compiles).  In its weight of `fc1` rows of gate and up alternate.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

NAME = "SonicMoE"


def is_installed() -> bool:
    return importlib.util.find_spec("sonicmoe") is not None


def alternating(fc1: Tensor) -> Tensor:
    """fc1 [E, 2 I, H] with gate before up, as its own leaf in SonicMoE's order."""
    experts, rows, hidden = fc1.shape
    mixed = fc1.detach().view(experts, 2, rows // 2, hidden).transpose(1, 2)
    return mixed.reshape(fc1.shape).requires_grad_()


def in_halves(gradient: Tensor) -> Tensor:
    """The gradient of such a leaf in the order of fc1."""
    experts, rows, hidden = gradient.shape
    return gradient.view(experts, rows // 2, 2, hidden).transpose(1, 2).reshape(gradient.shape)


def experts(x: Tensor, fc1: Tensor, fc2: Tensor, probs: Tensor, ids: Tensor) -> Tensor:
    """x [T, H], alternating fc1 [E, 2 I, H], fc2 [E, H, I], probs and ids [T, K] -> [T, H]."""
    functional, plan, swiglu = _installed()
    tokens, choices = ids.shape
    rows, count = tokens * choices, fc2.shape[0]

    def integers(length: int) -> Tensor:
        return torch.empty(length, dtype=torch.int32, device=x.device)

    scatter, reverse, gather = (integers(rows) for _ in range(3))
    frequency, offsets = integers(count), integers(count + 1)
    plan(ids, count, frequency, offsets, gather, scatter, reverse)
    places = gather, scatter, reverse, None, False
    a, h = functional._UpProjection.apply(
        *(x, fc1.permute(1, 2, 0), None, offsets, rows, choices, *places, swiglu, False, False)
    )
    shape = offsets, tokens, choices
    y: Tensor = functional._DownProjection.apply(
        *(a, h, fc2.permute(1, 2, 0), None, probs, *shape, *places, swiglu)
    )
    return y


def _installed() -> tuple[Any, Any, Any]:
    """Its functions, that of a routing's plan, and what it calls SwiGLU."""
    functional, enums, kernels = (
        importlib.import_module(f"sonicmoe.{name}")
        for name in ("functional", "enums", "functional.triton_kernels")
    )
    return functional, kernels.TC_topk_router_metadata_triton, enums.ActivationType.SWIGLU
