"""Comments, includes, staleness and texts of the ledger and its support matrix in tests/gpu."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fusegen.emit.text.escape import cmake
from fusegen.ir.naming import Cell
from fusegen.spec.arch import ArchSpec
from fusegen.spec.editions import CURRENT

from .gpu_files import load

ledger = load("ledger")
matrix, choices, steps = ledger.matrix, ledger.choices, ledger.steps
units = load("units")
sanitize = load("sanitize")
bundles = ledger.bundles


# ---- comments


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("int a; // note", "int a;  "),
        ("int/* x */a;", "int a;"),
        ("a /* one\ntwo */ b", "a   b"),
        ('s = "// no /* comment";', 's = "// no /* comment";'),
        (r's = "\"// in"; // out', r's = "\"// in";  '),
        ("c = '\"'; // out", "c = '\"';  "),
        ("c = '\\''; /* out */ d", "c = '\\'';   d"),
        ("n = 1'000'000; // out's", "n = 1'000'000;  "),
        ('r = R"x(// " )" */ in)x"; // out', 'r = R"x(// " )" */ in)x";  '),
        ("// goes on \\\nhere\nint a;", " \nint a;"),
        ("a /**/ b", "a   b"),
        ("a / b * c // d", "a / b * c  "),
    ],
)
def test_strip_comments(text: str, expected: str) -> None:
    assert units.strip_comments(text) == expected


# ---- a bundle on disk


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


SOURCES = "set(FUSEGEN_GENCODE arch=compute_90a,code=sm_90a)\n"
FILES = {
    "csrc/kernels/a.cu": '#include "fusegen/gemm.cuh"\nint a;\n',
    "csrc/kernels/b.cu": '// b\n#include "fusegen/sum.cuh"\n#include <cuda.h>\nint b;\n',
    "csrc/cell.cpp": '#include "fusegen/host/checks.h"\nint cell;\n',
    "csrc/fusegen/gemm.cuh": '#pragma once\n#include "status.h"\nint gemm;\n',
    "csrc/fusegen/sum.cuh": '#pragma once\n#include "status.h"\nint sum;\n',
    "csrc/fusegen/host/checks.h": "#pragma once\nint checks;\n",
    "csrc/fusegen/status.h": "#pragma once\nint status;\n",
}


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write(tmp_path / "sm_90a", FILES)


def changed(bundle: Path, files: dict[str, str]) -> set[str]:
    """Units whose hash is another after these files are written."""
    before = ledger.hash_units(bundle)
    after = ledger.hash_units(write(bundle, files))
    return {unit for unit in after if before.get(unit) != after[unit]}


def test_includes_are_put_in_place_once(bundle: Path) -> None:
    csrc = bundle / "csrc"
    twice = '#include "fusegen/sum.cuh"\n#include "fusegen/gemm.cuh"\n  int   c ;\n\n'
    write(bundle, {"csrc/kernels/c.cu": twice})
    assert units.Sources(csrc).expand(csrc / "kernels/c.cu") == [
        *("#pragma once", "#pragma once", "int status;", "int sum;"),
        *("#pragma once", "int gemm;", "int c ;"),
    ]
    assert "#include <cuda.h>" in units.Sources(csrc).expand(csrc / "kernels/b.cu")


def test_comments_and_spaces_make_nothing_stale(bundle: Path) -> None:
    files = {
        "csrc/kernels/a.cu": '// header\n#include  "fusegen/gemm.cuh"  // why\n\n  int a;\n',
        "csrc/fusegen/status.h": "/* c */\n#pragma once\nint   status; // s\n",
    }
    assert changed(bundle, files) == set()


def test_a_changed_header_makes_its_users_stale_and_nothing_else(bundle: Path) -> None:
    assert changed(bundle, {"csrc/fusegen/sum.cuh": "#pragma once\nlong sum;\n"}) == {
        "kernels/b.cu"
    }
    assert changed(bundle, {"csrc/fusegen/host/checks.h": "#pragma once\nlong checks;\n"}) == {
        "cell.cpp"
    }
    write(bundle, FILES)
    status = {"csrc/fusegen/status.h": "#pragma once\nlong status;\n"}
    assert changed(bundle, status) == {"kernels/a.cu", "kernels/b.cu"}


def test_a_commented_out_include_is_none(bundle: Path) -> None:
    write(bundle, {"csrc/kernels/d.cu": '// #include "gone.h"\nint d;\n'})
    assert ledger.hash_units(bundle)["kernels/d.cu"]


def test_an_include_that_leads_nowhere_is_told(bundle: Path) -> None:
    write(bundle, {"csrc/kernels/d.cu": '#include "gone.h"\n'})
    with pytest.raises(ledger.LedgerError, match=r'd\.cu: #include "gone\.h" is in neither'):
        ledger.hash_units(bundle)


# ---- entries


def entry(value: str, date: str = "2026-11-20", tests: int = 7) -> Any:
    return ledger.Entry(
        value, "NVIDIA H200", "580.1", "2.11.0", "13.0", date, tests, "memcheck clean"
    )


def test_dump_reads_back_and_has_one_line_per_unit(tmp_path: Path) -> None:
    entries = {
        "sm_90a": {"kernels/b.cu": entry("2"), "cell.cpp": entry("1")},
        "sm_80": {"cell.cpp": replace(entry("3"), code="PTX")},
    }
    path = tmp_path / "ledger.json"
    index = {"sm_90a": {"options": {"debug": {"cell": 3}}, "activations": {}}}
    text = ledger.dump(entries, index)
    path.write_text(text)
    assert ledger.load(path) == entries
    assert json.loads(text)["ran"] == index
    assert ledger.dump(ledger.load(path), index) == text
    lines = [line for line in text.splitlines() if '"hash"' in line]
    assert [line.split('"')[1] for line in lines] == ["cell.cpp", "cell.cpp", "kernels/b.cu"]
    assert '        "debug": {"cell": 3}' in text.splitlines()
    path.write_text(ledger.dump({}, {}))
    assert ledger.load(path) == {}
    assert ledger.load(tmp_path / "none.json") == {}


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 2}', '{"version": 1}'])
def test_a_broken_ledger_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ledger.json"
    path.write_text(text)
    with pytest.raises(ledger.LedgerError, match=r"ledger\.json: "):
        ledger.load(path)


def test_states() -> None:
    hashes = {"a": "1", "b": "2", "c": "3"}
    known = {"a": entry("1"), "b": entry("old", "2026-01-02"), "d": entry("4", "2026-01-03")}
    state = ledger.State
    states = ledger.state_of(hashes, known)
    assert states == {"a": state.CURRENT, "b": state.STALE, "c": state.NEVER}
    assert ledger.combine(states.values()) is state.STALE
    assert ledger.combine([state.CURRENT]) is state.CURRENT
    assert ledger.combine([state.NEVER, state.NEVER]) is state.NEVER
    assert ledger.combine([state.NEVER, state.CURRENT]) is state.STALE
    assert ledger.gaps(hashes, known) == [
        "b: stale, changed since it ran on 2026-01-02",
        "c: never ran",
        "d: gone, last ran on 2026-01-03",
    ]
    assert ledger.gaps(hashes, {}) == []


def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one compiled bundle that ran as it is."""
    folder = write(tmp_path / "generated" / "sm_90a", FILES)
    write(folder, {"csrc/sources.cmake": SOURCES})
    monkeypatch.setattr(bundles, "GENERATED", tmp_path / "generated")
    monkeypatch.setattr(bundles, "BUILD", tmp_path)
    monkeypatch.setattr(steps, "FOUND", tmp_path / "found")
    monkeypatch.setattr(ledger, "LEDGER", tmp_path / "ledger.json")
    monkeypatch.setattr(ledger, "further_bundles", bundles.further_bundles)
    known = {unit: entry(value) for unit, value in ledger.hash_units(folder).items()}
    (tmp_path / "ledger.json").write_text(ledger.dump({"sm_90a": known}, {}))
    return folder


