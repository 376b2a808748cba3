"""Every option under torch.compile: the first cell, sorted, of those that the GPU runs it in."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusegen.ir.naming import Cell

from .loading import cells_of_every_option, run_generated_tests, write_cells

SHARDS = 2  # one for each of the workers that there are at least


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> tuple[Cell, ...]:
    """A cell for every word."""
    return cells_of_every_option(tmp_path_factory.mktemp("specs"))


@pytest.mark.parametrize("shard", range(SHARDS))
def test_compiles_whole(cells: tuple[Cell, ...], shard: int, tmp_path: Path) -> None:
    own = cells[shard::SHARDS]
    bundle = write_cells("sampled", "cpu", tmp_path, own)
    passed = run_generated_tests(bundle, "-k", "compiles_whole")
    assert passed >= len(own)
