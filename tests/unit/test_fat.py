"""Fat bundles on the disk: what `all` makes, and what every command does with it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from fusegen import api, cli
from fusegen.build.toolchain import BuildError
from fusegen.cli import ExitCode
from fusegen.commands import build
from fusegen.emit.devices import one_interface
from fusegen.families.limits import CAPABILITIES
from fusegen.ir.buffers import Buffer
from fusegen.ir.naming import Cell
from fusegen.ir.shapes import align
from fusegen.passes.pipeline import Plan, resolve
from fusegen.publish.lock import LOCK_NAME, LockError, read_lock
from fusegen.publish.paths import builtin_specs
from fusegen.publish.selection import Selection, read_selection
from fusegen.spec.load import SpecSet
from fusegen.spec.serving import all_archs, arch_of
from fusegen.spec.usage import UsageError

SPECS = api.load_specs()
ARCHS = ("sm_80", "sm_90a")
FEW = (*ARCHS, "sm_87")
SILU = ("--arch", "all", "--module", "silu", "--recipe", "bf16")


def run(*words: str | Path) -> Result:
    result = CliRunner().invoke(cli.program, [str(word) for word in words])
    print(result.exit_code, result.output)  # pytest shows it where a test fails
    return result


def tree(folder: Path) -> dict[str, bytes]:
    """All that a folder holds."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture(scope="module", autouse=True)
def few_architectures() -> Iterator[None]:
    """`all` stands for those that tests speak of, which takes less time than for all."""
    with pytest.MonkeyPatch.context() as patch:
        named = "fusegen.commands.request.all_archs"
        patch.setattr(named, lambda specs: tuple(a for a in all_archs(specs) if a in FEW))
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("a folder")
    assert run("generate", *SILU, "--out", out).exit_code == 0
    return out


@pytest.fixture
def out(made: Path, tmp_path: Path) -> Path:
    """A folder with a fat bundle of SiLU, in a path with a space."""
    return Path(shutil.copytree(made, tmp_path / "a folder"))


def arch_file(folder: Path, name: str, like: str, **changes: object) -> Path:
    """A spec folder with an architecture that is another one but for a few keys."""
    text = (builtin_specs() / "archs" / f"{like}.yaml").read_text(encoding="utf-8")
    spec = yaml.safe_load(text) | {"arch": name} | changes
    path = folder / "archs" / f"{name}.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(yaml.safe_dump(spec), encoding="utf-8")
    return folder


def without(name: str, *families: str) -> dict[str, object]:
    """The kernels of an architecture but for a few families."""
    text = (builtin_specs() / "archs" / f"{name}.yaml").read_text(encoding="utf-8")
    kernels = yaml.safe_load(text)["kernels"]
    return {family: kernels[family] for family in kernels if family not in families}


SM_87 = {"gencode": "arch=compute_87,code=sm_87"}


# What `all` makes


def test_all_stands_for_every_architecture_of_gpus_but_parts(tmp_path: Path) -> None:
    every = all_archs(SPECS)
    assert {*ARCHS} <= {*every} and "cpu" not in every
    part = arch_file(tmp_path / "part", "sm_90a_h20", "sm_90a")
    own = arch_file(tmp_path / "own", "sm_87", "sm_80", **SM_87)
    specs = api.load_specs(api.Folders((part, own)))
    assert "sm_90a_h20" in specs.archs
    assert {*all_archs(specs)} == {*every, "sm_87"}


def test_a_folder_per_architecture_in_one_package(out: Path) -> None:
    fat = out / "all"
    whole = read_selection(fat)
    assert whole == Selection("all", cells=(Cell("silu", "bf16"),), archs=ARCHS)
    assert whole.op_namespace == "fusegen_all" and whole.own_arch == "cpu"
    for arch in ARCHS:
        inner = read_selection(fat / arch)
        assert inner == Selection(arch, cells=whole.cells)
        assert (fat / arch / "csrc" / "sources.cmake").is_file()
    assert not (fat / "csrc").exists()
    assert Selection.parse(whole.to_json(), fat / LOCK_NAME) == whole
    assert [path.name for path in out.iterdir()] == ["all"]


