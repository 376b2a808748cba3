"""The walk-through of an architecture whose MMA is known: a spec in a folder of one's own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from generated.loading import run_generated_tests

from fusegen import api
from fusegen.cli import program
from fusegen.ir.naming import Cell
from fusegen.spec.serving import arch_of

from .walk import HERE

ARCH = "sm_90a_h20"
OWN = HERE / "known_mma" / "specs"
FOLDERS = api.Folders((OWN,))
MODULES, RECIPES = ("linear", "grouped_linear", "swiglu"), ("bf16", "fp8_current")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("known_mma")
    request = api.Request(out, archs=(ARCH,), modules=MODULES, recipes=RECIPES, folders=FOLDERS)
    assert not any(each.unsupported for each in api.generate(request).bundles)
    return out / ARCH


def test_its_cells_are_native(bundle: Path) -> None:
    rows = api.plan(api.Query(archs=(ARCH,), modules=MODULES, recipes=RECIPES), FOLDERS)
    assert [row.status for row in rows] == ["native"] * 6
    assert {row.reason for row in rows} == {"compiled kernels"}


def test_its_own_rules_choose_among_its_own_points(bundle: Path) -> None:
    headers = (bundle / "csrc" / "dispatch").glob("*gemm*.h")
    text = "\n".join(path.read_text(encoding="utf-8") for path in headers)
    points = {*re.findall(r"\d+x\d+x\d+_2x1", text)}
    assert points == {f"128x{n}x{k}_2x1" for n in (128, 256) for k in (64, 128)}


def test_launchers_ask_for_hopper_and_say_the_parts_name(bundle: Path) -> None:
    launcher = (bundle / "csrc" / f"{Cell('linear', 'bf16')}.cpp").read_text(encoding="utf-8")
    assert f'constexpr Arch kArch{{"{ARCH}", 9, 0, Reach::none}};' in launcher


def test_the_tests_of_the_bundle_pass(bundle: Path) -> None:
    assert run_generated_tests(bundle, "-k", "matches or no_tokens") > 0


def test_a_gpu_is_not_taken_for_a_part() -> None:
    """The capability of both is 9.0."""
    assert arch_of((9, 0), api.load_specs(FOLDERS)) == "sm_90a"


def test_a_copy_of_the_whole_spec_is_begun_by_the_command_line(tmp_path: Path) -> None:
    words = ("new", "arch", ARCH, "--from", "sm_90a", "--specs", str(tmp_path))
    assert CliRunner().invoke(program, words).exit_code == 0
    specs = api.load_specs(api.Folders((tmp_path,)))
    assert specs.archs[ARCH].kernels == specs.archs["sm_90a"].kernels
