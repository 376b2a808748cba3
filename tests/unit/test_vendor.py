"""Bundles in somebody else's repository: vendored, edited, upgraded, ejected."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fusegen import __version__, cli
from fusegen.build.sources import check_files, read_sources
from fusegen.cli import ExitCode
from fusegen.commands import build
from fusegen.publish import paths
from fusegen.publish.changes import PRISTINE_NAME, STATES
from fusegen.publish.lock import LOCK_NAME, PENDING_NAME, git_blob, read_lock
from fusegen.publish.publish import STAGING_NAME

DEST = Path("experts")
CPU = DEST / "cpu"
CELL = "silu__bf16.py"
SILU = ("--arch", "cpu", "--module", "silu", "--recipe", "bf16")
SWIGLU = ("--arch", "cpu", "--module", "swiglu", "--recipe", "bf16")

# What another version of fusegen wrote: the end of the text of one template and one static file.
OTHER_TEMPLATE = "module/cell.py.j2"
OTHER_STATIC = "static/runtime/_transforms.py"
LINE = "# as an earlier version wrote it\n"


def run(*words: str | Path) -> Result:
    result = CliRunner().invoke(cli.program, [str(word) for word in words])
    print(result.exit_code, result.output)  # pytest shows it where a test fails
    return result


def git(*words: str | Path) -> str:
    done = subprocess.run(
        ["git", *map(str, words)], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


def commit() -> None:
    git("add", "--all")
    git("commit", "--quiet", "--allow-empty", "--message", "as it is")


AUTHOR = {
    "GIT_AUTHOR_NAME": "Somebody",
    "GIT_AUTHOR_EMAIL": "somebody@example.com",
    "GIT_COMMITTER_NAME": "Somebody",
    "GIT_COMMITTER_EMAIL": "somebody@example.com",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
}


@contextmanager
def repository(folder: Path) -> Iterator[None]:
    """Within it commands run in this folder, a repository of its own."""
    folder.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, value in AUTHOR.items():
            patch.setenv(name, value)
        git("init", "--quiet")
        yield


@pytest.fixture(autouse=True)
def own_repository(tmp_path: Path) -> Iterator[None]:
    """Every test runs in a repository whose path has a space and a letter beyond ASCII."""
    with repository(tmp_path / "mein Bündel"):
        yield


@pytest.fixture(scope="module")
def other_templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The templates of another version."""
    folder = tmp_path_factory.mktemp("other") / "templates"
    shutil.copytree(paths.builtin_templates(), folder)
    for name in (OTHER_TEMPLATE, OTHER_STATIC):
        (folder / name).write_text((folder / name).read_text() + f"\n\n{LINE}")
    (folder / "static/bundle_tests/_gone.py").write_text('"""Written no more."""\n\nX = [1, 2]\n')
    return folder


