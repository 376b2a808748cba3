"""Every option under torch.compile: the first cell, sorted, of those that the GPU runs it in."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiers import first_with_each_option
from unit.gpu_files import load

from fusegen import api
from fusegen.ir.naming import Cell

from .loading import run_generated_tests, write_cells

SHARDS = 2  # one for each of the workers that there are at least


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> tuple[Cell, ...]:
    """A cell for every word."""
    evidence = load("evidence")
    folder = tmp_path_factory.mktemp("specs")
    evidence.write_further_specs(folder)
    specs = api.load_specs(api.Folders(specs=(folder,)))
    planned = {str(cell): cell for cell in evidence.cells(specs, "cpu")}
    chosen = first_with_each_option(planned)
    assert set(chosen) == set(evidence.option_words())
    return tuple(planned[name] for name in sorted(set(chosen.values())))


@pytest.mark.parametrize("shard", range(SHARDS))
def test_compiles_whole(cells: tuple[Cell, ...], shard: int, tmp_path: Path) -> None:
    own = cells[shard::SHARDS]
    bundle = write_cells("sampled", "cpu", tmp_path, own)
    passed = run_generated_tests(bundle, "-k", "compiles_whole")
    assert passed >= len(own)