OWNERS = {
    "grouped_linear__bf16__add_to_main_grad": ["kernels/gemm_a.cu"],
    "grouped_linear__bf16__add_to_main_grad__delayed_wgrad": ["kernels/gemm_a.cu"],
    "gelu__bf16": ["kernels/pointwise_gelu_forward.cu"],
    "expert_gelu__bf16": ["kernels/gemm_a.cu", "kernels/pointwise_gelu_forward.cu"],
    "expert_gelu__mx": ["kernels/gemm_a.cu", "kernels/pointwise_gelu_backward_quantize_mx.cu"],
    "scaled_gelu__mx__interleaved_32": [
        "kernels/pointwise_scaled_gelu_interleaved_32_forward_quantize_mx.cu"
    ],
}


def further(tmp_path: Path) -> Path:
    """A bundle of further cells beside that of `repository`, which never ran."""
    owned = {unit for of_cell in OWNERS.values() for unit in of_cell}
    owners = {
        f"csrc/{unit}": [c for c, of_cell in OWNERS.items() if unit in of_cell] for unit in owned
    }
    lock = {"files": {path: {"owners": cells} for path, cells in owners.items()}}
    files = {f"csrc/{unit}": f"int {unit[8:-3]};\n" for unit in owned}
    files |= {"csrc/sources.cmake": SOURCES, "README.md": "", "fusegen.lock": json.dumps(lock)}
    return write(tmp_path / "evidence" / "sm_90a", files)


def written(tmp_path: Path) -> Path:
    """A bundle of what users may write beside both, which never ran."""
    owners = {"csrc/kernels/pointwise_own_forward.cu": {"owners": ["own__mine"]}}
    files = {"csrc/sources.cmake": SOURCES, "README.md": ""}
    files |= dict.fromkeys(owners, "int own;\n")
    files["fusegen.lock"] = json.dumps({"files": owners})
    return write(tmp_path / "written" / "sm_90a", files)


def test_check_and_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = repository(tmp_path, monkeypatch)
    assert ledger.main(["check"]) == 0
    assert ledger.main(["report"]) == 0
    assert capsys.readouterr().out == "sm_90a: current, ran on NVIDIA H200 on 2026-11-20\n"
    write(folder, {"csrc/kernels/a.cu": "int other;\n", "csrc/kernels/e.cu": "int e;\n"})
    assert ledger.main(["check"]) == 1
    assert capsys.readouterr().err == (
        "sm_90a: kernels/a.cu: stale, changed since it ran on 2026-11-20\n"
        "sm_90a: kernels/e.cu: never ran\n"
        "on a machine with that GPU, run: make gpu-test\n"
    )
    assert ledger.main(["report"]) == 0
    assert capsys.readouterr().out.startswith("sm_90a: stale, ran on NVIDIA H200")
    (tmp_path / "ledger.json").unlink()
    assert ledger.main(["check"]) == 0
    ledger.main(["report"])
    assert capsys.readouterr().out == "sm_90a: never ran (compiled only), 4 units\n"


def test_a_library_from_other_sources_is_refused(bundle: Path) -> None:
    write(bundle, {"lib/x.so": "code"})
    with pytest.raises(ledger.LedgerError, match="no library that says what it was built from"):
        steps.verify_build(bundle)
    built = {"library": steps._sha256(bundle / "lib/x.so"), "units": ledger.hash_units(bundle)}
    write(bundle, {"lib/units.json": json.dumps(built)})
    steps.verify_build(bundle)
    write(bundle, {"csrc/kernels/a.cu": "int other;\n"})
    with pytest.raises(ledger.LedgerError, match="built from other sources"):
        steps.verify_build(bundle)
    write(bundle, {**FILES, "lib/x.so": "other code"})
    with pytest.raises(ledger.LedgerError, match="not the library that"):
        steps.verify_build(bundle)


def test_only_named_bundles_are_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a committed one no further bundle is generated."""
    repository(tmp_path, monkeypatch)
    built: list[str] = []
    monkeypatch.setattr(steps, "build_bundle", lambda folder, jobs: built.append(folder.name))
    with monkeypatch.context() as nothing_generated:
        nothing_generated.setattr(ledger, "further_bundles", None)
        assert ledger.main(["build", "sm_90a"]) == 0 and built == ["sm_90a"]
    further(tmp_path)
    assert ledger.main(["build", "sm_90a evidence"]) == 0 and built == ["sm_90a"] * 2
    assert ledger.main(["build"]) == 0 and built == ["sm_90a"] * 4, "no twin is of this one"
    assert ledger.main(["build", "sm_91"]) == 1
    assert "'sm_91': no bundle here; there are sm_90a, sm_90a evidence" in capsys.readouterr().err


def test_every_twin_has_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twin = load("twin")
    assert twin.MADE_BY.keys() == bundles.TWINS.keys()
    made: list[Path] = []
    monkeypatch.setattr(twin, "MADE_BY", {"sm_120a": made.append})
    monkeypatch.setattr(bundles, "BUILD", tmp_path)
    twin.generate(["sm_120a"])
    assert made == [tmp_path / "twin"]


# ---- what is whole


PART = {
    "README.md": "| [`linear__bf16`](linear__bf16.py) | `Linear` | bf16 | native |\n",
    "fusegen.lock": json.dumps({"files": {}}),
    "manifest.json": json.dumps(
        {
            "cells": {
                "silu__bf16": "native 1",
                "silu__mx": "unsupported: no",
                "linear__bf16__debug": "native 2",
            }
        }
    ),
}


@pytest.fixture
def part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A committed bundle that holds a part, beside the whole one, neither of which has run."""
    repository(tmp_path, monkeypatch)
    return write(tmp_path / "generated" / "sm_89", {**FILES, **PART, "csrc/sources.cmake": ADA})


