"""The object cache, with a made-up compiler that copies its input and lists what it read."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from fusegen.build.objcache import (
    CachedObject,
    Cancelled,
    KernelUsage,
    ObjectCache,
    Report,
    Unit,
    default_root,
    dependencies,
)

REPORT = Report(
    seconds=1.5,
    peak_bytes=1 << 20,
    kernels=(KernelUsage("k", 32, 0, 0, 0, shared=1024),),
    warnings=("w",),
)


class Project:
    """A source with two headers, one of its own and one of a library."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder.resolve()
        self.cache = cache
        self.calls = 0
        self.write("src/unit.cu", "unit")
        self.write("src/own.h", "own")
        self.write("lib/far/lib.h", "lib")
        self.unit = Unit(
            source=self.folder / "src" / "unit.cu",
            compiler="made up 1.0",
            flags=("-O3",),
            roots=(("project", self.folder / "src"), ("lib", self.folder / "lib")),
        )

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def compile(self, binary: Path, rule: Path) -> Report:
        self.calls += 1
        read = [self.folder / n for n in ("src/unit.cu", "src/own.h", "lib/far/lib.h")]
        binary.write_text("+".join(path.read_text() for path in read))
        rule.write_text(f"unit: unit.cu own.h \\\n  {read[2]}\n")
        return REPORT

    def obtain(self, unit: Unit | None = None) -> CachedObject:
        """One build: a fresh cache object, since hashes are remembered for one build only."""
        target = self.folder / "out.o"
        return ObjectCache(self.cache).obtain(unit or self.unit, target, self.compile)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "project", tmp_path / "cache")


def objects(cache: Path) -> list[Path]:
    return sorted(cache.glob("v*/objects/*.o"))


def test_second_lookup_runs_no_compiler(project: Project) -> None:
    first, second = project.obtain(), project.obtain()
    assert (first.cached, second.cached, project.calls) == (False, True, 1)
    assert first.sha256 == second.sha256
    assert second.report == REPORT
    assert second.path.read_text() == "unit+own+lib"


@pytest.mark.parametrize("name", ["src/unit.cu", "src/own.h", "lib/far/lib.h"])
def test_every_file_counts_and_old_contents_hit_again(project: Project, name: str) -> None:
    project.obtain()
    before = (project.folder / name).read_text()
    project.write(name, "changed")
    assert not project.obtain().cached
    assert "changed" in (project.folder / "out.o").read_text()
    project.write(name, before)
    assert project.obtain().cached
    assert (project.folder / "out.o").read_text() == "unit+own+lib"


def test_time_stamps_do_not_count(project: Project) -> None:
    project.obtain()
    for path in project.folder.rglob("*.h"):
        os.utime(path, (1, 1))
    assert project.obtain().cached


def test_flags_and_compilers_count(project: Project) -> None:
    project.obtain()
    assert not project.obtain(dataclasses.replace(project.unit, flags=("-O2",))).cached
    assert not project.obtain(dataclasses.replace(project.unit, flags=("-O", "3"))).cached
    assert not project.obtain(dataclasses.replace(project.unit, compiler="made up 1.1")).cached
    assert project.obtain().cached


def test_clone_elsewhere_hits(project: Project, tmp_path: Path) -> None:
    project.obtain()
    clone = Project(tmp_path / "clone", project.cache)
    assert clone.obtain().cached
    assert clone.calls == 0


@pytest.mark.parametrize(
    ("name", "hits"),
    [("src/deep/own.h", False), ("src/far/lib.h", False), ("src/other.h", True)],
)
def test_new_header_counts_where_it_could_be_found_first(
    project: Project, name: str, hits: bool
) -> None:
    project.obtain()
    project.write(name, "new")
    assert project.obtain().cached is hits
    assert project.obtain().cached


def test_header_of_another_library_counts(project: Project, tmp_path: Path) -> None:
    other = ("other", (tmp_path / "other").resolve())
    unit = dataclasses.replace(project.unit, roots=(*project.unit.roots, other))
    project.obtain(unit)
    (other[1] / "far").mkdir(parents=True)
    assert project.obtain(unit).cached
    (other[1] / "far" / "lib.h").touch()
    assert not project.obtain(unit).cached


@pytest.mark.parametrize("damage", ["object", "short object", "record", "no object", "manifest"])
def test_damage_is_found_and_repaired(project: Project, damage: str) -> None:
    project.obtain()
    binary = objects(project.cache)[0]
    manifest = next(project.cache.glob("v*/manifests/*.json"))
    path, text = {
        "object": (binary, "xxxx+own+lib"),
        "short object": (binary, ""),
        "record": (binary.with_suffix(".json"), '{"sha256": '),
        "no object": (binary, None),
        "manifest": (manifest, "[{}]"),
    }[damage]
    path.unlink()  # the builder holds a hard link: writing in place would change its copy as well
    if text is not None:
        path.write_text(text)
    assert not project.obtain().cached
    assert (project.folder / "out.o").read_text() == "unit+own+lib"
    assert project.obtain().cached


