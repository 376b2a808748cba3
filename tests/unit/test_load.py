"""Reading spec folders: layers, sources, and every problem of every file in one run."""

from __future__ import annotations

import os
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from fusegen.checks.load import load
from fusegen.ir.shapes import Shape
from fusegen.publish.paths import builtin_specs
from fusegen.spec.diagnostics import Loc, Problem, SpecError, did_you_mean
from fusegen.spec.kinds import SpecKind
from fusegen.spec.load import parse_spec
from fusegen.spec.op import OpSpec

OP = """edition: 2
op: {name}
summary: y = x
dims: {{T: rows}}
inputs: {{x: {{shape: [T...]}}}}
outputs: {{y: {{shape: [T...]}}}}
pointwise:
  y: {expression}
"""


def write(folder: Path, kind: str, name: str, text: str) -> Path:
    path = folder / kind / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_built_in_specs_are_right() -> None:
    specs = load([builtin_specs()])
    for kind in SpecKind:
        assert list(specs.of(kind)) == sorted(specs.of(kind))
        for name, spec in specs.of(kind).items():
            assert spec.name == name
            written = Path(specs.source(kind, name).file)
            assert written.parent == Path("specs", kind.folder)
            assert written.stem == name or name in specs.modules[written.stem].variants
            assert specs.source(kind, name).loc(kind.key).line > 1
    assert specs.ops and specs.modules and specs.recipes and specs.archs and specs.targets


def test_specs_cannot_be_changed() -> None:
    op = load([builtin_specs()]).ops["silu"]
    with pytest.raises(FrozenInstanceError):
        op.summary = "other"  # type: ignore[misc]


def test_a_layer_adds_and_builds_on_the_ones_before(tmp_path: Path) -> None:
    write(tmp_path / "mine", "ops", "half", OP.format(name="half", expression="x * 0.5"))
    write(tmp_path / "mine", "modules", "both", """edition: 2
module: both
class: Both
summary: half of silu
dims: {T: rows}
inputs: {x: {shape: [T]}}
chain: [{op: silu, as: act}, {op: half, as: half}]
""")  # fmt: skip
    specs = load([builtin_specs(), tmp_path / "mine"])
    assert {"silu", "half"} <= set(specs.ops)
    assert specs.source(SpecKind.OPS, "half").file == "mine/ops/half.yaml"
    assert specs.ops["half"].inputs["x"].shape == Shape.parse(["T..."])


