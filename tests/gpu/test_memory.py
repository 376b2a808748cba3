"""What a forward keeps for its backward: the plan's saved tensors to the byte, nothing else."""

from __future__ import annotations

from types import ModuleType

import bundles
import pytest
import torch
from programs import Programs

from fusegen.checks.load import load
from fusegen.ir.buffers import size_in_bytes
from fusegen.ir.naming import Cell, need
from fusegen.ir.plan import ModulePlan
from fusegen.ir.shapes import evaluate
from fusegen.passes.pipeline import resolve
from fusegen.publish.paths import builtin_specs

MODULES = ("linear", "grouped_linear", "grouped_mlp")
CELLS = [
    pytest.param(folder, cell, id=f"{folder.name}-{cell}")
    for folder in bundles.bundles_to_test(torch.cuda.get_device_capability())
    for name in MODULES
    for cell in bundles.cells_of(folder, name, choices=True)
]
SIZES = {"T": 1000, "E": 5, "K": 264, "N": 392, "H": 264, "F": 200}
SPECS = load([builtin_specs()])
BLOCK = 512  # PyTorch's allocator rounds to multiples of it


def plan_of(arch: str, cell: str) -> ModulePlan:
    return resolve(SPECS, arch, [Cell.parse(cell)]).modules[0]


def rounded(count: int) -> int:
    return -(-count // BLOCK) * BLOCK


def saved_bytes(plan: ModulePlan, sizes: dict[str, int], wanted: tuple[str, ...]) -> int:
    """Of what the forward makes; inputs and parameters are somebody else's memory."""
    given = {argument.buffer for argument in plan.forward.arguments}
    flags = {need(name) for name in wanted}
    return sum(
        rounded(evaluate(size_in_bytes(plan.buffer(kept.buffer)), sizes))
        for kept in plan.saved
        if kept.buffer not in given and (not kept.when or flags & set(kept.when))
    )


@pytest.mark.parametrize(("folder", "cell"), CELLS, indirect=["folder"])
def test_a_forward_keeps_what_the_plan_saves(bundle: ModuleType, cell: str) -> None:
    programs = Programs(bundle, cell)
    tests, plan = programs.tests, plan_of(bundle.__name__.removeprefix("bundle_"), cell)
    function = getattr(programs.module, cell.partition("__")[0])
    sizes = {name: size for name, size in SIZES.items() if name in tests.SIZES}
    tensors = programs.inputs(torch.bfloat16, None, sizes)
    sizes["T"] = tensors["x"].shape[:-1].numel()  # rows, whatever dimensions they come in
    for wanted in (tests.WANTED, *((name,) for name in tests.WANTED)):
        leaves = {name: tensors[name].detach().requires_grad_() for name in wanted}
        before = torch.cuda.memory_allocated()
        y = function(**{**tensors, **leaves})
        held = torch.cuda.memory_allocated() - before
        assert held == rounded(y.nbytes) + saved_bytes(plan, sizes, wanted), wanted
        del y
        assert torch.cuda.memory_allocated() == before, wanted
