"""Cells of which a bundle has digests alone: the same machinery keeps, checks and changes them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from fusegen import api, cli
from fusegen.commands.scaffold import new
from fusegen.emit.manifest import MANIFEST, differing, render_manifest
from fusegen.emit.render import Renderer
from fusegen.ir.naming import Cell
from fusegen.options import OPTIONS
from fusegen.passes.pipeline import resolve
from fusegen.publish.lock import LOCK_NAME
from fusegen.publish.paths import builtin_templates
from fusegen.publish.selection import Selection, SelectionError, read_selection
from fusegen.spec.cells import target_cells
from fusegen.spec.editions import CURRENT
from fusegen.spec.offers import words_of

ARCH = "sm_86"
KEPT = {"files": "linear", "digests": "silu, linear, linear_cross_entropy"}


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An architecture that no bundle is committed for, and targets of it."""
    folder = tmp_path_factory.mktemp("specs of a test")
    new("arch", ARCH, origin="sm_80", folder=folder)
    (folder / "targets").mkdir()
    for kept, modules in KEPT.items():
        target = {
            "edition": CURRENT,
            "target": f"of_{kept}",
            "summary": "Cells of a test",
            "archs": [ARCH],
            "modules": modules.split(", "),
            "recipes": ["bf16"] if kept == "files" else ["bf16", "fp8_block"],
            "kept": kept,
        }
        (folder / "targets" / f"of_{kept}.yaml").write_text(yaml.safe_dump(target))
    return folder


