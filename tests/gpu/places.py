"""Where ranks run a cell: one process per GPU over NCCL, or on the CPU over gloo."""

from __future__ import annotations

from pathlib import Path

import bundles
import pytest
import torch
from further import plan_of

from fusegen import api
from fusegen.build.library import build, is_current
from fusegen.build.toolchain import BuildError
from fusegen.ir.naming import Cell

from ..generated import test_overlap, test_reduced_amax, test_tensor_parallel
from ..generated.loading import write_cells
from ..generated.ranks import Place

PARTS = bundles.BUILD / "parts"
GPUS = torch.cuda.device_count()


def needs(count: int) -> pytest.MarkDecorator:
    """Mark tests of as many ranks, each of which has a GPU of its own."""
    return pytest.mark.skipif(
        bundles.DEVICE != "cpu" and count > GPUS,
        reason=f"needs {count} GPUs, one for each rank; torch sees {GPUS}",
    )


NEEDS_TWO = needs(2)


def on_devices(bundle: Path) -> Place:
    """The ranks of a bundle: one per GPU, or on the CPU as a check of the tests themselves."""
    return Place(bundle) if bundles.DEVICE == "cpu" else Place(bundle, "nccl", "cuda")


def place_with_reduced_amax(module: str, folder: Path, out: Path) -> Place:
    """The ranks of a bundle that has the cell of a module with shared amaxes.

    Args:
        module: `linear` or another.
        folder: the bundle under test; it, or that of further cells, is taken where it has the cell.
        out: else a bundle of that cell alone is generated there, and built; where it cannot be,
            the test is skipped.
    """
    cell = test_reduced_amax.cell_of(module)
    for held in (folder, bundles.BUILD / bundles.EVIDENCE / folder.name):
        runs = bundles.DEVICE == "cpu" or bundles.library_of(held) is not None
        if runs and (held / f"{cell}.py").is_file():
            return on_devices(held)
    return on_devices(built(test_reduced_amax.generate(folder.name, out, module)))


def place_of_parts(folder: Path) -> Place:
    """The ranks of a bundle of whole and of split modules, for the GPU of the bundle under test.

    It is generated below the folder of builds, where one that was built before stays.
    """
    return on_devices(built(test_tensor_parallel.generate(folder.name, PARTS)))


def products_by_rows(folder: Path) -> tuple[Path, list[Cell]]:
    """A bundle of modules whose products may take the rows of one rank, and which it has of them,
    for the architecture of the bundle under test.
    """
    specs, arch = api.load_specs(), folder.name
    cells = [cell for cell in test_overlap.CELLS if plan_of(specs, arch, cell)]
    return built(write_cells("fusegen", arch, bundles.BUILD / "codes", cells)), cells


def built(made: Path) -> Path:
    """A generated bundle, with a library of its sources; where there can be none the test is
    skipped.
    """
    if bundles.DEVICE != "cpu" and not is_current(made):
        try:
            build(made)
        except BuildError as error:
            pytest.skip(f"{made}: cannot be built here: {error}")
    return made
