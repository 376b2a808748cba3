"""Publishing: every state of a file, every step a publish can die at, and two at a time."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from fusegen.emit.fileset import Artifact, ArtifactKind, FileSet
from fusegen.publish import publish as publish_module
from fusegen.publish.changes import (
    NO_EDITS,
    PRISTINE_NAME,
    Change,
    ChangeKind,
    Changes,
    Disk,
    Edit,
    diff,
    unified_diff,
)
from fusegen.publish.lock import (
    LOCK_NAME,
    PENDING_NAME,
    LockError,
    dump_lock,
    git_blob,
    lock_of,
    read_lock,
)
from fusegen.publish.publish import (
    DISK,
    MUTEX_NAME,
    STAGING_NAME,
    BusyError,
    Filesystem,
    PublishError,
    RefusedError,
    Report,
    publish,
    recover,
)

SELECTION = {"cells": ["gemm__fp8"], "options": ("a", "b")}
VERSION = "1.2.3"

OLD = {
    "same.py": "x = 1\n",
    "changed.py": "x = 1\n" * 50,
    "csrc/changed.cu": "int old;\n" * 50,
    "gone.py": "x = 0\n",
    "only/deep/gone.py": "x = 0\n",
    "folder/becomes_file": "inside\n",
    "file_becomes_folder": "file\n",
}
NEW = {
    "same.py": "x = 1\n",
    "changed.py": "x = 2\n" * 50,
    "csrc/changed.cu": "int new;\n" * 50,
    "created/here.py": "x = 3\n" * 50,
    "twin/a.py": "x = 4\n",
    "twin/b.py": "x = 4\n",
    "folder": "now a file\n",
    "file_becomes_folder/inside": "inside\n",
}
LATER = {**NEW, "changed.py": "x = 5\n" * 50, "gone.py": "x = 6\n"}
del LATER["twin/a.py"]

KILLED = 77


class Quick(Filesystem):
    """Without the wait for the disk: dying at a step loses nothing that was written before it."""

    def fsync(self, path: Path) -> None:
        assert path.exists()

    def fsync_all(self, paths: Sequence[Path]) -> None:
        for path in paths:  # One after another, so that every step has its number.
            self.fsync(path)


def file_set(texts: Mapping[str, str]) -> FileSet:
    return FileSet(
        (path, Artifact(text, ArtifactKind.STATIC, ("gemm__fp8",), ("specs/x.yaml",)))
        for path, text in texts.items()
    )


def put(
    texts: Mapping[str, str],
    bundle: Path,
    *,
    prune: bool = True,
    accept_format: bool = False,
    edits: Mapping[str, Edit] = NO_EDITS,
    filesystem: Filesystem | None = None,
) -> Report:
    return publish(
        file_set(texts),
        bundle,
        SELECTION,
        VERSION,
        prune=prune,
        accept_format=accept_format,
        edits=edits,
        filesystem=filesystem or Quick(),
    )


def contents(bundle: Path) -> dict[str, str]:
    """Every file of a bundle but the lock, and every empty folder."""
    found = {}
    for path in bundle.rglob("*"):
        name = path.relative_to(bundle).as_posix()
        if path.is_file() and name != LOCK_NAME:
            found[name] = path.read_text()
        elif path.is_dir() and not any(path.iterdir()):
            found[name + "/"] = ""
    return found


def kinds(changes: Changes) -> dict[str, str]:
    return {change.path: change.kind.value for change in changes}


def assert_settled(bundle: Path, texts: Mapping[str, str]) -> None:
    """The bundle holds exactly `texts` and the lock a fresh publish would leave."""
    assert contents(bundle) == texts
    expected = dump_lock(lock_of(file_set(texts), SELECTION, VERSION))
    assert (bundle / LOCK_NAME).read_text() == expected
    assert not diff(file_set(texts), bundle).drifted


# One file `f.py` in every state: what the lock says, what the disk holds, what is rendered.
STATES = [
    # lock, disk, rendered, kind
    (None, None, "new", "create"),
    (None, "new", "new", "unchanged"),
    (None, "old", "new", "unknown_exists"),
    (None, "hand", "new", "unknown_exists"),
    (None, "new reformatted", "new", "unknown_exists"),
    (None, "hand", None, None),
    ("old", None, "new", "create"),
    ("old", "new", "new", "unchanged"),
    ("old", "old", "new", "update"),
    ("old", "hand", "new", "edited"),
    ("old", "not python", "new", "edited"),
    ("old", "not text", "new", "edited"),
    ("old", "new reformatted", "new", "reformatted"),
    ("old", None, None, None),
    ("old", "old", None, "prune"),
    ("old", "hand", None, "edited"),
    ("new", None, "new", "create"),
    ("new", "new", "new", "unchanged"),
    ("new", "old", "new", "edited"),
    ("new", "hand", "new", "edited"),
    ("new", "new reformatted", "new", "reformatted"),
]
STATE_BYTES = {
    "old": b"x = {'a': 1}\n",
    "new": b'x = {"a": 2}\n',
    "hand": b"x = 'mine'\n",
    "new reformatted": b"x = {\n  'a': 2}\n",
    "not python": b"x = (\n",
    "not text": b"\xff\xfe",
}
REFUSED = {"edited", "reformatted", "unknown_exists"}


def in_state(bundle: Path, lock: str | None, disk: str | None) -> None:
    put({"f.py": STATE_BYTES[lock].decode()} if lock else {}, bundle)
    (bundle / "f.py").unlink(missing_ok=True)
    if disk:
        (bundle / "f.py").write_bytes(STATE_BYTES[disk])


@pytest.mark.parametrize(("lock", "disk", "rendered", "kind"), STATES)
def test_every_state_of_a_file(
    tmp_path: Path, lock: str | None, disk: str | None, rendered: str | None, kind: str | None
) -> None:
    in_state(tmp_path, lock, disk)
    texts = {"f.py": STATE_BYTES[rendered].decode()} if rendered else {}
    changes = diff(file_set(texts), tmp_path)
    assert kinds(changes) == ({"f.py": kind} if kind else {})
    before = contents_bytes(tmp_path)
    if kind in REFUSED:
        with pytest.raises(RefusedError) as caught:
            put(texts, tmp_path)
        assert kinds(caught.value.changes) == {"f.py": kind}
        assert contents_bytes(tmp_path) == before
        assert changes.drifted
    else:
        put(texts, tmp_path)
        unknown = {"f.py": STATE_BYTES["hand"].decode()} if (lock, rendered) == (None, None) else {}
        assert contents(tmp_path) == {**texts, **unknown}
        assert not diff(file_set(texts), tmp_path).drifted


def contents_bytes(bundle: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in bundle.rglob("*") if path.is_file()}


def test_one_publish_does_everything(tmp_path: Path) -> None:
    bundle = tmp_path / "generated" / "sm_90a"
    assert put(OLD, bundle).summary() == "7 files: 0 updated, 7 created, 0 removed, 0 unchanged"
    assert_settled(bundle, OLD)
    report = put(NEW, bundle)
    assert_settled(bundle, NEW)
    assert report.summary() == "8 files: 2 updated, 5 created, 4 removed, 1 unchanged"
    assert report.counts[ChangeKind.PRUNE] == 4
    assert report.to_json() == {
        "changes": [
            {"path": "changed.py", "kind": "update"},
            {"path": "created/here.py", "kind": "create"},
            {"path": "csrc/changed.cu", "kind": "update"},
            {"path": "file_becomes_folder", "kind": "prune"},
            {"path": "file_becomes_folder/inside", "kind": "create"},
            {"path": "folder", "kind": "create"},
            {"path": "folder/becomes_file", "kind": "prune"},
            {"path": "gone.py", "kind": "prune"},
            {"path": "only/deep/gone.py", "kind": "prune"},
            {"path": "twin/a.py", "kind": "create"},
            {"path": "twin/b.py", "kind": "create"},
        ]
    }
    assert put({}, bundle).summary() == "0 files: 0 updated, 0 created, 8 removed, 0 unchanged"
    assert contents(bundle) == {}


def test_unchanged_files_keep_their_time(tmp_path: Path) -> None:
    put(OLD, tmp_path)
    for path in [*OLD, LOCK_NAME]:
        os.utime(tmp_path / path, ns=(1, 1))
    put(OLD, tmp_path)
    times = {path: (tmp_path / path).stat().st_mtime_ns for path in [*OLD, LOCK_NAME]}
    assert set(times.values()) == {1}
    put({**OLD, "changed.py": "x = 9\n"}, tmp_path)
    times = {path: (tmp_path / path).stat().st_mtime_ns for path in [*OLD, LOCK_NAME]}
    assert {path for path, time in times.items() if time != 1} == {"changed.py", LOCK_NAME}


def test_nothing_to_do_writes_nothing(tmp_path: Path) -> None:
    put(OLD, tmp_path)
    counting = Counting()
    put(OLD, tmp_path, filesystem=counting)
    assert counting.steps == ["mkdir"]


def test_selection_alone_rewrites_the_lock_alone(tmp_path: Path) -> None:
    put(OLD, tmp_path)
    before = contents(tmp_path)
    publish(file_set(OLD), tmp_path, {"cells": []}, VERSION)
    lock = read_lock(tmp_path)
    assert lock is not None and lock.selection == {"cells": []}
    assert contents(tmp_path) == before


def test_owner_alone_is_drift(tmp_path: Path) -> None:
    put(OLD, tmp_path)
    other = FileSet(
        (path, Artifact(text, ArtifactKind.STATIC, ("other",), ())) for path, text in OLD.items()
    )
    changes = diff(other, tmp_path)
    assert set(kinds(changes).values()) == {"unchanged"}
    assert changes.drifted and not changes.lock_current


def test_one_edit_refuses_everything_and_names_the_ways_out(tmp_path: Path) -> None:
    put(OLD, tmp_path)
    (tmp_path / "changed.py").write_text("x = 'mine'\n")
    (tmp_path / "gone.py").write_text("x = 'mine too'\n")
    (tmp_path / "created").mkdir()
    (tmp_path / "created/here.py").write_text("x = 'never yours'\n")
    before = contents_bytes(tmp_path)
    counting = Counting()
    with pytest.raises(RefusedError) as caught:
        put(NEW, tmp_path, filesystem=counting)
    assert counting.steps == ["mkdir"]
    assert contents_bytes(tmp_path) == before
    assert str(caught.value).splitlines() == [
        f"{tmp_path}: 3 files are not ours to change; nothing was written",
        "  changed.py       changed by hand since fusegen wrote it",
        "  created/here.py  exists and was not written by fusegen",
        "  gone.py          changed by hand since fusegen wrote it",
        "Ways out:",
        "  - keep the change and take the new output besides: commit it to git, and run "
        f"`fusegen upgrade {tmp_path} --on-edit merge`",
        "  - keep the change where it lasts: make it in the spec or template, delete or move away "
        f"the files above, and run `fusegen generate --out {tmp_path.parent}`",
        "  - take the new output: delete the files above, or restore them with git, and run "
        f"`fusegen generate --out {tmp_path.parent}`",
    ]


def test_deleting_the_edited_file_takes_the_new_output(tmp_path: Path) -> None:
    put(OLD, tmp_path)
    (tmp_path / "changed.py").write_text("x = 'mine'\n")
    (tmp_path / "changed.py").unlink()
    put(NEW, tmp_path)
    assert_settled(tmp_path, NEW)


def test_unknown_files_and_their_folders_stay(tmp_path: Path) -> None:
    put(OLD, tmp_path)
    (tmp_path / "only/deep/mine.txt").write_text("mine")
    (tmp_path / "empty").mkdir()
    put(NEW, tmp_path)
    assert contents(tmp_path) == {**NEW, "only/deep/mine.txt": "mine", "empty/": ""}


def test_folder_with_an_unknown_file_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    put(OLD, tmp_path)
    (tmp_path / "folder/mine.txt").write_text("mine")
    assert kinds(diff(file_set(NEW), tmp_path))["folder"] == "unknown_exists"
    with pytest.raises(RefusedError):
        put(NEW, tmp_path)


def test_file_where_a_folder_is_needed(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("mine")
    changes = diff(file_set({"folder/x.py": "x"}), tmp_path)
    assert kinds(changes) == {"folder/x.py": "unknown_exists"}


def test_folders_without_a_file_make_room(tmp_path: Path) -> None:
    (tmp_path / "folder/deep").mkdir(parents=True)
    put({"folder": "x"}, tmp_path)
    assert_settled(tmp_path, {"folder": "x"})


def test_accept_format_overwrites_layout_and_nothing_else(tmp_path: Path) -> None:
    put({"a.py": "x = 1\n", "b.cu": "int a;\n"}, tmp_path)
    (tmp_path / "a.py").write_text("x   =   1\n")
    (tmp_path / "b.cu").write_text("int   a;\n")
    texts = {"a.py": "x = 1\n", "b.cu": "int a;\n"}
    with pytest.raises(RefusedError, match="--accept-format"):
        put(texts, tmp_path)
    report = put(texts, tmp_path, accept_format=True)
    assert report.counts[ChangeKind.UPDATE] == 2
    assert_settled(tmp_path, texts)
    (tmp_path / "a.py").write_text("x = 2\n")
    with pytest.raises(RefusedError):
        put(texts, tmp_path, accept_format=True)


def test_without_pruning_orphans_stay_owned(tmp_path: Path) -> None:
    put(OLD, tmp_path)
    (tmp_path / "only/deep/gone.py").write_text("x = 'mine'\n")
    shrunk = {"same.py": OLD["same.py"]}
    report = put(shrunk, tmp_path, prune=False)
    assert report.counts[ChangeKind.KEPT] == 6
    assert "6 no longer generated but kept" in report.summary()
    assert not diff(file_set(shrunk), tmp_path, prune=False).drifted
    later = kinds(diff(file_set(shrunk), tmp_path))
    assert Counter(later.values()) == {"prune": 5, "edited": 1, "unchanged": 1}
    assert later["only/deep/gone.py"] == "edited"


def test_link_out_of_the_bundle_is_refused(tmp_path: Path) -> None:
    outside, bundle = tmp_path / "outside", tmp_path / "bundle"
    put(OLD, bundle)
    outside.mkdir()
    (outside / "changed.cu").write_text(OLD["csrc/changed.cu"])
    shutil.rmtree(bundle / "csrc")
    (bundle / "csrc").symlink_to(outside)
    (bundle / "changed.py").unlink()
    (bundle / "changed.py").symlink_to(outside / "missing.py")
    for texts in (NEW, {}):
        found = kinds(diff(file_set(texts), bundle))
        assert found["csrc/changed.cu"] == found["changed.py"] == "outside"
        with pytest.raises(RefusedError, match="leads out of the bundle through a symbolic link"):
            put(texts, bundle)
    assert contents(outside) == {"changed.cu": OLD["csrc/changed.cu"]}


def test_bundle_that_is_itself_a_link_is_fine(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    put(OLD, tmp_path / "link")
    put(NEW, tmp_path / "link")
    assert_settled(tmp_path / "real", NEW)


@pytest.mark.parametrize("name", [LOCK_NAME, PENDING_NAME, STAGING_NAME, MUTEX_NAME, PRISTINE_NAME])
def test_own_names_may_not_be_links(tmp_path: Path, name: str) -> None:
    outside, bundle = tmp_path / "outside", tmp_path / "bundle"
    outside.mkdir()
    bundle.mkdir()
    (bundle / name).symlink_to(outside)
    for act in (lambda: put(NEW, bundle), lambda: recover(bundle)):
        with pytest.raises(PublishError, match="is a symbolic link"):
            act()
    assert contents(outside) == {}


def test_bundle_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "bundle").write_text("mine")
    with pytest.raises(PublishError, match="expected a folder"):
        put(NEW, tmp_path / "bundle")


def test_broken_lock_stops_before_anything(tmp_path: Path) -> None:
    put(OLD, tmp_path)
    (tmp_path / LOCK_NAME).write_text("<<<<<<< ours\n")
    before = contents_bytes(tmp_path)
    with pytest.raises(LockError):
        put(NEW, tmp_path)
    assert contents_bytes(tmp_path) == before


def test_patch_is_one_that_git_applies(tmp_path: Path) -> None:
    old = {**OLD, "no_newline.txt": "a\nb"}
    new = {**NEW, "no_newline.txt": "a\x0cc"}
    for texts in (old, new):
        for folder in ("folder", "file_becomes_folder"):
            for path in [p for p in texts if p.startswith(folder)]:
                del texts[path]
    # Two bundles, whose patches make one: applied where the bundles lie, each file finds its own.
    bundles = {tmp_path / "cpu": new, tmp_path / "sm_90a": {**new, "created/here.py": "x = 7\n"}}
    for bundle in bundles:
        put(old, bundle)
    patch = "".join(unified_diff(diff(file_set(texts), b)) for b, texts in bundles.items())
    assert "same.py" not in patch
    for name in ("cpu", "sm_90a"):
        assert f"--- /dev/null\n+++ b/{name}/created/here.py\n" in patch
        assert f"--- a/{name}/gone.py\n+++ /dev/null\n" in patch
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=patch, text=True, check=True)
    for bundle, texts in bundles.items():
        assert contents(bundle) == texts
        assert unified_diff(diff(file_set(texts), bundle)) == ""


def test_patch_of_the_folder_one_is_in_bears_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tmp_path / "cpu"
    put({}, bundle)
    monkeypatch.chdir(bundle)
    patch = unified_diff(diff(file_set({"a.py": "x = 1\n"}), Path()))
    assert patch.startswith("--- /dev/null\n+++ b/cpu/a.py\n")


def test_patch_shows_an_edit_as_lost(tmp_path: Path) -> None:
    put({"a.py": "x = 1\n"}, tmp_path)
    (tmp_path / "a.py").write_text("x = 'mine'\n")
    patch = unified_diff(diff(file_set({"a.py": "x = 1\n"}), tmp_path))
    assert patch.endswith("@@ -1 +1 @@\n-x = 'mine'\n+x = 1\n")


class Counting(Quick):
    """Names the steps of a publish, with a hook before each."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.places: list[tuple[str, str]] = []

    def before(self, step: str, path: Path, data: bytes = b"") -> None:
        self.steps.append(step)
        self.places.append((step, path.name))

    def mkdir(self, path: Path) -> None:
        self.before("mkdir", path)
        super().mkdir(path)

    def write(self, path: Path, data: bytes) -> None:
        self.before("write", path, data)
        super().write(path, data)

    def fsync(self, path: Path) -> None:
        self.before("fsync", path)
        super().fsync(path)

    def replace(self, source: Path, target: Path) -> None:
        self.before("replace", target)
        super().replace(source, target)

    def unlink(self, path: Path) -> None:
        self.before("unlink", path)
        super().unlink(path)

    def rmdir(self, path: Path) -> None:
        self.before("rmdir", path)
        super().rmdir(path)