@pytest.fixture(scope="module")
def out(specs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out")
    generate(folder, specs, targets=("of_files", "of_digests"))
    return folder


def generate(out: Path, specs: Path, **words: Any) -> None:
    request = api.Request(out=out, folders=api.Folders(specs=(specs,)), **words)
    assert not api.generate(request).refused


def manifest(out: Path) -> Mapping[str, str]:
    cells: Mapping[str, str] = json.loads((out / ARCH / MANIFEST).read_text("utf-8"))["cells"]
    return cells


def check(out: Path, specs: Path) -> Result:
    return CliRunner().invoke(cli.program, ["check", str(out / ARCH), "--specs", str(specs)])


def test_a_bundle_has_files_of_some_cells_and_digests_of_others(out: Path, specs: Path) -> None:
    found = manifest(out)
    assert sorted(path.stem for path in (out / ARCH).glob("[a-z]*__*.py")) == ["linear__bf16"]
    assert sorted(found) == [
        "linear__fp8_block",
        "linear_cross_entropy__bf16",
        "linear_cross_entropy__fp8_block",
        "silu__bf16",
        "silu__fp8_block",
    ]
    refused = found["linear_cross_entropy__fp8_block"]
    assert refused.startswith("unsupported: recipe 'fp8_block' quantises what op")
    digests = [digest for digest in found.values() if digest != refused]
    assert [digest.split()[0] for digest in digests] == ["emulated", "native", "native", "native"]
    assert len({digest.split()[1] for digest in digests}) == 4
    assert check(out, specs).exit_code == 0


def test_a_digest_is_of_its_cell_alone(out: Path, specs: Path, tmp_path: Path) -> None:
    """What else the manifest or the bundle has changes none."""
    target = yaml.safe_load((specs / "targets" / "of_digests.yaml").read_text())
    alone = {**target, "target": "alone", "modules": ["linear"], "recipes": ["fp8_block"]}
    (specs / "targets" / "alone.yaml").write_text(yaml.safe_dump(alone))
    generate(tmp_path, specs, targets=("alone",))
    assert manifest(tmp_path) == {"linear__fp8_block": manifest(out)["linear__fp8_block"]}


def test_a_target_of_every_option_has_each_choice_by_itself() -> None:
    """Whatever the registry gets is named without being listed."""
    specs = api.load_specs()
    target = replace(specs.targets["representative"], modules=("linear", "silu"), every_option=True)
    specs = replace(specs, targets={"each": target})
    cells = target_cells(specs, ["each"])["sm_120a"].files
    for name in target.modules:
        offered = words_of(specs.modules[name], specs.ops)
        found = {cell.options for cell in cells if cell.module == name and cell.recipe == "bf16"}
        assert offered and found == {(word,) for word in offered}
    assert {cell.recipe for cell in cells} == {*target.recipes}


def test_the_shipped_digests_have_every_option_and_every_recipe() -> None:
    """Of architectures that nobody here can run."""
    specs = api.load_specs()
    cells = target_cells(specs, specs.targets)
    kept = {arch: found.digests for arch, found in cells.items() if found.digests}
    assert {*kept} == {"sm_89", "sm_100a", "sm_120a"}
    for found in kept.values():
        words = {word for cell in found for word in cell.options}
        assert words == {word for option in OPTIONS for word in option.further}
        assert {cell.recipe for cell in found if cell.options} == {*specs.recipes}


def test_every_cell_of_hopper_has_files_or_a_digest_of_other_gpus() -> None:
    specs = api.load_specs()
    cells = target_cells(specs, specs.targets)
    committed = {*cells["sm_90a"].files}
    for arch in ("sm_89", "sm_100a", "sm_120a"):
        kept = {*cells[arch].files, *cells[arch].digests}
        assert not committed - kept, sorted(committed - kept)


@pytest.mark.slow
def test_what_a_cell_is_made_of_is_in_its_digest(tmp_path: Path) -> None:
    """A header that only GEMMs include, several headers down."""
    specs, copy = api.load_specs(), tmp_path / "templates"
    shutil.copytree(builtin_templates(), copy)
    header = copy / "static/csrc/fusegen/gemm/config.mma.cuh"
    header.write_text(header.read_text("utf-8").replace("#pragma once", "#pragma once\n// more", 1))
    cells = [Cell("silu", "bf16"), Cell("linear", "bf16"), Cell("linear", "fp8_block")]
    plan = resolve(specs, "sm_80", cells)
    before, after = (
        render_manifest(plan, specs.archs["sm_80"], "toy", Renderer((folder,)), ()).data
        for folder in (builtin_templates(), copy)
    )
    assert differing(before, after) == ("linear__bf16", "linear__fp8_block")


@pytest.mark.slow
def test_check_names_the_cells_that_changed_and_the_command(specs: Path, tmp_path: Path) -> None:
    mine = Path(shutil.copytree(specs, tmp_path / "specs"))
    generate(tmp_path, mine, targets=("of_files", "of_digests"))
    arch = mine / "archs" / f"{ARCH}.yaml"
    head, tail = arch.read_text("utf-8").split("  gemm_decoded_mma:")
    tail = tail.replace("stages: 4", "stages: 3").replace("_2x2_4_1", "_2x2_3_1")
    arch.write_text(f"{head}  gemm_decoded_mma:{tail}", "utf-8")
    said = check(tmp_path, mine)
    assert said.exit_code == 1
    assert said.output.splitlines()[1:3] == [
        f"  stale           {MANIFEST}",
        "                  cells: linear__fp8_block",
    ]
    assert "To fix it:\nfusegen generate" in said.output
    generate(tmp_path, mine)
    assert check(tmp_path, mine).exit_code == 0


def test_a_line_edited_by_hand_is_refused(specs: Path, tmp_path: Path) -> None:
    generate(tmp_path, specs, targets=("of_digests",))
    path = tmp_path / ARCH / MANIFEST
    path.write_text(path.read_text("utf-8").replace('"silu__bf16": "', '"silu__bf16": "non'))
    said = check(tmp_path, specs)
    assert said.exit_code == 1 and "edited          manifest.json" in said.output
    assert "cells: silu__bf16\n" in said.output
    path.unlink()
    said = check(tmp_path, specs)
    assert said.exit_code == 1 and "missing         manifest.json" in said.output


@pytest.mark.slow
def test_cells_come_go_and_change_what_is_kept(specs: Path, tmp_path: Path) -> None:
    generate(tmp_path, specs, targets=("of_files", "of_digests"))
    words = {"archs": (ARCH,), "modules": ("silu",), "recipes": ("bf16",)}
    generate(tmp_path, specs, **words)
    assert (tmp_path / ARCH / "silu__bf16.py").is_file() and "silu__bf16" not in manifest(tmp_path)
    digests = {"modules": ("linear_cross_entropy", "silu", "linear"), "recipes": ("fp8_block",)}
    generate(tmp_path, specs, archs=(ARCH,), remove=True, **digests)
    assert [*manifest(tmp_path)] == ["linear_cross_entropy__bf16"]
    last = {"modules": ("linear_cross_entropy",), "recipes": ("bf16",)}
    generate(tmp_path, specs, archs=(ARCH,), remove=True, **last)
    selection = read_selection(tmp_path / ARCH)
    assert selection is not None
    assert [*map(str, selection.cells)] == ["linear__bf16", "silu__bf16"]
    assert not (tmp_path / ARCH / MANIFEST).exists(), "there is nothing left for it to say"


@pytest.mark.parametrize(
    ("digests", "said"),
    [
        ("silu__bf16", "expected a list of strings as 'digests'"),
        (["silu"], "'silu' is not <module>__<recipe>"),
        (["linear__bf16"], "linear__bf16 is in cells and in digests"),
    ],
)
def test_a_lock_that_cannot_be(digests: object, said: str) -> None:
    data = {**Selection(ARCH, cells=(Cell("linear", "bf16"),)).to_json(), "digests": digests}
    with pytest.raises(SelectionError, match=said):
        Selection.parse(data, Path("bundle", LOCK_NAME))


def test_a_lock_has_what_it_records() -> None:
    some = Selection(ARCH, cells=(Cell("linear", "bf16"),), digests=(Cell("silu", "bf16"),))
    assert Selection.parse(some.to_json(), Path(LOCK_NAME)) == some
    assert "digests" not in Selection(ARCH).to_json()


def test_manifests_that_cannot_be_read_differ_in_all_cells() -> None:
    good = b'{"cells": {"a__b": "1", "c__d": "2"}}'
    for bad in (None, b"", b"[", b"[]", b'{"cells": 3}', b'{"cells": {}}'):
        assert differing(bad, good) == differing(good, bad) == ("a__b", "c__d")
    assert differing(good, good.replace(b"2", b"3")) == ("c__d",)
