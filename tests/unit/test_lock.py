"""The lock: its layout, its round trip, and what it says of a broken file."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from fusegen.emit.fileset import Artifact, ArtifactKind, FileSet, RenderError
from fusegen.publish.lock import (
    LOCK_NAME,
    PENDING_NAME,
    Decided,
    FileRecord,
    Lock,
    LockError,
    Pending,
    dump_lock,
    dump_pending,
    git_blob,
    lock_of,
    read_lock,
    read_pending,
)

SELECTION = {"cells": ["b__fp8", "a__fp8"], "namespace": "fusegen_sm_90a"}


def sample() -> Lock:
    artifact = Artifact("x = 1\n", ArtifactKind.PYTHON, ("b", "a", "b"), ("specs/x.yaml",))
    return lock_of(FileSet([("pkg/b.py", artifact), ("a.py", artifact)]), SELECTION, "1.2.3")


def test_lock_survives_the_round_trip(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).write_text(dump_lock(sample()))
    assert read_lock(tmp_path) == sample()


def test_pending_lock_survives_the_round_trip(tmp_path: Path) -> None:
    pending = Pending(sample(), {"a.py": ("0" * 64,), "gone.py": ("1" * 64, "2" * 64)})
    decided = {"a.py": Decided("0" * 64, "1" * 64), "b.py": Decided(None, "2" * 64)}
    for each in (pending, replace(pending, decided={**decided, "c.py": Decided("3" * 64, None)})):
        (tmp_path / PENDING_NAME).write_text(dump_pending(each))
        assert read_pending(tmp_path) == each


def test_nothing_published_is_no_lock(tmp_path: Path) -> None:
    assert read_lock(tmp_path) is None
    assert read_pending(tmp_path) is None


def test_lock_has_one_line_per_file_and_no_order_of_its_own() -> None:
    lock = sample()
    shuffled = Lock(
        lock.generator,
        dict(reversed(list(lock.selection.items()))),
        dict(reversed(list(lock.files.items()))),
    )
    assert dump_lock(shuffled) == dump_lock(lock)
    rows = [line for line in dump_lock(lock).splitlines() if "sha256" in line]
    assert [row.split(":")[0].strip() for row in rows] == ['"a.py"', '"pkg/b.py"']
    assert json.loads(dump_lock(lock))["files"]["a.py"]["owners"] == ["a", "b"]


def test_blob_is_the_id_git_gives(tmp_path: Path) -> None:
    data = "grüß\n\n".encode()
    source = tmp_path / "f"
    source.write_bytes(data)
    told = subprocess.run(
        ["git", "hash-object", "--no-filters", source], capture_output=True, text=True, check=True
    )
    assert git_blob(data) == told.stdout.strip()
    assert FileRecord.of(data, ()).blob == told.stdout.strip()


def edited_lock(**changes: object) -> str:
    return json.dumps({**json.loads(dump_lock(sample())), **changes})


RECORD = {"sha256": "0", "blob": "0" * 40, "owners": []}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not valid JSON (Expecting value at line 1, column 1)"),
        ('{\n"version": 1,,', "line 2, column 14"),
        ("[]", "expected an object as the file, got list"),
        ("{\n<<<<<<< ours\n=======\n>>>>>>> theirs\n}", "unresolved merge conflict"),
        ("{}", "lock version None"),
        (edited_lock(version=2), "lock version 2, written by fusegen 1.2.3; this fusegen reads"),
        (edited_lock(version=True), "lock version True"),
        (edited_lock(files=[]), "expected an object as files, got list"),
        (edited_lock(selection=None), "expected an object as selection, got nothing"),
        (edited_lock(generator=3), "expected a string as generator, got int"),
        (edited_lock(extra=3), "unknown key 'extra' in the file"),
        (edited_lock(files={"../up.py": RECORD}), "'../up.py'"),
        (edited_lock(files={"/etc/passwd": RECORD}), "'/etc/passwd'"),
        (edited_lock(files={"a.py": {**RECORD, "sha256": 1}}), "a string as a.py: sha256, got int"),
        (edited_lock(files={"a.py": {**RECORD, "owners": "x"}}), "list of strings as a.py: owners"),
        (
            edited_lock(files={"a.py": {**RECORD, "blob": "../x"}}),
            "40 hexadecimal digits as a.py: bl",
        ),
        (edited_lock(files={"a.py": {**RECORD, "mode": 1}}), "unknown key 'mode' in a.py"),
        ('{"version": 1, "version": 1}', "holds 'version' twice"),
        pytest.param("[" * 100_000, "not a lock (nested too deep)", id="brackets"),
        pytest.param('{"a":' * 100_000, "not a lock (nested too deep)", id="braces"),
        pytest.param('{"version": ' + "9" * 5000 + "}", "has too many digits", id="digits"),
    ],
)
def test_broken_lock_names_file_fault_and_remedy(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / LOCK_NAME).write_text(text)
    with pytest.raises(LockError) as caught:
        read_lock(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / LOCK_NAME}: ")
    assert says in message
    assert "make the bundle again, by `fusegen generate`" in message or "use fusegen" in message


def test_lock_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).write_bytes(b'{"version": \xff}')
    with pytest.raises(LockError, match=r"not UTF-8 .* at byte 12"):
        read_lock(tmp_path)


def test_pending_lock_may_not_name_a_path_outside(tmp_path: Path) -> None:
    pending = Pending(sample(), {"../../victim": ("0" * 64,)})
    (tmp_path / PENDING_NAME).write_text(dump_pending(pending))
    with pytest.raises(LockError, match="victim"):
        read_pending(tmp_path)


def artifact(name: str = "t") -> Artifact:
    return Artifact("", ArtifactKind.PYTHON, (), (f"templates/{name}.j2",))


def test_file_set_is_sorted_whatever_the_order() -> None:
    paths = ["b.py", "a/z.py", "a.py", "B2.py"]
    forward = FileSet((path, artifact()) for path in paths)
    backward = FileSet((path, artifact()) for path in reversed(paths))
    assert list(forward) == list(backward) == sorted(paths)
    assert forward == backward


@pytest.mark.parametrize(
    ("paths", "says"),
    [
        (["/a.py"], "relative to the bundle"),
        ([""], "relative to the bundle"),
        (["a/../b.py"], "components"),
        (["./a.py"], "components"),
        (["a//b.py"], "components"),
        (["a\\b.py"], "character"),
        (["c:a.py"], "character"),
        (["a\n.py"], "character"),
        (["fusegen.lock"], "belong to publishing"),
        (["Fusegen.lock.next"], "belong to publishing"),
        ([".fusegen.staging/x"], "belong to publishing"),
        (["a.py", "a.py"], "rendered twice, from templates/t.j2 and from templates/t.j2"),
        (["a.py", "A.py"], "one name where case is ignored"),
        (["x/a.py", "X/b.py"], "one name where case is ignored"),
        (["a", "a/b.py"], "also have to be a folder"),
    ],
)
def test_file_set_refuses(paths: list[str], says: str) -> None:
    with pytest.raises(RenderError) as caught:
        FileSet((path, artifact()) for path in paths)
    assert says in str(caught.value)
    assert "templates/t.j2" in str(caught.value)


@pytest.mark.parametrize("name", [LOCK_NAME, PENDING_NAME])
def test_a_pipe_in_the_place_of_a_lock_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(OSError, match="expected a regular file") as caught:
        read_lock(tmp_path) if name == LOCK_NAME else read_pending(tmp_path)
    assert caught.value.filename == str(tmp_path / name)
