"""Ranks on GPUs of their own, over NCCL: the tests that elsewhere run over gloo, on this bundle.

Training under DDP and FSDP2 with a distributed checkpoint, weights that FSDP2 gathers quantised,
every rule for DTensors, shared amaxes, experts that are spread over ranks, weights that ranks have
parts of; and the examples that many ranks run.
"""

from __future__ import annotations

from pathlib import Path

import bundles
import pytest

from fusegen.ir.naming import Cell

from ..generated import test_quantized_gather as gather
from ..generated import test_tensor_parallel as tensor_parallel
from ..generated.loading import write_cells
from ..generated.ranks import Place, run_ranks
from ..generated.test_distributed import test_training_equals_one_process
from ..generated.test_dtensor import (
    others,
    steps,
    test_compiles_into_one_graph,
    test_errors_name_the_tensor_and_the_remedy,
    test_every_placement_equals_one_process,
    test_experts_are_quantised_where_they_are,
    test_flags_are_not_mixed_up_in_the_cache_of_decisions,
    test_no_shard_cuts_a_block,
    test_pointwise_modules_keep_their_placement,
    test_state_moves_on_alike,
    test_tokens_of_experts_go_through_local_map,
)
from ..generated.test_examples import PARTS, check_megatron_style, check_parallel
from ..generated.test_expert_parallel import (
    RANK,
    spread,
    spread_in_slots,
    test_compiles_whole,
    test_layers_exchange_slots,
    test_layers_that_exchange_slots_compile_whole,
    test_ranks_are_one_layer,
    test_ranks_that_differ_are_refused,
    test_tokens_as_codes_compile_whole,
    test_tokens_travel_as_codes,
)
from ..generated.test_overlap import (
    BEGIN,
    COLUMN,
    OTHERS,
    QUANTISED,
    ROW,
    check_waits_end,
    quantised,
    script,
)
from ..generated.test_reduced_amax import test_ranks_share_their_scales
from .places import (
    NEEDS_TWO,
    built,
    on_devices,
    place_of_parts,
    place_with_reduced_amax,
    products_by_rows,
)

# Collected from here: fixtures of this module take the places of those beside them.
__all__ = [
    "others",
    "spread",
    "spread_in_slots",
    "steps",
    "test_compiles_into_one_graph",
    "test_compiles_whole",
    "test_errors_name_the_tensor_and_the_remedy",
    "test_every_placement_equals_one_process",
    "test_experts_are_quantised_where_they_are",
    "test_flags_are_not_mixed_up_in_the_cache_of_decisions",
    "test_layers_exchange_slots",
    "test_layers_that_exchange_slots_compile_whole",
    "test_no_shard_cuts_a_block",
    "test_pointwise_modules_keep_their_placement",
    "test_ranks_are_one_layer",
    "test_ranks_share_their_scales",
    "test_ranks_that_differ_are_refused",
    "test_state_moves_on_alike",
    "test_tokens_as_codes_compile_whole",
    "test_tokens_of_experts_go_through_local_map",
    "test_tokens_travel_as_codes",
    "test_training_equals_one_process",
]

pytestmark = NEEDS_TWO

# A graph exchanges slots of routes that change, by collectives of NCCL and by copy engines.
REPLAYED = (
    RANK.partition("inner = layer_of")[0]
    + """
from random import Random
from bundle.integrations.tensor_parallel import overlap
experts, here = (rank * own, rank * own + own), slice(rank * TOKENS, (rank + 1) * TOKENS)
x, probs, ids, dy = (each[here].contiguous() for each in (x, probs, ids, dy))
plain = ExpertParallel(layer_of(experts), capacity=TOKENS)
inner = layer_of(experts, spread_module)
layer = ExpertParallel(inner, capacity=TOKENS)
x.requires_grad_()

def step(layer):
    y = layer(x, probs, ids)
    return y, torch.autograd.grad(y, x, dy)[0]

for on in (True,) if shared else (False, True):  # no graph captures what goes by the host
    overlap(on=on)
    for _ in range(2):
        step(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(layer)
    late = Random(rank)  # each rank at other replays, and by other times, up to about 1 ms
    for replay in range(1000):
        drawn = torch.rand(TOKENS, EXPERTS, device=device).topk(CHOICES).indices.int()
        ids.copy_(torch.where(torch.rand_like(probs) < replay / 1000, -1, drawn))
        if late.random() < 0.2:
            torch.cuda._sleep(late.randrange(2_000_000))
        graph.replay()
        if replay % 10 == 0:
            overlap(on=False)
            for one, other in zip(found, step(plain)):
                assert torch.equal(one, other), (on, replay)
            overlap(on=on)
"""
)


