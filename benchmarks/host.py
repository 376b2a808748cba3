"""Host time of one call, on shapes so small that the device never is what one waits for."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import common
import peers
import torch
from common import OURS, Case, Outcome
from torch import Tensor, nn

TOKENS, WIDTH = 128, 128
CALLS = 1000
REPEATS = 9
EXPERTS = (8, 128)

Call = Callable[[], Any]


def _forward(module: nn.Module, *inputs: Any) -> Call:
    def call() -> Any:
        with torch.no_grad():
            return module(*inputs)

    return call


def _both(module: nn.Module, x: Tensor, *inputs: Any) -> Call:
    x = x.detach().requires_grad_()
    leaves = [x, *module.parameters()]
    dy = torch.randn_like(module(x, *inputs))
    return lambda: torch.autograd.grad(module(x, *inputs), leaves, dy)


def _microseconds(call: Call) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / CALLS * 1e6


def _contenders(package: Any) -> dict[str, tuple[nn.Module, tuple[Any, ...]]]:
    """Modules by name, with what they take after x."""
    make = {"device": common.DEVICE, "dtype": torch.bfloat16}
    found: dict[str, tuple[nn.Module, tuple[Any, ...]]] = {
        "nn.Linear": (nn.Linear(WIDTH, WIDTH, bias=False, **make), ()),
        "Linear": (package.linear__bf16.Linear(WIDTH, WIDTH, **make), ()),
    }
    for experts in EXPERTS:
        layer = package.grouped_linear__bf16.GroupedLinear(experts, WIDTH, WIDTH, **make)
        each = torch.full((experts,), TOKENS // experts, dtype=torch.int64, device=common.DEVICE)
        found[f"GroupedLinear, {experts} experts"] = (layer, (each,))
    return found | _transformer_engine()


def _transformer_engine() -> dict[str, tuple[nn.Module, tuple[Any, ...]]]:
    """TransformerEngine's modules of the same size, where it is installed."""
    name = "TransformerEngine"
    there = peers.installed({name: peers.PEERS[name]})
    if not there:
        return {}
    te: Any = importlib.import_module(there[name].module)
    make = {"bias": False, "params_dtype": torch.bfloat16}
    found: dict[str, tuple[nn.Module, tuple[Any, ...]]] = {
        "te.Linear": (te.Linear(WIDTH, WIDTH, **make), ())
    }
    for experts in EXPERTS:
        layer = te.GroupedLinear(experts, WIDTH, WIDTH, **make)
        found[f"te.GroupedLinear, {experts} experts"] = (layer, ([TOKENS // experts] * experts,))
    return found


def _measure(
    case: str, make: Callable[..., Call], contenders: dict[str, tuple[nn.Module, tuple[Any, ...]]]
) -> list[Outcome]:
    """Microseconds per call, contenders taking turns."""
    x = common.normal(TOKENS, WIDTH)

    def call_of(name: str, given: tuple[nn.Module, tuple[Any, ...]]) -> Call:
        module, rest = given
        call = make(module, x, *rest)
        call()
        return call

    calls, failures = common.try_each(case, contenders, call_of)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(REPEATS + 1):
        for name, call in calls.items():
            value = _microseconds(call)
            if turn:  # the first round warms up
                samples[name].append(value)
    rows = [
        common.row(f"{case}: {name}", _who(name), "us", times, extra=_ratio(samples, name))
        for name, times in samples.items()
    ]
    return [*rows, *failures]


def host() -> Iterator[Case]:
    """Every contender without and with gradients."""
    contenders = _contenders(common.bundle())
    for case, make in (("forward", _forward), ("forward + backward", _both)):
        yield Case(case, partial(_measure, case, make, contenders))


def _who(name: str) -> str:
    return {"n": "torch", "t": "transformer_engine"}.get(name[0], OURS)


def _ratio(samples: dict[str, list[float]], name: str) -> dict[str, float]:
    middle = REPEATS // 2
    return {"times_nn_linear": sorted(samples[name])[middle] / sorted(samples["nn.Linear"])[middle]}