class Dying(Counting):
    """Ends the process before the given step, with half of the data written if it is a write."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.last = last

    def before(self, step: str, path: Path, data: bytes = b"") -> None:
        super().before(step, path)
        if len(self.steps) == self.last:
            if step == "write":
                path.write_bytes(data[: len(data) // 2])
            os._exit(KILLED)


class Interrupted(Counting):
    """Raises KeyboardInterrupt once, before the given step."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.last = last

    def before(self, step: str, path: Path, data: bytes = b"") -> None:
        super().before(step, path)
        if len(self.steps) == self.last:
            raise KeyboardInterrupt


class Logging(Counting):
    """Appends every step to a log that several processes share."""

    def __init__(self, log: Path, name: str) -> None:
        super().__init__()
        self.log = log
        self.name = name

    def before(self, step: str, path: Path, data: bytes = b"") -> None:
        with self.log.open("a") as log:
            log.write(f"{self.name} {step} {path.name}\n")


def test_contents_are_safe_before_the_publish_is_decided(tmp_path: Path) -> None:
    put(OLD, tmp_path)
    counting = Counting()
    put(NEW, tmp_path, filesystem=counting)
    places = counting.places
    decided = places.index(("replace", PENDING_NAME))
    staged = [name for step, name in places[:decided] if step == "write"]
    assert len(staged) == 8  # two updates, five new files, the pending lock
    for name in staged:
        assert places.index(("write", name)) < places.index(("fsync", name)) < decided
    assert ("fsync", STAGING_NAME) in places[:decided]
    assert {step for step, _ in places[:decided]} == {"mkdir", "write", "fsync"}
    locked = places.index(("replace", LOCK_NAME))
    assert places.index(("unlink", PENDING_NAME)) > locked
    assert ("fsync", "created") in places[decided:locked]