@contextmanager
def version_of(templates: Path) -> Iterator[None]:
    """Commands run as another version of fusegen within it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "builtin_templates", lambda: templates)
        yield


@pytest.fixture(scope="module")
def vendored(tmp_path_factory: pytest.TempPathFactory, other_templates: Path) -> Path:
    """Repositories with a committed bundle: of another version in `old`, of this one in `new`."""
    folder = tmp_path_factory.mktemp("vendored")
    for name, templates in (("old", other_templates), ("new", paths.builtin_templates())):
        with repository(folder / name), version_of(templates):
            assert run("vendor", DEST, *SILU, "--namespace", "acme").exit_code == 0
            commit()
    return folder


@pytest.fixture
def old(vendored: Path, own_repository: None) -> Path:
    """A committed bundle that another version wrote."""
    shutil.copytree(vendored / "old", ".", dirs_exist_ok=True)
    return CPU


@pytest.fixture
def new(vendored: Path, own_repository: None) -> Path:
    """A committed bundle that this version wrote."""
    shutil.copytree(vendored / "new", ".", dirs_exist_ok=True)
    return CPU


def edit(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))


def states(*words: str | Path) -> dict[str, str]:
    """What `status` says of the files that are not pristine."""
    done = run("status", *(words or (DEST,)), "--json")
    data = json.loads(done.stdout)
    assert data["version"] == 1 and data["generator"]
    found = {row["path"]: row["state"] for each in data["bundles"] for row in each["files"]}
    assert data["clean"] is (not found) is (done.exit_code == ExitCode.OK)
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def lose_history() -> None:
    """Make git forget what files were: the repository begins with what they are now."""
    shutil.rmtree(".git")
    git("init", "--quiet")
    commit()


# vendor


def test_a_copy_holds_what_was_asked_for_and_is_a_package() -> None:
    done = run("vendor", DEST, *SILU, "--namespace", "acme", "--json")
    data = json.loads(done.stdout)
    assert (data["version"], data["bundles"][0]["namespace"]) == (1, "acme_cpu")
    assert "fusegen upgrade experts" in done.stderr
    assert sorted(p.name for p in DEST.iterdir()) == ["__init__.py", "cpu"]
    assert not list(CPU.rglob("_quantized_weights.py")) and not list(CPU.rglob("*.cu"))
    (DEST / "__init__.py").write_text("mine = 1\n")
    assert run("vendor", DEST, *SWIGLU, "--namespace", "acme").exit_code == 0
    assert (DEST / "__init__.py").read_text() == "mine = 1\n"
    assert (CPU / "swiglu__bf16.py").exists() and (CPU / CELL).exists()
    again = run("vendor", DEST, *SWIGLU, "--namespace", "acme")
    assert (again.exit_code, again.stderr) == (0, "")


def test_a_folder_of_other_things_is_its_owners_to_make_a_package_of() -> None:
    DEST.mkdir()
    (DEST / "notes.txt").write_text("mine\n")
    assert run("vendor", DEST, *SILU, "--namespace", "acme").exit_code == 0
    assert not (DEST / "__init__.py").exists()


def test_a_copy_needs_a_name_and_a_content() -> None:
    assert "--namespace" in run("vendor", DEST, *SILU).stderr
    done = run("vendor", DEST, "--namespace", "acme")
    assert done.exit_code == ExitCode.USAGE and "say what to vendor" in done.stderr
    assert not DEST.exists()


# status


@pytest.mark.slow
def test_every_state_of_a_file(old: Path, tmp_path: Path) -> None:
    with_format = (old / "_library.py").read_text().replace("import torch\n", "import   torch\n", 1)
    (old / "_library.py").write_text(with_format)
    (old / CELL).write_text((old / CELL).read_text().replace("import torch\n", "import  torch\n"))
    edit(old / "_cells.py", "import mmap", "import mmap  # mine")
    (old / "README.md").unlink()
    (old / "reference" / "_steps.py").unlink()
    (old / "reference" / "_steps.py").symlink_to(tmp_path / "elsewhere.py")
    (old / "tests" / "_support.py").write_text(f"<<<<<<< yours\n{LINE}=======\n>>>>>>> new\n")
    assert states() == {
        "_library.py": "reformatted",
        CELL: "reformatted",  # though stale as well: git has what it was
        "_cells.py": "edited",
        "README.md": "missing",
        "reference/_steps.py": "outside the bundle",
        "tests/_support.py": "conflict",
        "tests/_gone.py": "orphan",
        "_transforms.py": "stale",
    }
    shown = run("status", CPU)
    assert shown.stdout.startswith("experts/cpu  acme_cpu, by fusegen ")
    assert "\n  orphan              tests/_gone.py\n" in shown.stdout
    assert set(states(CPU).values()) <= set(STATES.values())


def test_what_is_in_the_way_and_a_stale_lock(new: Path) -> None:
    lock = json.loads((new / LOCK_NAME).read_text())
    del lock["files"]["README.md"]
    (new / LOCK_NAME).write_text(json.dumps(lock))
    (new / "README.md").write_text("mine\n")
    assert states() == {"README.md": "in the way"}
    git("restore", DEST)
    lock = json.loads((new / LOCK_NAME).read_text())
    lock["files"]["README.md"]["owners"] = []
    (new / LOCK_NAME).write_text(json.dumps(lock))
    assert states() == {LOCK_NAME: "stale"}


@pytest.mark.slow
def test_a_bundle_or_a_folder_of_them(new: Path) -> None:
    for word in (DEST, CPU, Path(".") / "experts"):
        assert run("status", word).exit_code == 0
        assert run("check", word).exit_code == 0
    for verb in ("status", "check", "upgrade"):
        done = run(verb, ".")
        assert done.exit_code == ExitCode.USAGE and "is not a bundle" in done.stderr
    assert run("build", DEST).exit_code == ExitCode.BUILD
    link = Path("link")
    link.symlink_to(DEST)
    assert run("status", link).exit_code == run("upgrade", link / "cpu").exit_code == 0


# upgrade


def test_what_nobody_edited_is_made_anew(old: Path) -> None:
    assert LINE in (old / CELL).read_text()
    done = run("upgrade", DEST, "--json")
    assert done.exit_code == 0 and json.loads(done.stdout)["conflicts"] == []
    assert states() == {} and LINE not in (old / CELL).read_text()
    assert not (old / "tests" / "_gone.py").exists()
    assert run("upgrade", DEST).exit_code == 0  # nothing is left to change, committed or not


@pytest.mark.slow
def test_an_edit_is_merged(old: Path) -> None:
    edit(old / CELL, "from __future__", "# mine\nfrom __future__")
    edit(old / "_cells.py", "import mmap", "import mmap  # not changed since")
    commit()
    before = contents(DEST)
    refused = run("upgrade", DEST)
    assert refused.exit_code == ExitCode.REFUSED and contents(DEST) == before
    assert "--on-edit merge" in refused.stderr and "_cells.py" not in refused.stderr
    done = run("upgrade", DEST, "--on-edit", "merge")
    assert done.exit_code == 0 and "2 edited by hand and kept so" in done.stdout
    text = (old / CELL).read_text()
    assert "# mine\nfrom __future__" in text and LINE not in text
    assert states() == {CELL: "edited", "_cells.py": "edited"}
    # The lock has what this version wrote: the edit is all that differs from it.
    shown = run("check", DEST).stdout.splitlines()
    changed = [line for line in shown if line.startswith("-") and not line.startswith("---")]
    assert changed == ["-import mmap  # not changed since", "-# mine"]
    commit()
    assert run("upgrade", DEST).exit_code == 0


@pytest.mark.slow
def test_a_second_merge_knows_what_the_first_one_wrote(old: Path, other_templates: Path) -> None:
    """Of which only the merge was ever committed."""
    edit(old / CELL, "from __future__", "# mine\nfrom __future__")
    commit()
    done = run("upgrade", DEST, "--on-edit", "merge")
    assert done.exit_code == 0
    assert f"commit {PRISTINE_NAME} with the rest, for the next merge: git add" in done.stderr
    assert git("status", "--short", "--", old / PRISTINE_NAME).startswith("??")
    lose_history()
    with version_of(other_templates):
        assert run("upgrade", DEST, "--on-edit", "merge").exit_code == 0
        assert states() == {CELL: "edited"}
        commit()
        (kept,) = (old / PRISTINE_NAME).iterdir()
        assert LINE in kept.read_text() and "# mine" not in kept.read_text()
        assert run("upgrade", DEST, "--on-edit", "take-new").exit_code == 0
    assert states().keys() == {CELL, "_transforms.py", "tests/_gone.py"}
    assert not (old / PRISTINE_NAME).exists()


@pytest.mark.slow
def test_a_conflict_stands_in_the_file_until_it_is_resolved(
    old: Path, other_templates: Path
) -> None:
    edit(old / CELL, LINE, "# mine\n")
    commit()
    done = run("upgrade", DEST, "--on-edit", "merge", "--json")
    assert done.exit_code == ExitCode.DRIFT
    assert json.loads(done.stdout)["conflicts"] == [
        {"bundle": "experts/cpu", "path": CELL, "kind": "merged"}
    ]
    text = (old / CELL).read_text()
    assert text.startswith("# @generated by fusegen") and "<<<<<<< yours\n" in text
    assert "# mine\n||||||| as fusegen " in text
    assert states() == {CELL: "conflict"}
    again = run("upgrade", DEST)
    assert again.exit_code == ExitCode.DRIFT and f"conflict  {old / CELL}\n" in again.stdout
    commit()
    with version_of(other_templates):  # and a merge over conflicts would bury them
        back = run("upgrade", DEST, "--on-edit", "merge")
        assert back.exit_code == ExitCode.REFUSED and "holds conflicts" in back.stderr
    start, rest = text.split("<<<<<<< yours\n")
    mine, rest = rest.split("||||||| ")
    (old / CELL).write_text(start + mine + rest.split(">>>>>>> ")[1].partition("\n")[2])
    assert states() == {CELL: "edited"}
    assert run("upgrade", DEST).exit_code == 0


def test_new_output_in_the_place_of_edits(old: Path) -> None:
    edit(old / CELL, LINE, "# mine\n")
    edit(old / "_cells.py", "import mmap", "import mmap  # mine")
    edit(old / "tests" / "_gone.py", "[1, 2]", "[3]")
    commit()
    assert run("upgrade", DEST, "--on-edit", "take-new").exit_code == 0
    assert states() == {} and not (old / "tests" / "_gone.py").exists()


@pytest.mark.slow
def test_an_edited_file_that_is_written_no_more_is_left_to_its_owner(old: Path) -> None:
    edit(old / "tests" / "_gone.py", "[1, 2]", "[3]")
    commit()
    assert run("upgrade", DEST).exit_code == ExitCode.REFUSED
    done = run("upgrade", DEST, "--on-edit", "merge")
    assert done.exit_code == ExitCode.DRIFT and "yours now  experts/cpu/tests/_gone.py" in (
        done.stdout
    )
    assert "[3]" in (old / "tests" / "_gone.py").read_text() and states() == {}
    commit()
    assert run("upgrade", DEST).exit_code == 0


def test_layout_is_no_edit(old: Path) -> None:
    for path in (old / CELL, old / "tests" / "_gone.py"):
        path.write_text(path.read_text().replace("import torch\n", "import  torch\n") + "\n\n\n")
    commit()
    assert run("upgrade", DEST).exit_code == 0 and states() == {}


@pytest.mark.parametrize("how", ["changed", "staged", "untracked", "ignored", "deleted"])
def test_what_is_not_committed_is_not_changed(old: Path, how: str) -> None:
    if how in ("changed", "staged"):
        edit(old / CELL, LINE, "# mine\n")
    if how == "staged":
        git("add", "--all")
    if how == "deleted":
        (old / "_transforms.py").unlink()
    if how in ("untracked", "ignored"):
        git("rm", "-r", "--quiet", "--cached", DEST)
    if how == "ignored":
        Path(".gitignore").write_text("cpu/\n")
        git("commit", "--quiet", "--message", "without it")
    before = contents(DEST)
    done = run("upgrade", DEST, "--on-edit", "take-new")
    assert done.exit_code == ExitCode.REFUSED and "not committed" in done.stderr
    assert contents(DEST) == before


@pytest.mark.slow
def test_what_lies_elsewhere_may_be_dirty(old: Path) -> None:
    Path("other.txt").write_text("not committed\n")
    (DEST / "cpu" / "lib").mkdir()
    (DEST / "cpu" / "lib" / "acme_cpu.so").write_text("built")
    assert run("upgrade", DEST).exit_code == 0


def test_a_repository_is_needed_and_that_of_a_hook_is_not_meant(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
        patch.setenv("GIT_INDEX_FILE", str(tmp_path / "index"))
        edit(old / CELL, LINE, "# mine\n")
        assert "not committed" in run("upgrade", DEST, "--on-edit", "merge").stderr
    git("restore", DEST)
    shutil.move(DEST, tmp_path / "moved")
    done = run("upgrade", tmp_path / "moved")
    assert done.exit_code == ExitCode.REFUSED and "not a git repository" in done.stderr
    monkeypatch.setenv("PATH", str(tmp_path))
    done = run("upgrade", tmp_path / "moved")
    assert done.exit_code == ExitCode.REFUSED and "git is not installed" in done.stderr


def as_other_version(templates: Path, script: Path) -> str:
    """A command that runs fusegen as the version of other templates."""
    script.write_text(
        "import sys\nfrom pathlib import Path\n"
        f"sys.path.insert(0, {str(paths.PACKAGE.parent)!r})\n"
        "from fusegen import cli\nfrom fusegen.publish import paths\n"
        f"paths.builtin_templates = lambda: Path({str(templates)!r})\ncli.main()\n"
    )
    return f"'{sys.executable}' '{script}'"


@pytest.mark.slow
def test_what_git_has_lost_is_written_again(
    old: Path, other_templates: Path, tmp_path: Path
) -> None:
    edit(old / CELL, "from __future__", "# mine\nfrom __future__")
    lose_history()
    before = contents(DEST)
    done = run("upgrade", DEST, "--on-edit", "merge")
    assert done.exit_code == ExitCode.REFUSED and contents(DEST) == before
    assert "git does not have it" in done.stderr and "--old-fusegen" in done.stderr
    for command, said in (
        ("fusegen-that-is-not-there", "No such file"),
        ("false", "failed"),
        ("'", "No closing quotation"),
        # A version that writes something else than the lock records is no base.
        (as_other_version(paths.builtin_templates(), tmp_path / "same.py"), "git does not have it"),
    ):
        words = ("upgrade", DEST, "--on-edit", "merge", "--old-fusegen", command)
        assert said in run(*words).stderr and contents(DEST) == before
    command = as_other_version(other_templates, tmp_path / "old version.py")
    assert run("upgrade", DEST, "--on-edit", "merge", "--old-fusegen", command).exit_code == 0
    text = (old / CELL).read_text()
    assert "# mine\nfrom __future__" in text and LINE not in text


@pytest.mark.slow
def test_a_kill_half_way_is_completed_conflicts_and_all(old: Path, tmp_path: Path) -> None:
    edit(old / CELL, LINE, "# mine\n")
    commit()
    script = tmp_path / "killed.py"
    script.write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(paths.PACKAGE.parent)!r})\n"
        "from fusegen import cli\nfrom fusegen.publish.publish import Filesystem\n"
        "replace, count = Filesystem.replace, []\n"
        "def dying(self, staged, target):\n"
        "    count.append(target)\n"
        "    if len(count) == 3:\n"
        "        os.kill(os.getpid(), 9)\n"
        "    replace(self, staged, target)\n"
        "Filesystem.replace = dying\n"
        f"sys.argv = ['fusegen', 'upgrade', {str(DEST)!r}, '--on-edit', 'merge']\ncli.main()\n"
    )
    assert subprocess.run([sys.executable, script], check=False).returncode == -9
    assert (old / PENDING_NAME).exists()
    done = run("upgrade", DEST, "--on-edit", "merge")
    assert done.exit_code == ExitCode.DRIFT and "was completed first" in done.stdout
    assert f"conflict  {old / CELL}\n" in done.stdout
    assert not (old / PENDING_NAME).exists() and not (old / STAGING_NAME).exists()
    assert states() == {CELL: "conflict"} and "# mine\n" in (old / CELL).read_text()


@pytest.mark.slow
def test_one_bundle_that_is_refused_keeps_all_as_they_are(old: Path, other_templates: Path) -> None:
    with version_of(other_templates):
        words = ("--arch", "sm_80", "--module", "silu", "--recipe", "bf16")
        assert run("vendor", DEST, *words, "--namespace", "acme").exit_code == 0
    edit(DEST / "sm_80" / CELL, LINE, "# mine\n")
    commit()
    before = contents(DEST)
    assert run("upgrade", DEST).exit_code == ExitCode.REFUSED and contents(DEST) == before
    assert run("upgrade", CPU).exit_code == 0
    assert set(states(CPU)) == set() and CELL in states(DEST / "sm_80")


def test_a_bundle_elsewhere_is_not_written_to(old: Path, tmp_path: Path) -> None:
    shutil.move(CPU, tmp_path / "outside")
    CPU.symlink_to(tmp_path / "outside")
    before = contents(tmp_path / "outside")
    for words in (("upgrade", DEST), ("eject", DEST, "silu")):
        done = run(*words)
        assert done.exit_code == ExitCode.REFUSED and "symbolic link" in done.stderr
    assert contents(tmp_path / "outside") == before


@pytest.mark.slow
def test_edits_with_windows_line_ends_merge(old: Path) -> None:
    edit(old / CELL, "from __future__", "# mine\nfrom __future__")
    (old / CELL).write_bytes((old / CELL).read_bytes().replace(b"\n", b"\r\n"))
    commit()
    assert run("upgrade", DEST, "--on-edit", "merge").exit_code == 0
    text = (old / CELL).read_bytes()
    assert b"# mine\r\nfrom __future__" in text and text.count(b"\n") == text.count(b"\r\n")


@pytest.mark.slow
def test_what_is_no_text_cannot_be_merged(old: Path) -> None:
    (old / CELL).write_bytes(b"\xff\xfe\x00")
    commit()
    done = run("upgrade", DEST, "--on-edit", "merge")
    assert done.exit_code == ExitCode.REFUSED and f"{old / CELL}: cannot be merged" in done.stderr
    (old / CELL).write_bytes(b"text = 1\0\n")
    commit()
    assert "binary" in run("upgrade", DEST, "--on-edit", "merge").stderr


def test_a_header_that_was_taken_away_stays_away(old: Path) -> None:
    text = (old / CELL).read_text()
    text = text[text.index('"""') :].replace("from __future__", "# mine\nfrom __future__", 1)
    (old / CELL).write_text(text)
    commit()
    assert run("upgrade", DEST, "--on-edit", "merge").exit_code == 0
    assert (old / CELL).read_text().startswith('"""')


