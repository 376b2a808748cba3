"""Quantised recipes: copies and state bit for bit as the reference has them, GEMMs closely.

The reference runs on the same device, so that large cases cost little.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import bundles
import gpu_support as support
import pytest
import selection
import torch
import yaml
from gpu_support import Case
from programs import Outcome, Programs
from torch import Tensor

FOLDERS = bundles.quantized_bundles()
CELLS, DENSE_CELLS = (
    sorted({cell for folder in FOLDERS for cell in bundles.quantized_cells(folder, module)})
    for module in ("grouped_linear", "linear")
)
CASES = [case for case in support.grouped_cases() if case.work < 1e10]
SUMMED = 4e-3  # of a bias gradient: fp32 sums, rounded once
# Of GEMMs of codes that have all scales at their end: fp32 sums, which seldom round otherwise
# than the reference's. Codes decoded by their scales would leave 2e-3.
OF_CODES = 1.5e-3


def tolerance_of(programs: Programs) -> float:
    """What the recipe accepts of a GEMM, whoever wrote it."""
    name = f"recipes/{programs.cell.split('__')[1]}.yaml"
    folders = bundles.spec_folders(Path(programs.module.__file__).parent)
    path = next(path for folder in folders if (path := folder / name).exists())
    return float(yaml.safe_load(path.read_text("utf-8"))["tolerance"]["gemm"])


def same_bits(name: str, got: Tensor | None, expected: Tensor | None) -> None:
    if got is None or expected is None:
        assert got is None and expected is None, name
        return
    assert got.dtype == expected.dtype and got.shape == expected.shape, name
    differ = int((support.bytes_of(got) != support.bytes_of(expected)).sum())
    assert differ == 0, f"{name}: {differ} of {got.nbytes} bytes differ"


def compare(programs: Programs, got: Outcome, expected: Outcome) -> None:
    cell = programs.cell
    codes = selection.multiplies_codes(programs.module._PLAN)
    limit = OF_CODES if codes else max(tolerance_of(programs), SUMMED)
    for index, (one, other) in enumerate(zip(got.kept, expected.kept, strict=True)):
        same_bits(f"{cell}: kept tensor {index}", one, other)
    assert got.states.keys() == expected.states.keys()
    for name, state in got.states.items():
        same_bits(f"{cell}: {name}", state, expected.states[name])
    pairs = [("y", got.y, expected.y)]
    pairs += [
        (f"gradient {index}", one, other)
        for index, (one, other) in enumerate(zip(got.gradients, expected.gradients, strict=True))
    ]
    for name, one, other in pairs:
        assert one is not None and other is not None, f"{cell}: {name}"
        error = support.relative_error(one, other.double())
        assert error <= limit, f"{cell}: {name}: {error}"


def check(bundle: ModuleType, cell: str, case: Case, dtype: torch.dtype) -> Outcome:
    programs = Programs(bundle, cell)
    tensors, dy = programs.step(case, dtype)
    got = programs.compiled(tensors, dy)
    compare(programs, got, programs.plain(tensors, dy))
    return got


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("cell", CELLS)
def test_grouped(bundle: ModuleType, cell: str, case: Case) -> None:
    dtype = torch.float16 if case.name in ("E7", "square136") else torch.bfloat16
    got = check(bundle, cell, case, dtype)
    used = support.bounds(case.splits, case.tokens)[-1][1]
    assert not got.y[used:].any()


@pytest.mark.parametrize("tokens", [0, 1, 7, 130, 4096])
@pytest.mark.parametrize(("k", "n"), [(8, 1032), (24, 200), (136, 24), (1032, 136)])
@pytest.mark.parametrize("cell", DENSE_CELLS)
def test_dense(bundle: ModuleType, cell: str, k: int, n: int, tokens: int) -> None:
    programs = Programs(bundle, cell)
    rows = 3 * tokens  # the tests of a bundle put three leading rows before T
    tensors = programs.inputs(torch.bfloat16, None, {"T": tokens, "K": k, "N": n})
    assert tensors["x"].shape[:-1].numel() == rows
    dy = support.randn((*tensors["x"].shape[:-1], n), torch.bfloat16, 9)
    compare(programs, programs.compiled(tensors, dy), programs.plain(tensors, dy))


@pytest.mark.parametrize("kind", selection.KINDS)
@pytest.mark.parametrize("cell", CELLS)
def test_every_schedule(bundle: ModuleType, cell: str, kind: str) -> None:
    rules = selection.gemm_rules(Programs(bundle, cell).module.GroupedLinear.describe(), kind)
    reached = selection.reach_every_point(kind, rules).items()
    for point, sizes in (each for each in reached if bundles.DEVICE != "cpu" or each[1].work < 3e8):
        splits = support.dirichlet(sizes.groups, sizes.tokens - sizes.tokens // 10, 2.0)
        case = Case(point, sizes.tokens, sizes.k, sizes.n, tuple(splits))
        check(bundle, cell, case, torch.bfloat16)


@pytest.mark.parametrize("cell", CELLS)
def test_each_gradient_alone(bundle: ModuleType, cell: str) -> None:
    """The same bits as together with the others, from the same state."""
    programs = Programs(bundle, cell)
    case = support.ragged("alone", 5, 600, 136, 200)
    tensors, dy = programs.step(case, torch.bfloat16)
    together = programs.compiled(tensors, dy)
    for index, name in enumerate(("x", "weight", "bias")):
        alone = programs.compiled(tensors, dy, {name})
        same_bits("y", alone.y, together.y)
        same_bits(name, alone.gradients[index], together.gradients[index])


def test_there_are_quantised_cells(folder: Path) -> None:
    assert bundles.quantized_cells(folder, "grouped_linear") and bundles.quantized_cells(
        folder, "linear"
    )