def test_real_disk_waits_for_files_and_folders(tmp_path: Path) -> None:
    publish(file_set(OLD), tmp_path, SELECTION, VERSION)
    publish(file_set(NEW), tmp_path, SELECTION, VERSION)
    assert_settled(tmp_path, NEW)
    with pytest.raises(FileNotFoundError):
        publish_module.DISK.fsync(tmp_path / "missing")


def test_nothing_bypasses_the_filesystem_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the steps that the tests below die at would not be all there are."""
    changed: list[str] = []

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        # Only this thread's own calls on this test's folder, while it is being watched.
        writes = event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir") or (
            event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT
        )
        if watching and writes and str(tmp_path) in str(arguments[0]):
            changed.append(f"{event} {Path(str(arguments[0])).name}")

    watching = False
    sys.addaudithook(audit)
    put(OLD, tmp_path)
    counting = Counting()
    watching = True
    put(NEW, tmp_path, filesystem=counting)
    watching = False
    seen = Counter(line.split()[0] for line in changed if MUTEX_NAME not in line)
    steps = Counter(counting.steps)
    assert seen["os.rename"] == steps["replace"] > 0
    assert seen["os.remove"] == steps["unlink"] > 0
    assert seen["os.rmdir"] == steps["rmdir"] > 0
    assert seen["open"] == steps["write"] > 0


def die_at_every_step(scratch: Path) -> None:
    """Runs as a program: leaves in `scratch/<scenario>/N` a bundle killed at step N, for all N."""
    for scenario, (before, after) in SCENARIOS.items():
        step, status = 0, KILLED
        while status == KILLED:
            step += 1
            bundle = scratch / scenario / str(step)
            for texts in before:
                put(texts, bundle)
            status = in_child(after, bundle, step)
        assert status == 0, f"{scenario}: step {step} ended with {status}"
    for bundle in sorted((scratch / "update").iterdir()):
        # A second publish, to yet another state, dies over the remains of the first.
        for scenario in ("twice", "twice, staged contents lost"):
            twice = scratch / scenario / bundle.name
            shutil.copytree(bundle, twice)
            if scenario != "twice":
                shutil.rmtree(twice / STAGING_NAME, ignore_errors=True)
            in_child(LATER, twice, 1 + int(bundle.name) * 7 % 60)


SCENARIOS: Mapping[str, tuple[tuple[dict[str, str], ...], dict[str, str]]] = {
    "create": ((), OLD),
    "update": ((OLD,), NEW),
    "remove": ((OLD,), {}),
}


def in_child(texts: Mapping[str, str], bundle: Path, step: int) -> int:
    child = os.fork()
    if child == 0:
        try:
            put(texts, bundle, filesystem=Dying(step))
            os._exit(0)
        except BaseException as error:
            print(f"{bundle}: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def as_program(*arguments: object) -> subprocess.Popen[str]:
    generator = Path(publish_module.__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, __file__, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(generator)},
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(program: subprocess.Popen[str]) -> None:
    _, errors = program.communicate(timeout=60)
    assert program.returncode == 0, errors


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scratch = tmp_path_factory.mktemp("killed")
    finish(as_program("die", scratch))
    return scratch


def survivors(killed: Path, scenario: str, tmp_path: Path) -> list[Path]:
    """Copies of the bundles of one scenario, by step, for a test to go on with."""
    shutil.copytree(killed / scenario, tmp_path / scenario)
    return sorted((tmp_path / scenario).iterdir(), key=lambda path: int(path.name))


def assert_whole(bundle: Path, *versions: Mapping[str, str]) -> None:
    """Each published file has all of one version's content, or is in none and absent."""
    for path, text in contents(bundle).items():
        if path.startswith((STAGING_NAME, MUTEX_NAME, PENDING_NAME)) or path.endswith("/"):
            continue
        assert text in [version.get(path) for version in versions], f"{bundle.name}: {path}"
    for path in set.intersection(*(set(version) for version in versions)):
        assert (bundle / path).is_file(), f"{bundle.name}: {path} was lost"


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_at_any_step_the_next_publish_reaches_its_end(
    killed: Path, scenario: str, tmp_path: Path
) -> None:
    before, after = SCENARIOS[scenario]
    bundles = survivors(killed, scenario, tmp_path)
    assert len(bundles) > 20
    for bundle in bundles:
        assert_whole(bundle, *before or ({},), after)
        for texts in (after, *before, LATER):
            assert diff(file_set(texts), bundle).refused == (), bundle.name
        put(after, bundle)
        assert_settled(bundle, after)


