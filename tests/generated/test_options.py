"""Choices at generation time: the tests that are generated with such modules pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from fusegen.ir.naming import Cell

from .loading import run_generated_tests, write_cells

CELLS = tuple(
    Cell(module, recipe, tuple(options))
    for module, recipe, *options in map(
        str.split,
        (
            # main_grad
            "grouped_mlp nvfp4 add_to_main_grad",
            "linear fp8_block write_main_grad",
            "grouped_mlp fp8_block add_to_16_bit_main_grad",
            "grouped_linear bf16 write_16_bit_main_grad delayed_wgrad",
            "linear fp8_delayed add_to_main_grad reduced_amax",
            # the backward's precision, each recipe with both
            "linear fp8_current high_precision_backward",
            "linear fp8_delayed high_precision_backward",
            "linear fp8_rowwise high_precision_backward",
            "grouped_linear fp8_block high_precision_backward",
            "grouped_mlp nvfp4 high_precision_backward",
            "linear mxfp8 dequantized_backward",
            "grouped_linear nvfp4 dequantized_backward",
            "linear nvfp4 quantized_weights dequantized_backward",
            "grouped_linear fp8_block cached_weights dequantized_backward",
            "grouped_mlp fp8_current dequantized_backward",
            "grouped_mlp nvfp4 delayed_wgrad dequantized_backward",
            "grouped_mlp fp8_delayed add_to_main_grad delayed_wgrad cached_weights"
            " dequantized_backward",
            "grouped_mlp fp8_block recompute_activations dequantized_backward",
            # weights that stay quantised
            "grouped_linear fp8_delayed cached_weights",
            "linear mxfp8 add_to_main_grad cached_weights",
            "grouped_mlp fp8_delayed quantized_weights debug",
            "linear mxfp8 add_to_main_grad delayed_wgrad quantized_weights",
            "linear nvfp4 cached_weights high_precision_backward",
            "linear fp8_delayed cached_weights nvtx_ranges debug",
            "quantize nvfp4 debug",
            # delayed gradients of weights
            "grouped_linear fp8_block delayed_wgrad",
            "linear mxfp8 add_to_main_grad delayed_wgrad",
            "grouped_mlp fp8_delayed write_main_grad delayed_wgrad",
            "grouped_mlp nvfp4 delayed_wgrad cached_weights",
            "grouped_mlp mxfp8 delayed_wgrad recompute_activations",
            "grouped_mlp_situglu fp8_delayed delayed_wgrad recompute_activations reduced_amax",
            # alternating halves, scaled biases
            "grouped_mlp bf16 scaled_bias",
            "swiglu bf16 interleaved_32",
            "grouped_mlp bf16 interleaved_32",
            "grouped_mlp_situglu fp8_block interleaved_32 scaled_bias",
            "grouped_mlp_clamped_qgeglu nvfp4 interleaved_32 delayed_wgrad recompute_activations",
            "grouped_linear fp8_rowwise scaled_bias",
            "grouped_linear nvfp4 scaled_bias add_to_main_grad",
            "grouped_mlp_situglu fp8_block scaled_bias delayed_wgrad cached_weights",
            "grouped_mlp_srelu fp8_delayed scaled_bias recompute_activations reduced_amax",
            "grouped_mlp fp8_rowwise interleaved_32 scaled_bias dequantized_backward",
            "grouped_mlp mxfp8 scaled_bias high_precision_backward",
            # a parameter for each group
            "grouped_linear bf16 parameter_per_group",
            "grouped_linear fp8_rowwise parameter_per_group debug",
            "grouped_mlp fp8_delayed parameter_per_group reduced_amax",
            "grouped_mlp_situglu nvfp4 interleaved_32 scaled_bias parameter_per_group"
            " recompute_activations",
            # parts of weights, experts of ranks: each op checks in its caller's words
            "linear bf16 row_sequence_parallel",
            "mlp bf16 tensor_sequence_parallel",
            "mlp_swiglu bf16 tensor_sequence_parallel",
            "grouped_mlp bf16 tensor_parallel",
            "moe_layer bf16 tensor_sequence_parallel",
            "moe_layer fp8_block expert_parallel",
            "moe_layer bf16 expert_parallel_all_to_all",
            # shared amaxes, activations that are made again
            "grouped_mlp fp8_delayed reduced_amax",
            "grouped_mlp bf16 recompute_activations",
            "grouped_mlp_srelu fp8_delayed recompute_activations",
            "grouped_mlp fp8_delayed add_to_main_grad recompute_activations reduced_amax",
            "grouped_mlp_clamped_qgeglu nvfp4 cached_weights recompute_activations",
            "grouped_mlp mxfp8 recompute_activations high_precision_backward",
        ),
    )
)
SHARDS = 6  # bundles and interpreters: each takes seconds to start, and workers share them out

ON_HOPPER = tuple(
    Cell(module, "fp8_block", ("dequantized_backward",)) for module in ("linear", "grouped_linear")
)
"""What the references of an architecture's own layout do: scales in the order of tokens."""


def test_references_follow_the_layout(tmp_path: Path) -> None:
    generate_and_test(ON_HOPPER, "sm_90a", tmp_path)


def test_no_cell_has_committed_tests(bundle: Path) -> None:
    """Those would run twice."""
    if bundle.name == "cpu":
        assert not {path.stem for path in bundle.glob("*__*.py")} & set(map(str, CELLS))


@pytest.mark.parametrize("shard", range(SHARDS))
def test_generated_tests_pass(shard: int, tmp_path: Path) -> None:
    generate_and_test(CELLS[shard::SHARDS], "cpu", tmp_path)


def generate_and_test(cells: Sequence[Cell], arch: str, folder: Path) -> None:
    bundle = write_cells("options", arch, folder, cells)
    files = {path.stem for path in bundle.glob("[a-z]*__*.py")}
    assert files == {str(cell) for cell in cells}
    run_generated_tests(bundle)
