"""Specs of an older edition: read with one warning, rewritten without touching anything else."""

from __future__ import annotations

import json
import os
import stat
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from fusegen import cli
from fusegen.checks import load as loading
from fusegen.checks.load import SpecWarning, load
from fusegen.cli.exits import ExitCode
from fusegen.commands import fix_specs as fixing
from fusegen.commands.fix_specs import fix_specs
from fusegen.commands.scaffold import new
from fusegen.publish.paths import builtin_specs
from fusegen.spec.diagnostics import SpecError
from fusegen.spec.editions import CURRENT, STEPS, upgraded
from fusegen.spec.kinds import SpecKind
from fusegen.spec.load import parse_yaml

OP = """\
# Copied from a paper.
edition: 1  # the oldest
op: pick
summary: y = x where mask is set
dims: {T: rows, D: width}
inputs:
  x: {shape: [T..., D]}
  mask:   {differentiable: false, dtype: uint8, shape: [T..., D]}   # one byte each
  random:
    shape: [2]
    # Not trained.
    differentiable: false  # as all integers
    dtype: int64
    drawn: true

internal: {kept: {shape: [T..., D], dtype: uint8, differentiable: false},
           r: {shape: [T...], dtype: float32, differentiable: false}}
outputs:
  y: {shape: [T..., D]}
forward:
  - {step: dropout, a: x, random: random, p: 0.5, out: y, mask: kept}
backward:
  - {step: dropout_grad, grad: dy, mask: kept, p: 0.5, out: dx}
"""
CURRENT_OP = """\
# Copied from a paper.
edition: 2  # the oldest
op: pick
summary: y = x where mask is set
dims: {T: rows, D: width}
inputs:
  x: {shape: [T..., D]}
  mask:   {dtype: uint8, shape: [T..., D]}   # one byte each
  random:
    shape: [2]
    # Not trained.
    # as all integers
    dtype: int64
    drawn: true

internal: {kept: {shape: [T..., D], dtype: uint8},
           r: {shape: [T...], dtype: float32, differentiable: false}}
outputs:
  y: {shape: [T..., D]}
forward:
  - {step: dropout, a: x, random: random, p: 0.5, out: y, mask: kept}
backward:
  - {step: dropout_grad, grad: dy, mask: kept, p: 0.5, out: dx}
"""
SILU = """\
edition: 1
op: {name}
summary: y = x
dims: {{T: rows}}
inputs: {{x: {{shape: [T...]}}}}
outputs: {{y: {{shape: [T...]}}}}
pointwise: {{y: x}}
"""


def write(folder: Path, kind: str, name: str, text: str) -> Path:
    path = folder / kind / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode("utf-8"))
    return path


def run(*words: str | Path) -> Result:
    result = CliRunner().invoke(cli.program, [str(word) for word in words])
    print(result.exit_code, result.stderr)
    return result


def said_of(*folders: Path) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load([builtin_specs(), *folders])
    return [str(each.message) for each in caught]


def rewritten(text: str, kind: SpecKind = SpecKind.OPS) -> str:
    """What `fix-specs` makes of a text, whatever else is wrong with it."""
    content, source, problems = parse_yaml(text, "toy.yaml")
    assert content is not None and not problems
    return fixing.text_of(text, "toy.yaml", upgraded(kind, content), source)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    return tmp_path / "my specs"


# Reading


def test_the_editions_follow_each_other() -> None:
    assert [step.edition for step in STEPS] == list(range(2, CURRENT + 1))


def test_the_shipped_specs_are_of_the_current_edition() -> None:
    assert said_of() == []
    assert fix_specs([builtin_specs()], write=False) == ()


