"""The walk-through of a recipe with blocks that no matrix instruction reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from generated.loading import run_generated_tests

from fusegen import api
from fusegen.ir.plan import Status

SPECS = Path(__file__).parent / "recipe_1x64" / "specs"
RECIPE = "fp8_block_1x64"
FOLDERS = api.Folders(specs=(SPECS,))


def test_modules_that_take_it_need_nothing() -> None:
    """It is the one file; every module of the shipped recipe has it, too."""
    assert [path.name for path in SPECS.rglob("*.*")] == [f"{RECIPE}.yaml"]
    status = {}
    for recipe in ("fp8_block", RECIPE):
        query = api.Query(archs=("cpu", "sm_90a"), recipes=(recipe,))
        status[recipe] = {(row.arch, row.module): row.status for row in api.plan(query, FOLDERS)}
    unsupported = [
        {place for place, each in status[recipe].items() if each == Status.UNSUPPORTED.value}
        for recipe in (RECIPE, "fp8_block")
    ]
    assert unsupported[0] == unsupported[1]
    assert {module for _, module in unsupported[0]} == {"linear_cross_entropy"}  # in chunks
    assert status[RECIPE].keys() == status["fp8_block"].keys()
    assert status[RECIPE]["sm_90a", "grouped_mlp"] == Status.EMULATED.value


@pytest.mark.parametrize("module", ["linear", "grouped_linear", "quantize"])
def test_the_tests_of_the_bundle_pass(tmp_path: Path, module: str) -> None:
    request = api.Request(
        out=tmp_path,
        archs=("cpu",),
        modules=(module,),
        recipes=(RECIPE,),
        namespace=f"recipe_1x64_{module}",
        folders=FOLDERS,
    )
    api.generate(request)
    assert run_generated_tests(tmp_path / "cpu") > 10


def test_launchers_decode_operands_in_any_block(tmp_path: Path) -> None:
    """Scales of tokens lie where their groups begin, those of a weight in squares."""
    request = api.Request(
        out=tmp_path,
        archs=("sm_90a",),
        modules=("grouped_linear",),
        recipes=(RECIPE,),
        folders=FOLDERS,
    )
    api.generate(request)
    csrc = tmp_path / "sm_90a" / "csrc"
    units = {path.stem for path in (csrc / "kernels").iterdir()}
    assert {each for each in units if not each.startswith("gemm_decoded")} == {
        "dequantize_e4m3_block_1x64",
        "dequantize_e4m3_block_64x64",
        "dequantize_e4m3_block_64x64_transposed",
        "dequantize_groups_e4m3_block_1x64_transposed",
        "quantize_e4m3_block_1x64",
        "quantize_e4m3_block_64x64",
    }
    unit = (csrc / "kernels" / "quantize_e4m3_block_1x64.cu").read_text(encoding="utf-8")
    assert "fusegen::Scaling<1, 64, float, fusegen::Rule::ratio>" in unit
    launcher = (csrc / f"grouped_linear__{RECIPE}.cpp").read_text(encoding="utf-8")
    assert "arguments.scale_block = 32 * (T / 32 + E);" in launcher
    assert "arguments.lines_per_scale = 64;" in launcher