@pytest.fixture(scope="module")
def place(folder: Path) -> Place:
    return on_devices(folder)


@pytest.fixture(scope="module")
def slots(folder: Path) -> Place:
    return place_of_parts(folder)


@pytest.fixture(scope="module")
def reduced(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    return place_with_reduced_amax("linear", folder, tmp_path_factory.mktemp("reduced"))


def test_weights_are_gathered_quantised(place: Place, tmp_path: Path) -> None:
    run_ranks(gather.COMMON + gather.TRAINED, tmp_path, place, "fp8_block", "fp8_delayed")


@pytest.mark.parametrize("cell", [COLUMN, ROW], ids=str)
def test_rows_by_rank_are_rows_of_all(folder: Path, tmp_path: Path, cell: Cell) -> None:
    run_ranks(script(cell), tmp_path, place_of_parts(folder), "4")


@pytest.mark.parametrize("how", ["lost", "fewer", "late", "replayed"])
@pytest.mark.parametrize("cell", [COLUMN, ROW], ids=str)
def test_no_wait_is_for_ever(folder: Path, tmp_path: Path, cell: Cell, how: str) -> None:
    """Nor is one of a graph that is replayed."""
    check_waits_end(place_of_parts(folder), tmp_path, cell, how)


@pytest.mark.parametrize("how", ["late", "replayed"])
@pytest.mark.parametrize("cell", [COLUMN, ROW], ids=str)
def test_no_wait_for_nccl_is_for_ever(folder: Path, tmp_path: Path, cell: Cell, how: str) -> None:
    """Nor is one of a graph that is replayed, of which NCCL's own watchdog sees nothing."""
    check_waits_end(place_of_parts(folder), tmp_path, cell, how, by="watch")


def test_modules_of_several_collectives(folder: Path, tmp_path: Path) -> None:
    run_ranks(BEGIN + OTHERS, tmp_path, place_of_parts(folder))


def test_quantised_rows_by_rank_are_rows_of_all(folder: Path, tmp_path: Path) -> None:
    made, cells = products_by_rows(folder)
    run_ranks(quantised(), tmp_path, on_devices(made), *(str(c) for c in cells if c in QUANTISED))


@pytest.mark.skipif(bundles.DEVICE == "cpu", reason="the CPU has no graphs")
def test_graphs_exchange_slots_of_other_routes(slots: Place, tmp_path: Path) -> None:
    run_ranks(REPLAYED, tmp_path, slots, "moe_layer__bf16", "any", "slots")


def test_parts_of_weights_are_one_layer(folder: Path, tmp_path: Path) -> None:
    found = tensor_parallel.run_cases(place_of_parts(folder), tmp_path)
    for case, each in found.items():
        tensor_parallel.check(each, case)


def test_the_model_of_megatron_style_learns(folder: Path) -> None:
    """It generates and builds its bundle itself."""
    check_megatron_style(_arch(folder), ranks=2)


def test_the_model_of_parallel_learns(folder: Path, tmp_path: Path) -> None:
    check_parallel(built(write_cells("split", _arch(folder), tmp_path, PARTS)))


def _arch(folder: Path) -> str:
    """Of a bundle; without GPUs, that of what runs there."""
    return "cpu" if bundles.DEVICE == "cpu" else folder.name
