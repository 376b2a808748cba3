"""Cells of bundles whose GEMMs are another architecture's: of every recipe, and of every store."""

from __future__ import annotations

from fusegen.ir.naming import Cell

MODULES = ("linear", "grouped_linear", "grouped_mlp")
RECIPES = ("bf16", "fp8_current", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4")
"""All: kernels whose MMAs read no scales run as they are."""
OF_STORES = ("bf16", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4")
"""A recipe of every family of kernels, each with every store."""
EPILOGUES = ("linear_activation", "linear_residual")
APART = ("gelu", "scaled_swiglu")
"""What epilogues are held against."""
FURTHER = (
    *(Cell("grouped_linear", recipe, ("add_to_main_grad",)) for recipe in OF_STORES),
    *(Cell("grouped_mlp", recipe, ("scaled_bias",)) for recipe in OF_STORES),
    *(Cell(module, recipe) for module in EPILOGUES for recipe in OF_STORES),
    *(Cell(module, "bf16") for module in APART),
    Cell("grouped_linear", "bf16", ("write_main_grad",)),
    Cell("grouped_linear", "bf16", ("add_to_16_bit_main_grad",)),
    Cell("grouped_mlp", "mxfp8", ("debug",)),
    Cell("grouped_linear", "mxfp8", ("dequantized_backward",)),
)
"""Cells whose stores, statistics and decoding kernels differ from those of every module."""


def cells() -> tuple[Cell, ...]:
    """All that each has."""
    return (*(Cell(module, recipe) for module in MODULES for recipe in RECIPES), *FURTHER)