# eject


@pytest.mark.slow
def test_an_ejected_module_is_nobody_elses(new: Path) -> None:
    run("vendor", DEST, *SWIGLU, "--namespace", "acme")
    edit(new / CELL, "from __future__", "# mine\nfrom __future__")
    edit(new / "_cells.py", "import mmap", "import mmap  # mine")
    edit(new / "README.md", "## Test", "My own words.\n\n## Test")
    for path in ("_transforms.py", "tests/test_silu__bf16.py"):
        edit(new / path, "import torch\n", "import  torch  \n")  # layout alone
    before = contents(new)
    done = run("eject", DEST, "silu", "--json")
    home = new / "ejected" / "silu__bf16"
    assert json.loads(done.stdout) == {
        "version": 1,
        "fusegen": __version__,
        "ejected": [
            {
                "bundle": "experts/cpu",
                "cell": "silu__bf16",
                "folder": str(home),
                "compiled": False,
            }
        ],
    }
    # Its files are as they were, and so is what it needs; headers say whose they are.
    opening, _, rest = (home / CELL).read_text().partition("\n")
    assert opening.startswith("# ejected from fusegen ") and "this file is yours" in opening
    assert "# mine\nfrom __future__" in rest and "checksum" not in rest.split('"""')[0]
    assert (home / "_cells.py").read_bytes() == before["_cells.py"]
    assert "import  torch  \n" in (home / "tests" / "test_silu__bf16.py").read_text()
    assert "# @generated" not in "".join(p.read_text() for p in home.rglob("*.py"))
    assert (home / "tests" / "test_silu__bf16.py").exists() and not (home / LOCK_NAME).exists()
    # The bundle has nothing of it but its name, and keeps its own edits.
    assert (
        "from .ejected.silu__bf16.silu__bf16 import (\n    DIGEST,\n    SiLU,\n"
        in (new / CELL).read_text()
    )
    lock = read_lock(new)
    assert lock is not None and not [path for path in lock.files if "silu__" in path]
    assert states() == {"_cells.py": "edited", "README.md": "edited"}
    assert "My own words." in (new / "README.md").read_text()
    assert "silu__bf16" not in (new / "README.md").read_text()
    # Nobody minds what becomes of it.
    git("add", "--all")
    shutil.rmtree(home / "tests")
    (home / CELL).write_text("mine = 1\n")
    (new / CELL).write_text("mine = 2\n")
    assert set(states()) == {"_cells.py", "README.md"}
    assert run("upgrade", DEST, "--on-edit", "take-new").exit_code == ExitCode.REFUSED
    commit()
    assert run("upgrade", DEST, "--on-edit", "take-new").exit_code == 0
    assert (new / CELL).read_text() == "mine = 2\n" and (home / CELL).read_text() == "mine = 1\n"
    again = run("vendor", DEST, *SILU, "--namespace", "acme")
    assert again.exit_code == ExitCode.REFUSED and f"{CELL}  exists and was not" in again.stderr
    assert run("eject", DEST, "silu").exit_code == ExitCode.USAGE