@pytest.mark.slow
def test_killed_at_any_step_a_publish_back_or_elsewhere_works(killed: Path, tmp_path: Path) -> None:
    for bundle in survivors(killed, "update", tmp_path):
        target = LATER if int(bundle.name) % 2 else OLD
        put(target, bundle)
        assert_settled(bundle, target)


def test_killed_at_any_step_recover_leaves_one_whole_version(killed: Path, tmp_path: Path) -> None:
    ends = Counter[str]()
    for bundle in survivors(killed, "update", tmp_path):
        decided = (bundle / PENDING_NAME).exists()
        assert recover(bundle) is decided
        (bundle / MUTEX_NAME).unlink(missing_ok=True)
        new = decided or (bundle / "created").exists()
        assert_settled(bundle, NEW if new else OLD)
        ends[f"{decided} {new}"] += 1
        assert recover(bundle) is False
    assert set(ends) == {"False False", "True True", "False True"}


@pytest.mark.parametrize("scenario", ["twice", "twice, staged contents lost"])
def test_killed_twice_over_two_states(killed: Path, scenario: str, tmp_path: Path) -> None:
    for bundle in survivors(killed, scenario, tmp_path):
        assert_whole(bundle, OLD, NEW, LATER)
        assert diff(file_set(LATER), bundle).refused == ()
        put(LATER, bundle)
        assert_settled(bundle, LATER)


