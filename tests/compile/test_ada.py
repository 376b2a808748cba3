"""FP8 by `mma.sync`, which sm_89 has and earlier GPUs have not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fusegen.build.sass import opcodes

from . import on_record

pytestmark = pytest.mark.compile

PAIRS = {("e4m3", "e4m3"), ("e5m2", "e4m3")}


def test_codes_are_multiplied_in_their_own_formats(tmp_path: Path) -> None:
    """By one instruction alone, which Ada has for each pair of formats."""
    units = on_record.units_of(on_record.write_further("ada", tmp_path), tmp_path)
    formats = {
        name: found.groups()
        for name in units
        if (found := re.search(r"/gemm_fp8_.*_(e\dm\d)_(e\dm\d)_", name))
    }
    assert {*formats.values()} == PAIRS
    objects = on_record.compiled([units[name] for name in formats], tmp_path)
    for name, pair in formats.items():
        kernels = [kernel.name for kernel in objects[name].report.kernels]
        code = opcodes(objects[name].path, kernels)
        expected = ".".join(("QMMA.16832.F32", *(each.upper() for each in pair)))
        for kernel in kernels:
            assert {each for each in code[kernel] if "MMA" in each} == {expected}, (name, kernel)
