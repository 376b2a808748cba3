"""Recipes that no matrix instruction fits: their kernels compile, and leave nothing in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusegen import api
from fusegen.build.library import BuildReport

from .contracts import broken, compiled, promises_of

pytestmark = pytest.mark.compile

TESTS = Path(__file__).parents[1]
RECIPES = {
    "fp8_block_1x64": TESTS / "walkthroughs" / "recipe_1x64" / "specs",
    "fp8_mixed": TESTS / "numerics" / "specs",
    "fp8_per_row": TESTS / "numerics" / "specs",
}
FOLDERS = api.Folders(specs=tuple(dict.fromkeys(RECIPES.values())))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> BuildReport:
    """It has the namespace of the committed bundle, so that units which both have compile once."""
    out = tmp_path_factory.mktemp("any_scaling")
    request = api.Request(
        out=out,
        archs=("sm_90a",),
        modules=("grouped_linear",),
        recipes=tuple(RECIPES),
        folders=FOLDERS,
    )
    api.generate(request)
    return compiled(out / "sm_90a")


def test_every_unit_keeps_its_contract(built: BuildReport) -> None:
    names = [unit.name for unit in built.units]
    assert any("quantize_e4m3_block_1x64" in name for name in names)
    assert any("dequantize_groups_e5m2_codes_transposed" in name for name in names)
    assert any("gemm_decoded_sm90_fprop_row_tensor" in name for name in names)
    specs = api.load_specs(FOLDERS)
    assert broken(built, promises_of(built.library.parents[1], specs)) == []
