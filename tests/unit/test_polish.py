"""Polishing: what is refused, what is formatted, and the header in front of it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from fusegen.emit import polish as polish_module
from fusegen.emit.fileset import Artifact, ArtifactKind, FileSet, RenderError
from fusegen.emit.polish import MARKER, polish, polishing, same_but_for_format, split_header

INPUTS = ("templates/module.py.j2", "specs/ops/gemm.yaml")

TEXTS = {
    "m.py": (ArtifactKind.PYTHON, 'import  os\n\n\n\nx = { "a":os.sep }'),
    "csrc/k.cu": (ArtifactKind.CUDA, "\n\nint a;  \n\n\n\nint b;\t\n"),
    "CMakeLists.txt": (ArtifactKind.CMAKE, "set(a b)"),
    "README.md": (ArtifactKind.MARKDOWN, "# t\n\n\n\ntext  \n"),
    "static.cuh": (ArtifactKind.STATIC, "int a;  \r\n\n\n\n"),
    "data.json": (ArtifactKind.JSON, '{"a": 1}'),
}
BODIES = {
    "m.py": 'import os\n\nx = {"a": os.sep}\n',
    "csrc/k.cu": "int a;\n\nint b;\n",
    "CMakeLists.txt": "set(a b)\n",
    "README.md": "# t\n\ntext\n",
    "static.cuh": "int a;  \r\n\n\n\n",
    "data.json": '{"a": 1}\n',
}


def files(texts: dict[str, tuple[ArtifactKind, str]]) -> FileSet:
    return FileSet(
        (path, Artifact(text, kind, ("cell",), INPUTS)) for path, (kind, text) in texts.items()
    )


def python(text: str, path: str = "m.py") -> FileSet:
    return files({path: (ArtifactKind.PYTHON, textwrap.dedent(text))})


def test_every_kind_gets_its_layout() -> None:
    polished = polish(files(TEXTS))
    assert {path: split_header(item.text)[1] for path, item in polished.items()} == BODIES
    assert {path: replace(item, text="") for path, item in polished.items()} == {
        path: replace(item, text="") for path, item in files(TEXTS).items()
    }


def test_header_is_exact() -> None:
    polished = polish(files({"m.py": (ArtifactKind.PYTHON, "x = 1\n")}))
    # printf 'x = 1\n' | sha256sum | cut -c-16
    assert polished["m.py"].text == (
        f"# {MARKER}; do not edit: change the spec and run `fusegen generate`\n"
        "# from specs/ops/gemm.yaml, templates/module.py.j2\n"
        "# checksum sha256:9e26bf369911c45c\n"
        "x = 1\n"
    )


def test_header_uses_the_comment_of_the_kind_or_none() -> None:
    first = {path: item.text.splitlines()[0] for path, item in polish(files(TEXTS)).items()}
    assert first["m.py"].startswith(f"# {MARKER}")
    assert first["CMakeLists.txt"].startswith(f"# {MARKER}")
    assert first["csrc/k.cu"].startswith(f"// {MARKER}")
    assert first["README.md"].startswith(f"<!-- {MARKER}") and first["README.md"].endswith(" -->")
    assert MARKER not in first["static.cuh"] + first["data.json"]


@pytest.mark.parametrize("path", ["m.py", "csrc/k.cu", "CMakeLists.txt", "README.md"])
def test_header_is_read_back_and_notices_an_edit(path: str) -> None:
    text = polish(files(TEXTS))[path].text
    header, body = split_header(text)
    assert header is not None
    assert header.inputs == tuple(sorted(INPUTS))
    assert header.matches(body)
    assert not header.matches(body + " ")


def test_header_wraps_many_inputs_and_reads_them_back() -> None:
    inputs = tuple(f"specs/recipes/a_recipe_with_a_long_name_{n:02}.yaml" for n in range(9))
    for kind, path in ((ArtifactKind.PYTHON, "m.py"), (ArtifactKind.MARKDOWN, "r.md")):
        text = polish(FileSet([(path, Artifact("", kind, (), inputs))]))[path].text
        assert max(map(len, text.splitlines())) <= polish_module.LINE_LENGTH
        header, body = split_header(text)
        assert header is not None and header.inputs == inputs
        assert body == ""


@pytest.mark.parametrize("text", ["", "# x\n", f"# {MARKER}; cut", f"# {MARKER}\nx = 1\n"])
def test_text_without_a_whole_header_is_all_body(text: str) -> None:
    assert split_header(text) == (None, text)


def test_own_source_does_not_carry_the_marker() -> None:
    assert MARKER not in Path(polish_module.__file__).read_text()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import os\n", "m.py:1:8: `os` imported but unused (F401)"),
        ("import os  # noqa: F401\n", "m.py:1:8: `os` imported but unused (F401)"),
        ("def f() -> int:\n    a = 1\n    return 2\n", "m.py:2:5: Local variable `a`"),
        ("x = undefined\n", "m.py:1:5: Undefined name `undefined` (F821)"),
        ("x = (\n", "m.py:2:1: unexpected EOF while parsing (invalid-syntax)"),
        ("x = '\\d'\n", "Invalid escape sequence"),
        ("x = '\0'\n", "m.py"),
    ],
)
def test_broken_python_names_place_rule_and_template(text: str, says: str) -> None:
    with pytest.raises(RenderError) as caught:
        polish(python(text))
    assert says in str(caught.value)
    assert ", ".join(INPUTS) in str(caught.value)


def test_all_broken_python_is_named_at_once_with_its_line() -> None:
    sources = {f"{n}/m.py": (ArtifactKind.PYTHON, f"import os as name_{n}\n") for n in range(3)}
    with pytest.raises(RenderError) as caught:
        polish(files(sources))
    for n in range(3):
        assert f"{n}/m.py:1:" in str(caught.value)
        assert f"import os as name_{n}" in str(caught.value)


def test_bad_json_is_refused() -> None:
    with pytest.raises(RenderError, match=r"data.json: not valid JSON: .*templates/module"):
        polish(files({"data.json": (ArtifactKind.JSON, "{,}")}))


def test_second_header_is_refused() -> None:
    once = polish(files({"m.py": TEXTS["m.py"]}))
    with pytest.raises(RenderError, match="already opens with a header"):
        polish(once)


def test_imports_are_sorted_and_result_is_stable(tmp_path: Path) -> None:
    source = '''
        """Doc."""
        from __future__ import annotations
        import torch
        from . import _library
        import os
        def f() -> object: return (os, torch, _library)
    '''
    text = polish(python(source, "build/__init__.py"))["build/__init__.py"].text
    assert text.index("import os") < text.index("import torch") < text.index("from . import")
    target = tmp_path / "m.py"
    target.write_text(text)
    for verb in (["format", "--check"], ["check", "--select=F,E,W,I"]):
        command = [
            sys.executable,
            "-m",
            "ruff",
            *verb,
            "--isolated",
            "--line-length=100",
            str(target),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("folder", ["build", "dist", "node_modules", ".hidden", "venv"])
def test_no_folder_is_passed_over(folder: str) -> None:
    polished = polish(python("x = { }\n", f"{folder}/m.py"))
    assert split_header(polished[f"{folder}/m.py"].text)[1] == "x = {}\n"


def test_user_configuration_does_not_reach_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = polish(files(TEXTS))
    (tmp_path / "ruff.toml").write_text('line-length = 20\nformat.quote-style = "single"\n')
    (tmp_path / ".gitignore").write_text("*\n")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    monkeypatch.setenv("RUFF_OUTPUT_FORMAT", "github")
    assert polish(files(TEXTS)) == expected
    assert list(scratch.iterdir()) == []


def test_ruff_runs_once_per_verb_however_many_files(monkeypatch: pytest.MonkeyPatch) -> None:
    verbs: list[str] = []
    run = subprocess.run

    def counting(command: list[str], **options: object) -> object:
        verbs.append(command[1])
        return run(command, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "run", counting)
    polish(files({f"m{n}.py": (ArtifactKind.PYTHON, f"x = {n}\n") for n in range(20)}))
    assert verbs == ["check", "format"]
    polish(files({"k.cu": TEXTS["csrc/k.cu"]}))
    assert verbs == ["check", "format"]


def test_ruff_works_while_the_caller_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()
    run = subprocess.run

    def last(command: list[str], **options: object) -> object:
        result = run(command, **options)  # type: ignore[call-overload]
        if command[1] == "format":
            done.set()
        return result

    monkeypatch.setattr(subprocess, "run", last)
    with polishing(files(TEXTS)) as finish:
        assert done.wait(60)
        assert finish() == polish(files(TEXTS))


def test_what_ruff_finds_is_raised_where_it_is_awaited() -> None:
    with (
        polishing(python("x = undefined\n")) as finish,
        pytest.raises(RenderError, match="Undefined name"),
    ):
        finish()


def test_a_caller_that_fails_meanwhile_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(RuntimeError, match="elsewhere"), polishing(files(TEXTS)):
        assert list(tmp_path.iterdir()) != []
        raise RuntimeError("elsewhere")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "left", "right", "same"),
    [
        ("m.py", "x = {'a': 1}\n", 'x = {\n    "a": 1,\n}\n', True),
        ("m.py", "x = 1\n", "x = 2\n", False),
        ("m.py", "x = 1  # why\n", "x = 1\n", False),
        ("m.py", "x = 1  # why\n", "# why\nx = 1\n", True),
        ("m.py", "x = (\n", "x = (\n", False),
        ("m.py", "if x:\n    y\nz\n", "if x:\n    y\n    z\n", False),
        ("k.cu", "int a;\nint b;\n", "int a; int b;", True),
        ("k.cu", "int a;\n", "int a; // why\n", False),
        ("r.md", "a\nb\n", "a b\n", True),
    ],
)
def test_same_but_for_format(path: str, left: str, right: str, same: bool) -> None:
    assert same_but_for_format(path, left, right) is same


def test_headers_do_not_count_as_a_difference() -> None:
    text = polish(files({"m.py": TEXTS["m.py"]}))["m.py"].text
    assert same_but_for_format("m.py", text, split_header(text)[1])
