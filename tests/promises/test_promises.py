"""What docs/promises.md promises: what earlier releases had is there, what they made works."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tarfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from promises import release as making
from promises import surfaces
from promises.release import BUNDLE, CELLS, CHECKPOINTS, FOLDER, ROOT, SPECS, STEPS, Training

from fusegen import __version__
from fusegen.checks.load import load
from fusegen.commands.fix_specs import fix_specs
from fusegen.emit.polish import split_header
from fusegen.publish import paths
from fusegen.publish.lock import digest, read_lock
from fusegen.spec.editions import CURRENT
from fusegen.spec.kinds import SpecKind

RELEASES = tuple(sorted(path.parent for path in FOLDER.glob(f"*/{making.ARCHIVE}")))

PRESENT = "present"
"""Namespace of the bundle that is made now."""


@pytest.fixture(scope="module", params=RELEASES, ids=lambda path: path.name)
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is in the archive of a release; whoever changes that takes a copy."""
    folder = tmp_path_factory.mktemp(f"release {request.param.name}")
    with tarfile.open(request.param / making.ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def bundles(release: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Names of the bundle of the release and of the same bundle made now, both imported by path."""
    made = tmp_path_factory.mktemp("now") / BUNDLE
    assert making.fusegen("vendor", made, *making.SELECTION, "--namespace", PRESENT) == 0
    name = re.sub(r"\W", "_", release.name)
    before = making.load_bundle(f"released_{name}", release / BUNDLE / "cpu")
    return before, making.load_bundle(f"present_{name}", made / "cpu")


# Surfaces


@pytest.fixture(scope="module")
def promised() -> dict[str, surfaces.Facts]:
    return making.bundle_pages()


@pytest.mark.parametrize("name", ["api.txt", "schemas.txt", "state_dicts.txt", "exit_codes.txt"])
@pytest.mark.parametrize("folder", RELEASES, ids=lambda path: path.name)
def test_all_of_a_release_is_still_there(
    promised: dict[str, surfaces.Facts], folder: Path, name: str
) -> None:
    before = surfaces.facts((folder / name).read_text(encoding="utf-8"))
    now = promised[name]
    if name == "schemas.txt":
        before, now = surfaces.without_flags(before), surfaces.without_flags(now)
    assert before
    assert surfaces.lost(before, now) == []


@pytest.mark.slow
@pytest.mark.parametrize("folder", RELEASES, ids=lambda path: path.name)
def test_answers_in_json_have_the_keys_of_a_release(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = surfaces.facts((folder / "json.txt").read_text(encoding="utf-8"))
    assert surfaces.lost(before, surfaces.json_keys()) == []


@pytest.mark.parametrize(
    ("before", "now", "kept"),
    [
        ("f(x: 'Tensor') -> 'Tensor'", "f(x: 'Tensor', *, eps: 'float' = 0.1) -> 'Tensor'", True),
        ("f(x: 'Tensor') -> 'Tensor'", "f(x: 'Tensor', eps: 'float') -> 'Tensor'", False),
        ("f(x: 'Tensor') -> 'Tensor'", "f(x: 'Tensor') -> 'tuple[Tensor, Tensor]'", False),
        ("f(x: 'Tensor') -> 'Tensor'", "f(y: 'Tensor') -> 'Tensor'", False),
        ("f(x, y) -> 'Tensor'", "f(y, x) -> 'Tensor'", False),
        ("f(x, y) -> 'Tensor'", "f(x) -> 'Tensor'", False),
        ("f(x, *, a=1, b=2) -> None", "f(x, *, a=1, b=3) -> None", False),
        ("f(x: 'tuple[int, int]') -> None", "f(x: 'tuple[int, int]', y: int = 2) -> None", True),
        ("f(x: 'A | None' = None) -> 'A'", "f(x: 'A | B[[], A] | None' = None) -> 'A'", True),
        ("f(x: 'A | B | None' = None) -> 'A'", "f(x: 'A | None' = None) -> 'A'", False),
        ("f(x: 'A' = None) -> 'A'", "f(x: 'A | B' = 1) -> 'A'", False),
        ("f(x: 'A') -> 'A'", "f(x: 'A') -> 'A | B'", False),
        ("ns::<cell>_forward(Tensor x, Tensor(a!) s)", "ns::<cell>_forward(Tensor x)", False),
        (
            "ns::<cell>_forward(Tensor x, Tensor(a!) s)",
            "ns::<cell>_forward(Tensor x, Tensor(a!) s, bool z=False)",
            True,
        ),
        ("f(x)", "g(x)", False),
        ("weight [16, 32] torch.bfloat16", "weight [32, 16] torch.bfloat16", False),
        ("all keys: weight", "all keys: weight, scale", False),
        ("Linear.weight", "Linear.weight", True),
        ("Linear.weight", "Linear.weights", False),
    ],
)
def test_what_counts_as_kept(before: str, now: str, kept: bool) -> None:
    cells = {"a": (before,), "b": (before, "Linear.bias")}
    assert surfaces.facts(surfaces.page(cells)) == cells
    found = surfaces.lost({"a": (before,)}, {"a": ("Linear.bias", now), "c": (before,)})
    assert found == ([] if kept else [f"a: {before}"])


# Bundles and checkpoints


@pytest.mark.parametrize("cell", CELLS)
def test_the_bundle_of_a_release_trains(bundles: tuple[str, str], cell: str) -> None:
    before, _ = bundles
    training = Training(before, cell)
    assert training.module.__module__ == f"{before}.{cell}"
    first = {key: each.clone() for key, each in training.module.state_dict().items()}
    losses = training.run(STEPS)
    assert losses[-1] < losses[0]
    after = training.module.state_dict()
    assert any(not torch.equal(first[key], after[key]) for key in after)


@pytest.mark.parametrize("cell", CELLS)
def test_a_checkpoint_of_a_release_goes_on_bit_for_bit(
    release: Path, bundles: tuple[str, str], cell: str
) -> None:
    kept = torch.load(release / CHECKPOINTS / f"{cell}.pt", weights_only=True)
    before, now = (Training(name, cell) for name in bundles)
    before.load(kept)
    now.load(kept)
    assert before.run(STEPS) == now.run(STEPS)
    assert_same(before, now)


@pytest.mark.parametrize("cell", CELLS)
def test_a_checkpoint_of_now_goes_on_in_the_bundle_of_a_release(
    bundles: tuple[str, str], cell: str
) -> None:
    before, now = (Training(name, cell) for name in bundles)
    now.run(STEPS)
    before.load(now.checkpoint())
    assert before.run(STEPS) == now.run(STEPS)
    assert_same(before, now)


def assert_same(one: Training, other: Training) -> None:
    states = one.module.state_dict(), other.module.state_dict()
    assert [*states[0]] == [*states[1]]
    for key, tensor in states[0].items():
        assert torch.equal(tensor, states[1][key]), key


# Folders that a release has vendored


def test_locks_and_headers_of_a_release_are_read(release: Path) -> None:
    bundle = release / BUNDLE / "cpu"
    lock = read_lock(bundle)
    assert lock and lock.files
    headers = 0
    for path, record in lock.files.items():
        data = (bundle / path).read_bytes()
        assert digest(data) == record.sha256
        header, body = split_header(data.decode("utf-8"))
        headers += header is not None
        assert header is None or header.matches(body), path
    assert headers > 10


@pytest.fixture
def repository(release: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A repository with the folder that a release has vendored, which is the working directory."""
    shutil.copytree(release / BUNDLE, tmp_path / BUNDLE, ignore=shutil.ignore_patterns("__pyca*"))
    monkeypatch.chdir(tmp_path)
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "Somebody")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "somebody@example.com")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    for words in (("init", "-q"), ("add", "--all"), ("commit", "-q", "-m", "As it was vendored")):
        subprocess.run(["git", *words], check=True, timeout=60)
    yield tmp_path


