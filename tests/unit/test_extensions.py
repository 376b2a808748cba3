"""Extensions that cannot be used: each error names the package, what is wrong and the remedy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fusegen import extensions
from fusegen.extensions import Extension, ExtensionError, Installed, extended
from fusegen.steps import SHIPPED, STEPS
from fusegen.steps.definition import StepDef

GENERATOR = Path(extensions.__file__).parents[1]

STEP = """
from fusegen.extensions import Extension
from fusegen.families.family import Family
from fusegen.steps.definition import Reference, StepDef
from fusegen.steps.launch import Launch

LAUNCH = Launch("Arguments", "arguments.h", ())
REFERENCE = Reference("own.step", frozenset(("a",)))
SHAPES = {None: {"a": "T N", "out": "T N"}}
def step(name="own_step", reference=REFERENCE, launch=lambda _: LAUNCH, shapes=SHAPES, **more):
    return StepDef(name, ("a",), shapes=shapes, reference=reference, launch=launch, **more)
def family(name="own_family", implements=("own_step",)):
    return Family(name, implements, LAUNCH, "Does it.", device="own.cuh")
"""


def package(folder: Path, name: str, code: str, entry: str = "EXTENSION") -> Path:
    """An installed package with one extension."""
    (folder / f"{name}.py").write_text(code, encoding="utf-8")
    about = folder / f"{name}-1.2.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    point = f"[{extensions.GROUP}]\n{name.removeprefix('other_')} = {name}:{entry}\n"
    (about / "entry_points.txt").write_text(point)
    return folder


def list_extensions(*folders: Path, before: str = "") -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, (GENERATOR, *folders)))
    words = ["-c", f"{before}\nfrom fusegen.cli import main\nmain()", "list", "extensions"]
    env = os.environ | {"PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *words], env=env, capture_output=True, text=True, check=False
    )


def test_what_an_extension_adds_is_listed(tmp_path: Path) -> None:
    code = f"{STEP}EXTENSION = Extension((step(),), (family(),))\n"
    done = list_extensions(package(tmp_path, "toy", code))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("toy: toy 1.2 (")
    assert done.stdout.splitlines()[1:] == ["  steps: own_step", "  families: own_family"]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import nothing_of_this_name\n", "toy:EXTENSION fails with ModuleNotFoundError"),
        ("raise OSError('no disk')\n", "toy:EXTENSION fails with OSError: no disk"),
        ("", "toy:EXTENSION fails with AttributeError"),
        ("EXTENSION = 5\n", "toy:EXTENSION is no fusegen.extensions.Extension"),
        (f"{STEP}EXTENSION = Extension((family(),))\n", "expected a StepDef, got Family"),
        (f"{STEP}EXTENSION = Extension((step('gemm'),))\n", "'gemm' is a StepDef of fusegen, too"),
        (f"{STEP}EXTENSION = Extension((step('Own'),))\n", "'Own' is no name"),
        (
            f"{STEP}EXTENSION = Extension((step(reference=None),))\n",
            "StepDef 'own_step' has no reference",
        ),
        (
            f"{STEP}EXTENSION = Extension((step(launch=None),))\n",
            "StepDef 'own_step' has no launch",
        ),
        (f"{STEP}EXTENSION = Extension((step(shapes={{}}),))\n", "'own_step' has no shapes"),
        (
            f"{STEP}EXTENSION = Extension((step(independent=('Q',)),))\n",
            "'own_step' is independent along 'Q'; its rule has N, T",
        ),
        (
            f"{STEP}EXTENSION = Extension((), (family(),))\n",
            "Family 'own_family' implements 'own_step', which is no kind of step",
        ),
        (
            f"{STEP}EXTENSION = Extension((step(),), (family('gemm_sm90'),))\n",
            "'gemm_sm90' is a Family of fusegen, too; rename it",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused(code: str, said: str, tmp_path: Path) -> None:
    done = list_extensions(package(tmp_path, "toy", code))
    assert done.returncode == 2
    assert said in done.stderr
    assert "extension 'toy' of package toy 1.2: " in done.stderr
    assert "pip uninstall toy" in done.stderr


def test_two_that_have_one_name(tmp_path: Path) -> None:
    """As extensions, or what they add."""
    code = f"{STEP}EXTENSION = Extension((step(),), (family(),))\n"
    (tmp_path / "second").mkdir()
    folders = package(tmp_path, "toy", code), package(tmp_path / "second", "other_toy", code)
    done = list_extensions(*folders)
    assert done.returncode == 2
    assert "extension 'toy' of package " in done.stderr
    assert " has that name, too; " in done.stderr
    (tmp_path / "third").mkdir()
    done = list_extensions(folders[0], package(tmp_path / "third", "more", code))
    assert done.returncode == 2
    assert "'own_step' is a StepDef of more, too; rename it; mend the package" in done.stderr
    assert "extension 'toy' of package toy 1.2: " in done.stderr


def test_one_that_is_imported_before_fusegen(tmp_path: Path) -> None:
    code = f"{STEP}EXTENSION = Extension((step(),), (family(),))\n"
    done = list_extensions(package(tmp_path, "toy", code), before="import toy")
    assert done.returncode == 1
    assert "where a program imports both, fusegen comes first" in done.stderr


def test_a_registry_is_what_comes_with_fusegen_and_then_the_extensions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert STEPS[: len(SHIPPED)] == SHIPPED
    own = StepDef("own")
    found = (Installed("toy", "toy", "1", "toy", Extension((own,))),)
    monkeypatch.setattr(extensions, "installed", lambda: found)
    assert extended(SHIPPED, StepDef, lambda each: each.steps, lambda _: "") == (*SHIPPED, own)
    with pytest.raises(ExtensionError, match="StepDef 'own' is odd; mend the package"):
        extended(SHIPPED, StepDef, lambda each: each.steps, lambda _: "is odd")


def test_a_digest_is_of_names_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "toy_with_files"
    (folder / "specs").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "__pycache__").mkdir()

    def digest() -> str:
        extensions._digest.cache_clear()
        extension = Extension(folder=folder)
        return Installed("toy", "toy", "1", "toy_with_files", extension).digest

    before = digest()
    (folder / "__pycache__" / "x.pyc").write_text("compiled")
    assert digest() == before
    (folder / "specs" / "a.yaml").write_text("a")
    second = digest()
    (folder / "specs" / "a.yaml").rename(folder / "specs" / "b.yaml")
    third = digest()
    (folder / "specs" / "b.yaml").write_text("b")
    assert len({before, second, third, digest()}) == 4
