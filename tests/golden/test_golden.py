"""The committed bundles are the golden snapshot: regenerating gives the same bytes anywhere."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from fusegen import api, cli
from fusegen.commands import scaffold
from fusegen.commands.request import jobs_of
from fusegen.publish import paths
from fusegen.publish.inputs import Inputs
from fusegen.publish.lock import LOCK_NAME
from fusegen.publish.selection import read_selection

ROOT = Path(__file__).parents[2]
SHIPPED = {path.stem for path in (ROOT / "specs" / "targets").glob("*.yaml")}
TARGETS = tuple(sorted(SHIPPED - {"all"}))
"""Of what is committed: every one but that of fat bundles, which are made of the others' parts."""
PACKED = (".yaml", ".j2", ".py", ".h", ".cuh", ".cpp")
"""Of specs and templates."""
FEW = ("cpu", "hopper", "ampere", "main_grad")
"""Targets of bundles for every architecture, with what is quantised and what is not."""
BUNDLES = sorted(path.parent for path in (ROOT / "generated").glob(f"*/{LOCK_NAME}"))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder by relative path."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def options_of(targets: tuple[str, ...]) -> tuple[str, ...]:
    """How a command names targets."""
    return tuple(word for target in targets for word in ("--target", target))


def differing(before: dict[str, bytes], after: dict[str, bytes]) -> set[str]:
    """Paths that are not the same in both."""
    return {path for path in {*before, *after} if before.get(path) != after.get(path)}


# Regenerated == committed


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> api.Generated:
    """Fresh bundles of a few cells, to be copied before they are changed."""
    return api.generate(api.Request(tmp_path_factory.mktemp("few"), targets=FEW))


@pytest.mark.slow  # `fusegen check` says nearly as much
def test_the_committed_bundles_hold_what_the_targets_name(tmp_path: Path) -> None:
    """That their bytes are those which their locks ask for is `fusegen check`'s, in `make lint`."""
    jobs = jobs_of(api.Request(tmp_path, targets=TARGETS), Inputs())
    recorded = {bundle.name: read_selection(bundle) for bundle in BUNDLES}
    assert {job.bundle.name: job.selection for job in jobs} == recorded


# Determinism


PARTS = 4
"""In which cells are added: each has some in front of and behind every cell of the others."""

# Runs the program with folders listed in an order that the seed decides.
SHUFFLED = """
import os, random, sys
seed = int(sys.argv.pop(1))
real_listdir, real_scandir = os.listdir, os.scandir
def shuffled(entries):
    entries = sorted(entries, key=lambda entry: getattr(entry, "name", entry))
    random.Random(seed).shuffle(entries)
    return entries
class Scan:
    def __init__(self, *args):
        with real_scandir(*args) as entries:
            self._entries = iter(shuffled(entries))
    def __enter__(self):
        return self
    def __exit__(self, *_):
        pass
    def __iter__(self):
        return self._entries
    def __next__(self):
        return next(self._entries)
    def close(self):
        pass
os.listdir = lambda *args: shuffled(real_listdir(*args))
os.scandir = Scan
from fusegen.cli import main
main()
"""


def generated(code_root: Path, out: Path, cwd: Path, seed: int, cache: Path) -> dict[str, bytes]:
    """What a process of its own generates from the checkout at `code_root`."""
    env = os.environ | {
        "FUSEGEN_CACHE_DIR": str(cache),
        "PYTHONHASHSEED": str(seed),
        "PYTHONPATH": str(code_root / "generator"),
    }
    words = ["generate", *options_of(FEW), "--out", out]
    command = [sys.executable, "-c", SHUFFLED, str(seed), *map(str, words)]
    subprocess.run(command, cwd=cwd, env=env, check=True, capture_output=True)
    return contents(out)


def copy_in_another_order(target: Path, seed: int) -> None:
    """Copy program, specs and templates file by file in an order that the seed decides."""
    folders = (paths.PACKAGE, ROOT / paths.SPECS, ROOT / paths.TEMPLATES)
    files = [p for f in folders for p in f.rglob("*") if p.is_file() and p.suffix != ".pyc"]
    random.Random(seed).shuffle(files)
    for file in files:
        place = target / file.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)


@pytest.mark.slow
def test_the_bytes_depend_on_nothing_but_the_inputs(few: api.Generated, tmp_path: Path) -> None:
    copy = tmp_path / "some where" / "else"
    copy_in_another_order(copy, 7)
    cache, unusable = tmp_path / "cache", tmp_path / "file" / "cache"
    unusable.parent.write_text("no folder")
    some = contents(few.bundles[0].bundle.parent)
    assert {
        "cold, elsewhere": differing(some, generated(copy, copy / "a", copy, 1, cache)),
        "warm": differing(some, generated(ROOT, tmp_path / "b", tmp_path, 2, cache)),
        "none": differing(some, generated(ROOT, tmp_path / "c", ROOT, 3, unusable)),
    } == {"cold, elsewhere": set(), "warm": set(), "none": set()}


@pytest.mark.slow
def test_the_order_in_which_cells_are_added_leaves_no_trace(tmp_path: Path) -> None:
    rows = api.plan(api.Query(archs=("sm_90a",), recipes=("bf16",)))
    modules = tuple(row.module for row in rows if row.status != "unsupported")
    api.generate(api.Request(tmp_path / "a", (), ("sm_90a",), modules, ("bf16",)))
    for last in reversed(range(PARTS)):
        part = modules[last::PARTS]
        api.generate(api.Request(tmp_path / "b", (), ("sm_90a",), part, ("bf16",)))
    assert differing(contents(tmp_path / "a"), contents(tmp_path / "b")) == set()


