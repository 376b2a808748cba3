"""Ranks that share one GPU, each a process: what copy engines bring while products run.

Streams, flags, symmetric memory and graphs are the GPU's, as where each rank has one of its own
(`test_two_devices.py`); only NCCL is not there.
"""

from __future__ import annotations

from pathlib import Path

import bundles
import pytest

from fusegen.ir.naming import Cell

from ..generated.ranks import Place, run_ranks
from ..generated.test_overlap import (
    ALONE,
    BEGIN,
    COLUMN,
    OTHERS,
    QUANTISED,
    ROW,
    SEVERAL,
    check_waits_end,
    quantised,
    script,
)
from .places import products_by_rows
from .test_two_devices import REPLAYED

pytestmark = pytest.mark.skipif(bundles.DEVICE == "cpu", reason="it is the GPU that copies")

OF_ROWS = pytest.mark.parametrize("cell", [COLUMN, ROW], ids=str)


@pytest.fixture(scope="module")
def made(folder: Path) -> tuple[Path, list[Cell]]:
    return products_by_rows(folder)


@pytest.fixture(scope="module")
def place(made: tuple[Path, list[Cell]]) -> Place:
    bundle, _ = made
    return Place(bundle, "gloo", "cuda", shared=True)


@pytest.mark.parametrize("ranks", [2, 4])
@OF_ROWS
def test_rows_by_rank_are_rows_of_all(place: Place, tmp_path: Path, cell: Cell, ranks: int) -> None:
    """A thousand replays among them, in which each rank is late at times."""
    run_ranks(script(cell), tmp_path, place, "2", ranks=ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_quantised_rows_by_rank_are_rows_of_all(
    made: tuple[Path, list[Cell]], place: Place, tmp_path: Path, ranks: int
) -> None:
    _, cells = made
    names = [str(each) for each in cells if each in QUANTISED]
    run_ranks(quantised(), tmp_path, place, *names, ranks=ranks)


def test_modules_of_several_collectives(
    made: tuple[Path, list[Cell]], place: Place, tmp_path: Path
) -> None:
    _, cells = made
    assert {*SEVERAL} <= {*cells}
    run_ranks(BEGIN + OTHERS, tmp_path, place)


def test_graphs_exchange_slots_of_other_routes(place: Place, tmp_path: Path) -> None:
    run_ranks(REPLAYED, tmp_path, place, str(ALONE), "any", "slots")


@pytest.mark.parametrize("how", ["lost", "fewer", "late", "replayed"])
@OF_ROWS
def test_no_wait_is_for_ever(place: Place, tmp_path: Path, cell: Cell, how: str) -> None:
    check_waits_end(place, tmp_path, cell, how)
