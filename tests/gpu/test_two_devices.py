"""Ranks on GPUs of their own, over NCCL: the tests that elsewhere run over gloo, on this bundle.

Training under DDP and FSDP2 with a distributed checkpoint, every rule for DTensors, shared amaxes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bundles import DEVICE

from fusegen.build.library import build
from fusegen.build.toolchain import BuildError

from ..generated import test_reduced_amax
from ..generated.ranks import Place
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
from ..generated.test_reduced_amax import test_ranks_share_their_scales

# Collected from here: fixtures of this module take the places of those beside them.
__all__ = [
    "others",
    "steps",
    "test_compiles_into_one_graph",
    "test_errors_name_the_tensor_and_the_remedy",
    "test_every_placement_equals_one_process",
    "test_experts_are_quantised_where_they_are",
    "test_flags_are_not_mixed_up_in_the_cache_of_decisions",
    "test_no_shard_cuts_a_block",
    "test_pointwise_modules_keep_their_placement",
    "test_ranks_share_their_scales",
    "test_state_moves_on_alike",
    "test_tokens_of_experts_go_through_local_map",
    "test_training_equals_one_process",
]

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(
    DEVICE != "cpu" and GPUS < 2, reason=f"needs two GPUs, one for each rank; torch sees {GPUS}"
)


def on_devices(bundle: Path) -> Place:
    """The ranks of a bundle: one per GPU, or on the CPU as a check of the tests themselves."""
    return Place(bundle) if DEVICE == "cpu" else Place(bundle, "nccl", "cuda")


@pytest.fixture(scope="module")
def place(folder: Path) -> Place:
    return on_devices(folder)


@pytest.fixture(scope="module")
def reduced(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The bundle itself if it has the cell, or one of that cell alone, which is built for this."""
    if (folder / f"{test_reduced_amax.CELL}.py").is_file():
        return on_devices(folder)
    made = test_reduced_amax.generate(folder.name, tmp_path_factory.mktemp("reduced"))
    if DEVICE != "cpu":
        try:
            build(made)
        except BuildError as error:
            pytest.skip(f"{folder} lacks {test_reduced_amax.CELL}, and here it cannot be: {error}")
    return on_devices(made)
