"""What a lock records of a bundle's making, and how requests change it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusegen import api
from fusegen.checks.load import load
from fusegen.emit.fileset import RenderError
from fusegen.ir.naming import Cell
from fusegen.publish import folders, paths, remedies, selection
from fusegen.publish.lock import LockError
from fusegen.publish.publish import PublishError
from fusegen.publish.selection import Selection, SelectionError
from fusegen.spec.cells import target_cells, with_options
from fusegen.spec.diagnostics import SpecError
from fusegen.spec.usage import UsageError

NAMES = st.from_regex(r"[a-z][a-z0-9]{0,5}(_[a-z0-9]{1,4}){0,2}", fullmatch=True)
FOLDERS = st.lists(st.from_regex(r"(\.\./){0,3}[a-z]{1,8}", fullmatch=True), unique=True)
CELLS = st.lists(st.builds(Cell, NAMES, NAMES, st.lists(NAMES, max_size=2).map(tuple)), unique=True)
SELECTIONS = st.builds(
    Selection,
    arch=NAMES,
    namespace=NAMES,
    cells=CELLS.map(lambda cells: tuple(sorted(cells))),
    specs=FOLDERS.map(lambda folders: tuple(sorted(folders))),
    templates=FOLDERS.map(lambda folders: tuple(sorted(folders))),
    no_fusions=st.lists(NAMES, unique=True).map(lambda names: tuple(sorted(names))),
)
LOCK = Path("generated/cpu/fusegen.lock")


@pytest.mark.slow
@given(SELECTIONS)
def test_a_selection_survives_the_lock(one: Selection) -> None:
    assert Selection.parse(json.loads(json.dumps(one.to_json())), LOCK) == one


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arch": None}, "expected a name as 'arch', got None"),
        ({"arch": "../up"}, "expected a name as 'arch', got '../up'"),
        ({"namespace": "Acme"}, "expected a name as 'namespace', got 'Acme'"),
        ({"cells": ["linear"]}, "'linear' is not <module>__<recipe>"),
        ({"cells": "linear__bf16"}, "expected a list of strings as 'cells'"),
        ({"specs": [1]}, "expected a list of strings as 'specs'"),
        ({"no_fusions": [1]}, "expected a list of strings as 'no_fusions'"),
        ({"extra": 1}, "unknown key 'extra'"),
    ],
)
def test_a_broken_selection_names_lock_key_and_remedy(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(SelectionError) as caught:
        Selection.parse(Selection("cpu").to_json() | change, LOCK)
    assert str(caught.value).startswith(f"{LOCK}: ")
    assert message in str(caught.value)
    assert str(caught.value).endswith("fusegen generate --target <target>")


def test_a_missing_key_is_named() -> None:
    data = Selection("cpu").to_json()
    del data["cells"]
    with pytest.raises(LockError, match="missing key 'cells'"):
        Selection.parse(data, LOCK)


@pytest.mark.parametrize("word", ["", "Acme", "a-b", "a__b", "_a", "1a", "a b"])
def test_a_namespace_is_snake_case(word: str) -> None:
    with pytest.raises(UsageError, match="--namespace: expected a name"):
        selection.check_prefix(word)


def test_folders_are_recorded_relative_to_the_lock(tmp_path: Path) -> None:
    bundle, folder = tmp_path / "out" / "cpu", tmp_path / "mine" / "specs"
    folder.mkdir(parents=True)
    written = folders.relative_folders(bundle, [folder])
    assert written == ("../../mine/specs",)
    assert folders.recorded_folders(bundle, written) == (folder.resolve(),)


def test_a_cell_that_is_not_there_cannot_be_removed() -> None:
    one = Selection("cpu", cells=(Cell("linear", "bf16"),))
    with pytest.raises(UsageError, match="did you mean 'linear__bf16'"):
        selection.without(one, [Cell("linaer", "bf16")], Path("generated/cpu"))
    assert selection.without(one, one.cells, Path("generated/cpu")).cells == ()


def test_the_fix_names_what_is_not_a_default() -> None:
    bundles = [Path("generated/cpu"), Path("generated/sm_90a"), Path("vendored/hopper")]
    command = remedies.regeneration(bundles, {"--specs": (Path("mine"),), "--templates": ()})
    assert command.splitlines() == [
        "fusegen generate --specs mine",
        "fusegen generate --out vendored --specs mine",
    ]


# Requests


def request(out: Path, **named: object) -> api.Request:
    return replace(api.Request(out), **named)  # type: ignore[arg-type]


def cells_of(bundle: Path) -> list[str]:
    found = selection.read_selection(bundle)
    assert found is not None
    return [str(cell) for cell in found.cells]


SILU = {"archs": ("cpu",), "modules": ("silu",), "recipes": ("bf16",)}
SWIGLU = {"archs": ("cpu",), "modules": ("swiglu",), "recipes": ("bf16",)}


@pytest.mark.slow
def test_names_add_and_remove_and_a_target_replaces(tmp_path: Path) -> None:
    bundle = tmp_path / "cpu"
    api.generate(request(tmp_path, **SILU))
    assert cells_of(bundle) == ["silu__bf16"]
    api.generate(request(tmp_path, **SWIGLU))
    assert cells_of(bundle) == ["silu__bf16", "swiglu__bf16"]
    api.generate(request(tmp_path, **SILU, remove=True))
    assert cells_of(bundle) == ["swiglu__bf16"]
    assert not (bundle / "silu__bf16.py").exists()
    api.generate(request(tmp_path, targets=("cpu",)))
    every = [row for row in api.plan(api.Query(targets=("cpu",))) if row.status != "unsupported"]
    assert len(cells_of(bundle)) == len(every) > 2


def in_processes(out: Path, *modules: str) -> list[tuple[int, str]]:
    """Exit code and messages of one `generate` for each module, all at once."""
    words = [sys.executable, "-m", "fusegen", "generate", "--arch", "cpu", "--recipe", "bf16"]
    environment = os.environ | {"PYTHONPATH": str(paths.PACKAGE.parent)}
    running = [
        subprocess.Popen(
            [*words, "--module", module, "--out", str(out)],
            env=environment,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for module in modules
    ]
    return [(process.wait(), process.communicate()[1]) for process in running]


@pytest.mark.slow
def test_processes_that_add_at_once_lose_nothing(tmp_path: Path) -> None:
    modules = ("linear", "silu", "swiglu", "grouped_linear")
    out = tmp_path / "out"
    done = in_processes(out, *modules, "silu")
    assert {code for code, _ in done} == {0}, done
    assert cells_of(out / "cpu") == sorted(f"{module}__bf16" for module in modules)
    assert [path.name for path in out.iterdir()] == ["cpu"]
    assert not api.check([out / "cpu"]).drifted


@pytest.mark.parametrize("writing", [True, False])
def test_a_bundle_that_leads_elsewhere_is_refused(tmp_path: Path, writing: bool) -> None:
    out, place = tmp_path / "out", tmp_path / "elsewhere"
    api.generate(request(out, **SILU))
    (out / "cpu").rename(place)
    (out / "cpu").symlink_to(place)
    before = sorted(place.rglob("*"))
    policy = api.Policy.WRITE if writing else api.Policy.COMPARE
    for named in (SWIGLU, {}, {"targets": ("cpu",)}, {**SILU, "remove": True}):
        with pytest.raises(PublishError, match="a symbolic link leads from here out of"):
            api.generate(request(out, **named), policy)
    assert sorted(place.rglob("*")) == before
    # A link from one name to another inside is what it was.
    (out / "cpu").unlink()
    place.rename(out / "real")
    (out / "cpu").symlink_to("real")
    assert api.generate(request(out, **SWIGLU)).bundles[0].written


@pytest.mark.parametrize("name", ["README.md", "reference"])
def test_links_in_a_circle_are_in_the_way(tmp_path: Path, name: str) -> None:
    api.generate(request(tmp_path, **SILU))
    path = tmp_path / "cpu" / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.symlink_to(name)
    done = api.generate(request(tmp_path, **SILU))
    assert {each.kind.value for each in done.refused[0].changes.refused} == {"unknown_exists"}
    assert path.is_symlink()


@pytest.mark.parametrize("option", ["specs", "templates"])
def test_a_folder_of_links_in_a_circle_is_named(tmp_path: Path, option: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    folders = api.Folders(**{option: (tmp_path / "loop",)})
    with pytest.raises((SpecError, RenderError), match=r"loop.*there is no such"):
        api.generate(request(tmp_path / "out", **SILU, folders=folders))


@pytest.mark.parametrize("folder", ["a\0b", "\ud800"])
def test_a_folder_that_cannot_be_one(tmp_path: Path, folder: str) -> None:
    api.generate(request(tmp_path, **SILU))
    lock = tmp_path / "cpu" / "fusegen.lock"
    data = json.loads(lock.read_text())
    data["selection"]["specs"] = [folder]
    lock.write_text(json.dumps(data))
    with pytest.raises(SelectionError, match="cannot name a folder of specs"):
        api.check([tmp_path / "cpu"])


def test_a_folder_whose_name_is_not_utf8_is_named(tmp_path: Path, extra: api.Folders) -> None:
    (folder,) = extra.specs
    moved = folder.rename(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    with pytest.raises(UsageError, match="its name is not UTF-8"):
        api.generate(request(tmp_path / "out", **TOY, folders=api.Folders(specs=(moved,))))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_processes_that_ask_for_one_thing_all_succeed(tmp_path: Path) -> None:
    done = in_processes(tmp_path / "out", *["silu"] * 4)
    assert {code for code, _ in done} == {0}, done


def test_a_request_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown module"):
        api.generate(request(tmp_path / "new", archs=("cpu",), modules=("no",), recipes=("bf16",)))
    assert not (tmp_path / "new").exists()


def test_a_link_in_the_place_of_the_mutex_is_refused(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    out = tmp_path / "out"
    out.mkdir()
    (out / ".fusegen.lockfile").symlink_to(precious)
    with pytest.raises(PublishError, match="is a symbolic link"):
        api.generate(request(out, archs=("cpu",), modules=("silu",), recipes=("bf16",)))
    assert precious.read_text() == "mine"


def test_removing_everything_removes_the_bundle(tmp_path: Path) -> None:
    api.generate(request(tmp_path, **SILU))
    api.generate(request(tmp_path, **SILU, remove=True))
    assert not (tmp_path / "cpu").exists()


def test_removing_everything_leaves_files_of_others(tmp_path: Path) -> None:
    api.generate(request(tmp_path, **SILU))
    note = tmp_path / "cpu" / "note.txt"
    note.write_text("mine")
    api.generate(request(tmp_path, **SILU, remove=True))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [note]


@pytest.mark.slow
def test_a_fusion_stays_left_out_until_all_are_back(tmp_path: Path) -> None:
    def recorded() -> tuple[str, ...]:
        found = selection.read_selection(tmp_path / "cpu")
        assert found
        return found.no_fusions

    api.generate(request(tmp_path, **SILU, no_fusions=("activation_quantize",)))
    assert recorded() == ("activation_quantize",)
    api.generate(request(tmp_path))
    assert recorded() == ("activation_quantize",)
    assert not api.check([tmp_path / "cpu"]).drifted
    api.generate(request(tmp_path, no_fusions=()))
    assert recorded() == ()
    assert "no_fusions" not in (tmp_path / "cpu" / "fusegen.lock").read_text()
    with pytest.raises(UsageError, match="unknown fusion 'activation'"):
        api.generate(request(tmp_path, no_fusions=("activation",)))


@pytest.mark.slow
def test_the_namespace_stays_until_another_is_named(tmp_path: Path) -> None:
    api.generate(request(tmp_path, **SILU, namespace="acme"))
    api.generate(request(tmp_path, **SWIGLU))
    api.generate(request(tmp_path, targets=("cpu",)))
    library = tmp_path / "cpu" / "_library.py"
    assert 'NAMESPACE = "acme_cpu"' in library.read_text()
    api.generate(request(tmp_path, namespace="other"))
    assert 'NAMESPACE = "other_cpu"' in library.read_text()


def test_nothing_is_written_where_nothing_changes(tmp_path: Path) -> None:
    api.generate(request(tmp_path, **SILU))
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    done = api.generate(request(tmp_path))
    assert not done.drifted
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert after == times


def test_a_moved_bundle_is_still_found_and_checked(tmp_path: Path) -> None:
    api.generate(request(tmp_path / "out", **SILU))
    (tmp_path / "vendored").mkdir()
    moved = (tmp_path / "out" / "cpu").rename(tmp_path / "vendored" / "reference")
    assert not api.check([moved]).drifted
    api.generate(request(tmp_path / "vendored", **SWIGLU))
    assert cells_of(moved) == ["silu__bf16", "swiglu__bf16"]
    assert not (tmp_path / "vendored" / "cpu").exists()


def test_one_edited_bundle_keeps_the_others_from_being_written(tmp_path: Path) -> None:
    sm_90a = {**SILU, "archs": ("cpu", "sm_90a")}
    api.generate(request(tmp_path, **sm_90a))
    (tmp_path / "sm_90a" / "silu__bf16.py").write_text("mine = 1\n")
    done = api.generate(request(tmp_path, namespace="acme"))
    assert [report.bundle.name for report in done.refused] == ["sm_90a"]
    assert 'NAMESPACE = "fusegen_cpu"' in (tmp_path / "cpu" / "_library.py").read_text()


def test_comparing_writes_nothing(tmp_path: Path) -> None:
    done = api.generate(request(tmp_path / "out", **SILU), api.Policy.COMPARE)
    assert done.drifted
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"modules": ("silu",), "recipes": ("bf16",)}, "add --arch"),
        ({"archs": ("cpu",), "modules": ("silu",)}, "add --recipe"),
        (
            {**SILU, "targets": ("cpu",)},
            "leave out --arch, --module, --recipe and --option, or --target",
        ),
        ({"remove": True}, "--remove: say what"),
        ({**SILU, "remove": True}, "nothing to remove"),
        ({"targets": ("hoper",)}, "unknown target 'hoper'; did you mean 'hopper'?"),
        ({**SILU, "archs": ("sm_90",)}, "unknown arch 'sm_90'; did you mean 'sm_90a'?"),
        ({**SILU, "archs": ("../cpu",)}, "unknown arch '../cpu'; did you mean 'cpu'?"),
        ({**SILU, "modules": ("silo",)}, "unknown module 'silo'; did you mean 'silu'?"),
        ({**SILU, "recipes": ("bf61",)}, "unknown recipe 'bf61'; did you mean 'bf16'?"),
        ({}, "holds no bundle to regenerate"),
        ({"archs": ("cpu",)}, "holds no bundle for it yet"),
    ],
)
def test_a_request_without_meaning_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: dict[str, object], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        api.generate(request(Path("generated"), **named))
    assert message in str(caught.value)
    assert list(tmp_path.rglob("*")) == []


# Folders of users


RECIPE = (paths.builtin_specs() / "recipes" / "bf16.yaml").read_text()
TOY = {"archs": ("cpu",), "modules": ("silu",), "recipes": ("toy",)}


@pytest.fixture
def extra(tmp_path: Path) -> api.Folders:
    folder = tmp_path / "extra"
    (folder / "recipes").mkdir(parents=True)
    (folder / "recipes" / "toy.yaml").write_text(RECIPE.replace("recipe: bf16", "recipe: toy"))
    return api.Folders(specs=(folder,))


@pytest.mark.slow
def test_a_folder_is_recorded_while_a_cell_needs_it(tmp_path: Path, extra: api.Folders) -> None:
    out = tmp_path / "out"
    bundle = out / "cpu"
    api.generate(request(out, **SILU, folders=extra))
    before = selection.read_selection(bundle)
    assert before is not None and before.specs == ()
    api.generate(request(out, **TOY, folders=extra))
    recorded = selection.read_selection(bundle)
    assert recorded is not None and recorded.specs == ("../../extra",)
    assert not api.generate(request(out, folders=extra)).drifted
    assert not api.check([bundle], folders=extra).drifted
    api.generate(request(out, **TOY, remove=True, folders=extra))
    assert selection.read_selection(bundle) == before


@pytest.mark.slow
def test_a_lock_alone_does_not_say_what_is_read(tmp_path: Path, extra: api.Folders) -> None:
    out = tmp_path / "out"
    bundle = out / "cpu"
    api.generate(request(out, **TOY, folders=extra))
    (folder,) = extra.specs
    for call in (
        lambda: api.check([bundle]),
        lambda: api.generate(request(out)),
        lambda: api.generate(request(out, **SILU)),
        lambda: api.generate(request(out, **SILU, folders=api.Folders(specs=(tmp_path / "out",)))),
    ):
        with pytest.raises(UsageError) as caught:
            call()
        text = str(caught.value)
        assert f"{bundle / 'fusegen.lock'} names the folder {folder}, which is outside of" in text
        assert f"fusegen generate --out {out} --specs {folder} " in text
    # What names a folder names all that is in it.
    assert not api.check([bundle], folders=api.Folders(specs=(folder,))).drifted
    # What goes is not read.
    assert not api.generate(request(out, **TOY, remove=True)).refused
    api.generate(request(out, **TOY, folders=extra))
    # A repository is one whole; a link out of it is not part of it.
    (tmp_path / ".git").mkdir()
    assert not api.check([bundle]).drifted
    (tmp_path / ".git").rmdir()
    (out / ".git").mkdir()
    (out / "link").symlink_to(folder)
    lock = bundle / "fusegen.lock"
    lock.write_text(lock.read_text().replace('"../../extra"', '"../link"'))
    with pytest.raises(UsageError, match="is outside of"):
        api.check([bundle])


def test_a_recorded_folder_that_is_gone_is_named(tmp_path: Path, extra: api.Folders) -> None:
    out = tmp_path / "out"
    api.generate(request(out, **SILU))
    api.generate(request(out, **TOY, folders=extra))
    moved = extra.specs[0].rename(tmp_path / "moved")
    with pytest.raises(UsageError, match=r"records the folder .*extra, which does not exist"):
        api.generate(request(out))
    api.generate(request(out, folders=api.Folders(specs=(moved,))))
    recorded = selection.read_selection(out / "cpu")
    assert recorded is not None and recorded.specs == ("../../moved",)


def test_a_recorded_name_that_is_gone_can_be_taken_out(tmp_path: Path, extra: api.Folders) -> None:
    out = tmp_path / "out"
    api.generate(request(out, **SILU))
    api.generate(request(out, **TOY, folders=extra))
    (extra.specs[0] / "recipes" / "toy.yaml").unlink()
    with pytest.raises(UsageError) as caught:
        api.generate(request(out, folders=extra))
    words = f"fusegen generate --remove --arch cpu --module silu --recipe toy --out {out}"
    assert str(caught.value).endswith(words)
    api.generate(request(out, **TOY, remove=True))
    assert cells_of(out / "cpu") == ["silu__bf16"]


ARCH = """\
edition: 2
arch: sm_100
summary: A GPU without kernels for GEMMs
gencode: arch=compute_100,code=sm_100
toolkit: "12.3"
kernels:
  pointwise:
    implements: [pointwise, pointwise_grad]
