"""Choices at generation time: the tests that are generated with such modules pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusegen import api

from .loading import run_generated_tests

CASES = {
    "add": ("grouped_linear", "bf16", "add_to_main_grad"),
    "write": ("linear", "fp8_block", "write_main_grad"),
    "add in 16 bits": ("grouped_mlp", "fp8_block", "add_to_16_bit_main_grad"),
    "write in 16 bits, delayed": (
        "grouped_linear",
        "bf16",
        "write_16_bit_main_grad",
        "delayed_wgrad",
    ),
    "chain": ("grouped_mlp", "nvfp4", "add_to_main_grad"),
    "both": ("linear", "fp8_delayed", "add_to_main_grad", "reduced_amax"),
    "forward only": ("grouped_mlp", "nvfp4", "high_precision_backward"),
    "of forward values": ("grouped_linear", "nvfp4", "dequantized_backward"),
    "of forward values, chain": ("grouped_mlp", "fp8_current", "dequantized_backward"),
    "of forward values, delayed": (
        "grouped_mlp",
        "fp8_delayed",
        "add_to_main_grad",
        "delayed_wgrad",
        "cached_weights",
        "dequantized_backward",
    ),
    "of forward values, made again": (
        "grouped_mlp",
        "fp8_block",
        "recompute_activations",
        "dequantized_backward",
    ),
    "cached": ("grouped_mlp", "fp8_block", "cached_weights"),
    "cached state": ("grouped_linear", "fp8_delayed", "cached_weights"),
    "cached and added": ("linear", "mxfp8", "add_to_main_grad", "cached_weights"),
    "quantised alone": ("grouped_mlp", "fp8_delayed", "quantized_weights"),
    "quantised alone, delayed and added": (
        "linear",
        "mxfp8",
        "add_to_main_grad",
        "delayed_wgrad",
        "quantized_weights",
    ),
    "cached, forward only": ("linear", "nvfp4", "cached_weights", "high_precision_backward"),
    "delayed": ("grouped_linear", "fp8_block", "delayed_wgrad"),
    "delayed and added": ("linear", "mxfp8", "add_to_main_grad", "delayed_wgrad"),
    "delayed chain": ("grouped_mlp", "fp8_delayed", "write_main_grad", "delayed_wgrad"),
    "delayed, cached": ("grouped_mlp", "nvfp4", "delayed_wgrad", "cached_weights"),
    "delayed, made again": ("grouped_mlp", "mxfp8", "delayed_wgrad", "recompute_activations"),
    "delayed, made again, shared": (
        "grouped_mlp_situglu",
        "fp8_delayed",
        "delayed_wgrad",
        "recompute_activations",
        "reduced_amax",
    ),
    "interleaved": ("swiglu", "bf16", "interleaved_32"),
    "interleaved experts": ("grouped_mlp", "bf16", "interleaved_32"),
    "interleaved, scaled, quantised": (
        "grouped_mlp_situglu",
        "fp8_block",
        "interleaved_32",
        "scaled_bias",
    ),
    "interleaved, made again, delayed": (
        "grouped_mlp_clamped_qgeglu",
        "nvfp4",
        "interleaved_32",
        "delayed_wgrad",
        "recompute_activations",
    ),
    "scaled": ("grouped_mlp", "bf16", "scaled_bias"),
    "scaled, one layer": ("grouped_linear", "fp8_rowwise", "scaled_bias"),
    "scaled, one layer, decoded": ("grouped_linear", "nvfp4", "scaled_bias", "add_to_main_grad"),
    "scaled, delayed, cached": (
        "grouped_mlp_situglu",
        "fp8_block",
        "scaled_bias",
        "delayed_wgrad",
        "cached_weights",
    ),
    "scaled, made again, shared": (
        "grouped_mlp_srelu",
        "fp8_delayed",
        "scaled_bias",
        "recompute_activations",
        "reduced_amax",
    ),
    "scaled, dequantised": (
        "grouped_mlp",
        "fp8_rowwise",
        "interleaved_32",
        "scaled_bias",
        "dequantized_backward",
    ),
    "scaled, forward only": ("grouped_mlp", "mxfp8", "scaled_bias", "high_precision_backward"),
    "looked into": ("linear", "fp8_delayed", "cached_weights", "nvtx_ranges", "debug"),
    "shared": ("grouped_mlp", "fp8_delayed", "reduced_amax"),
    "made again": ("grouped_mlp", "bf16", "recompute_activations"),
    "made again by old scales": ("grouped_mlp_srelu", "fp8_delayed", "recompute_activations"),
    "made again, shared": (
        "grouped_mlp",
        "fp8_delayed",
        "add_to_main_grad",
        "recompute_activations",
        "reduced_amax",
    ),
    "made again, cached": (
        "grouped_mlp_clamped_qgeglu",
        "nvfp4",
        "cached_weights",
        "recompute_activations",
    ),
    "made again, forward only": (
        "grouped_mlp",
        "mxfp8",
        "recompute_activations",
        "high_precision_backward",
    ),
}


ON_HOPPER = {
    "scales in the order of tokens": ("linear", "fp8_block", "dequantized_backward"),
    "and in groups": ("grouped_linear", "fp8_block", "dequantized_backward"),
}
"""What the references of an architecture's own layout do."""


@pytest.mark.parametrize("case", ON_HOPPER)
def test_references_follow_the_layout(case: str, tmp_path: Path) -> None:
    generate_and_test(ON_HOPPER[case], "sm_90a", tmp_path)


@pytest.mark.parametrize("case", CASES)
def test_generated_tests_pass(case: str, tmp_path: Path) -> None:
    generate_and_test(CASES[case], "cpu", tmp_path)


def generate_and_test(case: tuple[str, ...], arch: str, tmp_path: Path) -> None:
    module, recipe, *options = case
    request = api.Request(
        out=tmp_path,
        archs=(arch,),
        modules=(module,),
        recipes=(recipe,),
        options=tuple(options),
        namespace="options",
    )
    done = api.generate(request)
    (cell,) = done.bundles[0].selection.cells
    assert cell.options == tuple(options)
    run_generated_tests(tmp_path / arch)
