"""The statistics kernels themselves, on the CPU: what they count against the reference."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from .quantize_harness import (
    ATOMS,
    CSRC,
    RECIPES,
    UNTRANSPOSED,
    Buffer,
    Case,
    Kernels,
    Long,
    Pointer,
    address,
    compile_for_cpu,
    reference,
)
from .test_quantize_kernels import _case

CASES = ("ragged", "out of range", "dense", "wide weights", "nothing")
TALLY = 48  # bytes that a block leaves


class _Statistics(ctypes.Structure):
    _fields_ = [
        ("input", Pointer),
        ("group_sizes", Pointer),
        ("rows", Long),
        ("columns", Long),
        ("groups", Long),
        ("data", Pointer),
        ("scale", Pointer),
        ("amax", Pointer),
        ("pitch", Long),
        ("row_align", Long),
        ("token_pitch", Long),
        ("partials", Pointer),
        ("blocks", Long),
        ("output", Pointer),
    ]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    folder = tmp_path_factory.mktemp("statistics_kernels")
    return Kernels(compile_for_cpu("statistics_kernels.cuh", folder), "cpu")


@pytest.fixture(scope="module")
def measure() -> Any:
    """The reference's own measure; its module imports its neighbour."""
    folder = CSRC.parent / "reference"
    spec = importlib.util.spec_from_file_location(
        "reference_of_statistics", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"{spec.name}._statistics").measure


def _made(recipe: str, case: Case, columnwise: bool, align: int) -> Any:
    q = RECIPES[recipe].quantization
    arguments: dict[str, Tensor] = {}
    if q.source == "history":
        rng = torch.Generator().manual_seed(1)
        arguments["scale"] = torch.rand(case.groups, generator=rng) * 100
    if q.rounding == "stochastic":
        arguments["rng_state"] = torch.tensor([3, 7])
    made = reference.quantize(
        case.x, q, rowwise=not columnwise, columnwise=columnwise, group_sizes=case.splits,
        layout=reference.Layout(align=align), **arguments,
    )  # fmt: skip
    return made.columnwise if columnwise else made.rowwise


def _launched(
    kernels: Kernels, recipe: str, case: Case, operand: Any, *, blocks: int, token_major: bool
) -> Tensor:
    """The five numbers, as the kernel leaves them."""
    data, scale = operand.data.view(torch.uint8), operand.scale
    align, atoms = operand.layout.align, operand.layout.atoms
    if token_major:
        scale = reference.token_major(scale, case.splits, align=align)
    scale = scale.contiguous()
    partials, output = Buffer(blocks * TALLY, "cpu"), kernels.floats(5)
    arguments = _Statistics(
        input=address(case.x), group_sizes=address(case.splits), **case.sizes(),
        data=address(data), scale=address(scale), pitch=data.shape[-1], row_align=align,
        amax=address(operand.amax), token_pitch=scale.shape[1] if token_major else 0,
        partials=address(partials), blocks=blocks, output=address(output),
    )  # fmt: skip
    half, columnwise = int(case.x.dtype == torch.float16), int(operand.columnwise)
    untransposed = operand.columnwise and not operand.layout.transposed
    named = UNTRANSPOSED if untransposed else ATOMS if atoms else RECIPES
    config = named[recipe].config
    kernels.call("run_statistics", half, columnwise, config, arguments)
    partials.bytes()
    return output.floats()


def _check(
    kernels: Kernels,
    measure: Any,
    recipe: str,
    case: Case,
    columnwise: bool,
    *,
    blocks: int = 2,
    align: int = 32,
    token_major: bool = False,
) -> Tensor:
    operand = _made(recipe, case, columnwise, align)
    wanted = measure(case.x, operand, group_sizes=case.splits)
    found = _launched(kernels, recipe, case, operand, blocks=blocks, token_major=token_major)
    assert torch.equal(found[:4], wanted[:4]), (found, wanted)
    assert torch.allclose(found[4], wanted[4], rtol=1e-6, atol=0, equal_nan=True), (found, wanted)
    return found


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_case(kernels: Kernels, measure: Any, recipe: str, columnwise: bool) -> None:
    for name in CASES:
        dtype = torch.float16 if name == "wide weights" else torch.bfloat16
        _check(kernels, measure, recipe, _case(name, dtype), columnwise)


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("recipe", ["mx_1x32", "nv_16x16", "nv_1x16_both", "pow2_1x128"])
def test_scales_in_atoms(kernels: Kernels, measure: Any, recipe: str, columnwise: bool) -> None:
    q = ATOMS[recipe].quantization
    for name in CASES:
        case = _case(name, torch.float16 if name == "wide weights" else torch.bfloat16)
        made = reference.quantize(
            case.x, q, rowwise=not columnwise, columnwise=columnwise, group_sizes=case.splits,
            layout=reference.Layout(align=128, atoms=True),
            rng_state=torch.tensor([3, 7]) if q.rounding == "stochastic" else None,
        )  # fmt: skip
        operand = made.columnwise if columnwise else made.rowwise
        wanted = measure(case.x, operand, group_sizes=case.splits)
        found = _launched(kernels, recipe, case, operand, blocks=2, token_major=False)
        assert torch.equal(found[:4], wanted[:4]), (name, found, wanted)
        assert torch.allclose(found[4], wanted[4], rtol=1e-6, atol=0, equal_nan=True), name


