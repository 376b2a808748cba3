"""Rows that ranks send to each other, added up in one kernel."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.utils._triton import has_triton, has_triton_package

__all__ = ["add_rows"]

_ELEMENTS, _ALIGNED = 2048, 8  # of a block; a thread has vectors of as many
_add: Any = None

if has_triton_package():
    triton: Any = importlib.import_module("triton")  # which need not be there for type checkers
    tl: Any = importlib.import_module("triton.language")

    # PyTorch's own sum of a few strided terms reads at a quarter of the memory's speed.  One kernel
    # for all sizes: none is compiled while a graph is captured, if one such call was before.
    @triton.jit(do_not_specialize=["vectors", "pitch_vectors"])
    def _add(  # type: ignore[no-untyped-def]
        others,
        own,
        total,
        vectors,
        pitch_vectors,
        TERMS: tl.constexpr,
        ELEMENTS: tl.constexpr,
        ALIGNED: tl.constexpr,
    ):
        """One block of the sum: terms in their order, then the own one."""
        at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
        inside = at < vectors.to(tl.int64) * ALIGNED
        pitch = pitch_vectors.to(tl.int64) * ALIGNED
        found = tl.load(others + at, mask=inside).to(tl.float32)
        for term in tl.static_range(1, TERMS):
            found += tl.load(others + term * pitch + at, mask=inside)
        found += tl.load(own + at, mask=inside)
        tl.store(total + at, found, mask=inside)


def add_rows(others: Tensor, own: Tensor, total: Tensor) -> None:
    """Terms and one more, added up in fp32 in their order and rounded once; of integers exact.

    Args:
        others: [terms, ...], each of which is contiguous.
        own: [...], contiguous, of the same type.
        total: where their sum goes, the own ones or others of their shape and type.
    """
    if len(others) == 1:
        torch.add(others[0], own, out=total)
        return
    if not own.is_floating_point():
        torch.add(others.sum(0, dtype=own.dtype), own, out=total)
        return
    count, pitch = own.numel(), others.stride(0)
    whole = count % _ALIGNED == pitch % _ALIGNED == 0
    if not (own.is_cuda and whole and has_triton()):
        first, *rest = others
        total.copy_(sum((*rest, own), first.float()))
    elif count:
        with torch.cuda.device(own.device):
            _add[(-(-count // _ELEMENTS),)](
                others,
                own,
                total,
                count // _ALIGNED,
                pitch // _ALIGNED,
                TERMS=len(others),
                ELEMENTS=_ELEMENTS,
                ALIGNED=_ALIGNED,
            )