@pytest.mark.slow
def test_the_inner_bundles_are_those_that_stand_alone(out: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    request = ("--arch", "sm_80", "--module", "silu", "--recipe", "bf16", "--out", alone)
    assert run("generate", *request).exit_code == 0
    assert tree(out / "all" / "sm_80") == tree(alone / "sm_80")


@pytest.mark.slow
def test_the_second_time_nothing_changes(out: Path) -> None:
    before = tree(out)
    assert run("generate", "--out", out, "--check").exit_code == 0
    assert run("generate", *SILU, "--out", out).exit_code == 0
    assert run("check", out).exit_code == run("status", out / "all").exit_code == 0
    assert tree(out) == before


@pytest.mark.slow
def test_a_target_is_a_fat_bundle(tmp_path: Path) -> None:
    target = tmp_path / "specs" / "targets" / "mine.yaml"
    target.parent.mkdir(parents=True)
    text = "edition: 2\ntarget: mine\nsummary: SiLU everywhere\n"
    target.write_text(f"{text}archs: [all]\nmodules: [silu]\nrecipes: [bf16]\n", encoding="utf-8")
    specs = ("--specs", tmp_path / "specs")
    planned = run("plan", "--target", "mine", *specs, "--json")
    rows = json.loads(planned.stdout)["modules"]
    assert {row["arch"] for row in rows} == {"cpu", *all_archs(SPECS)}
    out = tmp_path / "out"
    assert run("vendor", out, "--target", "mine", "--namespace", "acme", *specs).exit_code == 0
    assert (out / "__init__.py").is_file()
    found = read_selection(out / "all")
    assert found is not None and found.archs == ARCHS and found.namespace == "acme"
    assert run("validate", *specs).exit_code == 0


def test_the_target_that_ships_has_all_recipes() -> None:
    target = SPECS.targets["all"]
    assert target.archs == ("all",) and set(target.recipes) == {*SPECS.recipes}


def test_a_target_of_unknown_architectures_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "targets" / "mine.yaml"
    target.parent.mkdir(parents=True)
    text = "edition: 2\ntarget: mine\nsummary: SiLU\narchs: [al]\nmodules: [silu]\n"
    target.write_text(f"{text}recipes: [bf16]\n", encoding="utf-8")
    assert "unknown arch 'al'" in run("validate", "--specs", tmp_path).output


@pytest.mark.slow
def test_what_is_added_or_taken_away_is_so_everywhere(out: Path) -> None:
    gelu = ("--arch", "all", "--module", "gelu", "--recipe", "bf16", "--out", out)
    assert run("generate", *gelu).exit_code == 0
    for folder in (out / "all", *(out / "all" / arch for arch in ARCHS)):
        assert {path.stem for path in folder.glob("*__bf16.py")} == {"gelu__bf16", "silu__bf16"}
    assert run("generate", "--remove", *SILU, "--out", out).exit_code == 0
    assert run("check", out).exit_code == 0
    assert not list(out.rglob("silu__bf16*"))
    assert run("generate", "--remove", *gelu).exit_code == 0
    assert not (out / "all").exists()


@pytest.mark.slow
def test_all_of_a_later_fusegen_has_its_architectures(out: Path, tmp_path: Path) -> None:
    """`--arch all` asks for what is known now; what is only made anew keeps what it has."""
    specs = ("--specs", arch_file(tmp_path / "specs", "sm_87", "sm_80", **SM_87))
    assert run("generate", "--out", out, *specs).exit_code == 0
    assert not (out / "all" / "sm_87").exists()
    assert run("generate", *SILU, "--out", out, *specs).exit_code == 0
    assert (out / "all" / "sm_87" / "silu__bf16.py").is_file()
    assert 'Arch("sm_87", (8, 7), "minor")' in (out / "all" / "_devices.py").read_text()
    assert run("check", out, *specs).exit_code == 0


def test_the_first_that_runs_on_a_gpu_is_its_architecture(out: Path) -> None:
    """The order that bundles state is the rule of `--arch native`."""
    lines = (out / "all" / "_devices.py").read_text().splitlines()
    stated = [line.split('"')[1] for line in lines if line.startswith("    Arch(")]
    assert sorted(stated) == sorted(ARCHS)
    for capability in CAPABILITIES:
        fit = [name for name in stated if SPECS.archs[name].runs_on(capability)]
        few = replace(SPECS, archs={name: SPECS.archs[name] for name in stated})
        assert (fit[0] if fit else None) == arch_of(capability, few)


# Cells that not all architectures have


@pytest.mark.slow
def test_an_architecture_without_a_cell_says_why(tmp_path: Path) -> None:
    kernels = without("sm_80", "gemm_decoded_mma")
    specs = arch_file(tmp_path / "specs", "sm_87", "sm_80", kernels=kernels, **SM_87)
    words = ("--arch", "all", "--module", "linear", "--recipe", "mxfp8", "--specs", specs)
    done = run("generate", *words, "--out", tmp_path / "out")
    assert done.exit_code == 0 and "not made: linear__mxfp8 for sm_87" in done.output
    fat = tmp_path / "out" / "all"
    text = (fat / "linear__mxfp8.py").read_text()
    assert "    sm_87: unsupported, " in text and '"sm_87": "sm_87 has no kernels for' in text
    assert not (fat / "sm_87" / "linear__mxfp8.py").exists()
    row = "| `linear__mxfp8` | emulated | unsupported | emulated |"
    assert row in (fat / "README.md").read_text().splitlines()
    assert run("check", tmp_path / "out", "--specs", specs).exit_code == 0


def _with_wider_copies(plan: Plan) -> Plan:
    """Another architecture, whose copies of weights had rows of more bytes."""

    def wider(buffer: Buffer) -> Buffer:
        if buffer.name != "weight_rowwise":
            return buffer
        *rows, columns = buffer.shape.dims
        return replace(buffer, shape=replace(buffer.shape, dims=(*rows, align(columns, 128))))

    return Plan(
        tuple(replace(each, buffers=tuple(map(wider, each.buffers))) for each in plan.modules),
        plan.unsupported,
    )


@pytest.mark.slow
def test_buffers_of_two_shapes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of weights are buffers of the one module: an architecture has them so or lacks it."""

    def planted(specs: SpecSet, arch: str, *rest: Any) -> Plan:
        plan = resolve(specs, arch, *rest)
        return _with_wider_copies(plan) if arch == "sm_80" else plan

    monkeypatch.setattr("fusegen.commands.rendering.resolve", planted)
    words = ("--arch", "all", "--module", "linear", "--recipe", "fp8_current")
    out = ("--out", tmp_path / "out")
    done = run("generate", *words, "--option", "cached_weights", *out)
    assert done.exit_code == 0
    said = "for sm_80: its buffer weight_rowwise ["
    assert f"not made: linear__fp8_current__cached_weights {said}" in done.output
    assert "make it with --arch sm_80" in done.output
    name = "linear__fp8_current__cached_weights.py"
    assert not (tmp_path / "out" / "all" / "sm_80" / name).exists()
    assert '"sm_80": "its buffer weight_rowwise [' in (tmp_path / "out" / "all" / name).read_text()
    assert run("generate", *out, "--check").exit_code == 0


def test_layouts_of_equal_sizes_are_told_apart() -> None:
    cell = Cell("linear", "fp8_current", ("cached_weights",))
    plans = [resolve(SPECS, arch, [cell]) for arch in ("sm_80", "cpu")]
    assert one_interface(plans) == plans
    (module,) = plans[0].modules
    layout = replace(module.layout, transposed=not module.layout.transposed)
    inner, own = one_interface([Plan((replace(module, layout=layout),), ()), plans[1]])
    assert not inner.modules and own == plans[1]
    assert "its layout of copies is not that of the reference" in inner.unsupported[0].reason


def test_cells_of_the_architectures_alone_are_left_out() -> None:
    plans = [resolve(SPECS, arch, [Cell("silu", "bf16")]) for arch in ("sm_80", "cpu")]
    inner, _ = one_interface([plans[0], Plan((), plans[1].unsupported)])
    assert inner == Plan((), ())


# Edits, locks, folders


@pytest.mark.slow
def test_an_edit_in_one_keeps_all_from_being_written(out: Path) -> None:
    (out / "all" / ARCHS[0] / "silu__bf16.py").write_text("# mine\n", encoding="utf-8")
    (out / "all" / "gelu").write_text("somebody's", encoding="utf-8")
    before = tree(out)
    done = run("generate", "--arch", "all", "--module", "gelu", "--recipe", "bf16", "--out", out)
    assert done.exit_code == ExitCode.REFUSED and tree(out) == before
    assert f"fusegen generate --out '{out}'" in done.output
    assert run("status", out).exit_code == run("check", out).exit_code == ExitCode.DRIFT
    diff = run("generate", "--out", out, "--diff").output
    assert f"--- a/all/{ARCHS[0]}/silu__bf16.py" in diff


def test_bundles_in_one_are_made_with_it_alone(out: Path) -> None:
    done = run("generate", "--out", out / "all")
    assert done.exit_code == ExitCode.USAGE and f"the folder that it is in: {out}" in done.output
    assert run("status", out / "all" / ARCHS[0]).exit_code == 0


def test_an_upgrade_of_one_is_that_of_the_whole(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (out / "all" / "silu__bf16.py").unlink()
    monkeypatch.setattr("fusegen.commands.upgrade.uncommitted", lambda *_: ())
    assert run("upgrade", out / "all" / ARCHS[0]).exit_code == 0
    assert (out / "all" / "silu__bf16.py").is_file()


def test_a_publish_that_was_cut_short_in_one_is_completed(out: Path) -> None:
    inner = out / "all" / ARCHS[0]
    (inner / ".fusegen.staging").mkdir()
    assert run("generate", "--out", out).exit_code == 0
    assert not (inner / ".fusegen.staging").exists()


@pytest.mark.slow
def test_other_bundles_in_the_folder_are_left_alone(out: Path) -> None:
    own = Path(shutil.copytree(out / "all" / "sm_80", out / "all" / "mine"))
    before = tree(own)
    assert run("generate", *SILU, "--out", out).exit_code == 0
    assert run("generate", "--remove", *SILU, "--out", out).exit_code == 0
    assert tree(own) == before


@pytest.mark.slow
def test_a_link_out_of_the_folder_is_not_followed(out: Path, tmp_path: Path) -> None:
    elsewhere = (out / "all" / "sm_80").rename(tmp_path / "elsewhere")
    (out / "all" / "sm_80").symlink_to(elsewhere)
    before = tree(elsewhere)
    done = run("generate", "--arch", "all", "--module", "gelu", "--recipe", "bf16", "--out", out)
    assert done.exit_code == ExitCode.REFUSED and "a symbolic link leads" in done.output
    assert tree(elsewhere) == before and not list(out.rglob("gelu*"))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"archs": ["../../elsewhere"]}, "expected a name as 'archs'"),
        ({"archs": ["tests"]}, "expected a name as 'archs'"),
        ({"archs": "sm_80"}, "expected a list of strings as 'archs'"),
        ({"archs": None}, "expected a list of strings as 'archs'"),
        ({"arch": "cpu"}, "expected 'archs' where arch is 'all', and there alone"),
        ({"archs": ["sm_12345"]}, "unknown arch 'sm_12345'"),
        ({"digests": ["gelu__bf16"]}, "'archs' and 'digests' do not go together"),
    ],
)
def test_locks_that_somebody_changed(out: Path, changes: dict[str, object], what: str) -> None:
    path = out / "all" / LOCK_NAME
    data = json.loads(path.read_text(encoding="utf-8"))
    data["selection"] |= changes
    path.write_text(json.dumps(data), encoding="utf-8")
    before = tree(out)
    for command in (("generate", "--out", out), ("status", out), ("check", out / "all")):
        done = run(*command)
        assert done.exit_code in (ExitCode.USAGE, ExitCode.REFUSED) and what in done.output
    assert tree(out) == before
    assert sorted(os.listdir(out.parent)) == ["a folder"]


def test_a_lock_that_cannot_be_read_is_no_fat_one(out: Path) -> None:
    (out / "all" / LOCK_NAME).write_text("{", encoding="utf-8")
    with pytest.raises(LockError):
        read_lock(out / "all")
    assert run("status", out / "all" / "sm_80").exit_code == 0
    assert run("generate", "--out", out).exit_code == ExitCode.REFUSED


KILLED = """
import os, sys
from fusegen import cli
from fusegen.publish.publish import Filesystem

done, replace = 0, Filesystem.replace

def killed(self, staged, target):
    global done
    if done == int(sys.argv[1]):
        os._exit(9)
    done += 1
    replace(self, staged, target)

Filesystem.replace = killed
try:
    cli.program(sys.argv[2:])
finally:
    print("steps", done)
"""


def killed(step: int, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """A command whose process ends where it would put this file in place; -1 for none."""
    line = [sys.executable, "-c", KILLED, str(step), *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_run_that_is_killed_is_finished_by_the_next(tmp_path: Path) -> None:
    """What calls choose among is whole before the files that choose are there."""
    whole = killed(-1, "generate", *SILU, "--out", tmp_path / "whole")
    steps = int(whole.stdout.split("steps ")[1])
    expected = tree(tmp_path / "whole")
    archs = all_archs(SPECS)
    for step in (0, steps // 3, steps // 2, steps - 12, steps - 1):
        out = tmp_path / str(step)
        assert killed(step, "generate", *SILU, "--out", out).returncode == 9
        left = tree(out)
        if "all/silu__bf16.py" in left:
            inner = {
                path for path in expected if path.startswith(tuple(f"all/{a}/" for a in archs))
            }
            assert {path: left.get(path) for path in inner} == {p: expected[p] for p in inner}
        assert killed(-1, "generate", *SILU, "--out", out).returncode == 0
        assert tree(out) == expected


@pytest.mark.slow
def test_two_that_write_at_once_take_turns(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "fusegen", "generate", *SILU, "--out", str(tmp_path / "out")]
    running = [subprocess.Popen(words, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [each.wait(timeout=120) for each in running] == [0, 0]
    assert run("check", tmp_path / "out").exit_code == 0


# Other commands


def test_build_takes_those_that_are_asked_for(out: Path) -> None:
    fat = out / "all"
    every = tuple(fat / arch for arch in ARCHS)
    assert build.with_kernels([fat]) == build.with_kernels([out]) == every
    assert build.with_kernels([out], ["sm_90a"]) == (fat / "sm_90a",)
    assert build.with_kernels([fat], ["sm_90a", "sm_80"]) == (fat / "sm_90a", fat / "sm_80")
    assert build.with_kernels([fat / "sm_80"], ["sm_80"]) == (fat / "sm_80",)
    with pytest.raises(UsageError, match=r"--arch sm_90: .*did you mean 'sm_90a'"):
        build.with_kernels([out], ["sm_90"])
    with pytest.raises(UsageError, match=r"--arch sm_90a: .*but for sm_80"):
        build.with_kernels([fat / "sm_80"], ["sm_90a"])


def test_build_of_the_visible_gpu(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusegen.build.gpu.visible_capability", lambda: (9, 0))
    assert build.with_kernels([out], ["native"]) == (out / "all" / "sm_90a",)
    monkeypatch.setattr("fusegen.build.gpu.visible_capability", lambda: None)
    with pytest.raises(UsageError, match="there is no visible NVIDIA GPU"):
        build.with_kernels([out], ["native"])


def test_a_fat_bundle_without_its_bundles_has_nothing_to_build(out: Path) -> None:
    for arch in ARCHS:
        shutil.rmtree(out / "all" / arch)
    with pytest.raises(BuildError, match="nothing to build"):
        build.with_kernels([out / "all"])


@pytest.mark.parametrize("inner", ["", "sm_80"])
def test_modules_of_one_class_are_not_ejected(out: Path, inner: str) -> None:
    before = tree(out)
    done = run("eject", out / "all" / inner, "silu")
    assert done.exit_code == ExitCode.USAGE and "vendor it for one architecture" in done.output
    assert tree(out) == before


def test_a_variant_of_a_kernel_is_of_one_architecture(out: Path, tmp_path: Path) -> None:
    done = run("export", "kernels", out, "--out", tmp_path / "hub")
    assert done.exit_code == ExitCode.USAGE and f"{out / 'all' / 'sm_80'}" in done.output


@pytest.mark.slow
def test_a_report_has_every_bundle(out: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert run("report", out, "--out", page).exit_code == 0
    text = page.read_text(encoding="utf-8")
    assert all(f"all/{arch}" in text for arch in ARCHS)