@pytest.mark.parametrize("recipe", ["row_e5m2", "block_1x128", "mx_1x32", "pow2_128x128"])
def test_untransposed(kernels: Kernels, measure: Any, recipe: str) -> None:
    own = UNTRANSPOSED[recipe]
    for name in CASES:
        case = _case(name, torch.float16 if name == "wide weights" else torch.bfloat16)
        operand = reference.quantize(
            case.x, own.quantization, rowwise=False, columnwise=True, group_sizes=case.splits,
            layout=own.layout(128 if own.atoms else 32),
        ).columnwise  # fmt: skip
        wanted = measure(case.x, operand, group_sizes=case.splits)
        found = _launched(kernels, recipe, case, operand, blocks=2, token_major=False)
        assert torch.equal(found[:4], wanted[:4]), (name, found, wanted)
        assert torch.allclose(found[4], wanted[4], rtol=1e-6, atol=0, equal_nan=True), name


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("recipe", ["current_e4m3", "mx_1x32", "nv_1x16_hadamard"])
def test_rows_past_the_groups(
    kernels: Kernels, measure: Any, recipe: str, columnwise: bool
) -> None:
    case = _case("ragged", torch.bfloat16)
    assert case.splits is not None
    before = _check(kernels, measure, recipe, case, columnwise)
    case.x[int(case.splits.sum()) :] = torch.nan
    assert torch.equal(_check(kernels, measure, recipe, case, columnwise), before)
    assert before[0] > 0 and before[4] > 0


@pytest.mark.parametrize("recipe", ["block_1x128", "block_1x64"])
@pytest.mark.parametrize("align", [16, 128])
@pytest.mark.parametrize("columnwise", [False, True])
def test_layouts(kernels: Kernels, measure: Any, align: int, columnwise: bool, recipe: str) -> None:
    for name in ("ragged", "forty groups", "dense"):
        case = _case(name, torch.bfloat16)
        _check(
            kernels, measure, recipe, case, columnwise,
            align=align, token_major=not columnwise,
        )  # fmt: skip


def test_any_number_of_blocks(kernels: Kernels, measure: Any) -> None:
    """It decides the order of the sums, and nothing else; one number gives the same bits."""
    case = _case("ragged", torch.bfloat16)
    for blocks in (1, 7, 40):
        found = [
            _check(kernels, measure, "block_1x128", case, True, blocks=blocks) for _ in range(2)
        ]
        assert torch.equal(*found)


@pytest.mark.parametrize("columnwise", [False, True])
def test_losses_that_are_known(kernels: Kernels, measure: Any, columnwise: bool) -> None:
    """A scale of 1: beyond 464 saturates, below half of 2^-9 is lost."""
    x = torch.zeros(16, 8)
    x[0, :6] = torch.tensor([448.0, 464.0, 466.0, -1000.0, 2.0**-11, -(2.0**-10)])
    case = Case(x.bfloat16(), None)
    q = RECIPES["delayed_e4m3"].quantization
    made = reference.quantize(
        case.x, q, rowwise=not columnwise, columnwise=columnwise, scale=torch.ones(1)
    )
    operand = made.columnwise if columnwise else made.rowwise
    wanted = measure(case.x, operand)
    found = _launched(kernels, "delayed_e4m3", case, operand, blocks=2, token_major=False)
    assert wanted[:4].tolist() == found[:4].tolist() == [1000.0, 6.0, 2.0, 2.0]
