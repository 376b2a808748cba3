"""Routers: choices of the logits that the GPU has, weights, losses, gradients, and replays."""

from __future__ import annotations

import importlib
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import gpu_support as support
import pytest
import torch
from bundles import BUILD, EVIDENCE, library_of, load_bundle
from torch import Tensor

PLAIN = {
    "score": "softmax",
    "normalized": True,
    "top_k": 8,
    "groups": 1,
    "kept_groups": 1,
    "group_top": 1,
}
MODULES: dict[str, dict[str, Any]] = {
    "router": {},
    "router_deepseek_v3": {"score": "sigmoid", "groups": 8, "kept_groups": 4, "group_top": 2},
    "router_olmoe": {"normalized": False},
    "router_llama4": {"score": "sigmoid", "normalized": False, "top_k": 1},
    "router_deepseek_v2": {"groups": 8, "kept_groups": 3, "normalized": False, "top_k": 6},
    "router_deepseek_v4": {"score": "sqrt_softplus", "top_k": 6},
    "router_longcat": {"normalized": False, "top_k": 12},
}
"""What each module is generated with, besides what is plain."""
BIASED = ("router_deepseek_v3", "router_deepseek_v4", "router_longcat")
NOT_GIVEN_BACKWARDS = ("top_k", "groups", "kept_groups", "group_top")
SCALARS = {
    "eps": 1e-20,
    "least_sum": 0.0,
    "scale": 2.5,
    "aux_coefficient": 0.5,
    "z_coefficient": 0.25,
    "sequences": 1,
}
HIDDEN = 264
EXPERTS = (16, 64, 128, 136, 256, 264, 512, 1024)
ROWS = (0, 1, 31, 5000)
PROBLEMS = (
    *product(("router", "router_deepseek_v3"), EXPERTS, ROWS),
    *product([*MODULES][2:], (16, 136, 1024), (0, 31, 5000)),
)


def operands(rows: int, experts: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Input, weight, bias of the choice, and counts of more tokens than these."""
    x = support.randn((rows, HIDDEN), dtype, 1)
    weight = support.randn((experts, HIDDEN), dtype, 2, 2 * HIDDEN**-0.5)
    bias = support.randn((experts,), torch.float32, 3, 0.1)
    return x, weight, bias, torch.arange(experts, device=x.device)


def holder(folder: Path, module: str) -> ModuleType:
    """The bundle under test where it has a router, or that of further cells of its architecture."""
    for held in (folder, BUILD / EVIDENCE / folder.name):
        runs = support.DEVICE == "cpu" or library_of(held) is not None
        if runs and (held / f"{module}__bf16.py").is_file():
            return load_bundle(held, None if held == folder else f"further_{folder.name}")
    pytest.skip(f"neither {folder.name} nor its bundle of further cells has {module}")


def reference_of(bundle: ModuleType) -> Any:
    return importlib.import_module(f"{bundle.__name__}.reference._router")


@pytest.mark.parametrize("dtype", support.DTYPES)
@pytest.mark.parametrize(("module", "experts", "rows"), PROBLEMS)
def test_both_directions(
    folder: Path, module: str, experts: int, rows: int, dtype: torch.dtype
) -> None:
    """Of the same logits the reference chooses the same; gradients are those of float64."""
    bundle, biased = holder(folder, module), module in BIASED
    x, weight, bias, all_counts = operands(rows, experts, dtype)
    given = (x, weight, bias if biased else None, all_counts, None)
    forward = support.op_of(bundle, f"{module}__bf16_forward")
    probs, aux_loss, z_loss, ids, counts, logits = forward(
        *given, True, True, True, *SCALARS.values()
    )
    exact = x.double() @ weight.double().T
    assert logits.dtype == torch.float32
    assert ((logits - exact).abs() <= 1e-5 * (1 + exact.abs())).all()
    words: dict[str, Any] = {**SCALARS, **PLAIN, **MODULES[module]}
    bias_there = bias.cpu() if biased else None
    expected = reference_of(bundle).forward(
        logits.cpu(), **words, choice_bias=bias_there, all_counts=all_counts.cpu()
    )
    # Scores of two devices differ by a rounding, and so may a choice where two are as near.
    same = (ids.cpu() == expected[3]).all(-1)
    assert same.all() if not biased else same.float().mean() > 0.999 or not rows
    assert torch.equal(counts, ids.long().flatten().bincount(minlength=experts))
    assert ((probs.cpu() - expected[0]).abs()[same] <= 1e-5).all()
    for loss, other in ((aux_loss, expected[1]), (z_loss, expected[2])):
        assert abs(loss.item() - other.item()) <= 1e-4 * abs(other.item())
    dprobs = support.randn((rows, words["top_k"]), torch.float32, 4)
    incoming = (dprobs, torch.tensor(30.0, device=x.device), torch.tensor(-20.0, device=x.device))
    function = getattr(importlib.import_module(f"{bundle.__name__}.{module}__bf16"), module)
    leaves = tuple(each.requires_grad_() for each in (x, weight, weight.new_zeros(experts)))
    results = function(*leaves[:2], given[2], all_counts, leaves[2], **SCALARS)
    dx, dweight, dbias = torch.autograd.grad(results[:3], leaves, incoming)
    scalars = {name: value for name, value in words.items() if name not in NOT_GIVEN_BACKWARDS}
    dlogits = reference_of(bundle).backward(
        dprobs.double(),
        logits.double(),
        ids=ids,
        counts=counts,
        like=exact,
        **scalars,
        all_counts=all_counts,
        grad_aux=incoming[1].double(),
        grad_z=incoming[2].double(),
    )
    tolerance = 2 * support.TOLERANCE[dtype]
    assert support.relative_error(dx, dlogits @ weight.detach().double()) < tolerance
    assert support.relative_error(dweight, dlogits.T @ x.detach().double()) < tolerance
    assert support.relative_error(dbias, dlogits.sum(0)) < tolerance


def test_logits_that_are_not_finite(folder: Path) -> None:
    """Every token chooses experts that differ and exist, and what follows from NaN is NaN."""
    x, weight, *_ = operands(64, 128, torch.bfloat16)
    x[1], x[2, 0] = torch.nan, torch.inf
    probs, _, _, ids, counts = support.function_of(holder(folder, "router"), "router")(x, weight)
    assert ((ids >= 0) & (ids < 128)).all() and counts.sum() == 64 * 8
    assert (ids.sort(-1).values.diff() > 0).all()
    assert probs[1].isnan().all() and probs[2].isnan().any()
    assert probs[3:].isfinite().all()


@pytest.mark.skipif(support.DEVICE == "cpu", reason="the CPU has no graphs")
@pytest.mark.parametrize("module", ["router_deepseek_v3", "router_deepseek_v4"])
def test_a_replay_has_the_bits_of_an_eager_call(folder: Path, module: str) -> None:
    x, weight, bias, _ = operands(4096, 256, torch.bfloat16)
    function = support.function_of(holder(folder, module), module)
    coefficients = {"aux_coefficient": 0.5, "z_coefficient": 0.25}

    def run() -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
        results: Any = function(*leaves, bias, **coefficients)
        total = results[0].square().sum() + results[1] + results[2]
        return (*results, *torch.autograd.grad(total, leaves))

    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        eager = [each.detach().clone() for each in run()]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(3):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, eager, strict=True))
