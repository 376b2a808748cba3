"""Which kernels ran: ours alone, the ones that the plan's rules choose, and no others."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import bundles
import gpu_support as support
import pytest
import selection
import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


def kernels_of(call: Callable[[], Any]) -> list[str]:
    """Names of what ran on the device during the call, in order."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        call()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    return [event.name for event in sorted(events, key=lambda event: event.time_range.start)]


def launches(names: list[str]) -> list[selection.Launch]:
    found = [selection.launch_of(name) for name in names]
    return [launch for launch in found if launch is not None]


def assert_ours_alone(names: list[str]) -> None:
    foreign = [name for name in names if "fusegen::" not in name]
    assert names and not foreign, foreign


CASE = support.ragged("kernels", 6, 1500, 264, 392)
MLP_GRADIENTS = ["dgrad", "dgrad", "wgrad", "wgrad"]
"""Sorted; the plan says which gradient runs first."""


@pytest.mark.parametrize("dtype", support.DTYPES)
def test_grouped_linear_runs_our_kernels_alone(bundle: ModuleType, dtype: torch.dtype) -> None:
    operands = support.grouped_linear_operands(CASE, dtype)
    dy = support.randn((CASE.tokens, CASE.n), dtype, 9)
    function = support.function_of(bundle, "grouped_linear")
    names = kernels_of(lambda: support.forward_backward(function, operands, dy))
    assert_ours_alone(names)
    assert [launch.kind for launch in launches(names)] == list(selection.KINDS)
    assert sum("group_sum" in name for name in names) == 1


@pytest.mark.parametrize("dtype", support.DTYPES)
def test_linear_runs_our_kernels_alone(bundle: ModuleType, dtype: torch.dtype) -> None:
    operands = {
        "x": support.randn((700, 136), dtype, 1),
        "weight": support.randn((264, 136), dtype, 2),
        "bias": support.randn((264,), dtype, 3),
    }
    dy = support.randn((700, 264), dtype, 9)
    function = support.function_of(bundle, "linear")
    names = kernels_of(lambda: support.forward_backward(function, operands, dy))
    assert_ours_alone(names)
    assert [launch.kind for launch in launches(names)] == list(selection.KINDS)
    assert sum("group_sum" in name for name in names) == 1


@pytest.mark.parametrize("dtype", support.DTYPES)
def test_grouped_mlp_runs_our_kernels_alone(bundle: ModuleType, dtype: torch.dtype) -> None:
    operands = support.grouped_mlp_operands(CASE, dtype)
    dy = support.randn((CASE.tokens, CASE.k), dtype, 9)
    function = support.function_of(bundle, "grouped_mlp")
    names = kernels_of(lambda: support.forward_backward(function, operands, dy))
    assert_ours_alone(names)
    kinds = [launch.kind for launch in launches(names)]
    assert kinds[:2] == ["fprop", "fprop"] and sorted(kinds[2:]) == MLP_GRADIENTS
    plan = bundles.load_cell(bundle, "grouped_mlp__bf16").GroupedMLP.describe()
    apart = 1 if "grouped_gemm_pointwise" in plan else 2  # or in the epilogue of the first GEMM
    assert sum("pointwise" in name for name in names) == apart
    assert sum("group_sum" in name for name in names) == 2


def _call(bundle: ModuleType, kind: str, sizes: selection.Reach, dtype: torch.dtype) -> Any:
    """One GEMM of one kind through the op that holds it."""
    forward = support.op_of(bundle, "grouped_linear__bf16_forward")
    backward = support.op_of(bundle, "grouped_linear__bf16_backward")
    x = support.randn((sizes.tokens, sizes.k), dtype, 1)
    weight = support.randn((sizes.groups, sizes.n, sizes.k), dtype, 2)
    dy = support.randn((sizes.tokens, sizes.n), dtype, 3)
    splits = support.splits_tensor([sizes.tokens // sizes.groups] * sizes.groups)
    if kind == "fprop":
        return lambda: forward(x, weight, splits, None)
    return lambda: backward(dy, x, splits, weight, kind == "dgrad", kind == "wgrad", False)


@pytest.mark.parametrize("dtype", support.DTYPES)
@pytest.mark.parametrize("kind", selection.KINDS)
def test_the_chosen_kernel_runs(bundle: ModuleType, kind: str, dtype: torch.dtype) -> None:
    element = str(dtype).removeprefix("torch.")
    plan = bundles.load_cell(bundle, "grouped_linear__bf16").GroupedLinear.describe()
    rules = selection.gemm_rules(plan, kind)
    for point, sizes in selection.reach_every_point(kind, rules).items():
        names = kernels_of(_call(bundle, kind, sizes, dtype))
        assert_ours_alone(names)
        assert launches(names) == [selection.Launch(kind, element, point)], sizes
