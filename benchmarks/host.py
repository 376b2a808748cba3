"""Host time of one call, on shapes so small that the device never is what one waits for.

Weights of 512 experts are not small, so calls come in bursts: in a full queue the host would wait.
A round's time is that of its fastest burst, since whatever else runs on the machine only ever adds;
ratios to nn.Linear are of the same rounds. The process stays on two cores: backwards have a thread
of their own, and one that moves finds cold caches.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import common
import pairs
import peers
import torch
from common import OURS, Case, Outcome
from torch import Tensor, nn

TOKENS, WIDTH = 128, 128
BURST, BURSTS = 20, 5  # calls without a wait, and how often in a round
CORES = 2
EXPERTS = (8, 512)
LINEAR = "nn.Linear"
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
    """Of one call in the fastest burst."""
    bursts = []
    for _ in range(BURSTS):
        common.synchronize()
        start = time.perf_counter()
        for _ in range(BURST):
            call()
        bursts.append(time.perf_counter() - start)
    common.synchronize()
    return min(bursts) / BURST * 1e6


@contextmanager
def pinned(count: int = CORES) -> Iterator[None]:
    """All threads of this process, and those that they start, on the last cores it may use."""
    before = os.sched_getaffinity(0)
    _move(sorted(before)[-count:])
    try:
        yield
    finally:
        _move(before)


def _move(cores: Iterable[int]) -> None:
    wanted = set(cores)
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread.name), wanted)


def _contenders(package: Any) -> Contenders:
    """Modules by name, with what they take after x."""
    linear = nn.Linear(WIDTH, WIDTH, bias=False, device=common.DEVICE, dtype=torch.bfloat16)
    return {LINEAR: (linear, ()), **dict(_ours(package)), **_transformer_engine()}


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
    for call in calls.values():
        _microseconds(call)  # warms up
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for order in pairs.orders(list(calls), common.ROUNDS):
        for name in order:
            samples[name].append(_microseconds(calls[name]))
    return [*(_row(case, name, samples) for name in samples), *failures]


def _row(case: str, name: str, samples: Mapping[str, Sequence[float]]) -> common.Row:
    over = pairs.ratio(samples[name], samples[LINEAR])
    return common.row(
        *(f"{case}: {name}", _who(name), "us", samples[name]),
        extra={"times_nn_linear": over.median},
        paired={LINEAR: over},
    )


def host(*, quick: bool = False) -> Iterator[Case]:
    """Every contender without and with gradients; quick: modules of bf16 alone."""
    contenders = _contenders(common.bundle())
    if quick:
        contenders = {name: each for name, each in contenders.items() if "fp" not in name}
    with pinned():
        for case, make in (("forward", _forward), ("forward + backward", _both)):
            yield Case(case, partial(_measure, case, make, contenders))


def _who(name: str) -> str:
    return {"n": "torch", "t": "transformer_engine"}.get(name[0], OURS)