"""
TARGET = """\
edition: 2
target: older
summary: A target of which only a part can be made
archs: [sm_100]
modules: [linear, silu]
recipes: [bf16]
"""


@pytest.fixture
def older(tmp_path: Path) -> api.Folders:
    folder = tmp_path / "older"
    for kind, name, text in (("archs", "sm_100", ARCH), ("targets", "older", TARGET)):
        (folder / kind).mkdir(parents=True)
        (folder / kind / f"{name}.yaml").write_text(text)
    return api.Folders(specs=(folder,))


def test_what_a_target_cannot_have_is_reported(tmp_path: Path, older: api.Folders) -> None:
    done = api.generate(request(tmp_path / "out", targets=("older",), folders=older))
    (report,) = done.bundles
    assert [(cell.cell, cell.reason) for cell in report.unsupported] == [
        ("linear__bf16", "sm_100 has no kernels for gemm; it has pointwise, pointwise_grad")
    ]
    assert cells_of(report.bundle) == ["silu__bf16"]
    assert not api.generate(request(tmp_path / "out", folders=older)).drifted


def test_what_is_asked_for_by_name_and_cannot_be_made_is_an_error(
    tmp_path: Path, older: api.Folders
) -> None:
    named = {"archs": ("sm_100",), "modules": ("linear",), "recipes": ("bf16",)}
    with pytest.raises(UsageError) as caught:
        api.generate(request(tmp_path / "out", **named, folders=older))
    assert str(caught.value) == (
        "linear__bf16 cannot be made for sm_100: sm_100 has no kernels for gemm;"
        " it has pointwise, pointwise_grad"
    )
    assert not (tmp_path / "out").exists()


def test_the_choices_of_a_target_are_those_of_every_module() -> None:
    specs = load([paths.builtin_specs()])
    cells = target_cells(specs, ["hopper", "hopper_lean"])["sm_90a"].every
    chosen = [cell for cell in cells if cell.options]
    assert {cell.recipe for cell in chosen} == {"bf16", "fp8_delayed"}
    assert {(cell.module, cell.options) for cell in chosen} == {
        ("grouped_mlp", ("recompute_activations",))
    }
    assert len(cells) > len(chosen)


# Choices that modules offer


REDUCED = Cell("linear", "fp8_delayed", ("reduced_amax",))


@pytest.mark.parametrize(
    ("words", "options"),
    [((), ()), (("reduced_amax",), ("reduced_amax",)), (("own_amax",), ())],
)
def test_a_first_choice_names_no_cell(words: tuple[str, ...], options: tuple[str, ...]) -> None:
    specs = api.load_specs(api.Folders())
    cells = with_options(specs, [Cell("linear", "fp8_delayed")], words)
    assert cells == (Cell("linear", "fp8_delayed", options),)


@pytest.mark.parametrize(
    ("module", "words", "message"),
    [
        ("linear", ("reduced",), "module 'linear' offers no option 'reduced'"),
        (
            "silu",
            ("reduced_amax",),
            "module 'silu' offers no option 'reduced_amax': no GEMM has operands whose amaxes",
        ),
        (
            "linear",
            ("reduced_amax", "own_amax"),
            "reduced_amax and own_amax are choices of one option, amax_reduction",
        ),
        ("liner", (), "unknown module 'liner'; did you mean 'linear'?"),
    ],
)
def test_choices_that_are_not_offered(module: str, words: tuple[str, ...], message: str) -> None:
    specs = api.load_specs(api.Folders())
    with pytest.raises(UsageError) as caught:
        with_options(specs, [Cell(module, "fp8_delayed")], words)
    assert str(caught.value).startswith(message)


def test_a_choice_is_recorded_and_taken_out_by_name(tmp_path: Path) -> None:
    request = api.Request(
        tmp_path,
        archs=("cpu",),
        modules=("linear",),
        recipes=("fp8_delayed",),
        options=("reduced_amax",),
    )
    api.generate(request)
    recorded = selection.read_selection(tmp_path / "cpu")
    assert recorded is not None and recorded.cells == (REDUCED,)
    assert (tmp_path / "cpu" / f"{REDUCED}.py").exists()
    assert api.generate(api.Request(tmp_path)).drifted is False
    command = remedies.removal(REDUCED, "cpu", tmp_path / "cpu")
    assert "--recipe fp8_delayed --option reduced_amax" in command
    api.generate(replace(request, remove=True))
    assert not (tmp_path / "cpu" / f"{REDUCED}.py").exists()


def test_a_choice_needs_a_module() -> None:
    with pytest.raises(UsageError, match="add --arch and --module and --recipe"):
        api.generate(api.Request(options=("reduced_amax",)))