def test_order_of_files_does_not_matter(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        write(tmp_path / "mine", "ops", name, OP.format(name=name, expression="x"))
    assert list(load([tmp_path / "mine"]).ops) == ["a", "b", "c"]


def test_every_problem_of_every_file_is_told(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    write(mine, "ops", "one", OP.format(name="one", expression="x * z"))
    write(mine, "ops", "two", OP.format(name="two", expression="x").replace("op:", "opp:"))
    write(mine, "recipes", "three", "edition: [\n")
    with pytest.raises(SpecError) as error:
        load([builtin_specs(), mine])
    assert [(str(p.loc), p.message) for p in error.value.problems] == [
        ("mine/ops/one.yaml:8:10", "unknown name 'z'; known: x"),
        ("mine/ops/two.yaml:1:1", "missing key 'op'"),
        ("mine/ops/two.yaml:2:1", "unknown key 'opp'; did you mean 'op'?"),
        (
            "mine/recipes/three.yaml:2:1",
            "not YAML: did not find expected node content",
        ),
    ]


def test_a_broken_file_hides_no_problem_and_invents_none(tmp_path: Path) -> None:
    """A module whose op could not be read is not told that the op is unknown."""
    mine = tmp_path / "mine"
    write(
        mine,
        "ops",
        "toy",
        OP.format(name="toy", expression="x").replace("edition: 2", "edition: 9"),
    )
    write(mine, "modules", "toy", "edition: 2\nmodule: toy\nclass: Toy\nop: toy\n")
    with pytest.raises(SpecError) as error:
        load([mine])
    assert str(error.value).startswith("mine/ops/toy.yaml:1:1: edition 9 is newer than edition 2")


def test_one_file_by_itself(tmp_path: Path) -> None:
    path = write(tmp_path, "ops", "toy", OP.format(name="toy", expression="'x * 2'"))
    spec, source = parse_spec(SpecKind.OPS, path, "toy.yaml")
    assert spec.name == "toy"
    assert source.loc("pointwise", "y") == Loc("toy.yaml", 8, 3)
    assert source.loc("pointwise", "nothing") == Loc("toy.yaml", 7, 1)
    assert source.loc("nothing") == Loc("toy.yaml", 1, 1)
    assert source.problem("wrong", "op") == Problem(Loc("toy.yaml", 2, 1), "wrong")
    assert source.problem_within("wrong", 3, "pointwise", "y") == Problem(
        Loc("toy.yaml", 8, 9), "wrong"
    )


def test_a_file_is_parsed_again_only_where_its_text_is_another(tmp_path: Path) -> None:
    path = write(tmp_path, "ops", "toy", OP.format(name="toy", expression="'x * 2'"))
    before, _ = parse_spec(SpecKind.OPS, path, "toy.yaml")
    path.touch()
    assert parse_spec(SpecKind.OPS, path, "toy.yaml")[0] is before
    assert parse_spec(SpecKind.OPS, path, "mine.yaml")[1].file == "mine.yaml"
    write(tmp_path, "ops", "toy", OP.format(name="toy", expression="'x * 3'"))
    after, _ = parse_spec(SpecKind.OPS, path, "toy.yaml")
    assert isinstance(after, OpSpec) and after.pointwise == {"y": "x * 3"}


def test_problems_are_sorted_and_each_stands_once() -> None:
    late, early = Problem(Loc("f", 10, 1), "late"), Problem(Loc("f", 9, 1), "early")
    assert SpecError([late, early, late]).problems == (early, late)


@pytest.mark.parametrize(
    ("word", "choices", "hint"),
    [
        ("silus", ["silu", "linear"], "; did you mean 'silu'?"),
        ("x", ["silu", "linear"], "; known: linear, silu"),
        ("x", [], ""),
    ],
)
def test_hints(word: str, choices: list[str], hint: str) -> None:
    assert did_you_mean(word, choices) == hint


def test_a_bomb_of_aliases_costs_nothing(tmp_path: Path) -> None:
    lines = ["a0: &a0 x"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 50)}]" for i in range(1, 9)]
    path = write(tmp_path, "ops", "bomb", "\n".join(lines))
    with pytest.raises(SpecError, match="aliases are refused"):
        parse_spec(SpecKind.OPS, path, "bomb.yaml")


def test_a_tag_runs_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    text = f"edition: !!python/object/apply:os.system ['touch {mark}']\n"
    path = write(tmp_path, "ops", "toy", text)
    with pytest.raises(SpecError, match="is refused"):
        parse_spec(SpecKind.OPS, path, "toy.yaml")
    assert not mark.exists()


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "ops").mkdir()
    os.mkfifo(tmp_path / "ops" / "pipe.yaml")
    (tmp_path / "ops" / "loop.yaml").symlink_to("loop.yaml")
    (tmp_path / "recipes").symlink_to("recipes")
    (tmp_path / "archs").write_text("")
    with pytest.raises(SpecError) as caught:
        load([tmp_path])
    said = [str(problem).partition("/")[2] for problem in caught.value.problems]
    assert said == [
        "archs:1:1: expected a folder of specs",
        "ops/loop.yaml:1:1: not a spec: Too many levels of symbolic links",
        "ops/pipe.yaml:1:1: not a spec: expected a regular file",
        "recipes:1:1: expected a folder of specs",
    ]