def test_the_last_module_of_a_bundle(new: Path) -> None:
    done = run("eject", CPU, "silu__bf16")
    assert (done.exit_code, done.stderr) == (0, "")
    assert sorted(p.name for p in CPU.iterdir()) == ["__init__.py", "ejected", CELL]
    assert "this file is yours" in (CPU / "__init__.py").read_text()


@pytest.mark.slow
def test_an_ejected_module_brings_its_kernels() -> None:
    words = ("--arch", "sm_80", "--recipe", "bf16", "--namespace", "acme")
    assert run("vendor", DEST, "--module", "silu", "--module", "swiglu", *words).exit_code == 0
    bundle, home = DEST / "sm_80", DEST / "sm_80" / "ejected" / "silu__bf16"
    launcher = (bundle / "csrc" / "silu__bf16.cpp").read_text()
    done = run("eject", DEST, "silu", "--json")
    assert json.loads(done.stdout)["ejected"][0]["compiled"] is True
    for folder, own, other in ((bundle, "swiglu", "silu"), (home, "silu", "swiglu")):
        sources = read_sources(folder / "csrc" / "sources.cmake")
        check_files(folder / "csrc", sources)
        assert list(sources.cells) == [f"{own}__bf16"] and sources.namespace == "acme_sm_80"
        # The digest that a library of these sources states is the one that the Python looks for.
        module = (folder / f"{own}__bf16.py").read_text()
        assert f'DIGEST = "{sources.cells[f"{own}__bf16"].digest}"' in module
        assert not list(folder.glob(f"csrc/**/*pointwise_{other}_*"))
    after = (home / "csrc" / "silu__bf16.cpp").read_text()
    assert after.startswith("// ejected from fusegen ")
    assert after.partition("\n#include")[2] == launcher.partition("\n#include")[2]
    assert build.with_kernels([DEST]) == (bundle,)
    assert build.with_kernels([home, bundle]) == (home, bundle)
    assert run("eject", DEST, "swiglu").stderr.endswith(
        "fusegen build experts/sm_80/ejected/swiglu__bf16\n"
    )


