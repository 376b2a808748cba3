"""`fusegen new`: every file it writes is valid as it is, and nothing is ever overwritten."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from fusegen import api
from fusegen.checks.load import SpecWarning
from fusegen.commands import scaffold, schemas
from fusegen.commands.scaffold import ExistsError, new
from fusegen.ir.naming import Cell
from fusegen.passes.pipeline import resolve
from fusegen.publish import paths
from fusegen.spec.arch import Reach
from fusegen.spec.diagnostics import SpecError
from fusegen.spec.usage import UsageError


def load(folder: Path) -> None:
    api.load_specs(api.Folders(specs=(folder,)))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("recipe", "mine"),
        ("op", "mine"),
        ("module", "mine"),
        ("arch", "sm_86"),
        ("arch", "sm_103a"),
    ],
)
def test_the_minimal_file_is_valid_and_commented(tmp_path: Path, kind: str, name: str) -> None:
    made = new(kind, name, folder=tmp_path)
    assert made.path == tmp_path / f"{kind}s" / f"{name}.yaml"
    assert made.path.read_text() == made.text
    assert sum(line.startswith("#") for line in made.text.splitlines()) >= 2
    assert yaml.safe_load(made.text)[kind] == name
    load(tmp_path)


@pytest.mark.parametrize(
    ("kind", "origin", "name"),
    [
        ("recipe", "bf16", "mine"),
        ("op", "grouped_linear", "mine"),
        ("module", "grouped_linear", "my_linear"),
    ],
)
def test_a_copy_keeps_everything_but_the_names(
    tmp_path: Path, kind: str, origin: str, name: str
) -> None:
    made = new(kind, name, origin=origin, folder=tmp_path)
    source = paths.builtin_specs() / f"{kind}s" / f"{origin}.yaml"
    kept = [line for line in made.text.splitlines() if not line.startswith("# ")]
    written = [line for line in source.read_text().splitlines() if not line.startswith("# ")]
    changed = [after for before, after in zip(written, kept, strict=True) if before != after]
    expected = {"module": ["module: my_linear", "class: MyLinear"]}
    assert changed == expected.get(kind, [f"{kind}: {name}"])
    comments = [line for line in source.read_text().splitlines() if line.startswith("# ")]
    assert [*comments] == [line for line in made.text.splitlines() if line in comments]
    load(tmp_path)


def test_a_copy_says_what_its_keys_mean(tmp_path: Path) -> None:
    """As the docstrings of the dataclasses do; not where somebody has said it."""
    text = new("recipe", "mine", origin="fp8_block", folder=tmp_path).text
    assert "\n# source: where the recipe was published.\nsource: " in text
    assert "\n# gemm: accumulation of each GEMM.\ngemm:" in text
    assert "# edition" not in text and "# recipe" not in text
    # Keys of objects as well, where they stand first.
    assert text.count("\n    # format: of the elements.\n    format: ") == 1
    assert text.count("# block: rows and columns that share a scale") == 1
    assert max(map(len, text.splitlines())) <= 100
    mine = tmp_path / "recipes" / "mine.yaml"
    mine.write_text(text.replace("# gemm: accumulation of each GEMM.", "# Ours."), encoding="utf-8")
    again = new("recipe", "another", origin="mine", folder=tmp_path).text
    assert "# Ours.\ngemm:" in again and "# gemm:" not in again
    assert again.count("# source:") == again.count("# yaml-language-server") == 1


@pytest.mark.parametrize("origin", [None, "bf16"])
def test_editors_find_the_schema_of_a_new_spec(tmp_path: Path, origin: str | None) -> None:
    made = new("recipe", "mine", origin=origin, folder=tmp_path)
    first = made.text.splitlines()[0]
    assert first == "# yaml-language-server: $schema=../schema/recipe.schema.json"
    assert made.steps[0] == f"fusegen schema --specs {tmp_path}"
    named = (made.path.parent / first.partition("=")[2]).resolve()
    assert not named.exists()
    assert named in [path.resolve() for path in schemas.write(tmp_path)]
    schema = json.loads(named.read_text(encoding="utf-8"))
    assert schema["title"] == "fusegen recipe" and "gemm" in schema["properties"]
    steps = new("recipe", "other", folder=tmp_path).steps
    assert not any(step.startswith("fusegen schema") for step in steps)
    load(tmp_path)


@pytest.mark.parametrize("name", ["sm_103a", "sm_86"])
def test_a_copy_of_an_arch_has_the_kernels_that_it_can_run(tmp_path: Path, name: str) -> None:
    made = new("arch", name, origin="sm_90a", folder=tmp_path)
    facts = yaml.safe_load(made.text)
    hopper = yaml.safe_load((paths.builtin_specs() / "archs" / "sm_90a.yaml").read_text())
    code = name.removeprefix("sm_")
    assert facts["gencode"] == f"arch=compute_{code},code={name}"
    kept = {k: v for k, v in hopper["kernels"].items() if not k.startswith("gemm_")}
    assert facts["kernels"] == kept
    assert "MMA" not in made.text and "sweep" not in made.text, "comments go with their family"
    kib = 227 if name == "sm_103a" else 99
    assert facts["limits"] == {"shared_memory": kib * 1024, "registers": 65536}
    load(tmp_path)


@pytest.mark.parametrize(
    ("name", "codes"),
    [("sm_87", "[sm_87,compute_87]"), ("sm_90", "[sm_90,compute_90]"), ("sm_103a", "sm_103a")],
)
def test_a_copy_of_ampere_runs_wherever_mma_sync_does(
    tmp_path: Path, name: str, codes: str
) -> None:
    """With PTX for what comes later, unless its own instructions are no others'."""
    made = new("arch", name, origin="sm_80", folder=tmp_path)
    facts = yaml.safe_load(made.text)
    ampere = yaml.safe_load((paths.builtin_specs() / "archs" / "sm_80.yaml").read_text())
    assert facts["gencode"] == f"arch=compute_{name.removeprefix('sm_')},code={codes}"
    assert facts["kernels"] == ampere["kernels"]
    load(tmp_path)