def test_one_warning_names_the_files_and_the_command(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c", "d", "e"):
        write(mine, "ops", name, SILU.format(name=name))
    write(mine, "ops", "f", SILU.format(name="f").replace("edition: 1", "edition: 2"))
    other = mine.parent / "other"
    write(other, "ops", "g", SILU.format(name="g"))
    monkeypatch.chdir(mine.parent)
    assert said_of(mine, other) == [
        "specs of an older edition were read as edition 2; my specs/ops/a.yaml,"
        " my specs/ops/b.yaml, my specs/ops/c.yaml and 2 more: fusegen fix-specs 'my specs'"
        " rewrites them;"
        " other/ops/g.yaml: fusegen fix-specs other rewrites them"
    ]
    for verb in ("validate", "list"):
        told = run(verb, "--specs", mine).stderr
        assert told.count("warning:") == 1 and "fusegen fix-specs 'my specs'" in told


def test_an_extension_is_its_authors_to_rewrite(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(mine, "ops", "a", SILU.format(name="a"))
    monkeypatch.setattr(
        loading, "installed", lambda: (SimpleNamespace(specs=mine, package="fusegen-toy"),)
    )
    (told,) = said_of(mine)
    assert "a newer release of package fusegen-toy may have them" in told
    assert "fix-specs" not in told


def test_places_are_those_of_the_file(mine: Path) -> None:
    write(mine, "ops", "pick", OP.replace("drawn: true", "drawn: maybe"))
    with pytest.raises(SpecError) as error:
        load([builtin_specs(), mine])
    (problem,) = error.value.problems
    assert str(problem) == "my specs/ops/pick.yaml:14:5: expected true or false, got 'maybe'"


# Rewriting


def test_nothing_moves_but_what_the_edition_changed(mine: Path) -> None:
    path = write(mine, "ops", "pick", OP)
    path.chmod(0o640)
    (done,) = fix_specs([mine], write=True)
    assert path.read_text(encoding="utf-8") == CURRENT_OP == done.after
    assert done.removed == (
        "inputs.mask.differentiable",
        "inputs.random.differentiable",
        "internal.kept.differentiable",
    )
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert fix_specs([mine], write=True) == ()
    assert [each.name for each in path.parent.iterdir()] == ["pick.yaml"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a: {dtype: int64, differentiable: false}", "a: {dtype: int64}"),
        ("a: {dtype: int64, differentiable: false,}", "a: {dtype: int64,}"),
        ("a: { differentiable: false , dtype: int64 }", "a: { dtype: int64 }"),
        ("a: {dtype: int64,\n     differentiable: false}", "a: {dtype: int64}"),
        (
            "a: {differentiable: false,  # none\n     dtype: int64}",
            "a: {  # none\n     dtype: int64}",
        ),
        (
            "a: {dtype: int64,  # codes\n     differentiable: false}",
            "a: {dtype: int64,  # codes\n     }",
        ),
        ('"a": {"dtype": "int64", "differentiable": false}', '"a": {"dtype": "int64"}'),
        ("ä: {summary: 😀, dtype: int64, differentiable: no}", "ä: {summary: 😀, dtype: int64}"),
        ("a:\n    dtype: int64\n    differentiable: false", "a:\n    dtype: int64"),
        ("a:\n    differentiable: false\n    dtype: int64", "a:\n    dtype: int64"),
        ("a:\n    dtype: int64\n    differentiable:\n      false", "a:\n    dtype: int64"),
        (
            "a: {dtype: float32, differentiable: false}",
            "a: {dtype: float32, differentiable: false}",
        ),
    ],
)
def test_ways_to_write_a_key(before: str, after: str) -> None:
    for newline, mark in (("\n", ""), ("\r\n", ""), ("\n", "\ufeff")):
        for last in ("", "\nop: toy\n"):
            text, wanted = (
                f"{mark}edition: {edition}\ninputs:\n  {each}{last}".replace("\n", newline)
                for edition, each in ((1, before), (2, after))
            )
            assert rewritten(text).rstrip() == wanted.rstrip()


def test_the_other_kinds() -> None:
    scale = "dtype: float32, rule: max_over_amax"
    head = "edition: 1\nroles:\n  input:\n"
    assert rewritten(
        f"{head}    scale: {{{scale}, source: history, history: 16}}\n"
        f"    tensor_scale: {{source: current, {scale}}}\n",
        SpecKind.RECIPES,
    ) == head.replace("1", "2") + (
        f"    scale: {{{scale}, history: 16}}\n    tensor_scale: {{{scale}}}\n"
    )
    arch = "arch: sm_120a\n# The newest.\n{}gencode: arch=compute_120a,code=sm_120a\n"
    for listed in ("capability: [12, 0]\n", "capability:\n- 12\n- 0\n"):
        assert rewritten("edition: 1\n" + arch.format(listed), SpecKind.ARCHS) == (
            "edition: 2\n" + arch.format("")
        )
    assert rewritten("edition: 1\narch: cpu\ncapability: null\n", SpecKind.ARCHS) == (
        "edition: 2\narch: cpu\n"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "edition: 1\narch: sm_90\ncapability:  # Hopper\n  - 9\n  - 0\ngencode: x\n",
            "toy.yaml:3:1: a comment stands between 'capability' and its value; edit the file",
        ),
        (
            "? edition\n: 1\n? arch\n: sm_90\n? capability\n: [9, 0]\n? gencode\n: x\n",
            "toy.yaml:5:3: 'capability' shares its line with what stands before it; edit the file",
        ),
        (
            "{edition: 1, arch: sm_90, capability: [9, 0]  # a, b\n, gencode: x}",
            "toy.yaml:1:1: the text cannot be changed in place; edit the file by hand",
        ),
    ],
)
def test_what_cannot_be_edited_is_said_with_its_place(text: str, message: str) -> None:
    with pytest.raises(SpecError) as error:
        rewritten(text, SpecKind.ARCHS)
    assert str(error.value).startswith(message)


