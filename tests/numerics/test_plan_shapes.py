"""Buffers that a plan declares for quantised copies are those that the reference returns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from subject import RECIPES, ROOT, quantization, reference

from fusegen.checks.load import load
from fusegen.ir.buffers import Buffer
from fusegen.ir.dtypes import DType, info
from fusegen.ir.kernel import LayoutSpec
from fusegen.ir.quantization import Orientation, Role
from fusegen.ir.shapes import Shape, evaluate
from fusegen.passes.copies import make_copy

SPECS = load([Path(ROOT) / "specs"])
SIZES = {"T": 70, "K": 72, "N": 40, "E": 3}
LAYOUTS = [(True, 32, 16), (True, 128, 16), (True, 64, 64), (False, 32, 16)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("role", "dims", "grouped"),
    [
        (Role.INPUT, ("T", "K"), False),
        (Role.INPUT, ("T", "K"), True),
        (Role.GRAD_OUTPUT, ("T", "N"), True),
        (Role.WEIGHT, ("N", "K"), False),
        (Role.WEIGHT, ("E", "N", "K"), True),
    ],
)
def test_plan_and_reference_agree(
    recipe: str, role: Role, dims: tuple[str, ...], grouped: bool, layout: tuple[bool, int, int]
) -> None:
    transposed = layout[0] or recipe == "nvfp4"  # columnwise E2M1 is transposed everywhere
    spec = SPECS.recipes[recipe].roles[role]
    q = quantization(recipe, role.value)
    source = Buffer("x", DType.IO, Shape.parse(dims), role)
    groups = Buffer("split_sizes", DType.INT64, Shape.parse(("E",))) if grouped else None
    count = SIZES["E"] if grouped else 1
    got = reference.quantize(
        torch.ones([SIZES[dim] for dim in dims]),
        q,
        columnwise=True,
        group_sizes=torch.tensor([30, 0, 33]) if grouped and len(dims) == 2 else None,
        layout=reference.Layout(transposed, *layout[1:]),
        scale=torch.ones(count) if q.source == "history" else None,
        rng_state=torch.tensor([0, 0]),
    )
    for orientation, operand in zip(Orientation, got, strict=True):
        place = LayoutSpec(transposed, *layout[1:])
        _, buffers = make_copy(source, role, orientation, spec, place, groups)
        tensors = [operand.data, operand.scale, operand.amax]
        for buffer, tensor in zip(buffers, tensors, strict=False):
            assert tuple(evaluate(dim, SIZES) for dim in buffer.shape.dims) == tuple(tensor.shape)
            assert getattr(torch, info(buffer.dtype).torch) == tensor.dtype
        assert len(buffers) == 2 + (spec.tensor_scale is not None)
