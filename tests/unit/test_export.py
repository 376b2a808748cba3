"""`fusegen export`: what it copies, what it replaces, and what it refuses."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fusegen import cli
from fusegen.build.library import _digests
from fusegen.build.link import LinkRecord, _sha256
from fusegen.build.sources import read_sources
from fusegen.cli import ExitCode
from fusegen.commands.export import METADATA

OUT = Path("my hub")
CPU = OUT / "build" / "torch-cpu"
GPU = OUT / "build" / "torch-stable-abi211-cu128-aarch64-linux"


def run(*words: str | Path) -> Result:
    result = CliRunner().invoke(cli.program, [str(word) for word in words])
    print(result.exit_code, result.output)  # pytest shows it where a test fails
    return result


def export(folder: Path, *words: str) -> Result:
    return run("export", "kernels", folder, "--out", OUT, *words)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "experts"
    words = ("--arch", "cpu", "--arch", "sm_80", "--arch", "sm_90a", "--module", "silu")
    assert run("vendor", folder, *words, "--recipe", "bf16", "--namespace", "acme").exit_code == 0
    return folder


@pytest.fixture
def bundles(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Bundles for cpu, sm_80 and sm_90a, none of them built, as `experts`."""
    shutil.copytree(made, tmp_path / "experts")
    monkeypatch.chdir(tmp_path)
    return Path("experts")


def pretend_to_build(bundle: Path) -> Path:
    """A library that says what a built one says; `fusegen build` writes the same beside it."""
    sources = read_sources(bundle / "csrc" / "sources.cmake")
    rows = [
        f"{name} {each.cell} {each.sources}\n"
        for name, each in _digests(bundle / "csrc", sources).items()
    ]
    library = bundle / "lib" / f"{sources.namespace}.so"
    library.parent.mkdir(exist_ok=True)
    library.write_bytes(b"\x7fELFfusegen digests\n" + "".join(rows).encode() + b"\0")
    record = LinkRecord("objects", _sha256(library), "12.8", "aarch64")
    library.with_suffix(".link.json").write_text(json.dumps(asdict(record)), "utf-8")
    return library