@pytest.mark.parametrize("name", ["sm_86", "sm_88", "sm_120"])
def test_a_copy_has_the_configurations_that_its_sm_holds(tmp_path: Path, name: str) -> None:
    """Of the one that fits fewer CTAs; rules that are left choose nothing but it."""
    made = new("arch", name, origin="sm_80", folder=tmp_path)
    point = {"tile": [128, 128, 32], "warps": [2, 2], "stages": 4, "ctas": 1}
    ampere = yaml.safe_load((paths.builtin_specs() / "archs" / "sm_80.yaml").read_text())
    for family in ampere["kernels"].values():
        for kind in family.get("kinds", {}).values():
            kind |= {"points": [point], "select": [{"use": "mma_128x128x32_2x2_4_1"}]}
    assert yaml.safe_load(made.text)["kernels"] == ampere["kernels"]
    gone, fewer = "mma_128x256x64_2x4_3_1", "mma_128x128x32_2x2_4_2"
    assert made.text.count(f"    # {gone}: does not fit\n") == 2
    assert made.text.count(f"    # {fewer}: fits as mma_128x128x32_2x2_4_1\n") == 2
    assert "was the fastest" not in made.text, "said of other configurations"
    assert made.text.count("\n  # No matrix instruction reads 8 or 4 bits") == 1
    load(tmp_path)
    specs = api.load_specs(api.Folders(specs=(tmp_path,)))
    arch = specs.archs[name]
    assert arch.reach is Reach.LATER and arch.least_limits == arch.limits
    cells = [Cell("grouped_linear", recipe) for recipe in ("bf16", "fp8_block", "nvfp4")]
    modules = resolve(specs, name, cells).modules
    assert [module.cell for module in modules] == [str(each) for each in cells]


WIDE = "{tile: [128, 256, 32], warps: [2, 4], stages: 4, ctas: 1}"
HOPPER_BY_MMA = """edition: 2
arch: sm_90
summary: toy
gencode: arch=compute_90,code=sm_90
toolkit: "12.0"
limits: {shared_memory: 232448, registers: 65536}
kernels:
  gemm_mma:
    implements: [gemm]
    row_alignment: 8
    kinds:
      fprop:
"""


@pytest.mark.parametrize(
    ("points", "error", "message"),
    [
        (
            f"        points:\n          - {WIDE}\n"
            "        select:\n          - {use: mma_128x256x32_2x4_4_1}\n",
            SpecError,
            r"sm_86\.yaml:.* 1 CTAs of 116736 bytes of shared memory, an SM has 101376 for one",
        ),
        (
            f"        points: [{WIDE}, {WIDE.replace('256', '128').replace('2, 4', '2, 2')}]\n"
            "        select: [{when: {rows: {lt: 9}}, use: mma_128x128x32_2x2_4_1},"
            " {use: mma_128x256x32_2x4_4_1}]\n",
            UsageError,
            r"sm_90, gemm_mma: line \d+: put each item on a line of its own",
        ),
    ],
    ids=["nothing fits", "no lines to change"],
)
def test_a_copy_whose_configurations_cannot_be_fitted_is_refused(
    tmp_path: Path, points: str, error: type[Exception], message: str
) -> None:
    origin = tmp_path / "archs" / "sm_90.yaml"
    origin.parent.mkdir()
    origin.write_text(HOPPER_BY_MMA + points)
    with pytest.raises(error, match=message):
        new("arch", "sm_86", origin="sm_90", folder=tmp_path)
    assert [each.name for each in origin.parent.iterdir()] == ["sm_90.yaml"]