@pytest.mark.slow
def test_what_a_release_has_vendored_is_known_and_upgraded(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert making.fusegen("status", BUNDLE, "--json") in (0, 1)
    (told,) = json.loads(capsys.readouterr().out)["bundles"]
    assert {*told["counts"]} <= {"pristine", "stale", "missing", "orphan"}, "nobody edited any"
    assert making.fusegen("upgrade", BUNDLE) == 0
    assert making.fusegen("status", BUNDLE) == making.fusegen("check", BUNDLE) == 0


# Editions of specs


@pytest.mark.slow
def test_specs_of_a_release_mean_what_they_meant(
    release: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read as they are and rewritten: the same dataclasses, and the same bytes of bundles."""
    before, after = tmp_path / "before" / SPECS, tmp_path / "after" / SPECS
    for folder in (before, after):
        shutil.copytree(release / SPECS, folder)
    rewritten = fix_specs([after], write=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read = load([before])
    assert len(caught) == bool(rewritten)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        current = load([after])
    for kind in SpecKind:
        assert read.of(kind) == current.of(kind) and read.of(kind)
        assert {spec.edition for spec in read.of(kind).values()} == {CURRENT}
    texts = []
    for folder in (before, after):
        monkeypatch.setattr(paths, "builtin_specs", lambda folder=folder: folder)
        out = folder.parent / "generated"
        words = ("--target", "hopper_quantized", "--target", "cpu_quantized", "--out", out)
        assert making.fusegen("generate", *words) == 0
        files = (path for path in out.rglob("*") if path.is_file())
        texts.append({path.relative_to(out): path.read_bytes() for path in files})
    assert texts[0] == texts[1] and len(texts[0]) > 100


# The pages


def test_every_promise_names_its_test() -> None:
    text = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    named = {name for row in rows for name in re.findall(r"`(test_\w+)`", row.rpartition("|")[0])}
    assert all(re.search(r"`test_\w+`|the same with", row) for row in rows) and len(rows) == 10
    assert named <= {*globals()} and len(named) == 8
    pages = {page for row in rows for page in re.findall(r"`(\w+\.txt)`", row)}
    assert all((folder / page).is_file() for folder in RELEASES for page in pages)
    assert len(pages) == 4


def test_every_release_of_the_change_log_is_kept() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    releases = re.findall(r"^## (\d+\.\d+\.\d+), \d{4}-\d\d-\d\d$", text, re.MULTILINE)
    assert {*releases} == {path.name for path in RELEASES}
    assert __version__ in releases
    for path in RELEASES:
        commit = (path / "commit.txt").read_text(encoding="utf-8")
        assert re.fullmatch(r"[0-9a-f]{40}\n", commit)