def test_where_one_file_is_wrong_none_is_written(mine: Path) -> None:
    good = write(mine, "ops", "pick", OP)
    texts = {
        "newer": SILU.format(name="newer").replace("edition: 1", "edition: 3"),
        "opposed": SILU.format(name="opposed").replace(
            "[T...]", "[T...], dtype: int64, differentiable: true"
        ),
        "torn": "edition: [",
    }
    for name, text in texts.items():
        write(mine, "ops", name, text)
    with pytest.raises(SpecError) as error:
        fix_specs([mine], write=True)
    told = str(error.value)
    assert "newer.yaml:1:1: edition 3 is newer than edition 2" in told
    assert "opposed.yaml:5:43: 'differentiable' is true, but false by dtype: int64" in told
    assert "torn.yaml" in told and "not YAML" in told
    assert good.read_text(encoding="utf-8") == OP


def test_a_file_that_changes_at_this_moment_is_left(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(mine, "ops", "pick", OP)
    copymode = fixing.shutil.copymode

    def edit(source: Path, target: Path) -> None:
        path.write_text(f"{OP}# mine\n", encoding="utf-8")
        copymode(source, target)

    monkeypatch.setattr(fixing.shutil, "copymode", edit)
    result = run("fix-specs", mine)
    assert result.exit_code == ExitCode.REFUSED
    assert "pick.yaml: was changed at this moment; run the command again" in result.stderr
    assert path.read_text(encoding="utf-8") == f"{OP}# mine\n"
    assert [each.name for each in path.parent.iterdir()] == ["pick.yaml"]


def test_a_link_stays_a_link(mine: Path) -> None:
    target = write(mine.parent / "shared", "ops", "pick", OP)
    link = mine / "ops" / "pick.yaml"
    link.parent.mkdir(parents=True)
    link.symlink_to(target)
    fix_specs([mine], write=True)
    assert link.is_symlink() and target.read_text(encoding="utf-8") == CURRENT_OP


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_to(mine: Path) -> None:
    path = write(mine, "ops", "pick", OP)
    path.parent.chmod(0o500)
    result = run("fix-specs", mine)
    path.parent.chmod(0o700)
    assert result.exit_code == ExitCode.REFUSED and path.read_text(encoding="utf-8") == OP


# The command


def test_check_diff_and_json(mine: Path) -> None:
    path = write(mine, "ops", "pick", OP)
    asked = run("fix-specs", mine, "--check")
    assert asked.exit_code == ExitCode.DRIFT
    assert asked.stdout == (
        f"{path}  edition 1: without inputs.mask.differentiable, inputs.random.differentiable,"
        " internal.kept.differentiable\n"
    )
    shown = run("fix-specs", path, "--diff")
    assert shown.exit_code == ExitCode.OK
    assert "\n-edition: 1  # the oldest\n+edition: 2  # the oldest\n" in shown.stdout
    told = json.loads(run("fix-specs", mine, "--json", "--check").stdout)
    assert (told["drifted"], told["written"]) == (True, False)
    assert told["files"][0] == {
        "path": str(path),
        "edition": 1,
        "to": 2,
        "removed": [
            "inputs.mask.differentiable",
            "inputs.random.differentiable",
            "internal.kept.differentiable",
        ],
    }
    assert path.read_text(encoding="utf-8") == OP
    done = run("fix-specs", mine)
    assert done.exit_code == ExitCode.OK and path.read_text(encoding="utf-8") == CURRENT_OP
    again = run("fix-specs", mine, "--check")
    assert again.exit_code == ExitCode.OK and "are of the current edition" in again.stderr


def test_where_it_looks(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(mine, "ops", "pick", OP)
    for place, code, words in (
        (mine / "ops", ExitCode.USAGE, "name the spec folder"),
        (mine / "nothing", ExitCode.SPEC, "there is no such spec folder"),
        (write(mine.parent / "notes", "any", "x", OP), ExitCode.USAGE, "in one of these folders"),
    ):
        result = run("fix-specs", place)
        assert result.exit_code == code and words in result.stderr
    monkeypatch.chdir(mine.parent)
    assert "specs:1:1: there is no such spec folder" in run("fix-specs").stderr
    mine.rename(mine.parent / "specs")
    assert run("fix-specs").exit_code == ExitCode.OK
    assert (mine.parent / "specs/ops" / path.name).read_text(encoding="utf-8") == CURRENT_OP


def test_a_spec_folder_may_have_the_name_of_a_kind(mine: Path) -> None:
    path = write(mine.parent / "ops", "ops", "pick", OP)
    assert run("fix-specs", mine.parent / "ops").exit_code == ExitCode.OK
    assert path.read_text(encoding="utf-8") == CURRENT_OP


def test_schemas_for_editors_are_asked_for_where_there_are_some(mine: Path) -> None:
    write(mine, "ops", "pick", OP)
    (mine / "schema").mkdir()
    (mine / "schema" / "op.schema.json").write_text("{}", encoding="utf-8")
    assert f"fusegen schema --specs {mine}" in run("fix-specs", mine).stderr
    assert run("schema", "--specs", mine).exit_code == ExitCode.OK
    assert "fusegen schema" not in run("fix-specs", mine).stderr


def test_a_copy_of_an_older_spec_is_of_the_current_edition(mine: Path) -> None:
    write(mine, "ops", "old", SILU.format(name="old"))
    with pytest.warns(SpecWarning, match="older edition"):
        made = new("op", "young", origin="old", folder=mine)
    assert "\nedition: 2\n" in made.text


ANYTHING = (
    "edition: 1\ninputs: [1]\nroles: 3\n",
    "edition: 1\ninputs: {x: 1, y: {dtype: [int64], differentiable: false}}\n",
    "edition: 1\nroles: {input: {scale: [], tensor_scale: {source: {}}}}\n",
    "edition: 1\narch: [1]\ncapability: {}\n",
    "edition: 1\ninputs: {x: {dtype: int64, differentiable: 0}}\n",
)


@pytest.mark.parametrize("text", ANYTHING)
@pytest.mark.parametrize("kind", SpecKind, ids=lambda kind: kind.key)
def test_a_document_may_be_anything(text: str, kind: SpecKind) -> None:
    content, _, _ = parse_yaml(text, "toy.yaml")
    assert content is not None
    assert upgraded(kind, content).document["edition"] == CURRENT