ADA = "set(FUSEGEN_GENCODE arch=compute_89,code=[sm_89,compute_89])\n"


def wholly(tmp_path: Path) -> Path:
    texts = {**FILES, "csrc/sources.cmake": ADA, "README.md": "", "fusegen.lock": '{"files": {}}'}
    return write(tmp_path / "whole" / "sm_89", texts)


def test_a_whole_bundle_has_what_is_committed_and_what_has_digests(
    part: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load("whole")
    wanted = (Cell("linear", "bf16"), Cell("silu", "bf16"))
    assert whole.cells(part) == wanted
    made: list[object] = []
    monkeypatch.setattr(whole.further, "generate", lambda *given: made.append(given))
    whole.generate([])
    whole.generate(["sm_89"])
    assert made == [(bundles.BUILD / "whole", {"sm_89": wanted}, ())]


def test_the_digests_that_are_committed_are_of_cells() -> None:
    """Of every architecture of which a part is: the modules that the tests of kernels are of."""
    whole = load("whole")
    parts = [f for f in bundles.compiled_bundles() if bundles.is_representative(f)]
    assert len(parts) == 3
    for each in parts:
        found = whole.cells(each)
        assert {Cell("grouped_linear", "bf16"), Cell("grouped_linear", "nvfp4")} <= {*found}
        assert len(found) > 60 and not any(cell.options for cell in found)


def test_one_that_is_whole_takes_the_place_of_its_part(
    part: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(part, {"lib/own.so": ""})
    assert bundles.bundles_to_test((8, 9)) == [part]
    whole = wholly(tmp_path)
    assert bundles.bundles_to_test((8, 9)) == [part], "it is not built"
    write(whole, {"lib/own.so": ""})
    assert bundles.bundles_to_test((8, 9)) == [whole]
    assert sanitize.known_units(whole) == set()
    assert ledger.main(["report"]) == 0


def test_a_gpu_of_which_a_part_is_committed_tests_the_whole(
    part: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    monkeypatch.setattr(steps, "verify_build", lambda folder: None)
    with pytest.raises(ledger.LedgerError, match="sm_89: no bundle of every module and recipe"):
        steps.bundles_here()
    whole = wholly(tmp_path)
    assert steps.bundles_here() == [part, whole]
    assert steps.is_here("sm_89") and not steps.is_here("sm_90a")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    assert steps.bundles_here() == [part, whole], "as PTX, which no bundle has to be whole for"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not steps.is_here("sm_89")


def test_what_a_whole_bundle_ran_is_said_of_cells_with_digests(part: Path, tmp_path: Path) -> None:
    whole = wholly(tmp_path)
    lock = {f"csrc/{unit}": {"owners": ["silu__bf16"]} for unit in ledger.hash_units(whole)}
    write(whole, {"fusegen.lock": json.dumps({"files": lock})})
    known = {unit: entry(value) for unit, value in ledger.hash_units(whole).items()}
    said = ledger.facts_of(part, {"sm_89 whole": known})
    (silu, *_) = said.digests
    assert said.evidence(silu) == "native, ran on H200"
    assert said.run().startswith(
        "compiled only: it has run on no GPU yet; every module and recipe: ran on NVIDIA H200"
    )
    assert ledger.facts_of(part, {}).evidence(silu) == "native, compiled only"


def test_columns_stand_in_the_order_of_capabilities() -> None:
    made = [facts({}, arch) for arch in ("sm_120a", "sm_90a", "cpu", "sm_80")]
    assert matrix.matrix(made).startswith(
        "| module | recipe | `cpu` | `sm_80` | `sm_90a` | `sm_120a` |"
    )


def test_passed_tests_are_told_from_others() -> None:
    junit = """<testsuites><testsuite>
    <testcase classname="sm.tests.test_x" name="a"/>
    <testcase classname="sm.tests.test_x" name="b"><failure/></testcase>
    <testcase classname="sm.tests.test_y" name="c"><system-out/></testcase>
    <testcase classname="sm.tests.test_y" name="d"><skipped/></testcase>
    <testcase classname="sm.tests.test_y" name="e"/>
    <testcase classname="sm.tests.test_y" name="f"><error/></testcase></testsuite></testsuites>"""
    assert steps.passed(junit) == [("test_x", "a"), ("test_y", "c"), ("test_y", "e")]


# ---- steps


H200 = "ran on H200"
MACHINE = {
    "device": "NVIDIA H200",
    "driver": "580.1",
    "torch": "2.11.0",
    "cuda": "13.0",
    "date": "2026-11-23",
    "code": "SASS",
}


def found(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    """Both steps ended on these bundles."""
    monkeypatch.setattr(steps, "machine", lambda folder: MACHINE)
    for folder in folders:
        cells = {"gelu__bf16": 5, "grouped_linear__bf16__add_to_main_grad": 9}
        own = bundles.kind_of(folder) == bundles.EVIDENCE
        said = {"tests": 20, "cells": cells if own else {}}
        said["reduce-overhead"] = {} if own else {"linear__bf16": 1, "linear__mx": 1}
        steps.keep("test", folder, said)
        steps.keep("sanitize", folder, {"sanitizer": "memcheck clean"})


def test_what_both_steps_found_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed, other = repository(tmp_path, monkeypatch), further(tmp_path)
    write(committed, {"README.md": "", "fusegen.lock": json.dumps({"files": {}})})
    found(monkeypatch, committed, other)
    assert ledger.main(["record"]) == 0
    entries = ledger.load()
    assert entries.keys() == {"sm_90a", "sm_90a evidence"}
    assert {unit: e.hash for unit, e in entries["sm_90a evidence"].items()} == (
        ledger.hash_units(other)
    )
    recorded = entries["sm_90a evidence"]["kernels/gemm_a.cu"]
    assert (recorded.tests, recorded.sanitizer, recorded.date) == (
        *(20, "memcheck clean"),
        "2026-11-23",
    )
    ran = json.loads(ledger.LEDGER.read_text())["ran"]["sm_90a"]
    assert ran["options"]["add_to_main_grad"] == {"grouped_linear__bf16__add_to_main_grad": 9}
    assert ran["activations"]["gelu"]["alone"] == {"gelu__bf16": 5}
    assert ran["reduce-overhead"] == {"linear": {"bf16": 1, "mx": 1}}
    assert ledger.main(["check"]) == 0


def test_what_did_not_run_again_stays_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed, other = repository(tmp_path, monkeypatch), further(tmp_path)
    write(committed, {"README.md": "", "fusegen.lock": json.dumps({"files": {}})})
    found(monkeypatch, committed, other)
    assert ledger.main(["record"]) == 0
    every = ledger.load_index()
    elsewhere = {"sm_80": every["sm_90a"]}
    ledger.LEDGER.write_text(ledger.dump(ledger.load(), every | elsewhere))
    for step in ("test", "sanitize"):
        (steps.FOUND / f"sm_90a_evidence.{step}.json").unlink()
    assert ledger.main(["record"]) == 0
    assert ledger.load_index() == every | elsewhere
    assert choices.counts(every["sm_90a"]) == (
        {"gelu__bf16": 5, "grouped_linear__bf16__add_to_main_grad": 9},
        {"linear__bf16": 1, "linear__mx": 1},
    )
    assert choices.counts({}) == ({}, {})


def test_what_no_sanitizer_saw_is_recorded_as_such_where_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    committed, other = repository(tmp_path, monkeypatch), further(tmp_path)
    write(committed, {"README.md": "", "fusegen.lock": json.dumps({"files": {}})})
    found(monkeypatch, committed, other)
    (steps.FOUND / "sm_90a_evidence.sanitize.json").unlink()
    assert ledger.main(["record"]) == 1
    assert "sm_90a_evidence.sanitize.json: missing" in capsys.readouterr().err
    assert ledger.main(["record", "--untested-memory"]) == 0
    entries = ledger.load()
    said = {key: {e.sanitizer for e in entries[key].values()} for key in entries}
    assert said == {"sm_90a": {"memcheck clean"}, "sm_90a evidence": {"not run"}}
    assert ledger.main(["check"]) == 0
    (steps.FOUND / "sm_90a_evidence.test.json").unlink()
    (steps.FOUND / "sm_90a.test.json").unlink()
    assert ledger.main(["record", "--untested-memory"]) == 1, "tests are needed in any case"


def test_bundles_are_told_apart_by_their_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [repository(tmp_path, monkeypatch), further(tmp_path), written(tmp_path)]
    assert [*bundles.compiled_bundles(), *bundles.further_bundles()] == made
    keys = [bundles.key_of(folder) for folder in made]
    assert keys == ["sm_90a", "sm_90a evidence", "sm_90a written"]
    assert [bundles.folder_of(key) for key in keys] == made
    assert [len(steps.suites_of(folder)) for folder in made] == [1, 1, 1]  # nothing to run here
    for folder in made:
        (folder / "grouped_linear__mx.py").write_text("")
    suites = [[suite.name for suite in steps.suites_of(folder)] for folder in made]
    assert suites == [
        ["sm_90a.generated", "sm_90a.gpu"],
        ["sm_90a_evidence.generated"],
        ["sm_90a_written.generated", "sm_90a_written.gpu"],
    ]
    (made[0] / "grouped_linear__bf16.py").write_text("")
    assert [suite.name for suite in steps.suites_of(made[0]) if suite.alone] == ["sm_90a.large"]


def test_a_run_needs_every_further_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [repository(tmp_path, monkeypatch), further(tmp_path)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(steps, "verify_build", lambda folder: None)
    with pytest.raises(ledger.LedgerError, match="sm_90a: no bundle of specs of tests: chains"):
        steps.bundles_here()
    assert steps.bundles_here(["sm_90a"]) == made[:1]
    made.append(written(tmp_path))
    assert steps.bundles_here() == made
    assert steps.bundles_here(["sm_90a written"]) == made[2:]


def test_the_sanitizer_leaves_out_what_the_committed_bundle_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed, own = repository(tmp_path, monkeypatch), written(tmp_path)
    assert sanitize.known_units(own) == set()
    write(own, {"csrc/fusegen/status.h": FILES["csrc/fusegen/status.h"]})
    write(own, {path: FILES[path] for path in ("csrc/kernels/a.cu", "csrc/fusegen/gemm.cuh")})
    assert sanitize.known_units(own) == {"kernels/a.cu"}
    assert sanitize.known_units(committed) == set()


def test_what_users_may_write_is_recorded_beside_what_ships(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    committed, own = repository(tmp_path, monkeypatch), written(tmp_path)
    folders = (committed, further(tmp_path), own)
    write(committed, {"README.md": "", "fusegen.lock": json.dumps({"files": {}})})
    monkeypatch.setattr(ledger, "README", tmp_path / "README.md")
    ledger.README.write_text(f"{matrix.BEGIN}\n{matrix.END}\n")
    found(monkeypatch, *folders)
    cells = {"tests": 3, "cells": {"own__mine": 3}, "reduce-overhead": {"own__mine": 1}}
    steps.keep("test", own, cells)
    assert (ledger.main(["record"]), ledger.main(["readme"]), ledger.main(["check"])) == (0, 0, 0)
    assert ledger.load()["sm_90a written"].keys() == {"kernels/pointwise_own_forward.cu"}
    ran = json.loads(ledger.LEDGER.read_text())["ran"]["sm_90a"]
    assert "own" not in ran["activations"] and "own" not in ran["reduce-overhead"]
    lines = ledger.README.read_text().splitlines()
    item = "- `sm_90a`, specs of tests: chains, recipes, extension: ran on NVIDIA H200"
    assert [line for line in lines if line.startswith(item)]
    assert not [line for line in lines if "`own`" in line]
    write(own, {"csrc/kernels/pointwise_own_forward.cu": "int changed;\n"})
    capsys.readouterr()
    assert (ledger.main(["report"]), ledger.main(["check"])) == (0, 1)
    said = capsys.readouterr()
    assert "sm_90a written: stale, ran on NVIDIA H200" in said.out
    assert "sm_90a written: kernels/pointwise_own_forward.cu: stale" in said.err


def test_units_that_one_step_saw_otherwise_stay_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed, other = repository(tmp_path, monkeypatch), further(tmp_path)
    write(committed, {"README.md": "", "fusegen.lock": json.dumps({"files": {}})})
    before = ledger.load()["sm_90a"]
    found(monkeypatch, committed, other)
    write(other, {"csrc/kernels/gemm_a.cu": "int other;\n"})
    steps.keep("sanitize", other, {"sanitizer": "memcheck clean"})
    assert ledger.main(["record"]) == 0
    entries = ledger.load()
    assert entries["sm_90a evidence"].keys() == (
        ledger.hash_units(other).keys() - {"kernels/gemm_a.cu"}
    )
    assert entries["sm_90a"] != before and entries["sm_90a"].keys() == before.keys()


def test_what_a_step_found_on_other_sources_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = repository(tmp_path, monkeypatch)
    before = ledger.LEDGER.read_text()
    assert ledger.main(["record"]) == 1
    assert "nothing ran; run: python tests/gpu/ledger.py test" in capsys.readouterr().err
    monkeypatch.setattr(steps, "machine", lambda folder: MACHINE)
    steps.keep("sanitize", folder, {"sanitizer": "memcheck clean"})
    assert ledger.main(["record"]) == 1
    assert "sm_90a.test.json: missing; run: python tests/gpu/ledger.py test" in (
        capsys.readouterr().err
    )
    found(monkeypatch, folder)
    seen = {path: path.read_text() for path in (folder / "csrc").rglob("*.c*") if path.is_file()}
    for path in seen:
        path.write_text("int other;\n")
    assert ledger.main(["record"]) == 1
    assert "found on other sources than lie here" in capsys.readouterr().err
    for path, text in seen.items():
        path.write_text(text)
    found(monkeypatch, folder)
    monkeypatch.setattr(steps, "machine", lambda folder: {**MACHINE, "device": "another"})
    steps.keep("sanitize", folder, {"sanitizer": "memcheck clean"})
    assert ledger.main(["record"]) == 1
    assert "repeat one there" in capsys.readouterr().err
    assert ledger.LEDGER.read_text() == before


def test_one_failing_suite_keeps_its_bundle_from_being_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed, other = repository(tmp_path, monkeypatch), further(tmp_path)
    write(other, {"tests/test_gelu__bf16.py": ""})
    monkeypatch.setattr(steps, "machine", lambda folder: MACHINE)
    names = ("test_a", "test_c[sm_90a-linear-reduce-overhead]")
    names += ("test_c[sm_90a-linear__mx-reduce-overhead]", "test_c[sm_90a-linear__mx-default]")
    passed = [("test_gelu__bf16", names[0]), *(("test_graphs", name) for name in names)]
    (committed / "grouped_linear__bf16.py").write_text("")
    ran: list[str] = []

    def run(suite: steps.Suite, _: int) -> list[tuple[str, str]] | None:
        ran.append(suite.name)
        return None if suite.name == "sm_90a.gpu" else passed

    monkeypatch.setattr(steps, "run_pytest", run)
    with pytest.raises(ledger.LedgerError, match=r"tests failed in sm_90a\.gpu; logs are in"):
        steps.test({committed: None, other: None})
    assert ran[-1] == "sm_90a.large" and len(ran) == 4, "it runs when all others have ended"
    assert steps.found_in("test", other)["said"] == {
        "tests": 5,
        "cells": {"gelu__bf16": 1},
        "reduce-overhead": {"linear__bf16": 1, "linear__mx": 1},
    }
    with pytest.raises(ledger.LedgerError, match=r"sm_90a\.test\.json: missing"):
        steps.found_in("test", committed)


def test_what_has_changed_runs_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cells of which a unit changed or never ran are tested, and their units recorded alone."""
    committed = repository(tmp_path, monkeypatch)
    hashes = ledger.hash_units(committed)
    (unit, _), *others = sorted(hashes.items())
    owned = {"linear__mx": [unit], "gelu__bf16": [name for name, _ in others]}
    files = {f"csrc/{u}": {"owners": [c]} for c, units in owned.items() for u in units}
    lock = json.dumps({"files": files})
    write(committed, {"README.md": "", "fusegen.lock": lock, "tests/test_linear__mx.py": ""})
    monkeypatch.setattr(steps, "bundles_here", lambda wanted=(): [committed])
    monkeypatch.setattr(steps, "machine", lambda folder: MACHINE)
    entries = {
        u: ledger.Entry(hash=h, tests=1, sanitizer="clean", **MACHINE) for u, h in hashes.items()
    }
    ledger.LEDGER.write_text(ledger.dump({"sm_90a": entries}, {}))
    assert ledger.main(["test", "--changed"]) == ledger.main(["sanitize", "--changed"]) == 0
    assert capsys.readouterr().out == "all has run as it is\n" * 2 and not steps.FOUND.exists()
    write(committed, {f"csrc/{unit}": "int changed;\n"})
    ran: list[steps.Suite] = []

    def run(suite: steps.Suite, _: int) -> list[tuple[str, str]]:
        ran.append(suite)
        return [("test_linear__mx", "test_a"), ("test_linear__mx", "test_b")]

    def sanitized(folders: Any, hands: int) -> Any:
        assert folders == {committed: [unit]}
        return {committed: [sanitize.ToolReport("memcheck", 0, {"linear__mx": []})]}

    monkeypatch.setattr(steps, "run_pytest", run)
    monkeypatch.setitem(sys.modules, "sanitize", sanitize)
    monkeypatch.setattr(sanitize, "sanitize", sanitized)
    assert ledger.main(["test", "--changed"]) == ledger.main(["sanitize", "--changed"]) == 0
    (suite,) = ran
    assert suite.paths == (committed / "tests" / "test_linear__mx.py",) and suite.files == 1
    assert steps.found_in("test", committed)["units"].keys() == {unit}
    assert ledger.main(["record"]) == 0
    found = ledger.load()["sm_90a"]
    assert {u: e for u, e in found.items() if u != unit} == {n: entries[n] for n, _ in others}
    assert (found[unit].hash, found[unit].tests) == (ledger.hash_units(committed)[unit], 2)
    assert found[unit].sanitizer == "memcheck clean"
    said = ledger.facts_of(committed, ledger.load()).run()
    assert f"; 1 tests, and 2 of units that changed by {MACHINE['date']}; " in said
    assert said.endswith("compute-sanitizer: memcheck clean")


@pytest.mark.parametrize(("code", "of_units"), ((5, False), (0, False), (5, True)))
def test_a_suite_without_tests_has_failed_unless_it_is_of_some_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, of_units: bool
) -> None:
    """The words of every generated suite choose among its tests, too."""
    committed = repository(tmp_path, monkeypatch)
    monkeypatch.setattr(steps, "machine", lambda folder: MACHINE)
    steps.FOUND.mkdir(parents=True)

    def ended(words: list[str], **_: Any) -> Any:
        (result,) = (word for word in words if word.startswith("--junitxml="))
        Path(result.partition("=")[2]).write_text("<testsuites/>")
        return subprocess.CompletedProcess(words, code)

    monkeypatch.setattr(steps.subprocess, "run", ended)
    suite = steps.Suite("x", (tmp_path / "test_x.py",), committed, ("-k", "not cpu"), part=of_units)
    assert steps.run_pytest(suite, 1) == ([] if of_units else None)
    monkeypatch.setattr(steps, "suites_of", lambda folder, units: [suite])
    with pytest.raises(ledger.LedgerError, match="tests failed in"):
        steps.test({committed: ["kernels/a.cu"] if of_units else None})
    assert not steps.has_found("test", committed)


def test_what_runs_of_some_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed = repository(tmp_path, monkeypatch)
    units = sorted(ledger.hash_units(committed))
    files = {f"csrc/{unit}": {"owners": ["gelu__bf16"]} for unit in units[1:]}
    files[f"csrc/{units[0]}"] = {"owners": ["linear__mx"]}
    cells = ("gelu__bf16", "linear__mx")
    made = {f"{cell}.py": "" for cell in cells} | {f"csrc/{cell}.cpp": "" for cell in cells}
    write(committed, {"fusegen.lock": json.dumps({"files": files}), **made})
    every = sanitize.Chosen.of(committed)
    assert every.cells == cells and not every.known
    some = sanitize.Chosen.of(committed, units[:1])
    assert some.cells == ("linear__mx",) and units[0] not in some.known
    assert {*units[1:]} <= some.known


def test_suites_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps.os, "cpu_count", lambda: 16)
    assert steps.workers_of([36, 17, 198]) == [4, 4, 12]
    monkeypatch.setattr(steps.os, "cpu_count", lambda: 2)
    assert steps.workers_of([36, 17, 198]) == [2, 2, 2]


# ---- options and activations


def test_options_and_activations_of_cells() -> None:
    owners = {cell: set(of_cell) for cell, of_cell in OWNERS.items()}
    alone, together = list(OWNERS)[:2]
    assert choices.by_option(owners) == {
        "add_to_main_grad": [alone, together],
        "delayed_wgrad": [together],
        "interleaved_32": ["scaled_gelu__mx__interleaved_32"],
    }
    assert choices.by_activation(owners) == {
        "gelu": {
            "alone": ["gelu__bf16"],
            "in an expert MLP": ["expert_gelu__bf16"],
            "merged with quantisation": ["expert_gelu__mx"],
        }
    }


def test_tables_have_all_architectures_side_by_side() -> None:
    def of_arch(arch: str, code: str | None, *words: str) -> Any:
        units = {"gelu__bf16": "kernels/pointwise_gelu_forward.cu"}
        units |= {f"linear__bf16__{word}": f"kernels/gemm_{word}.cu" for word in words}
        ran = {unit: replace(entry("1"), code=code) for unit in units.values()} if code else {}
        owners = {cell: {unit} for cell, unit in units.items()}
        return matrix.BundleFacts(arch, (), owners, dict.fromkeys(units.values(), "1"), ran)

    new, old = of_arch("sm_90a", "SASS", "debug", "other"), of_arch("sm_80", None, "debug")
    assert choices.tables([choices.Choices([old]), choices.Choices([new])]) == [
        "| option | alone | together with | `sm_80` | `sm_90a` |",
        "|---|---|---|---|---|",
        "| `debug` | `linear`: bf16 |  | never ran | ran on H200 |",
        "| `other` | `linear`: bf16 |  | none | ran on H200 |",
        "",
        "| pointwise op | alone | in an expert MLP | merged with quantisation |",
        "|---|---|---|---|",
        "| `gelu` | bf16: never ran (`sm_80`), ran on H200 (`sm_90a`) | none | none |",
    ]
    by_ptx = choices.Choices([of_arch("sm_80", "PTX", "debug")])
    assert choices.tables([by_ptx])[2].endswith("| PTX ran on H200 |")
    assert choices.tables([by_ptx])[-1] == "| `gelu` | bf16: PTX ran on H200 | none | none |"
    assert by_ptx.behind() == []


def test_readme_says_what_ran_and_the_report_what_did_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    committed, other = repository(tmp_path, monkeypatch), further(tmp_path)
    lock = {"files": {"csrc/kernels/b.cu": {"owners": ["linear__bf16"]}}}
    write(committed, {"README.md": BUNDLE_README, "fusegen.lock": json.dumps(lock)})
    monkeypatch.setattr(ledger, "README", tmp_path / "README.md")
    ledger.README.write_text(f"{matrix.BEGIN}\n{matrix.END}\n")
    found(monkeypatch, committed, other)
    assert (ledger.main(["record"]), ledger.main(["readme"])) == (0, 0)
    text = ledger.README.read_text()
    assert f"| `add_to_main_grad` | `grouped_linear`: bf16 | `delayed_wgrad` | {H200} |" in text
    assert f"| `gelu` | bf16: {H200} | bf16: {H200} | mx: {H200} |" in text
    assert "- `sm_90a`, further cells: ran on NVIDIA H200" in text
    replayed = '- `sm_90a`, `torch.compile(mode="reduce-overhead")`: `linear` (bf16, mx stale)'
    assert replayed in text.splitlines()
    capsys.readouterr()
    write(other, {"csrc/kernels/pointwise_gelu_forward.cu": "int changed;\n"})
    assert ledger.main(["check"]) == 1
    assert ledger.main(["report"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "sm_90a: gelu alone: 0 of 1 ran as they are" in said
    assert "sm_90a: gelu merged with quantisation: 0 of 1 ran as they are" not in said
    assert not [line for line in said if "option" in line]
    ledger.main(["readme"])
    assert "| `gelu` | bf16: 0 of 1 ran as they are | bf16: 0 of 1" in ledger.README.read_text()


# ---- support matrix


BUNDLE_README = """\
| module | class | recipe | status | gradients of |
|---|---|---|---|---|
| [`linear__bf16`](linear__bf16.py) | `Linear` | bf16 | native | x, weight, bias |
| [`linear__mxfp8__main_grad`](x.py) | `Linear` | mxfp8 | emulated | x, weight |
| [`quantize__bf16`](quantize__bf16.py) | `Quantize` | bf16 | native | x |
"""


def facts(entries: dict[str, object], arch: str = "sm_90a") -> object:
    return matrix.BundleFacts(
        arch=arch,
        cells=tuple(matrix.read_cells(BUNDLE_README)),
        owners={"linear__bf16": {"a.cu", "linear.cpp"}, "linear__mxfp8__main_grad": {"b.cu"}},
        hashes={} if arch == "cpu" else {"a.cu": "1", "linear.cpp": "2", "b.cu": "3"},
        entries=entries,
    )


def test_cells_of_a_readme() -> None:
    cells = matrix.read_cells(BUNDLE_README)
    assert [(cell.module, cell.recipe, cell.status) for cell in cells] == [
        ("linear", "bf16", "native"),
        ("linear", "mxfp8", "emulated"),
        ("quantize", "bf16", "native"),
    ]


def test_owners_of_units() -> None:
    files = {
        "csrc/kernels/a.cu": {"owners": ["x", "y"]},
        "csrc/y.cpp": {"owners": ["y"]},
        "csrc/fusegen/gemm.cuh": {"owners": ["x"]},
        "x.py": {"owners": ["x"]},
    }
    owners = matrix.read_owners(json.dumps({"files": files}))
    assert owners == {"x": {"kernels/a.cu"}, "y": {"kernels/a.cu", "y.cpp"}}


def test_matrix() -> None:
    ran = {"a.cu": entry("1"), "linear.cpp": entry("2"), "b.cu": entry("old")}
    assert matrix.matrix([facts(ran), facts({}, "cpu"), facts({}, "sm_80")]).splitlines() == [
        "| module | recipe | `cpu` | `sm_80` | `sm_90a` |",
        "|---|---|---|---|---|",
        "| `linear` | `bf16` | reference | native, compiled only | native, ran on H200 |",
        "| `linear` | `mxfp8` | reference | emulated, compiled only |"
        " emulated, ran on H200, changed since |",
        "| `quantize` | `bf16` | reference | native, no kernels | native, no kernels |",
        "",
        "- `cpu`: the PyTorch reference; runs in every test",
        "- `sm_80`: compiled only: it has run on no GPU yet",
        "- `sm_90a`: ran on NVIDIA H200, torch 2.11.0, CUDA 13.0, 2026-11-20; 7 tests; "
        "compute-sanitizer: memcheck clean; some kernels have changed since",
    ]


def test_a_cell_whose_kernels_ran_for_another_one_never_did() -> None:
    ran = {"a.cu": entry("old")}
    assert facts(ran).said("linear__bf16") == "compiled only"
    assert facts({**ran, "linear.cpp": entry("2")}).said("linear__bf16") == (
        "ran on H200, changed since"
    )


def test_code_that_only_ran_as_ptx_says_so() -> None:
    ran = {
        unit: replace(entry(value), code="PTX")
        for unit, value in (("a.cu", "1"), ("linear.cpp", "2"), ("b.cu", "3"))
    }
    lines = matrix.matrix([facts(ran, "sm_80")]).splitlines()
    assert lines[2] == "| `linear` | `bf16` | native, PTX ran on H200 |"
    assert lines[-1] == (
        "- `sm_80`: PTX ran on NVIDIA H200; SASS compiled, not run, torch 2.11.0, CUDA 13.0,"
        " 2026-11-20; 7 tests; compute-sanitizer: memcheck clean"
    )


def test_what_a_twin_ran_is_said_of_cells_that_never_ran() -> None:
    """Those that have files, and those of which there are digests; unsupported ones stay so."""
    ran = {unit: replace(entry(h), code="twin") for unit, h in (("a.cu", "1"), ("linear.cpp", "2"))}
    manifest = {"linear__fp8": "native 12", "linear__nvfp4": "emulated 3", "silu__fp8": "native 4"}
    manifest |= {"silu__mx": "unsupported: no", "silu__fp8__debug": "native 5"}
    twin = replace(facts(ran), owners={**facts(ran).owners, "linear__fp8": {"a.cu"}})
    new = replace(
        facts({}, "sm_120a"),
        others=(("its", twin),),
        digests=tuple(matrix.read_manifest(json.dumps({"cells": manifest}))),
    )
    assert matrix.matrix([new]).splitlines()[2:] == [
        "| `linear` | `bf16` | native, twin ran on H200 |",
        "| `linear` | `fp8` | native, twin ran on H200 |",
        "| `linear` | `mxfp8` | emulated, compiled only |",
        "| `linear` | `nvfp4` | emulated, generated only |",
        "| `quantize` | `bf16` | native, no kernels |",
        "| `silu` | `fp8` | native, generated only |",
        "| `silu` | `mx` | unsupported |",
        "",
        "- `sm_120a`: compiled only: it has run on no GPU yet; its twin ran on NVIDIA H200, with"
        " matrix instructions in software; its own code compiled, not run, torch 2.11.0, CUDA 13.0,"
        " 2026-11-20; 7 tests; compute-sanitizer: memcheck clean; some never ran",
    ]
    stale = replace(twin, entries={**ran, "b.cu": replace(entry("old"), code="twin")})
    said = matrix.matrix([replace(new, others=(("its", stale),))])
    assert "| `linear` | `mxfp8` | emulated, twin ran on H200, changed since |" in said
    assert "| native, compiled only |" in matrix.matrix([replace(new, compiled=True)])
    assert "twin" not in matrix.matrix([replace(new, others=())])


def test_a_twin_stands_beside_the_bundle_it_is_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another architecture's folder, compiled for the GPU that is there; the ledger keeps both."""
    record = tmp_path / "architectures.json"
    monkeypatch.setattr(bundles, "RECORD", record)
    committed = repository(tmp_path, monkeypatch)
    own = write(tmp_path / "generated" / "sm_100a", FILES)
    sources = {"csrc/sources.cmake": "set(FUSEGEN_GENCODE arch=compute_100a,code=sm_100a)\n"}
    texts = {"README.md": "", "fusegen.lock": json.dumps({"files": {}})}
    write(own, sources | texts)
    write(own, {"manifest.json": json.dumps({"cells": {"silu__bf16": "native 1"}})})
    name = bundles.TWINS["sm_100a"]
    twin = write(tmp_path / "twin" / name, {**FILES, "csrc/sources.cmake": SOURCES, **texts})
    assert bundles.code_on(own, (9, 0)) is None
    assert bundles.code_on(twin, (9, 0)) is bundles.Code.TWIN
    assert bundles.code_on(committed, (9, 0)) is bundles.Code.SASS
    assert bundles.folder_of(bundles.key_of(twin)) == twin
    assert bundles.further_bundles() == [twin]
    known = {unit: replace(entry(h), code="twin") for unit, h in ledger.hash_units(twin).items()}
    (tmp_path / "ledger.json").write_text(ledger.dump({f"{name} twin": known}, {}))
    said = ledger.facts_of(own, ledger.load())
    assert bundles.is_representative(own) and [words for words, _ in said.others] == ["its"]
    assert said.run().startswith("compiled only: it has run on no GPU yet; its twin ran on NVIDIA")
    assert [cell.name for cell in said.digests] == ["silu__bf16"] and not said.compiled
    for complete in (True, False):
        record.write_text(json.dumps({"sm_100a": {"complete": complete}}))
        assert ledger.facts_of(own, ledger.load()).compiled is complete


def test_a_cell_that_one_bundle_lacks() -> None:
    other = matrix.BundleFacts("cpu", (matrix.Cell("silu", "bf16", "native", "s"),), {}, {}, {})
    assert "| `silu` | `bf16` | reference | not generated |" in matrix.matrix([other, facts({})])


def test_readme_marks() -> None:
    text = f"a\n{matrix.BEGIN}\nold\n{matrix.END}\nb\n"
    once = matrix.replace_matrix(text, "new")
    assert once == f"a\n{matrix.BEGIN}\nnew\n{matrix.END}\nb\n"
    assert matrix.replace_matrix(once, "new") == once
    for broken in ("a", matrix.BEGIN, matrix.END + matrix.BEGIN, text + text):
        with pytest.raises(ledger.LedgerError, match="once each"):
            matrix.replace_matrix(broken, "new")


def test_readme_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = repository(tmp_path, monkeypatch)
    lock = {"files": {"csrc/kernels/a.cu": {"owners": ["linear__bf16"]}}}
    write(folder, {"README.md": BUNDLE_README, "fusegen.lock": json.dumps(lock)})
    readme = tmp_path / "README.md"
    readme.write_text(f"{matrix.BEGIN}\n{matrix.END}\n")
    monkeypatch.setattr(ledger, "README", readme)
    assert ledger.main(["readme", "--check"]) == 1
    assert "run: python tests/gpu/ledger.py readme" in capsys.readouterr().err
    assert ledger.main(["readme"]) == 0
    assert "| `linear` | `bf16` | native, ran on H200 |" in readme.read_text()
    assert ledger.main(["readme", "--check"]) == 0


# ---- bundles and the sanitizer's log


@pytest.mark.parametrize(
    ("gencode", "capability", "expected"),
    [
        ("arch=compute_90a,code=sm_90a", (9, 0), "SASS"),
        ("arch=compute_90a,code=sm_90a", (10, 0), None),
        ("arch=compute_80,code=sm_80", (8, 6), "SASS"),
        ("arch=compute_89,code=sm_89", (8, 6), None),
        ("arch=compute_80,code=sm_80", (9, 0), None),
        ("arch=compute_80,code=[sm_80,compute_80]", (8, 0), "SASS"),
        ("arch=compute_80,code=[sm_80,compute_80]", (8, 9), "SASS"),
        ("arch=compute_80,code=[sm_80,compute_80]", (9, 0), "PTX"),
        ("arch=compute_80,code=[sm_80,compute_80]", (7, 5), None),
        ("arch=compute_80,code=[sm_80,compute_80]", (12, 0), "PTX"),
        ("arch=compute_100a,code=sm_100a", (10, 0), "SASS"),
        ("arch=compute_100a,code=sm_100a", (10, 3), None),
        ("arch=compute_120a,code=sm_120a", (12, 0), "SASS"),
    ],
)
def test_code_that_runs_on_a_device(
    tmp_path: Path, gencode: str, capability: tuple[int, int], expected: str | None
) -> None:
    """As the spec of an architecture of that gencode has it, too."""
    write(tmp_path, {"csrc/sources.cmake": f"set(FUSEGEN_GENCODE {cmake(gencode)})\n"})
    code = bundles.code_on(tmp_path, capability)
    assert (code.value if code else None) == expected
    number = re.findall(r"sm_(\d+a?)", gencode)[0]
    arch = ArchSpec(CURRENT, f"sm_{number}", "toy", gencode=gencode, toolkit="13.0")
    assert arch.runs_on(capability) == bool(expected)


LOG = """\
========= COMPUTE-SANITIZER
@@ sanitize: gemm_a
@@ sanitize: gemm_b
========= Invalid __global__ write of size 16 bytes
=========     at void kernel<int>(int *)+0x120
=========     by thread (0,0,0) in block (0,0,0)
@@ sanitize: end
========= ERROR SUMMARY: 1 error
"""


def test_problems_belong_to_the_kernel_that_ran() -> None:
    report = sanitize.parse_log("memcheck", LOG)
    assert report.total == 1
    assert report.kernels == {
        "gemm_a": [],
        "gemm_b": ["Invalid __global__ write of size 16 bytes"],
    }
    assert not report.clean


def test_a_clean_log() -> None:
    log = LOG.replace("========= Invalid __global__ write of size 16 bytes\n", "")
    assert sanitize.parse_log("memcheck", log.replace("1 error", "0 errors")).clean
    races = "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
    assert sanitize.parse_log("racecheck", log.replace("ERROR SUMMARY: 1 error", races)).clean


@pytest.mark.parametrize("cut", ["ERROR SUMMARY", "@@ sanitize: end", "@@ sanitize: "])
def test_a_run_that_broke_off_is_told(cut: str) -> None:
    log = "\n".join(line for line in LOG.splitlines() if cut not in line)
    with pytest.raises(sanitize.SanitizeError, match="memcheck broke off"):
        sanitize.parse_log("memcheck", log)


def test_a_process_may_be_dealt_no_case_but_not_all_of_them() -> None:
    log = "@@ sanitize: end\n========= ERROR SUMMARY: 0 errors\n"
    idle = sanitize.parse_log("memcheck", log)
    ran = sanitize.parse_log("memcheck", LOG)
    assert sanitize.merge([idle, ran]) == ran
    with pytest.raises(sanitize.SanitizeError, match="memcheck had no case to run"):
        sanitize.merge([idle, idle])


def test_a_tool_that_breaks_off_takes_no_other_bundle_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed, other = repository(tmp_path, monkeypatch), further(tmp_path)
    monkeypatch.setattr(steps, "machine", lambda folder: MACHINE)
    # `steps` imports it by this name when it sanitizes.
    monkeypatch.setitem(sys.modules, "sanitize", sanitize)
    monkeypatch.setattr(sanitize, "find_sanitizer", lambda: "compute-sanitizer")

    def run(sanitizer: str, tool: str, bundle: Path, hand: str, units: None) -> Any:
        if bundle == committed:
            raise sanitize.SanitizeError(f"{tool} broke off after gemm_a")
        return sanitize.ToolReport(tool, 0, {"gemm_b": []})

    monkeypatch.setattr(sanitize, "run_tool", run)
    with pytest.raises(steps.LedgerError, match="sm_90a: memcheck broke off after gemm_a"):
        steps.sanitize({committed: None, other: None})
    assert steps.found_in("sanitize", other)["said"]["sanitizer"] == "memcheck and racecheck clean"
    with pytest.raises(steps.LedgerError, match="missing"):
        steps.found_in("sanitize", committed)


def test_what_a_tool_says_in_several_processes_is_one_report() -> None:
    first = sanitize.ToolReport("memcheck", 1, {"a": ["x"], "b": []})
    second = sanitize.ToolReport("memcheck", 0, {"c": []})
    merged = sanitize.merge([first, second])
    assert (merged.total, merged.kernels) == (1, {"a": ["x"], "b": [], "c": []})
    assert not merged.clean


def test_further_cells_leave_out_what_the_committed_bundle_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed, other = repository(tmp_path, monkeypatch), further(tmp_path)
    same = {"csrc/kernels/gemm_b.cu": "int same;\n"}
    write(committed, same | {"csrc/kernels/gemm_a.cu": "int old;\n"})
    write(other, same)
    assert sanitize.known_units(other) == {"kernels/gemm_b.cu"}
    assert sanitize.known_units(committed) == set()