def metadata(place: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((place / METADATA).read_text("utf-8"))
    return found


def test_what_runs_is_copied_and_what_develops_is_not(bundles: Path) -> None:
    (bundles / "cpu" / "mine.py").write_text("HELP = 1\n", "utf-8")
    (bundles / "cpu" / "__pycache__").mkdir()
    (bundles / "cpu" / "__pycache__" / "mine.pyc").touch()
    assert export(bundles / "cpu").exit_code == 0
    names = {path.relative_to(CPU).as_posix() for path in CPU.rglob("*") if path.is_file()}
    assert {"__init__.py", "silu__bf16.py", "mine.py", "LICENSE", "reference/silu__bf16.py"} < names
    assert not {name for name in names if name.startswith(("tests", ".", "fusegen.lock"))}
    assert not [name for name in names if "__pycache__" in name]
    digest = metadata(CPU)["digest"]
    assert isinstance(digest, dict) and {*digest["files"]} == names - {METADATA}


@pytest.mark.parametrize(("arch", "capability"), [("sm_90a", "9.0a"), ("sm_80", "8.0+PTX")])
def test_a_library_says_where_it_runs(bundles: Path, arch: str, capability: str) -> None:
    library = pretend_to_build(bundles / arch)
    assert export(bundles / arch).exit_code == 0
    assert metadata(GPU)["backend"] == {"type": "cuda", "archs": [capability]}
    assert (GPU / "lib" / library.name).read_bytes() == library.read_bytes()
    assert [path.name for path in (GPU / "lib").iterdir()] == [library.name]
    assert not (GPU / "csrc").exists()


def test_a_bundle_that_is_not_built_is_refused(bundles: Path) -> None:
    done = export(bundles / "sm_90a")
    assert done.exit_code == ExitCode.BUILD and not CPU.parent.exists()
    assert "experts/sm_90a: the kernels are not compiled\n  run: fusegen build" in done.stderr


def test_a_stale_library_is_refused(bundles: Path) -> None:
    library = pretend_to_build(bundles / "sm_90a")
    unit = bundles / "sm_90a" / "csrc" / "silu__bf16.cpp"
    unit.write_text(unit.read_text("utf-8") + "// edited\n", "utf-8")
    done = export(bundles / "sm_90a")
    assert done.exit_code == ExitCode.BUILD
    assert f"{library}: was not built from what lies there: silu__bf16 (other" in done.stderr
    assert "run: fusegen build experts/sm_90a" in done.stderr


def test_a_bundle_that_lacks_a_source_is_refused_with_its_name(bundles: Path) -> None:
    (bundles / "sm_90a" / "csrc" / "silu__bf16.cpp").unlink()
    done = export(bundles / "sm_90a")
    assert done.exit_code == ExitCode.BUILD and "do not exist: silu__bf16.cpp" in done.stderr


def test_a_library_without_its_record_is_refused(bundles: Path) -> None:
    """As one is that CMake linked, or that was replaced since."""
    library = pretend_to_build(bundles / "sm_90a")
    library.write_bytes(library.read_bytes() + b"more")
    done = export(bundles / "sm_90a")
    assert done.exit_code == ExitCode.BUILD and "which CUDA toolkit" in done.stderr
    library.with_suffix(".link.json").unlink()
    assert export(bundles / "sm_90a").exit_code == ExitCode.BUILD


def test_two_bundles_of_one_variant_are_refused(bundles: Path) -> None:
    for arch in ("sm_80", "sm_90a"):
        pretend_to_build(bundles / arch)
    done = export(bundles)
    assert done.exit_code == ExitCode.USAGE and not OUT.joinpath("build").exists()
    assert "experts/sm_90a and experts/sm_80 are both torch-stable-abi211-cu128" in done.stderr


def test_an_export_replaces_what_it_wrote_and_nothing_else(bundles: Path) -> None:
    assert export(bundles / "cpu").exit_code == 0
    (OUT / "README.md").write_text("mine\n", "utf-8")
    first = metadata(CPU)["id"]
    (CPU / "silu__bf16.pyc").touch()  # no file of the export, nor byte code in its folder
    assert export(bundles / "cpu").exit_code == ExitCode.REFUSED
    (CPU / "silu__bf16.pyc").unlink()
    (bundles / "cpu" / "silu__bf16.py").write_text("NEW = 1\n", "utf-8")
    assert export(bundles / "cpu").exit_code == 0
    assert (CPU / "silu__bf16.py").read_text("utf-8") == "NEW = 1\n"
    assert metadata(CPU)["id"] != first, "another content is another module"
    (CPU / "silu__bf16.py").write_text("EDITED = 1\n", "utf-8")
    done = export(bundles / "cpu")
    assert done.exit_code == ExitCode.REFUSED and "was changed since; move it away" in done.stderr
    assert (CPU / "silu__bf16.py").read_text("utf-8") == "EDITED = 1\n"
    assert {path.name for path in OUT.iterdir()} == {"build", "README.md"}


def test_a_run_that_was_killed_is_taken_away(bundles: Path) -> None:
    (OUT / ".fusegen.export" / "torch-cpu").mkdir(parents=True)
    (OUT / ".fusegen.export" / "torch-cpu" / "half.py").touch()
    assert export(bundles / "cpu").exit_code == 0
    assert {path.name for path in OUT.iterdir()} == {"build"} and not (CPU / "half.py").exists()


def test_a_repository_is_one_version_of_one_kernel(bundles: Path) -> None:
    pretend_to_build(bundles / "sm_90a")
    assert export(bundles / "cpu").exit_code == 0
    for words in (("--version", "2"), ("--name", "other")):
        done = export(bundles / "sm_90a", *words)
        assert done.exit_code == ExitCode.REFUSED and "torch-cpu" in done.stderr
    assert export(bundles / "cpu", "--version", "2").exit_code == 0
    assert metadata(CPU)["version"] == 2


@pytest.mark.parametrize("name", ["Acme", "a", "a_b", "-a", "a-", "a b", "a/b", ""])
def test_names_of_kernels(bundles: Path, name: str) -> None:
    done = export(bundles / "cpu", f"--name={name}")
    assert done.exit_code == ExitCode.USAGE and "acme-experts" in done.stderr
    assert not CPU.exists()


def test_what_is_no_bundle_and_what_lies_in_it(bundles: Path) -> None:
    Path("empty").mkdir()
    assert export(Path("empty")).exit_code == ExitCode.USAGE
    done = run("export", "kernels", bundles / "cpu", "--out", bundles / "cpu" / "hub")
    assert done.exit_code == ExitCode.USAGE and "lies in the bundle" in done.stderr
    done = run("export", "kernel", bundles, "--out", OUT)
    assert done.exit_code == ExitCode.USAGE and "did you mean 'kernels'" in done.stderr


def test_an_answer_in_json(bundles: Path) -> None:
    done = export(bundles / "cpu", "--name", "acme-experts", "--json")
    (told,) = json.loads(done.stdout)["exported"]
    assert told == {
        "bundle": "experts/cpu", "folder": str(CPU), "name": "acme-experts", "version": 1,
    }  # fmt: skip
