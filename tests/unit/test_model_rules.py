"""Rules from a model: how they choose against what was measured, and how they are marked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from plans import SPECS

from fusegen import cli
from fusegen.checks.archs import variants_of
from fusegen.checks.load import load
from fusegen.emit.text.explain import explain
from fusegen.families.gpus import GPUS, gpu_called
from fusegen.families.registry import known_family
from fusegen.ir.kernel import GemmKind, Work
from fusegen.ir.naming import Cell
from fusegen.passes.pipeline import resolve
from fusegen.publish.paths import builtin_specs
from fusegen.spec.points import parse_point
from fusegen.spec.usage import UsageError
from fusegen.tuning.cases import Case, Measured, Sample, grid
from fusegen.tuning.model import Kernel, milliseconds, modelled, wave_time
from fusegen.tuning.rewrite import marked
from fusegen.tuning.tune import Tuned, rewritten, tune, tune_by_model

ROOT = Path(__file__).parents[2]
SWEEPS = sorted((ROOT / "benchmarks" / "results" / "sweeps").glob("*.json"))
CASES = grid([(2048, 1408), (7168, 2048)], quick=True)
ARCH, FAMILY = "sm_80", "gemm_mma"


def kernels_of(points: set[str], kind: GemmKind, family: str) -> dict[str, Kernel]:
    arch = SPECS.archs["sm_90a"]
    spec = arch.kernels[family]
    known = known_family(spec.template or family)
    assert known is not None and known.configured is not None
    variant = variants_of(kind, family, spec, known)[0]
    constants = known.configured.constants
    configs = {name: parse_point(name) for name in points}
    return {
        name: Kernel.of(config, dict(constants(config, kind, variant, arch.limits)))
        for name, config in configs.items()
    }


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.name.split("_nvidia")[0])
def test_the_model_chooses_well_where_times_were_measured(path: Path) -> None:
    """On an H200 it loses 6% at most on average, and less than some tile does by itself."""
    data = json.loads(path.read_text("utf-8"))
    samples = [Sample.parse(each) for each in data["samples"]]
    gpu = gpu_called("h200")
    assert gpu is not None
    for kind in GemmKind:
        own = [sample for sample in samples if sample.kind is kind]
        if not own:
            continue
        kernels = kernels_of({*own[0].times}, kind, data["family"])
        lost = []
        for sample in own:
            times = {name: milliseconds(kind, sample.case, kernels[name], gpu) for name in kernels}
            lost.append(sample.regrets()[min(times, key=lambda name: times[name])])
        alone = [sum(each.regrets()[name] for each in own) / len(own) for name in kernels]
        assert sum(lost) / len(lost) < min(0.065, max(alone)), kind


def test_the_three_numbers() -> None:
    """A tile that is multiplied longer than it is loaded, and one whose stages are too few."""
    gpu = gpu_called("a100")
    assert gpu is not None
    work = Work(128, 256, sms=1, clusters=1)
    deep = wave_time(Kernel(work, 16, 160 * 1024), gpu)
    operations = 2 * 128 * 256 * 1024
    assert deep.k == round(operations / (312e12 / 108) * 1e9)
    shallow = wave_time(Kernel(work, 16, 8 * 1024), gpu)
    assert shallow.k == round((128 + 256) * 1024 * 2 / (8 * 1024 / 800)) > deep.k
    assert shallow.wave == deep.wave > 800


def test_small_work_takes_what_memory_takes() -> None:
    gpu = gpu_called("h200")
    assert gpu is not None
    kernel = Kernel(Work(128, 128, 1, 1), 16, 96 * 1024)
    case = Case(groups=64, tokens=64, n=4096, k=4096)
    expected = 2 * (64 * (4096 + 4096) + 64 * 4096 * 4096) / 4.8e12 * 1e3
    assert milliseconds(GemmKind.FPROP, case, kernel, gpu) == pytest.approx(expected)


def test_every_gpu_can_be_modelled() -> None:
    kernel = Kernel(Work(128, 128, 1, 1), 16, 96 * 1024)
    for gpu in GPUS:
        (sample,) = modelled(GemmKind.DGRAD, CASES[:1], {"a": kernel}, gpu)
        assert sample.times["a"] > 0.003 and gpu.name in sample.recipe


def by_model(name: str = "a100", family: str = FAMILY, arch: str = ARCH) -> Tuned:
    gpu = gpu_called(name)
    assert gpu is not None
    return tune_by_model(SPECS, arch, family, gpu, CASES, ())


def test_rules_of_the_model_are_marked_and_measurements_replace_them(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(builtin_specs(), tmp_path / "specs"))
    spec = folder / "archs" / f"{ARCH}.yaml"
    before = spec.read_text("utf-8")
    assert "measured" not in before
    tuned = by_model()
    assert tuned.to_json()["model"] == "a100"
    text = rewritten(before, [tuned])
    assert text.count("        measured: false\n        points:\n") == 3
    assert rewritten(text, [tuned]) == text, "once more changes nothing"
    spec.write_text(text, "utf-8")
    specs = load([folder])
    kinds = specs.archs[ARCH].kernels[FAMILY].kinds
    assert {each.measured for each in kinds.values()} == {False}
    assert all({*each.select[0].least} == {p.name for p in each.points} for each in kinds.values())
    (plan,) = resolve(specs, ARCH, [Cell("linear", "bf16")]).modules
    said = "\n".join(explain(plan))
    assert "  gemm_mma_fprop, from a model, not measured\n" in said
    assert said.count("not measured") == 3

    samples = [replaced(sample) for sample in tuned.measured.samples]
    measured = tune(specs, ARCH, FAMILY, Measured(tuple(samples), 0))
    assert "measured" not in rewritten(text, [measured])


OF = {"sm_89": "l40s", "sm_100a": "b200", "sm_120a": "rtx_pro_6000"}
"""The GPU by whose data sheet the rules of an architecture are, of which none was measured."""

UNMEASURED = [
    (arch, family)
    for arch, spec in SPECS.archs.items()
    for family, kernels in spec.kernels.items()
    if not all(kind.measured for kind in kernels.kinds.values())
]


def test_every_rule_of_gpus_that_nobody_had_is_marked() -> None:
    with_rules = {a: {f for f, k in SPECS.archs[a].kernels.items() if k.kinds} for a in OF}
    marked_so = {a: {family for arch, family in UNMEASURED if arch == a} for a in OF}
    assert marked_so == with_rules and {arch for arch, _ in UNMEASURED} == OF.keys()


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "family"), UNMEASURED)
def test_rules_that_are_marked_are_those_of_the_model(arch: str, family: str) -> None:
    """The sweep that wrote them would change nothing."""
    words = ["bench", "--sweep", family, "--model", OF[arch], "--dry-run"]
    done = CliRunner().invoke(cli.program, words)
    assert done.exit_code == 0, done.output
    assert "1334 cases" in done.output and "@@" not in done.output


def replaced(sample: Sample) -> Sample:
    """As if it had been measured: whoever was slow is fast."""
    return Sample(sample.kind, "bf16", sample.case, {p: 1 / t for p, t in sample.times.items()})


def test_what_was_measured_says_nothing_in_explain() -> None:
    (plan,) = resolve(SPECS, "sm_90a", [Cell("linear", "bf16")]).modules
    assert "not measured" not in "\n".join(explain(plan))


def test_a_mark_keeps_every_other_line() -> None:
    text = (builtin_specs() / "archs" / f"{ARCH}.yaml").read_text("utf-8")
    kinds = [GemmKind.DGRAD]
    without = marked(text, FAMILY, kinds, measured=False)
    added = [line for line in without.splitlines() if line not in text.splitlines()]
    assert added == ["        measured: false"]
    assert marked(without, FAMILY, kinds, measured=True) == text
    dos = marked(text.replace("\n", "\r\n"), FAMILY, kinds, measured=False)
    assert dos == without.replace("\n", "\r\n")


@pytest.mark.parametrize(
    ("name", "family", "arch", "said"),
    [
        ("a30", "gemm_sm90", "sm_90a", "a30 does not run the code of sm_90a"),
        ("a100", "gemm_mm", ARCH, "unknown kernel family 'gemm_mm'"),
    ],
)
def test_what_cannot_be_modelled(name: str, family: str, arch: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        by_model(name, family, arch)