def test_failed_compilation_stores_nothing(project: Project) -> None:
    def fail(binary: Path, rule: Path) -> Report:
        binary.write_text("half")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        ObjectCache(project.cache).obtain(project.unit, project.folder / "out.o", fail)
    assert not (project.folder / "out.o").exists()
    assert objects(project.cache) == []
    assert list((project.cache / "v1" / "tmp").iterdir()) == []
    assert not project.obtain().cached


def test_file_edited_during_compilation_is_not_remembered(project: Project) -> None:
    cache = ObjectCache(project.cache)

    def slow(binary: Path, rule: Path) -> Report:
        report = project.compile(binary, rule)
        project.write("src/own.h", "edited meanwhile")
        return report

    assert not cache.obtain(project.unit, project.folder / "out.o", slow).cached
    assert objects(project.cache) == []
    assert not project.obtain().cached
    assert (project.folder / "out.o").read_text() == "unit+edited meanwhile+lib"


def test_waiting_builder_takes_the_other_ones_object(project: Project) -> None:
    inside, go_on = Event(), Event()

    def held(binary: Path, rule: Path) -> Report:
        inside.set()
        assert go_on.wait(10)
        return project.compile(binary, rule)

    with ThreadPoolExecutor(2) as pool:
        target = project.folder / "first.o"
        first = pool.submit(ObjectCache(project.cache).obtain, project.unit, target, held)
        assert inside.wait(10)
        second = pool.submit(project.obtain)
        time.sleep(0.2)
        assert not second.done()
        go_on.set()
        assert (first.result(10).cached, second.result(10).cached) == (False, True)
    assert project.calls == 1


def test_waiting_builder_can_be_cancelled(project: Project) -> None:
    inside, go_on = Event(), Event()

    def held(binary: Path, rule: Path) -> Report:
        inside.set()
        assert go_on.wait(10)
        return project.compile(binary, rule)

    with ThreadPoolExecutor(1) as pool:
        target = project.folder / "first.o"
        first = pool.submit(ObjectCache(project.cache).obtain, project.unit, target, held)
        assert inside.wait(10)
        with pytest.raises(Cancelled):
            ObjectCache(project.cache).obtain(
                project.unit, project.folder / "out.o", project.compile, cancelled=lambda: True
            )
        go_on.set()
        assert not first.result(10).cached


PROCESS = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_objcache import Project
class Slow(Project):
    def compile(self, binary, rule):
        time.sleep(0.3)
        return super().compile(binary, rule)
project = Slow(Path(sys.argv[2]), Path(sys.argv[3]))
project.obtain()
print(project.calls)
"""


@pytest.mark.slow
def test_many_processes_compile_once(tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, here, str(tmp_path / f"p{i}"), str(tmp_path / "cache")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(4)
    ]
    calls = [int(process.communicate(timeout=60)[0]) for process in processes]
    assert sum(calls) == 1


def test_prune_removes_what_was_unused_longest(project: Project) -> None:
    for i in range(4):
        project.write("src/unit.cu", str(i) * 1000)
        project.obtain()
        for record in project.cache.glob("v*/objects/*.json"):
            os.utime(record, (record.stat().st_mtime - 100,) * 2)
    project.write("src/unit.cu", "0" * 1000)
    assert project.obtain().cached  # the oldest is now the one used last
    size = sum(p.stat().st_size for p in project.cache.glob("v*/objects/*"))
    assert ObjectCache(project.cache, limit=size).prune() == 0
    assert ObjectCache(project.cache, limit=size // 2).prune() > 0
    assert len(objects(project.cache)) == 2
    assert len(list(project.cache.glob("v*/manifests/*.json"))) == 2
    hits = []
    for i in (0, 3, 1, 2):
        project.write("src/unit.cu", str(i) * 1000)
        hits.append(project.obtain().cached)
    assert hits == [True, True, False, False]


def test_pruned_object_stays_with_its_builder(project: Project) -> None:
    kept = project.obtain()
    assert ObjectCache(project.cache, limit=0).prune() > 0
    assert objects(project.cache) == []
    assert kept.path.read_text() == "unit+own+lib"


def test_dependency_rules() -> None:
    folder = Path("/base")
    rule = "unit: a.cu \\\n  /x/../y/b\\ c.h \\\n d\\#e.h $$f.h a.cu\n"
    expected = [Path(p) for p in ("/base/a.cu", "/y/b c.h", "/base/d#e.h", "/base/$f.h")]
    assert dependencies(rule, folder) == expected
    assert dependencies("unit : a.cu\n", folder) == [Path("/base/a.cu")]
    with pytest.raises(ValueError, match="not a dependency rule"):
        dependencies("", folder)


def test_cache_folder() -> None:
    assert default_root({"FUSEGEN_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert default_root({"XDG_CACHE_HOME": "/b"}) == Path("/b/fusegen")
    assert default_root({}) == Path.home() / ".cache" / "fusegen"
