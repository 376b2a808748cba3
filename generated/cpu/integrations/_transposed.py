"""Matrices of one-byte elements, transposed at the speed of memory."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.utils._triton import has_triton, has_triton_package

__all__ = ["fill_transposed"]

_ROWS, _COLUMNS = 64, 128
_transpose: Any = None

if has_triton_package():
    triton: Any = importlib.import_module("triton")  # which need not be there for type checkers
    tl: Any = importlib.import_module("triton.language")

    # Lines of 128 bytes are read and of 64 written.  PyTorch's own copy reads byte by byte, and the
    # kernel that it compiles of one reaches a third of this one's speed.
    @triton.jit
    def _transpose(  # type: ignore[no-untyped-def]
        source,
        to,
        rows,
        columns,
        source_pitch,
        to_pitch,
        source_matrix,
        to_matrix,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
    ):
        """One tile of one matrix."""
        matrix = tl.program_id(2).to(tl.int64)
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (row[:, None] < rows) & (column[None, :] < columns)
        at = source + matrix * source_matrix + row[:, None] * source_pitch + column[None, :]
        values = tl.load(at, mask=inside)
        at = to + matrix * to_matrix + column[:, None] * to_pitch + row[None, :]
        tl.store(at, tl.trans(values), mask=tl.trans(inside))


def fill_transposed(to: Tensor, source: Tensor) -> None:
    """Write matrices transposed; in both, elements of a row are neighbours.

    Args:
        to: [..., columns, rows], of one leading dimension or none.
        source: [..., rows, columns], of the same type, which has one byte.
    """
    if not (to.is_cuda and has_triton()):
        to.copy_(source.mT)
        return
    rows, columns = source.shape[-2:]
    matrices = source.shape[0] if source.dim() == 3 else 1
    grid = (-(-rows // _ROWS), -(-columns // _COLUMNS), matrices)
    pitches = (source.stride(-2), to.stride(-2), source.stride(0), to.stride(0))
    with torch.cuda.device(to.device):
        _transpose[grid](
            source.view(torch.uint8),
            to.view(torch.uint8),
            rows,
            columns,
            *pitches,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
        )