@pytest.mark.slow
def test_what_cannot_be_ejected(old: Path) -> None:
    before = contents(DEST)
    done = run("eject", DEST, "silo")
    assert done.exit_code == ExitCode.USAGE and "did you mean 'silu'?" in done.stderr
    done = run("eject", DEST, "silu")
    assert done.exit_code == ExitCode.REFUSED and "fusegen upgrade experts/cpu" in done.stderr
    assert contents(DEST) == before
    assert run("upgrade", DEST).exit_code == 0
    (old / "ejected").mkdir()
    (old / "ejected" / "silu__bf16").write_text("mine\n")
    before = contents(DEST)
    done = run("eject", DEST, "silu")
    assert done.exit_code == ExitCode.REFUSED and "not written by fusegen" in done.stderr
    assert contents(DEST) == before
    shutil.rmtree(old / "ejected")
    (old / CELL).write_text("def (\n")
    assert "does not parse" in run("eject", DEST, "silu").stderr
    (old / CELL).write_text("<<<<<<< yours\n")
    assert "holds conflicts" in run("eject", DEST, "silu").stderr


def test_the_lock_knows_files_as_git_does(new: Path) -> None:
    lock = read_lock(new)
    assert lock is not None
    row = git("rev-parse", f"HEAD:experts/cpu/{CELL}").strip()
    assert lock.files[CELL].blob == row == git_blob((new / CELL).read_bytes())
