"""An architecture whose MMA is known is a copied spec: its units compile as contracts say."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from fusegen.build.contracts import Promise, promises
from fusegen.checks.load import load
from fusegen.commands.scaffold import new
from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan
from fusegen.publish.paths import builtin_specs
from fusegen.spec.arch import ArchSpec
from fusegen.spec.load import SpecSet

from . import compile_all

pytestmark = pytest.mark.compile

NAME = "sm_86"
CELLS = [Cell("grouped_linear", recipe) for recipe in ("bf16", "nvfp4")]
UNITS = ("gemm_mma_wgrad_mma_128x128x32_2x2_4_1", "gemm_decoded_mma_fprop_mma_128x128x32_2x2_4_1")


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> SpecSet:
    folder = tmp_path_factory.mktemp("specs")
    new("arch", NAME, origin="sm_80", folder=folder)
    return load([builtin_specs(), folder])


def test_a_bundle_has_the_points_that_fit_alone(specs: SpecSet) -> None:
    plans = compile_all.plans_of(specs, NAME, CELLS)
    names = {Path(name).stem for name in promises(plans, specs.archs[NAME])}
    gemms = {name for name in names if name.startswith("gemm_")}
    assert {*UNITS} <= gemms
    assert all(name.endswith("_mma_128x128x32_2x2_4_1") for name in gemms)


def compiled(specs: SpecSet, unit: str) -> compile_all.Compiled:
    """All that was found of the units whose names hold a text."""
    return [*compile_all.compiled(specs, NAME, CELLS, units=(unit,))][-1]


@pytest.mark.parametrize("name", UNITS)
def test_its_units_keep_their_contracts(specs: SpecSet, name: str) -> None:
    found = compiled(specs, name)
    assert found.broken == {} and found.cells == 2 and not found.complete
    unit = found.units[name]
    assert [*found.units] == [name] and unit.registers <= unit.most_registers == 255
    assert unit.shared_memory <= 99 * 1024
    assert [each.split(".")[0] for each in unit.opcodes] == ["HMMA", "LDGSTS", "LDSM"]


def stricter(plans: Iterable[ModulePlan], arch: ArchSpec) -> dict[str, Promise]:
    """Contracts that allow less, and ask for more, than those of families."""
    return {
        name: replace(
            each,
            registers=100,
            contract=replace(each.contract, opcodes=("QMMA",), gibibytes=0.01),
        )
        for name, each in promises(plans, arch).items()
    }


def test_a_broken_contract_is_told(specs: SpecSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_all, "promises", stricter)
    found = compiled(specs, UNITS[0])
    assert [*found.broken] == [UNITS[0]] and found.units == {}, "it is recorded as such"
    said = "\n".join(compile_all.summary(NAME, found))
    assert re.search(rf"{NAME} {UNITS[0]}: compiled in 0\.\d GiB of memory, expected", said)
    assert "no instruction QMMA, expected one" in said
    assert "registers, expected 100 at most" in said


def test_what_was_found_is_told_after_every_few_units(
    specs: SpecSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An end of the run in between loses no more than those."""
    monkeypatch.setattr(compile_all, "AT_ONCE", 1)
    few = compile_all.compiled(specs, NAME, CELLS, units=("_fprop_mma_128x128x32",), whole=True)
    first, second = (next(few) for _ in range(2))
    assert (len(first.units), len(second.units)) == (1, 2)
    assert first.whole == second.whole and first.whole is not None and first.whole > 2
    assert not second.complete


UNIT = compile_all.Unit("norm", 128, 128, 64, ("HMMA.16816",), 1.5, 190, 70)
WHOLE = compile_all.Compiled("13.0", True, 9, 2, {"a": UNIT, "b": UNIT})


def test_a_record_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(compile_all.dump({"sm_80": WHOLE, "sm_90a": WHOLE}))
    assert compile_all.read(path) == {"sm_80": WHOLE, "sm_90a": WHOLE}
    spills = replace(WHOLE, units={"a": UNIT}, broken={"b": ("a spill", 'warning: "x": 1')})
    twice = ("_Z4halfv: a spill", "_Z5floatv: a spill", *spills.broken["b"])
    path.write_text(compile_all.dump({"sm_80": replace(spills, broken={"b": twice})}))
    assert compile_all.read(path) == {"sm_80": spills}
    assert compile_all.read(tmp_path / "none.json") == {}


def test_a_record_is_joined_with_a_part() -> None:
    other = replace(UNIT, registers=64)
    part = compile_all.Compiled("13.1", False, 2, None, {"a": other})
    joined = compile_all.joined(WHOLE, part)
    assert joined == replace(WHOLE, toolkit="13.1", units={"a": other, "b": UNIT})
    more = replace(part, units={"c": other})
    assert not compile_all.joined(WHOLE, more).complete, "other cells were to be compiled, too"
    assert compile_all.joined(None, part) == part
    spill = {"a": ("a spill",)}
    broken = compile_all.joined(WHOLE, replace(part, units={}, broken=spill))
    assert broken.complete and broken.broken == spill, "compiled it was"
    assert [*broken.units] == ["b"], "what it came to is on record no more"
    assert compile_all.joined(broken, replace(part, units={"b": other})).broken == spill
    mended = compile_all.joined(broken, part)
    assert mended == joined, "what it broke is on record no more"
    again = compile_all.Compiled("13.1", True, 9, 1, {"c": UNIT})
    assert compile_all.joined(WHOLE, again) == again, "units that are gone are forgotten"
