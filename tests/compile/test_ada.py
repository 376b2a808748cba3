"""Kernels of sm_89 that earlier GPUs have not: FP8 by `mma.sync`, and what they stand beside."""

from __future__ import annotations

import re

import pytest

from fusegen import api
from fusegen.build.library import BuildReport
from fusegen.build.sass import opcodes

from .contracts import broken, compiled, promises_of
from .test_bundles import SPECS

pytestmark = pytest.mark.compile

ARCH = "sm_89"
RECIPES = ("fp8_delayed", "fp8_rowwise", "fp8_block", "nvfp4")
"""Fast and split sums of both formats, every scaling, and what is decoded."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> BuildReport:
    out = tmp_path_factory.mktemp("ada")
    request = api.Request(
        out=out,
        archs=(ARCH,),
        modules=("grouped_linear",),
        recipes=RECIPES,
        options=("add_to_main_grad",),
    )
    api.generate(request, api.Policy.WRITE)
    return compiled(out / ARCH)


def test_every_unit_keeps_its_contract(built: BuildReport) -> None:
    assert broken(built, promises_of(built.library.parents[1], SPECS)) == []


def test_codes_are_multiplied_in_their_own_formats(built: BuildReport) -> None:
    """By one instruction alone, which Ada has for each pair of formats."""
    units = {
        unit: found.groups()
        for unit in built.units
        if (found := re.search(r"/gemm_fp8_.*_(e\dm\d)_(e\dm\d)_", unit.name))
    }
    assert {*units.values()} == {("e4m3", "e4m3"), ("e5m2", "e4m3")}
    names = [kernel.name for unit in units for kernel in unit.report.kernels]
    code = opcodes(built.library, names)
    for unit, formats in units.items():
        expected = ".".join(("QMMA.16832.F32", *(each.upper() for each in formats)))
        for kernel in unit.report.kernels:
            found = {each for each in code[kernel.name] if "MMA" in each}
            assert found == {expected}, (unit.name, kernel.name)
