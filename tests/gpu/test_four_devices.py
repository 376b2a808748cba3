"""Four ranks on GPUs of their own, over NCCL: what two could get right by being two.

Each has several others to send to and to wait for, in an order; sums have more than two terms.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fusegen.ir.naming import Cell

from ..generated import test_quantized_gather as gather
from ..generated import test_tensor_parallel as tensor_parallel
from ..generated.ranks import Place, run_ranks
from ..generated.test_expert_parallel import (
    test_four_ranks_are_one_layer,
    test_four_ranks_exchange_slots,
    test_no_more_tokens_than_there_are_slots_for,
    test_no_more_tokens_than_there_is_room_for,
)
from ..generated.test_overlap import COLUMN, ROW, others, script
from .places import needs, on_devices, place_of_parts

# Collected from here: the fixture of this module takes the place of that beside them.
__all__ = [
    "test_four_ranks_are_one_layer",
    "test_four_ranks_exchange_slots",
    "test_no_more_tokens_than_there_are_slots_for",
    "test_no_more_tokens_than_there_is_room_for",
]

RANKS = 4
pytestmark = needs(RANKS)


@pytest.fixture(scope="module")
def place(folder: Path) -> Place:
    return on_devices(folder)


@pytest.fixture(scope="module")
def slots(folder: Path) -> Place:
    return place_of_parts(folder)


@pytest.mark.parametrize("cell", [COLUMN, ROW], ids=str)
def test_rows_by_rank_are_rows_of_all(folder: Path, tmp_path: Path, cell: Cell) -> None:
    run_ranks(script(cell), tmp_path, place_of_parts(folder), "4", ranks=RANKS)


def test_modules_of_several_collectives(folder: Path, tmp_path: Path) -> None:
    run_ranks(others(), tmp_path, place_of_parts(folder), ranks=RANKS)


def test_parts_of_weights_are_one_layer(folder: Path, tmp_path: Path) -> None:
    found = tensor_parallel.run_cases(place_of_parts(folder), tmp_path, ranks=RANKS)
    for case, each in found.items():
        tensor_parallel.check(each, case)


def test_weights_are_gathered_quantised(place: Place, tmp_path: Path) -> None:
    script = gather.COMMON + gather.TRAINED
    run_ranks(script, tmp_path, place, "fp8_block", "fp8_delayed", ranks=RANKS)
