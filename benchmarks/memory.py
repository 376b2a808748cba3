"""Memory of the whole expert MLP: held between forward and backward, and at the worst moment.

Nobody is timed.  Above what a step finds, in GiB: `held` is what there is when gradients are asked
for, beside y; `peak` is the most that there is in the step, y and all gradients included.  Torch's
is in bf16.  Cases are named after models, `MODEL main_grad` as in `mlp`.

On the CPU tensors that autograd saves stand for what is held, and what PyTorch's allocator handed
out for the peak: that it runs, for the reference is no launcher.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import common
import floors
import mlp
import shapes
import torch
from common import Case, Outcome
from torch import Tensor

from fusegen.ir.buffers import size_in_bytes
from fusegen.ir.shapes import evaluate
from fusegen.steps.footprint import backward_peak, held

GIB = 2**30


def measured(step: mlp.Step) -> dict[str, float]:
    """What one step holds, and its peak, GiB."""
    if common.DEVICE != "cpu":
        return mlp.memory_of(step)
    return {"held_gib": _saved_bytes(step) / GIB, "peak_gib": _cpu_peak(step) / GIB}


def _saved_bytes(step: mlp.Step) -> int:
    """Of tensors that autograd saves, each storage once."""
    found: dict[int, int] = {}

    def kept(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(kept, lambda tensor: tensor):
        step()
    return sum(found.values())


def _cpu_peak(step: mlp.Step) -> int:
    """The most that the CPU's allocator had handed out at once, above what it had before."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()
    now = worst = 0
    results: Any = profile.profiler
    for event in results.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            worst = max(worst, now)
    return worst


def planned(cell: str, arch: str, lengths: Mapping[str, int]) -> dict[str, float]:
    """What the plan of a cell comes to, GiB: made for the backward, and the backward's peak."""
    plan = floors.plan_of(cell, arch)
    made = sum(evaluate(size_in_bytes(plan.buffer(name)), lengths) for name in held(plan))
    peak = backward_peak(plan, lengths)
    return {"planned_held_gib": made / GIB, "planned_backward_gib": peak / GIB}


def _rows(package: Any, model: mlp.Model, case: str, made: Mapping[str, mlp.Contender]) -> Any:
    """A row of each contender whose results are torch's."""
    contenders, failures, _ = mlp.as_torch(case, made)
    arch = mlp.ARCH if common.DEVICE == "cpu" else Path(package.__path__[0]).name

    def row(name: str, contender: mlp.Contender) -> Outcome:
        if common.DEVICE != "cpu":
            torch.cuda.empty_cache()
        known = measured(contender.step)
        own = planned(contender.cell, arch, model.lengths) if _is_ours(name) else {}
        return common.row(case, name, "GiB", [known["peak_gib"]], extra={**known, **own})

    rows, more = common.try_each(case, contenders, row)
    return [*rows.values(), *failures, *more]


def _is_ours(contender: str) -> bool:
    return contender.split()[0] == common.OURS


def _case(package: Any, shape: shapes.Expert, *, main_grad: bool) -> list[Outcome]:
    torch._dynamo.reset()
    compiled = torch.compile(mlp.torch_mlp, fullgraph=True, dynamic=False)
    model = mlp.Model.of(shape)
    if main_grad:
        made = mlp.adding(package, model, compiled)
        return list(_rows(package, model, f"{shape.name} main_grad", made))
    made = mlp.plain(package, model, mlp.cells_of(package), compiled)
    return list(_rows(package, model, shape.name, made))


def memory(*, quick: bool = False) -> Iterator[Case]:
    """The expert MLP of seven models under every recipe and choice; of three with main_grad."""
    package = common.bundle()
    closely = (shapes.SMALL,) if quick else shapes.EXPERTS
    for shape in (*closely, *(() if quick else shapes.MORE_EXPERTS)):
        measure: Callable[..., list[Outcome]] = partial(_case, package, shape)
        yield Case(shape.name, partial(measure, main_grad=False))
        if shape in closely:
            yield Case(f"{shape.name} main_grad", partial(measure, main_grad=True))
