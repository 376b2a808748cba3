"""Cells with choices that no committed bundle has, made anew: they compile as those do."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusegen import api
from fusegen.build.library import BuildReport

from .contracts import broken, compiled, promises_of
from .test_bundles import COMPILED, SPECS, report

pytestmark = pytest.mark.compile

ARCH = "sm_90a"
MAIN_GRAD_RECIPES = ("bf16", "fp8_block", "mxfp8")
CACHED_RECIPES = ("fp8_current", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4")
CHOICES = (
    ("linear", ("fp8_delayed",), "reduced_amax"),
    ("linear", ("fp8_delayed",), "nvtx_ranges"),
    ("grouped_linear", ("nvfp4",), "debug"),
    ("grouped_linear", MAIN_GRAD_RECIPES, "add_to_main_grad"),
    ("grouped_linear", MAIN_GRAD_RECIPES, "write_main_grad"),
    ("grouped_linear", CACHED_RECIPES, "cached_weights"),
    ("linear", ("fp8_block", "nvfp4"), "dequantized_backward"),
    ("grouped_linear", ("fp8_delayed", "mxfp8"), "delayed_wgrad"),
    ("grouped_mlp", ("bf16", "fp8_block"), "delayed_wgrad"),
    ("grouped_mlp", ("fp8_delayed",), "recompute_activations"),
    ("grouped_mlp", ("bf16", "fp8_current", "fp8_block", "mxfp8"), "scaled_bias"),
    ("grouped_linear", ("bf16",), "scaled_bias"),
    ("grouped_mlp", ("bf16", "fp8_block"), "interleaved_32"),
    ("swiglu", ("bf16",), "interleaved_32"),
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> BuildReport:
    """Every choice that changes a launcher or a kernel.

    It has the namespace of the committed bundle, so that units which both have compile once.
    """
    out = tmp_path_factory.mktemp("choices")
    for module, recipes, option in CHOICES:
        request = api.Request(
            out=out,
            archs=(ARCH,),
            modules=(module,),
            recipes=recipes,
            options=(option,),
        )
        api.generate(request, api.Policy.WRITE)
    return compiled(out / ARCH)


def test_every_unit_keeps_its_contract(built: BuildReport) -> None:
    """Those of the committed bundle are looked at with it."""
    (committed,) = (bundle for bundle in COMPILED if bundle.name == ARCH)
    known = {unit.name for unit in report(committed).units}
    assert broken(built, promises_of(built.library.parents[1], SPECS), known) == []


def test_the_launchers_exist_for_every_cell(built: BuildReport) -> None:
    cells = {Path(unit.name).stem for unit in built.units if unit.name.endswith(".cpp")}
    expected = {
        f"{module}__{recipe}__{option}" for module, recipes, option in CHOICES for recipe in recipes
    }
    assert cells - {"digests"} == expected
