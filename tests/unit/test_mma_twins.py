"""The bundle that runs sm_120a's kernels on another GPU: the same plans, but for instructions."""

from __future__ import annotations

from pathlib import Path

import pytest
from plans import plan_of

from fusegen import api
from fusegen.ir.plan import Status
from fusegen.passes.pipeline import resolve_module

from .gpu_files import load

twins = load("mma_twins")
twin_cells = load("twin_cells")


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> api.SpecSet:
    folder: Path = tmp_path_factory.mktemp("twins")
    twins.write_spec(folder)
    return api.load_specs(api.Folders(specs=(folder,)))


@pytest.mark.parametrize("cell", twin_cells.cells(), ids=str)
def test_a_cell_has_the_kernels_of_its_own_architecture(specs: api.SpecSet, cell: object) -> None:
    found, wanted = resolve_module(specs, cell, twins.NAME), plan_of(twins.OF, cell)
    assert found.status is wanted.status is Status.NATIVE
    assert [each.name for each in found.kernel_sets] == [each.name for each in wanted.kernel_sets]
    assert found.directions == wanted.directions