# Additivity


# Files that speak of the whole bundle.
INTEGRATIONS = {
    "integrations/_adapters.py",
    "integrations/_experts.py",
    "integrations/_parameters.py",
}
SHARED = {"README.md", "csrc/sources.cmake", *INTEGRATIONS, LOCK_NAME}


@pytest.fixture
def toy(few: api.Generated, tmp_path: Path) -> api.Request:
    """A request that adds one module with a recipe of a user's own to fresh bundles."""
    specs = tmp_path / "mine"
    scaffold.new("recipe", "toy", origin="bf16", folder=specs)
    for report in few.bundles:
        shutil.copytree(report.bundle, tmp_path / "out" / report.bundle.name)
    return api.Request(
        tmp_path / "out",
        archs=tuple(report.selection.arch for report in few.bundles),
        modules=("grouped_mlp",),
        recipes=("toy",),
        folders=api.Folders(specs=(specs,)),
    )


@pytest.mark.slow
def test_a_recipe_adds_only_its_own_files_and_leaves_without_a_trace(toy: api.Request) -> None:
    before = contents(toy.out)
    assert not api.generate(toy).refused
    after = contents(toy.out)
    for path in differing(before, after):
        inside = path.partition("/")[2]
        if path in before:
            assert inside in SHARED
        else:
            assert "grouped_mlp__toy" in inside
    added = [path for path in after if path not in before]
    assert len([path for path in added if path.startswith("cpu/")]) == 4
    api.generate(api.Request(toy.out, (), toy.archs, toy.modules, toy.recipes, remove=True))
    assert differing(before, contents(toy.out)) == set()


@pytest.mark.slow
def test_a_bundle_edited_by_hand_is_refused_whole(toy: api.Request) -> None:
    edited = toy.out / "cpu" / "reference" / "grouped_mlp__bf16.py"
    edited.write_text(edited.read_text() + "mine = 1\n")
    before = contents(toy.out)
    words = ["generate", *options_of(FEW), "--namespace", "acme"]
    done = CliRunner().invoke(cli.program, [*words, "--out", str(toy.out)])
    assert done.exit_code == cli.ExitCode.REFUSED
    assert "reference/grouped_mlp__bf16.py  changed by hand" in done.stderr
    assert differing(before, contents(toy.out)) == set()


# The wheel and the source archive


def call(*words: str | Path, cwd: Path) -> str:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """A wheel of the checkout, and the folder of its unpacked source archive."""
    folder = tmp_path_factory.mktemp("archives")
    call(sys.executable, "-m", "hatchling", "build", "-d", folder, cwd=ROOT)
    (wheel,) = folder.glob("*.whl")
    (archive,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(archive, folder, filter="data")
    (source,) = (path for path in folder.iterdir() if path.is_dir())
    yield wheel, source


@pytest.mark.slow
def test_the_source_archive_makes_the_same_wheel(
    archives: tuple[Path, Path], tmp_path: Path
) -> None:
    wheel, source = archives
    for name in ("specs", "templates", "generator", "generated", "tests", "pyproject.toml"):
        assert (source / name).exists()
    call(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=source)
    (again,) = tmp_path.glob("*.whl")
    left, right = zipfile.ZipFile(wheel), zipfile.ZipFile(again)
    assert left.namelist() == right.namelist()
    assert all(left.read(name) == right.read(name) for name in left.namelist())
    assert not [name for name in left.namelist() if "__pycache__" in name or "/lib/" in name]


@pytest.mark.slow
def test_a_wheel_and_an_editable_install_find_specs_and_templates(
    archives: tuple[Path, Path], tmp_path: Path
) -> None:
    names = zipfile.ZipFile(archives[0]).namelist()
    packed = {data for name in names if (data := name.partition("/_data/")[2])}
    files = (file for top in ("specs", "templates") for file in (ROOT / top).rglob("*"))
    assert packed >= {f.relative_to(ROOT).as_posix() for f in files if f.suffix in PACKED}
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=True)
    python, fusegen = environment / "bin" / "python", environment / "bin" / "fusegen"
    install = (python, "-m", "pip", "install", "-q", "--no-compile")  # compiling takes longest
    call(*install, "--prefer-binary", archives[0], cwd=tmp_path)
    assert "grouped_linear" in call(fusegen, "list", "ops", cwd=tmp_path)
    call(fusegen, "generate", *options_of(FEW), cwd=tmp_path)
    api.generate(api.Request(tmp_path / "here", targets=FEW))
    assert differing(contents(tmp_path / "generated"), contents(tmp_path / "here")) == set()
    assert call(fusegen, "check", cwd=tmp_path) == ""
    call(*install, "--no-deps", "-e", ROOT, cwd=tmp_path)
    code = "from fusegen.publish import paths; print(paths.builtin_specs(), paths.checkout())"
    assert call(python, "-c", code, cwd=tmp_path).split() == [str(ROOT / "specs"), str(ROOT)]
    assert "grouped_linear" in call(fusegen, "list", "ops", cwd=tmp_path)