def test_a_copy_of_a_module_leaves_its_variants(tmp_path: Path) -> None:
    made = new("module", "my_mlp", origin="grouped_mlp", folder=tmp_path)
    source = (paths.builtin_specs() / "modules" / "grouped_mlp.yaml").read_text()
    kept = source.partition("variants:")[0].replace("module: grouped_mlp", "module: my_mlp")
    lines = [line for line in made.text.splitlines() if not line.startswith("# ")]
    assert lines == kept.replace("GroupedMLP", "MyMlp").splitlines()
    load(tmp_path)


def test_a_copy_of_a_users_spec_keeps_its_comments(tmp_path: Path) -> None:
    made = new("recipe", "first", folder=tmp_path)
    text = made.text.replace("recipe: first", "recipe: first  # the name")
    made.path.write_text("# mine\n" + text)
    copy = new("recipe", "second", origin="first", folder=tmp_path)
    assert "\n# mine\nedition: 2\nrecipe: second  # the name\n" in copy.text


@pytest.mark.slow
def test_a_new_op_becomes_a_module_and_is_generated(tmp_path: Path) -> None:
    specs = tmp_path / "specs"
    op = new("op", "squared_relu", folder=specs)
    assert op.steps[-1] == f"fusegen new module squared_relu --specs {specs}"
    module = new("module", "squared_relu", folder=specs)
    assert "op: squared_relu\n" in module.text
    named = api.Request(
        tmp_path / "out", (), ("cpu",), ("squared_relu",), ("bf16",), folders=api.Folders((specs,))
    )
    api.generate(named)
    text = (tmp_path / "out" / "cpu" / "squared_relu__bf16.py").read_text()
    assert "class SquaredRelu(" in text


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    made = new("recipe", "mine", folder=tmp_path)
    made.path.write_text("mine: 1\n")
    with pytest.raises(ExistsError, match=r"mine\.yaml exists"):
        new("recipe", "mine", folder=tmp_path)
    assert made.path.read_text() == "mine: 1\n"


def test_a_name_of_the_built_in_specs_is_taken(tmp_path: Path) -> None:
    with pytest.raises(ExistsError, match=r"recipe 'bf16' is already at specs/recipes/bf16.yaml:2"):
        new("recipe", "bf16", folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "name"),
    [("op", "../up"), ("op", "Big"), ("op", "a__b"), ("op", "a" * 41), ("arch", "hopper")],
)
def test_a_bad_name_is_refused(tmp_path: Path, kind: str, name: str) -> None:
    with pytest.raises(UsageError, match="cannot name an"):
        new(kind, name, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_gpu_is_no_architecture(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'l40s' cannot name an arch.*did you mean 'sm_89'\?"):
        new("arch", "l40s", folder=tmp_path)


@pytest.mark.parametrize(
    ("kind", "origin", "message"),
    [
        ("recip", None, "unknown kind 'recip'; did you mean 'recipe'"),
        ("recipe", "bf61", "unknown recipe 'bf61'; did you mean 'bf16'"),
        ("module", "grouped_mlp_srelu", r"is a variant in specs/modules/grouped_mlp\.yaml"),
    ],
)
def test_what_cannot_be_copied_is_refused(
    tmp_path: Path, kind: str, origin: str | None, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        new(kind, "mine", origin=origin, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_broken_spec_is_reported_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "bad.yaml").write_text("op: [\n")
    with pytest.warns(SpecWarning, match=r"ops/bad\.yaml:2:1"):
        new("op", "mine", folder=tmp_path)
    assert (tmp_path / "ops" / "bad.yaml").read_text() == "op: [\n"
    with pytest.warns(SpecWarning), pytest.raises(SpecError, match=r"ops/bad\.yaml:2:1"):
        new("module", "bad", folder=tmp_path)


def test_outside_the_checkout_the_folder_is_specs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert scaffold.default_folder() == Path("specs")
    monkeypatch.chdir(Path(__file__).parent)
    assert scaffold.default_folder() == Path(__file__).parents[2] / "specs"