@pytest.mark.slow
def test_staged_contents_lost_after_the_kill(killed: Path, tmp_path: Path) -> None:
    """As after `git clean`: nothing to roll forward with, and still nothing looks hand-edited."""
    unfinished = 0
    for bundle in survivors(killed, "update", tmp_path):
        shutil.rmtree(bundle / STAGING_NAME, ignore_errors=True)
        unfinished += (bundle / PENDING_NAME).exists() and not recover(bundle)
        assert_whole(bundle, OLD, NEW)
        assert diff(file_set(LATER), bundle).refused == ()
        put(LATER, bundle)
        assert_settled(bundle, LATER)
    assert unfinished > 5


def test_an_edit_made_after_the_kill_is_not_overwritten(killed: Path, tmp_path: Path) -> None:
    for bundle in survivors(killed, "update", tmp_path):
        (bundle / "changed.py").write_text("x = 'mine'\n")
        recover(bundle)
        assert (bundle / "changed.py").read_text() == "x = 'mine'\n"
        assert [change.path for change in diff(file_set(NEW), bundle).refused] == ["changed.py"]
        with pytest.raises(RefusedError):
            put(NEW, bundle)
        assert (bundle / "changed.py").read_text() == "x = 'mine'\n"


def test_a_file_put_in_the_way_after_the_kill_is_not_lost(killed: Path, tmp_path: Path) -> None:
    met = 0
    for bundle in survivors(killed, "update", tmp_path):
        if (bundle / PENDING_NAME).exists() and (bundle / "folder").is_dir():
            met += 1
            (bundle / "folder/mine.txt").write_text("mine")
            assert recover(bundle) is False
            assert [change.path for change in diff(file_set(NEW), bundle).refused] == ["folder"]
            (bundle / "folder/mine.txt").unlink()
            put(NEW, bundle)
            assert_settled(bundle, NEW)
    assert met > 3


