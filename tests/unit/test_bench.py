"""`fusegen bench`: what runs where, records and comparisons, and a sweep without a GPU."""

from __future__ import annotations

import importlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fusegen import api, bench, cli, gpu, paths
from fusegen.model.primitives import GemmKind
from fusegen.selection import UsageError
from fusegen.tuning import fit, variants
from fusegen.tuning.cases import Case

ROOT = Path(__file__).parents[2]
OURS = "fusegen"


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(cli.program, [str(word) for word in words])


@pytest.fixture(autouse=True)
def no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu, "visible_capability", lambda: None)
    assert paths.checkout() == ROOT


@pytest.fixture
def benchmarks() -> bench.Benchmarks:
    return bench.find()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, benchmarks: bench.Benchmarks) -> list[str]:
    """Benchmarks that take no time: `generate` and `grouped` give made-up rows."""
    runner, common = benchmarks.module("run"), benchmarks.module("common")
    ran: list[str] = []

    def measure(name: str, *, quick: bool = False) -> Mapping[str, Any]:
        ran.append(f"{name}, quick" if quick else name)
        print("a benchmark's own words")
        rows = [common.row("a case", who, "ms", [9.0, 10.0, 11.0], fraction=0.9) for who in PAIR]
        return dict(common.result(name, rows, ENVIRONMENT))

    monkeypatch.setattr(runner, "measure", measure)
    return ran


PAIR = (OURS, "torch")
ENVIRONMENT = {"date": "2026-01-02T03:04:05Z", "commit": "0000000", "device": "cpu"}


# What runs where


def test_without_a_gpu_those_that_need_one_are_refused(measured: list[str]) -> None:
    for words in (("grouped",), ("generate", "mlp"), ("host", "--check")):
        done = run("bench", *words)
        assert done.exit_code == cli.ExitCode.USAGE
        assert "needs a GPU, and there is no visible NVIDIA GPU; what runs here: generate" in (
            done.stderr
        )
    assert not measured


def test_by_default_runs_what_can(
    measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("bench", "--results", tmp_path / "here").exit_code == 0
    assert measured == ["generate"]
    measured.clear()
    monkeypatch.setattr(gpu, "visible_capability", lambda: (9, 0))
    assert run("bench", "--results", tmp_path / "there").exit_code == 0
    assert {"grouped", "mlp", "model", "host", "kernels_quantize_bench", "generate"} <= set(
        measured
    )
    assert len(list((tmp_path / "there").glob("*.json"))) == len(measured)


def test_what_is_quick_is_not_recorded(
    measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "visible_capability", lambda: (9, 0))
    done = run("bench", "model", "--quick", "--results", tmp_path)
    assert done.exit_code == 0 and measured == ["model, quick"]
    assert len(done.stdout.splitlines()) == 2 and not list(tmp_path.iterdir())
    done = run("bench", "model", "--quick", "--check", "--results", tmp_path)
    assert done.exit_code == cli.ExitCode.USAGE and "nothing quick is on record" in done.stderr


def test_unknown_names_and_options_that_do_not_go_together(measured: list[str]) -> None:
    for words, hint in (
        (["grouppd"], "unknown benchmark 'grouppd'; did you mean 'grouped'?"),
        (["generate", "--seconds", "9"], "go with --sweep"),
        (["generate", "--quick"], "--quick goes with --sweep, and with these: model"),
        (["--quick"], "--quick goes with --sweep, and with these: model"),
        (["generate", "--sweep", "gemm_sm90"], "--sweep goes neither with names nor with --check"),
        (["--check", "--sweep", "gemm_sm90"], "--sweep goes neither with names nor with --check"),
        (["--sweep", "gemm_sm90"], "there is no visible NVIDIA GPU; --recorded fits"),
        (["summary", "--check"], "summary measures nothing"),
    ):
        done = run("bench", *words)
        assert done.exit_code == cli.ExitCode.USAGE, (words, done.output)
        assert hint in done.stderr and done.stdout == ""
    assert not measured


def test_a_wheel_says_where_the_benchmarks_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "checkout", lambda: None)
    done = run("bench", "generate")
    assert done.exit_code == cli.ExitCode.USAGE
    assert "clone it, and in it run: pip install -e" in done.stderr


