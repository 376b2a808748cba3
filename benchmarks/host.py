"""Host time of one call, on shapes so small that the device never is what one waits for.

Weights of 512 experts are not small, so calls come in bursts: in a full queue the host would wait.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import common
import peers
import torch
from common import OURS, Case, Outcome
from torch import Tensor, nn

TOKENS, WIDTH = 128, 128
BURST, BURSTS = 20, 20  # calls without a wait, and how often
REPEATS = 9
EXPERTS = (8, 512)
MODULES = {"linear": "Linear", "grouped_linear": "GroupedLinear", "grouped_mlp": "GroupedMLP"}

Call = Callable[[], Any]
Contender = tuple[nn.Module, tuple[Any, ...]]  # a module and what it takes after x
Contenders = Mapping[str, Contender]


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
    elapsed = 0.0
    for _ in range(BURSTS):
        common.synchronize()
        start = time.perf_counter()
        for _ in range(BURST):
            call()
        elapsed += time.perf_counter() - start
    common.synchronize()
    return elapsed / (BURSTS * BURST) * 1e6


def _contenders(package: Any) -> Contenders:
    """Modules by name, with what they take after x."""
    linear = nn.Linear(WIDTH, WIDTH, bias=False, device=common.DEVICE, dtype=torch.bfloat16)
    return {"nn.Linear": (linear, ()), **dict(_ours(package)), **_transformer_engine()}


def _ours(package: Any) -> Iterator[tuple[str, Contender]]:
    """Every module under every recipe; without a recipe's name it is bf16's."""
    make = {"device": common.DEVICE, "dtype": torch.bfloat16}
    for module, name in MODULES.items():
        for cell in common.bundles.cells_of(Path(package.__path__[0]), module):
            recipe = cell.partition("__")[2]
            label = name if recipe == "bf16" else f"{name} {recipe}"
            made = getattr(common.bundles.load_cell(package, cell), name)
            if module == "linear":
                yield label, (made(WIDTH, WIDTH, **make), ())
                continue
            for experts in EXPERTS:
                layer = made(experts, WIDTH, WIDTH, **make)
                yield f"{label}, {experts} experts", (layer, _routing(module, experts))


def _routing(module: str, experts: int) -> tuple[Tensor, ...]:
    """Group sizes as even as can be, and what weights the tokens of an MLP."""
    ranks = torch.arange(experts, device=common.DEVICE)
    sizes = TOKENS // experts + (ranks < TOKENS % experts).long()
    probs = torch.ones(TOKENS, device=common.DEVICE)
    return (sizes, probs) if module == "grouped_mlp" else (sizes,)


def _transformer_engine() -> Contenders:
    """TransformerEngine's modules of the same size, where it is installed."""
    name = "TransformerEngine"
    there = peers.installed({name: peers.PEERS[name]})
    if not there:
        return {}
    te: Any = importlib.import_module(there[name].module)
    make = {"bias": False, "params_dtype": torch.bfloat16}
    found: dict[str, Contender] = {"te.Linear": (te.Linear(WIDTH, WIDTH, **make), ())}
    for experts in EXPERTS:
        layer = te.GroupedLinear(experts, WIDTH, WIDTH, **make)
        found[f"te.GroupedLinear, {experts} experts"] = (
            layer,
            (_routing("te", experts)[0].tolist(),),
        )
    return found


def _measure(case: str, make: Callable[..., Call], contenders: Contenders) -> list[Outcome]:
    """Microseconds per call, contenders taking turns."""
    x = common.normal(TOKENS, WIDTH)

    def call_of(name: str, given: Contender) -> Call:
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
    rows = {
        name: common.row(f"{case}: {name}", _who(name), "us", times)
        for name, times in samples.items()
    }
    linear = rows["nn.Linear"].median
    timed = (replace(row, extra={"times_nn_linear": row.median / linear}) for row in rows.values())
    return [*timed, *failures]


def host() -> Iterator[Case]:
    """Every contender without and with gradients."""
    contenders = _contenders(common.bundle())
    for case, make in (("forward", _forward), ("forward + backward", _both)):
        yield Case(case, partial(_measure, case, make, contenders))


def _who(name: str) -> str:
    return {"n": "torch", "t": "transformer_engine"}.get(name[0], OURS)