@pytest.mark.slow
def test_control_c_at_any_step(tmp_path: Path) -> None:
    step, done = 0, False
    while not done:
        step += 1
        bundle = tmp_path / str(step)
        put(OLD, bundle)
        try:
            put(NEW, bundle, filesystem=Interrupted(step))
            done = True
        except KeyboardInterrupt:
            assert not (bundle / MUTEX_NAME).exists()
        assert_whole(bundle, OLD, NEW)
        assert diff(file_set(NEW), bundle).refused == ()
        put(NEW, bundle)
        assert_settled(bundle, NEW)
    assert step > 20


# Files that somebody has edited, and what is decided of them: before and after, None for no file.
EDITS = {
    "changed.py": ("x = 'mine'\n", "x = 'mine and new'\n"),
    "csrc/changed.cu": ("int mine;\n", NEW["csrc/changed.cu"]),
    "same.py": ("x = 'kept'\n", "x = 'kept'\n"),
    "gone.py": ("x = 'released'\n", "x = 'released'\n"),
    "only/deep/gone.py": ("x = 'to go'\n", None),
    "placed/here.py": (None, "x = 'not owned'\n"),
}
EDITED = {path: before for path, (before, _) in EDITS.items() if before is not None}


def bytes_of(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


def put_edits(bundle: Path, filesystem: Filesystem | None = None) -> Report:
    edits = {path: Edit(bytes_of(b), bytes_of(a)) for path, (b, a) in EDITS.items()}
    return put(NEW, bundle, edits=edits, filesystem=filesystem)


def edited(bundle: Path) -> Path:
    """A bundle of the old version, with files that somebody has edited."""
    put(OLD, bundle)
    for path, text in EDITED.items():
        (bundle / path).write_text(text)
    return bundle


def assert_edits_settled(bundle: Path) -> None:
    """Files hold what was decided; the lock says what was generated, and nothing of the others."""
    decided = {path: after for path, (_, after) in EDITS.items() if after is not None}
    merged = ("changed.py", "same.py")
    bases = {f"{PRISTINE_NAME}/{git_blob(NEW[path].encode())}": NEW[path] for path in merged}
    assert contents(bundle) == {**NEW, **decided, **bases}
    expected = dump_lock(lock_of(file_set(NEW), SELECTION, VERSION))
    assert (bundle / LOCK_NAME).read_text() == expected


def test_what_is_decided_of_edited_files(tmp_path: Path) -> None:
    report = put_edits(edited(tmp_path))
    assert_edits_settled(tmp_path)
    for path, kind in (
        ("changed.py", "merged"),
        ("csrc/changed.cu", "update"),
        ("same.py", "merged"),
        ("gone.py", "released"),
        ("only/deep/gone.py", "prune"),
        ("placed/here.py", "released"),
    ):
        assert kinds(report.changes)[path] == kind
    assert "2 edited by hand and kept so, 2 left to you" in report.summary()
    # From here on the files that differ from the lock are edits, and the others nobody's.
    left = {
        path: kind for path, kind in kinds(diff(file_set(NEW), tmp_path)).items() if path in EDITS
    }
    assert left == {"changed.py": "edited", "csrc/changed.cu": "unchanged", "same.py": "edited"}


def test_what_a_merge_began_with_is_kept_while_it_differs(tmp_path: Path) -> None:
    """Only the merge was ever on the disk, so no commit has what was rendered."""
    put_edits(edited(tmp_path))
    disk = Disk(tmp_path)
    assert disk.pristine("changed.py") == NEW["changed.py"].encode()
    assert disk.pristine("changed.py", b"another") == NEW["changed.py"].encode()
    assert disk.pristine("gone.py") is None  # not owned
    for path in ("changed.py", "same.py", "gone.py"):
        (tmp_path / path).unlink()
    put(LATER, tmp_path)
    assert not (tmp_path / PRISTINE_NAME).exists()


def test_a_decision_about_a_file_that_changed_since_is_void(tmp_path: Path) -> None:
    for path in EDITS:
        bundle = edited(tmp_path / path.replace("/", "_"))
        (bundle / path).parent.mkdir(exist_ok=True)
        (bundle / path).write_text("x = 'changed once more'\n")
        before = contents(bundle)
        with pytest.raises(RefusedError) as caught:
            put_edits(bundle)
        assert [change.path for change in caught.value.changes.refused] == [path]
        assert contents(bundle) == before


def test_nothing_is_written_where_a_decision_leaves_all_as_it_is(tmp_path: Path) -> None:
    put(OLD, tmp_path)
    (tmp_path / "same.py").write_text("x = 'kept'\n")
    counting = Counting()
    kept = Edit(b"x = 'kept'\n", b"x = 'kept'\n")
    put(OLD, tmp_path, edits={"same.py": kept}, filesystem=counting)
    assert counting.steps == ["mkdir"]


@pytest.mark.slow
@pytest.mark.parametrize("lost", [False, True], ids=["staged", "staged contents lost"])
def test_interrupted_at_any_step_edits_are_never_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """The next look completes the publish, or finds every file before or after it."""
    monkeypatch.setattr("fusegen.publish.changes.blob", lambda *_: None)  # hundreds of processes
    step, done, completed = 0, False, 0
    while not done:
        step += 1
        bundle = edited(tmp_path / str(step))
        try:
            put_edits(bundle, Interrupted(step))
            done = True
        except KeyboardInterrupt:
            if lost:
                shutil.rmtree(bundle / STAGING_NAME, ignore_errors=True)
        decided = (bundle / PENDING_NAME).exists()
        if recover(bundle, filesystem=Quick()):
            completed += 1
            assert_edits_settled(bundle)
            continue
        assert lost or not decided
        for path, (before, after) in EDITS.items():
            have = (bundle / path).read_text() if (bundle / path).exists() else None
            assert have in (before, after), f"{step}: {path}"
            if have is not None and have == before != OLD.get(path):
                # Whatever is generated next, nobody takes what is not generated for its own.
                assert kinds(diff(file_set(NEW), bundle)).get(path) in ("edited", None)
    assert step > 20 and completed > 0


class Full(Quick):
    """A disk without space for the fourth file."""

    left = 3

    def write(self, path: Path, data: bytes) -> None:
        self.left -= 1
        if self.left < 0:
            path.write_bytes(data[:1])
            raise OSError(28, "No space left on device", str(path))
        super().write(path, data)


def test_full_disk_leaves_the_bundle_as_it_was(tmp_path: Path) -> None:
    put(OLD, tmp_path)
    before = contents_bytes(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        put(NEW, tmp_path, filesystem=Full())
    assert contents_bytes(tmp_path) == before
    assert not (tmp_path / STAGING_NAME).exists()


def test_what_fails_without_a_name_is_given_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    monkeypatch.setattr(os, "fsync", full)
    for step in (lambda p: DISK.write(p, b""), DISK.fsync, lambda p: DISK.fsync_all([p])):
        (tmp_path / "file").touch()
        with pytest.raises(OSError, match="No space left") as caught:
            step(tmp_path / "file")
        assert caught.value.filename == str(tmp_path / "file")


def test_report_says_that_an_interrupted_publish_was_completed(
    killed: Path, tmp_path: Path
) -> None:
    notes = [
        "an interrupted publish was completed first" in put(NEW, bundle).summary()
        for bundle in survivors(killed, "update", tmp_path)
    ]
    assert any(notes) and not all(notes)


def publish_in_turns(bundle: Path, log: Path, name: str) -> None:
    """Runs as a program: publishes two versions in turns, each publish under a name of its own."""
    for turn in range(12):
        put((OLD, NEW)[turn % 2], bundle, filesystem=Logging(log, f"{name}{turn}"))


@pytest.mark.slow
def test_two_processes_take_turns(tmp_path: Path) -> None:
    bundle, log = tmp_path / "bundle", tmp_path / "log"
    programs = [as_program("turns", bundle, log, name) for name in "ab"]
    for program in programs:
        finish(program)
    # The folder of the bundle itself is made before the turn is taken.
    steps = [line.split() for line in log.read_text().splitlines()]
    turns = [name for name, step, path in steps if (step, path) != ("mkdir", "bundle")]
    runs = [name for n, name in enumerate(turns) if n == 0 or turns[n - 1] != name]
    assert len(runs) == len(set(runs)), f"interleaved: {runs}"
    assert {name[0] for name in runs} == {"a", "b"}
    assert_settled(bundle, NEW if "created" in os.listdir(bundle) else OLD)


def test_waiting_for_another_publish_ends_in_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish_module, "MUTEX_TIMEOUT_S", 0.05)
    entered, leave = threading.Event(), threading.Event()

    class Slow(Quick):
        def write(self, path: Path, data: bytes) -> None:
            entered.set()
            leave.wait(10)
            super().write(path, data)

    thread = threading.Thread(target=put, args=(OLD, tmp_path), kwargs={"filesystem": Slow()})
    thread.start()
    try:
        assert entered.wait(10)
        with pytest.raises(BusyError, match="another fusegen has been publishing here"):
            put(NEW, tmp_path)
    finally:
        leave.set()
        thread.join()
    assert_settled(tmp_path, OLD)


def test_json_is_json(tmp_path: Path) -> None:
    answer = io.StringIO()
    json.dump(diff(file_set(NEW), tmp_path).to_json(), answer)
    assert json.loads(answer.getvalue())["changes"][0] == {"path": "changed.py", "kind": "create"}


def test_diff_writes_nothing(tmp_path: Path) -> None:
    changes = diff(file_set(NEW), tmp_path / "bundle")
    assert changes.of(ChangeKind.CREATE) == changes.changes
    assert changes.changes[0] == Change(
        "changed.py", ChangeKind.CREATE, None, NEW["changed.py"].encode()
    )
    assert list(tmp_path.iterdir()) == []


if __name__ == "__main__":
    if sys.argv[1] == "die":
        die_at_every_step(Path(sys.argv[2]))
    else:
        publish_in_turns(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
