"""A head and its loss in chunks of rows: more rows than a chunk has give what each chunk gives."""

from __future__ import annotations

from types import ModuleType

import gpu_support as support
import pytest
import torch
from gpu_support import Operands
from torch import Tensor

NAME = "linear_cross_entropy"
CHUNK = 2048
ROWS = (0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 5000)
HIDDEN, VOCABULARY = 264, 1032
IGNORED = -100
SUMS = 2**-7
"""Relative: a sum of chunks that are each rounded to bfloat16, against one that is rounded once."""


def operands(rows: int, dtype: torch.dtype) -> tuple[Operands, Tensor]:
    """Of the function, and the gradient of the losses; every 97th target is ignored."""
    rng = torch.Generator().manual_seed(rows)
    targets = torch.randint(VOCABULARY, (rows,), generator=rng)
    targets[::97] = IGNORED
    given = {
        "x": support.randn((rows, HIDDEN), dtype, 1),
        "weight": support.randn((VOCABULARY, HIDDEN), dtype, 2, HIDDEN**-0.5),
        "targets": targets.cuda(),
    }
    return given, support.randn((rows,), torch.float32, 3)


@pytest.mark.parametrize("dtype", support.DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_rows_do_not_know_of_each_other(bundle: ModuleType, rows: int, dtype: torch.dtype) -> None:
    """Losses and dx are the bits of each chunk alone, the weight's gradient their sum."""
    function = support.function_of(bundle, NAME)
    given, dloss = operands(rows, dtype)
    whole = support.forward_backward(function, given, dloss)
    parts = []
    for first in range(0, rows, CHUNK):
        own = slice(first, first + CHUNK)
        part = {**given, "x": given["x"][own], "targets": given["targets"][own]}
        parts.append(support.forward_backward(function, part, dloss[own]))
    if not parts:
        assert whole["y"].numel() == whole["x"].numel() == 0
        assert not whole["weight"].any()
        return
    apart = {name: torch.cat([part[name] for part in parts]) for name in ("y", "x")}
    support.assert_same({name: whole[name] for name in apart}, apart)
    total = torch.stack([part["weight"].double() for part in parts]).sum(0)
    assert support.relative_error(whole["weight"], total) < SUMS
    again = support.forward_backward(function, given, dloss)
    support.assert_same(again, whole)


def test_a_replay_has_the_bits_of_an_eager_call(bundle: ModuleType) -> None:
    function = support.function_of(bundle, NAME)
    given, dloss = operands(5000, torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        eager = support.forward_backward(function, given, dloss)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = support.forward_backward(function, given, dloss)
    for _ in range(3):
        graph.replay()
        support.assert_same(results, eager)


def test_logits_are_never_stored_whole(bundle: ModuleType) -> None:
    """Peak memory above the operands: a chunk of logits, and the sums of the weight's gradient."""
    rows, hidden, vocabulary = 16384, 64, 32000
    x = support.randn((rows, hidden), torch.bfloat16, 1).requires_grad_()
    weight = support.randn((vocabulary, hidden), torch.bfloat16, 2).requires_grad_()
    targets = torch.zeros(rows, dtype=torch.int64, device="cuda")
    function = support.function_of(bundle, NAME)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function(x=x, weight=weight, targets=targets).sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    gradients = 2 * x.numel() + (2 + 4) * weight.numel()
    assert peak <= 2 * CHUNK * vocabulary + gradients + (1 << 22)
    assert peak < 2 * rows * vocabulary / 4