def test_words_of_benchmarks_are_progress(measured: list[str], tmp_path: Path) -> None:
    done = run("bench", "generate", "--results", tmp_path)
    (path,) = tmp_path.glob("generate_cpu_2026-01-02.json")
    lines = done.stdout.splitlines()
    assert lines[-1] == str(path) and len(lines) == 3
    assert "a benchmark's own words" in done.stderr
    assert json.loads(path.read_text())["rows"][1]["times_ours"] == 1
    done = run("bench", "generate", "--results", tmp_path, "--json")
    data = json.loads(done.stdout)
    assert data["benchmarks"][0]["files"] == [str(path)]


def test_a_wrong_result_is_no_record(
    benchmarks: bench.Benchmarks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def wrong(name: str, *, quick: bool = False) -> Mapping[str, Any]:
        raise SystemExit("a case: relative difference 1e+00, expected at most 0.01")

    monkeypatch.setattr(benchmarks.module("run"), "measure", wrong)
    done = run("bench", "generate", "--results", tmp_path)
    assert done.exit_code == cli.ExitCode.REFUSED
    assert "fusegen: a case: relative difference" in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_script_is_the_same_code(benchmarks: bench.Benchmarks) -> None:
    """One list of names, and every one of them can be loaded by what it names."""
    runner = benchmarks.module("run")
    assert benchmarks.names == runner.NAMES
    for module, function in {**runner.GPU, **runner.CPU}.values():
        source = (benchmarks.folder / f"{module.replace('.', '/')}.py").read_text()
        assert re.search(rf"^def {function}\(.*\) -> Iterator\[", source, re.MULTILINE)


# --check


def result_of(*rows: Any, name: str = "grouped", device: str = "cpu") -> dict[str, Any]:
    common = bench.find().module("common")
    return dict(common.result(name, rows, {**ENVIRONMENT, "device": device}))


def row(contender: str, times: Sequence[float], case: str = "a case", **more: Any) -> Any:
    return bench.find().module("common").row(case, contender, "ms", times, **more)


RECORD = (
    row(OURS, [9.9, 10.0, 10.1], fraction=0.80),
    row("torch", [10.9, 11.0, 11.1], fraction=0.7),
)


@pytest.fixture
def check(benchmarks: bench.Benchmarks) -> Any:
    return benchmarks.module("checking")


def test_the_same_again_is_fine(check: Any) -> None:
    assert check.findings(result_of(*RECORD), result_of(*RECORD)) == []


def test_better_is_fine(check: Any) -> None:
    better = result_of(row(OURS, [5.0], fraction=0.99), row("torch", [11.0], fraction=0.7))
    assert check.findings(better, result_of(*RECORD)) == []


def test_slower_machines_are_fine_where_everybody_is_slower(check: Any) -> None:
    slow = result_of(row(OURS, [20.0], fraction=0.80), row("torch", [22.0], fraction=0.1))
    assert check.findings(slow, result_of(*RECORD)) == []


def test_within_spread_and_tolerance_is_fine_and_beyond_is_not(check: Any) -> None:
    # Recorded: torch takes 1.1 times ours, at the ends of both spreads 10.9 / 10.1.
    least = 10.9 / 10.1 * (1 - check.TOLERANCE)
    for factor, count in ((1.001, 0), (0.999, 1)):
        now = result_of(row(OURS, [10.0], fraction=0.8), row("torch", [10 * least * factor]))
        found = check.findings(now, result_of(*RECORD))
        assert len(found) == count and all(each.worse for each in found)
    (finding,) = found
    assert (finding.case, finding.contender) == ("a case", "torch")
    assert finding.quantity == "time over ours" and finding.least == pytest.approx(least)
    assert "torch: time over ours 1.100 recorded, at least" in str(finding)


def test_a_lower_part_of_the_ceiling_is_worse(check: Any) -> None:
    least = 0.80 * 10.0 / 10.1 * (1 - check.TOLERANCE)
    for factor, count in ((1.001, 0), (0.999, 1)):
        now = result_of(row(OURS, [10.0], fraction=least * factor), row("torch", [11.0]))
        found = check.findings(now, result_of(*RECORD))
        assert [each.quantity for each in found] == ["of the ceiling"] * count


def test_another_recipe_of_ours_is_to_take_less_time_not_more(check: Any) -> None:
    record = result_of(row(OURS, [10.0]), row(f"{OURS} fp8", [5.0]))
    assert check.findings(result_of(row(OURS, [10.0]), row(f"{OURS} fp8", [3.0])), record) == []
    (found,) = check.findings(result_of(row(OURS, [10.0]), row(f"{OURS} fp8", [6.0])), record)
    assert found.worse and found.quantity == "time of fusegen over it"


def test_ratios_of_host_time_are_compared(check: Any) -> None:
    record = result_of(row(OURS, [10.0], extra={"times_nn_linear": 2.0}))
    same = result_of(row(OURS, [30.0], extra={"times_nn_linear": 2.05}))
    worse = result_of(row(OURS, [5.0], extra={"times_nn_linear": 2.2}))
    assert check.findings(same, record) == []
    assert [each.worse for each in check.findings(worse, record)] == [True]


def test_what_was_not_measured(check: Any) -> None:
    """A peer may be absent; a case of ours may not."""
    found = check.findings(result_of(RECORD[0]), result_of(*RECORD))
    assert [(each.contender, each.measured, each.worse) for each in found] == [
        ("torch", None, False)
    ]
    found = check.findings(result_of(row(OURS, [1.0], case="b")), result_of(RECORD[0]))
    assert [(each.contender, each.worse) for each in found] == [(OURS, True)]
    assert "not measured" in str(found[0])


def test_records_that_cannot_be_compared_with(check: Any, benchmarks: bench.Benchmarks) -> None:
    record = result_of(*RECORD, device="NVIDIA H200")
    records = {("grouped", "NVIDIA H200"): record}
    assert check.record_of("grouped", "NVIDIA H200", records) is record
    with pytest.raises(check.NoRecordError, match=r"on NVIDIA B200 .*one of: NVIDIA H200"):
        check.record_of("grouped", "NVIDIA B200", records)
    with pytest.raises(check.NoRecordError, match="one of: no device"):
        check.record_of("mlp", "NVIDIA H200", records)
    alone = {("generate", "cpu"): result_of(row(OURS, [1.0]), name="generate")}
    with pytest.raises(check.NoRecordError, match="records times alone"):
        check.record_of("generate", "cpu", alone)


def test_every_committed_record_equals_itself(check: Any, benchmarks: bench.Benchmarks) -> None:
    newest = benchmarks.module("common").newest()
    assert {"grouped", "mlp", "host"} <= {name for name, _ in newest}
    for (name, device), record in newest.items():
        assert check.findings(record, record) == []
        if name in ("grouped", "dense", "mlp", "host", "pointwise", "kernels_quantize_bench"):
            assert check.record_of(name, device, newest) is record


def test_the_newest_record_counts(benchmarks: bench.Benchmarks, tmp_path: Path) -> None:
    common = benchmarks.module("common")
    for day in ("2026-01-02", "2026-03-01", "2026-02-01"):
        result = result_of(*RECORD)
        result["environment"] = {**ENVIRONMENT, "date": f"{day}T00:00:00Z"}
        common.save(result, tmp_path)
    (found,) = common.newest(tmp_path).values()
    assert found["environment"]["date"] == "2026-03-01T00:00:00Z"


def test_check_writes_nothing_and_says_what_is_worse(measured: list[str], tmp_path: Path) -> None:
    done = run("bench", "generate", "--check", "--results", tmp_path)
    assert done.exit_code == cli.ExitCode.USAGE and "no record of generate on cpu" in done.stderr
    assert not measured, "a record is looked for before the time is spent"
    common = bench.find().module("common")
    record = common.save(result_of(*RECORD, name="generate"), tmp_path)
    before = record.read_bytes()
    done = run("bench", "generate", "--check", "--results", tmp_path)
    assert done.exit_code == cli.ExitCode.DRIFT
    assert "worse  generate: a case, torch: time over ours 1.100 recorded" in done.stdout
    done = run("bench", "generate", "--check", "--results", tmp_path, "--json")
    data = json.loads(done.stdout)
    assert data["worse"] and [each["contender"] for each in data["findings"]] == ["torch"]
    assert [*tmp_path.iterdir()] == [record] and record.read_bytes() == before
    run("bench", "generate", "--results", tmp_path)
    done = run("bench", "generate", "--check", "--results", tmp_path)
    assert (done.exit_code, done.stdout) == (0, "")
    assert "no ratio is worse than its record: generate" in done.stderr


# Failures


@pytest.fixture
def flawed(benchmarks: bench.Benchmarks, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`generate` whose second of three cases fails, and with it one contender of the third."""
    common, generation = benchmarks.module("common"), benchmarks.module("generation")

    def measured(case: str, contenders: Mapping[str, float]) -> list[Any]:
        made, failures = common.try_each(case, contenders, lambda _, time: [1 / time, 1 / time])
        return [*(common.row(case, who, "s", times) for who, times in made.items()), *failures]

    def wrong() -> list[Any]:
        raise SystemExit("b: relative difference 1e+00, expected at most 0.01\nand more")

    def generate() -> Iterator[Any]:
        yield common.Case("a", lambda: measured("a", {OURS: 2.0, "torch": 1.0}))
        yield common.Case("b", wrong)
        yield common.Case("c", lambda: measured("c", {OURS: 4.0, "torch": 0.0}))

    monkeypatch.setattr(generation, "generate", generate)
    return generate


MESSAGES = (
    "b                                  all              failed: b: relative difference 1e+00, "
    "expected at most 0.01",
    "c                                  torch            failed: ZeroDivisionError: "
    "float division by zero",
)


def test_a_case_that_fails_loses_no_other(flawed: Any, tmp_path: Path) -> None:
    done = run("bench", "generate", "--results", tmp_path)
    assert done.exit_code == cli.ExitCode.REFUSED
    (path,) = tmp_path.glob("generate_cpu_*.json")
    rows = json.loads(path.read_text())["rows"]
    assert [(each["case"], each["contender"], "error" in each) for each in rows] == [
        ("a", OURS, False),
        ("a", "torch", False),
        ("b", "all", True),
        ("c", OURS, False),
        ("c", "torch", True),
    ]
    assert rows[1]["times_ours"] == 2 and rows[2]["error"].endswith("0.01\nand more")
    for message in MESSAGES:
        assert f"{message}\n" in done.stdout and f"fusegen: {message}\n" in done.stderr
    assert done.stdout.endswith(f"{path}\n") and "Traceback" in done.stderr


def test_failures_are_told_of_a_page_and_of_a_comparison(
    flawed: Any, benchmarks: bench.Benchmarks, tmp_path: Path
) -> None:
    result = benchmarks.measure("generate")
    page = benchmarks.module("summary").page([result], figure=False)
    assert "| b | all | failed: b: relative difference 1e+00, expected at most 0.01 |" in page
    assert set(benchmarks.module("summary").bars([result])) == {"generate: a"}
    check = benchmarks.module("checking")
    assert check.findings(result, result) == []
    benchmarks.save(result, tmp_path)
    done = run("bench", "generate", "--check", "--results", tmp_path)
    assert done.exit_code == cli.ExitCode.REFUSED and MESSAGES[0] in done.stderr
    assert "no ratio is worse" not in done.stderr


# What results are to reach


def aim(**words: Any) -> dict[str, Any]:
    return {"title": "a number", "benchmark": "grouped", "at_least": {"a": 2}, **words}


AIMS = (
    (aim(value="fraction"), 0.5),
    (aim(value="floor"), 0.25),
    (aim(value="time", of="torch"), 2.0),
    (aim(value="rate", of=["a", "b"]), 3.0),
    (aim(value="peak_gib"), 8.0),
    (aim(value="peak_gib", of="torch"), 4.0),
    (aim(value="fraction", contender="torch"), None),
    (aim(value="missing"), None),
)


def measured_on(device: str) -> dict[str, Any]:
    ours = {"contender": OURS, "median": 4.0, "floor": 1.0, "fraction": 0.5}
    rows = [
        {**ours, "case": "a", "rate": 6.0, "extra": {"peak_gib": 8.0}},
        {**ours, "case": "b", "rate": 2.0, "extra": {}},
        {"case": "a", "contender": "torch", "median": 2.0, "extra": {"peak_gib": 2.0}},
    ]
    return {"name": "grouped", "environment": {"device": device}, "rows": rows}


@pytest.mark.parametrize(("entry", "number"), AIMS)
def test_what_comes_of_a_target(
    benchmarks: bench.Benchmarks, entry: dict[str, Any], number: float | None
) -> None:
    targets = benchmarks.module("targets")
    result = measured_on("NVIDIA H200")
    (found,) = targets.compare([targets.Target.parse(entry)], [result])
    assert found.number == number and found.met == (number is not None and number >= 2)
    entry = {**entry, "at_most": entry["at_least"]}
    del entry["at_least"]
    (found,) = targets.compare([targets.Target.parse(entry)], [result])
    assert found.met == (number is not None and number <= 2)
    assert not list(targets.compare([targets.Target.parse(entry)], [measured_on("NVIDIA H100")]))


def test_a_number_is_compared_as_it_is_shown(benchmarks: bench.Benchmarks) -> None:
    target = benchmarks.module("targets").Target.parse(aim(value="fraction"))
    assert target.met(1.9996, 2) and not target.met(1.9994, 2)


@pytest.mark.parametrize("words", [{"at_most": {"a": 2}}, {"kind": "time"}])
def test_an_entry_of_targets_says_what_is_wrong(
    benchmarks: bench.Benchmarks, words: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=r"targets\.yaml: a number: expected one of at_least and"):
        benchmarks.module("targets").Target.parse(aim(value="fraction", **words))


def test_every_target_is_measured(benchmarks: bench.Benchmarks) -> None:
    """By the results on record: a misspelt case would be missed for ever."""
    targets, summary = benchmarks.module("targets"), benchmarks.module("summary")
    found = list(targets.compare(targets.load(), summary.newest()))
    assert {each.target.benchmark for each in found} == {t.benchmark for t in targets.load()}
    assert [each for each in found if each.number is None] == []
    page = summary.aims(found)
    assert page.count("\n| ") == len(found) + 1 and "not measured" not in page


def test_a_benchmark_that_fails_loses_no_other(
    flawed: Any,
    benchmarks: bench.Benchmarks,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """One that cannot begin, and one of which nothing is right, leave no record."""
    runner, common = benchmarks.module("run"), benchmarks.module("common")
    pointwise, products = benchmarks.module("pointwise"), benchmarks.module("products")
    monkeypatch.setattr(runner, "GPU", {})
    cpu = {"pointwise": ("pointwise", "pointwise"), "dense": ("products", "dense"), **runner.CPU}
    monkeypatch.setattr(runner, "CPU", cpu)
    monkeypatch.setattr(pointwise, "pointwise", lambda: 1 // 0)

    def wrong() -> list[Any]:
        raise SystemExit("wrong")

    monkeypatch.setattr(products, "dense", lambda: [common.Case("d", wrong)])
    done = run("bench", *cpu, "--results", tmp_path, "--json")
    assert done.exit_code == cli.ExitCode.REFUSED
    assert "pointwise: ZeroDivisionError" in done.stderr and "failed: wrong" in done.stderr
    assert [path.name.partition("_")[0] for path in tmp_path.iterdir()] == ["generate"]
    first, second, third = json.loads(done.stdout)["benchmarks"]
    assert first["error"] and second["error"] and len(third["rows"]) == 5


def test_cases_that_follow_a_failure_between_cases_are_missed(benchmarks: bench.Benchmarks) -> None:
    common = benchmarks.module("common")

    def cases() -> Iterator[Any]:
        yield common.Case("a", lambda: [common.row("a", OURS, "s", [1.0])])
        raise RuntimeError("out of memory")

    first, second = common.outcomes(cases())
    assert first.case == "a"
    assert second == common.Failure("the cases that remained", "all", "RuntimeError: out of memory")
    with pytest.raises(RuntimeError):
        common.outcomes(iter(list(cases())))


# --sweep

FAMILY, ARCH = "gemm_sm90", "sm_90a"


@pytest.fixture
def own_specs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the specs in place of the built-in ones; those stay as they are."""
    builtin = paths.builtin_specs() / "archs" / f"{ARCH}.yaml"
    before = builtin.read_bytes()
    copy = Path(shutil.copytree(paths.builtin_specs(), tmp_path / "specs"))
    monkeypatch.setattr(paths, "builtin_specs", lambda: copy)
    yield copy / "archs" / f"{ARCH}.yaml"
    assert builtin.read_bytes() == before


@pytest.fixture
def swept(benchmarks: bench.Benchmarks, own_specs: Path, tmp_path: Path) -> Any:
    """A sweep whose times are made up: the first point up to 100 tokens a group, then the last."""
    module = benchmarks.module("sweep")
    made: list[Any] = []

    def timer_of(variants: Sequence[Any], recipes: Mapping[str, frozenset[GemmKind]]) -> Any:
        made.extend(variants)
        assert all(variant.folder.is_dir() for variant in variants)

        def timer(recipe: str, case: Case) -> dict[GemmKind, dict[str, float]]:
            best = 0 if case.tokens // case.groups <= 100 else -1
            found: dict[GemmKind, dict[str, float]] = {}
            for kind in recipes[recipe]:
                points = list(dict.fromkeys(variant.points[kind] for variant in variants))
                found[kind] = {p: 1.0 if p == points[best] else 1.2 for p in points}
            return found

        return timer

    options = module.Options(quick=True, results=tmp_path / "results")
    return module.sweep([FAMILY], ARCH, options, timer_of), made


def test_a_sweep_writes_the_rules_that_its_times_call_for(swept: Any, own_specs: Path) -> None:
    found, made = swept
    assert not any(variant.folder.exists() for variant in made), "bundles are temporary"
    (tuned,) = found.tuned
    kinds = api.load_specs().archs[ARCH].kernels[FAMILY].kinds
    for kind, choice in tuned.choices.items():
        assert kinds[kind].select == choice.after
        assert choice.loss_after.weighted == 0 < choice.loss_before.weighted
        for mean, point in ((16, "cooperative_128x256x64_2x1"), (256, "pingpong_128x128x64_2x1")):
            assert fit.choose(choice.after, Case(8, 8 * mean, 4096, 7168).sizes(kind)) == point
    assert found.difference and found.spec == own_specs


def test_a_sweep_is_on_record_and_can_be_fitted_again(
    swept: Any, own_specs: Path, tmp_path: Path
) -> None:
    found, _ = swept
    (path,) = found.records
    assert path.parent == tmp_path / "results" / "sweeps"
    data = json.loads(path.read_text())
    assert {"name", "environment", "kinds", "samples", "left_out"} <= data.keys()
    assert len(data["samples"]) == len(found.tuned[0].measured.samples)
    original = (ROOT / "specs" / "archs" / f"{ARCH}.yaml").read_bytes()
    written = own_specs.read_bytes()
    assert written != original
    own_specs.write_bytes(original)
    words = ("bench", "--sweep", FAMILY, "--recorded", "--results", tmp_path / "results")
    done = run(*words, "--dry-run")
    assert done.exit_code == 0 and own_specs.read_bytes() == original
    assert "\n-          - {when: {depth: {ge: 6144}}" in done.stdout
    assert "\n+          - {when: {mean_group_tokens: {ge: " in done.stdout
    assert "gemm_sm90 fprop:" in done.stdout and "mean regret" in done.stdout
    done = run(*words, "--json")
    assert json.loads(done.stdout)["written"] and own_specs.read_bytes() == written
    done = run(*words)
    assert "the rules stay as they are" in done.stderr and own_specs.read_bytes() == written


def test_a_sweep_without_records_or_of_nothing(tmp_path: Path, own_specs: Path) -> None:
    done = run("bench", "--sweep", FAMILY, "--recorded", "--results", tmp_path)
    assert done.exit_code == cli.ExitCode.USAGE and "no measurements of gemm_sm90" in done.stderr
    module = bench.find().module("sweep")
    with pytest.raises(UsageError, match="unknown kernel family 'gemm_sm91'"):
        module.sweep(["gemm_sm91"], ARCH, module.Options(results=tmp_path))


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
def test_a_case_is_timed_under_every_point(
    benchmarks: bench.Benchmarks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recipe: str
) -> None:
    """On the reference: all but the build and the profiler, whose kernels are made up."""
    common, module = benchmarks.module("common"), benchmarks.module("sweep")
    monkeypatch.setattr(common, "DEVICE", "cpu")
    monkeypatch.setattr(common, "L2_BYTES", 16)
    monkeypatch.setattr(api, "find_tools", lambda folders: None)
    built: list[Path] = []
    monkeypatch.setattr(api, "build", lambda folder, toolchain: built.append(folder))
    family = {"bf16": FAMILY, "fp8_block": "gemm_fp8_block_sm90"}[recipe]
    kinds = frozenset({GemmKind.FPROP, GemmKind.WGRAD})
    specs = api.load_specs()
    made = list(variants.write_variants(specs, ARCH, family, (recipe,), tmp_path))
    timer = module.GpuTimer(made, {recipe: kinds})
    assert built == [variant.folder for variant in made]
    launches = [
        (kind, variant.points[kind], float(10 * place + turn))
        for place, variant in enumerate(made)
        for turn in (3, 1, 2)
        for kind in GemmKind
    ]

    @contextmanager
    def profiled() -> Iterator[Any]:
        yield lambda: launches

    monkeypatch.setattr(module, "_profiled", profiled)
    found = timer(recipe, Case(3, 100, 16, 32))
    expected = {
        kind: {variant.points[kind]: 10.0 * place + 2 for place, variant in enumerate(made)}
        for kind in kinds
    }
    assert found == expected, "medians, of the kinds asked for alone"
    missing = made[-1].points
    launches[:] = [each for each in launches if each[1] != missing[each[0]]]
    with pytest.raises(SystemExit, match=r"3 x 33 tokens.* ran .*, not "):
        timer(recipe, Case(3, 100, 16, 32))


def test_a_kernel_that_waits_for_another_is_not_charged_for_it(
    benchmarks: bench.Benchmarks,
) -> None:
    module = benchmarks.module("sweep")
    ran = [
        module.Ran("waits", 1500, 4000),
        module.Ran("first", 1000, 3000),
        module.Ran("later", 5000, 5500),
    ]
    assert dict(module.alone(ran)) == {"first": 2, "waits": 1, "later": 0.5}


def test_points_that_disagree_are_not_timed(
    benchmarks: bench.Benchmarks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    common, module = benchmarks.module("common"), benchmarks.module("sweep")
    monkeypatch.setattr(common, "DEVICE", "cpu")
    monkeypatch.setattr(common, "L2_BYTES", 16)
    monkeypatch.setattr(api, "find_tools", lambda folders: None)
    monkeypatch.setattr(api, "build", lambda folder, toolchain: None)
    made = list(variants.write_variants(api.load_specs(), ARCH, FAMILY, ("bf16",), tmp_path))
    timer = module.GpuTimer(made, {"bf16": frozenset(GemmKind)})
    steps = module._steps

    def wrong(*arguments: Any) -> list[Any]:
        first, *others = steps(*arguments)
        return [first, *others[:-1], lambda: tuple(1.1 * each for each in others[-1]())]

    monkeypatch.setattr(module, "_steps", wrong)
    with pytest.raises(SystemExit, match=r"bf16, 3 x 33 tokens, 32 -> 16: relative difference"):
        timer("bf16", Case(3, 100, 16, 32))


# Host time


def test_host_time_of_every_module_and_recipe(
    benchmarks: bench.Benchmarks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the reference, in bursts of one call."""
    common, host = benchmarks.module("common"), benchmarks.module("host")
    monkeypatch.setattr(common, "DEVICE", "cpu")
    for name, value in (("BURST", 1), ("BURSTS", 1), ("REPEATS", 1), ("TOKENS", 20), ("WIDTH", 32)):
        monkeypatch.setattr(host, name, value)
    rows = common.with_ratios(common.outcomes(host.host()))
    assert all("error" not in row and row["median"] > 0 for row in rows)
    recipes = ("", *(f" {each}" for each in sorted(api.load_specs().recipes) if each != "bf16"))
    ours = [f"Linear{recipe}" for recipe in recipes] + [
        f"{module}{recipe}, {experts} experts"
        for module in ("GroupedLinear", "GroupedMLP")
        for recipe in recipes
        for experts in (8, 512)
    ]
    cases = {row["case"]: row for row in rows if row["contender"] == OURS}
    assert [*cases] == [
        f"{call}: {each}" for call in ("forward", "forward + backward") for each in ours
    ]
    (linear,) = (row for row in rows if row["case"] == "forward: nn.Linear")
    ratio = cases["forward: Linear"]["median"] / linear["median"]
    assert cases["forward: Linear"]["extra"] == {"times_nn_linear": pytest.approx(ratio)}


def test_groups_of_host_calls_fill_the_tokens(
    benchmarks: bench.Benchmarks, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = benchmarks.module("host")
    monkeypatch.setattr(benchmarks.module("common"), "DEVICE", "cpu")
    for experts, sizes in ((8, [16] * 8), (512, [1] * 128 + [0] * 384), (100, [2] * 28 + [1] * 72)):
        assert host._routing("grouped_linear", experts)[0].tolist() == sizes


# Products


def test_rounded_groups_end_at_multiples(benchmarks: bench.Benchmarks) -> None:
    import torch

    shapes = benchmarks.module("shapes")
    sizes = torch.tensor([100, 0, 300, 10, 90, 1])
    assert shapes.rounded(sizes, 128).tolist() == [128, 0, 256, 0, 0, 117]
    drawn = torch.randint(0, 400, (50,), generator=torch.Generator().manual_seed(1))
    rounded = shapes.rounded(drawn, 128)
    assert rounded.sum() == drawn.sum() and bool((rounded >= 0).all())
    assert bool((rounded.cumsum(0)[:-1] % 128 == 0).all())
    assert bool(((rounded - drawn).cumsum(0).abs() < 128).all())


@pytest.mark.parametrize("name", ["grouped", "main_grad"])
def test_grouped_products_equal_torchs(
    benchmarks: bench.Benchmarks, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """On the reference, with nothing timed: what is compared are contenders' results."""
    common, products = benchmarks.module("common"), benchmarks.module("products")
    shapes = benchmarks.module("shapes")
    monkeypatch.setattr(common, "DEVICE", "cpu")
    monkeypatch.setattr(common, "L2_BYTES", 16)
    monkeypatch.setattr(common, "copy_rate", lambda: 1e12)
    monkeypatch.setattr(products, "DENSE", 8)
    monkeypatch.setattr(shapes, "GROUPED", (shapes.Grouped("small", 3, 300, 32, 16),))
    monkeypatch.setattr(
        common,
        "compare",
        lambda contenders: {name: [float(run(1).numel())] for name, run in contenders.items()},
    )
    cases = list(getattr(products, name)())
    kinds = ["fprop", "dgrad", "wgrad"] if name == "grouped" else ["wgrad, added"]
    assert [case.name for case in cases] == [f"small {kind}" for kind in kinds]
    for case in cases:
        rows = {row.contender: row for row in case.measure()}
        rounded = ["fusegen rounded groups"] if name == "grouped" else []
        assert [*rows] == [OURS, "torch", *rounded]
        assert len({row.median for row in rows.values()}) == 1


# Peers


@pytest.mark.parametrize("alignment", [1, 4, 128])
def test_padded_groups(benchmarks: bench.Benchmarks, alignment: int) -> None:
    torch: Any = importlib.import_module("torch")
    sizes = torch.tensor([3, 0, 128, 5])
    rows, layout = benchmarks.module("peers").padded(sizes, alignment)
    owner = [0] * 3 + [2] * 128 + [3] * 5
    assert layout[rows].tolist() == owner
    assert len(set(rows.tolist())) == len(owner)
    assert int((layout == -1).sum()) == len(layout) - len(owner)
    starts = [rows.tolist().index(row) for row in rows.tolist()]
    assert starts == sorted(starts)
    for group in (0, 2, 3):
        assert int(rows[owner.index(group)]) % alignment == 0


def test_peers_that_are_absent_fail_or_are_wrong_are_left_out(
    benchmarks: bench.Benchmarks, capsys: pytest.CaptureFixture[str]
) -> None:
    torch: Any = importlib.import_module("torch")
    peers = benchmarks.module("peers")
    x, weight, dy = torch.ones(4, 2), torch.ones(1, 3, 2), torch.ones(4, 3)
    sizes = torch.tensor([4])

    def right(kind: str, sizes: Any, x: Any, weight: Any, dy: Any) -> Any:
        return None if kind == "wgrad" else peers.Made(lambda: x @ weight[0].t())

    def wrong(kind: str, sizes: Any, x: Any, weight: Any, dy: Any) -> Any:
        return peers.Made(lambda: x @ weight[0].t() + 1)

    def broken(kind: str, sizes: Any, x: Any, weight: Any, dy: Any) -> Any:
        raise RuntimeError("not on this GPU")

    made = {
        "right": peers.Peer("json", "", right),
        "wrong": peers.Peer("json", "", wrong),
        "broken": peers.Peer("json", "", broken),
        "absent": peers.Peer("no_such_library.at_all", "nothing", broken),
    }
    there = peers.installed(made)
    assert set(there) == {"right", "wrong", "broken"}
    assert "absent is left out: not installed (pip install nothing)" in capsys.readouterr().err
    operands = [(x, weight, dy), (2 * x, weight, dy)]
    found = peers.calls(there, "fprop", sizes, operands, x @ weight[0].t())
    assert set(found) == {"right"}
    assert [float(call()[0, 0]) for call in found["right"]] == [2.0, 4.0]
    said = capsys.readouterr().err
    assert "wrong is left out of fprop: it is off by" in said
    assert "broken is left out of fprop: RuntimeError: not on this GPU" in said
    assert peers.calls({"right": made["right"]}, "wgrad", sizes, operands, x) == {}
