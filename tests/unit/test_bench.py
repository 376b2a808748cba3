"""`fusegen bench`: what runs where, records and comparisons, and a sweep without a GPU."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import random
import re
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fusegen import api, cli
from fusegen.build import gpu
from fusegen.build.compilation import HOST_FLAGS, HOST_STRICT
from fusegen.build.sources import read_sources
from fusegen.build.toolchain import find_toolchain
from fusegen.commands import bench
from fusegen.ir.kernel import GemmKind
from fusegen.publish import paths
from fusegen.spec.usage import UsageError
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

    def measure(
        name: str, *, quick: bool = False, rounds: int | None = None, cases: Sequence[str] = ()
    ) -> Mapping[str, Any]:
        words = [name, *(["quick"] if quick else []), *([f"{rounds} rounds"] if rounds else [])]
        ran.append(", ".join([*words, *cases]))
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
        (["generate", "--quick"], "--quick goes with --sweep, and with these: grouped"),
        (["--quick"], "--quick goes with --sweep, and with these: grouped"),
        (["generate", "--check", "--case", "a"], "it goes with no --case or --rounds"),
        (["--sweep", "gemm_sm90", "--rounds", "2"], "go with benchmarks, not with --sweep"),
        (["generate", "--sweep", "gemm_sm90"], "--sweep goes neither with names nor with --check"),
        (["--check", "--sweep", "gemm_sm90"], "--sweep goes neither with names nor with --check"),
        (["--sweep", "gemm_sm90"], "there is no visible NVIDIA GPU; --recorded fits"),
        (["summary", "--check"], "summary measures nothing"),
    ):
        done = run("bench", *words)
        assert done.exit_code == cli.ExitCode.USAGE, (words, done.output)
        assert hint in done.stderr and done.stdout == ""
    assert not measured


def test_some_cases_leave_the_others_of_the_day(measured: list[str], tmp_path: Path) -> None:
    words = ("bench", "generate", "--results", tmp_path)
    assert run(*words).exit_code == 0
    (path,) = tmp_path.iterdir()
    record = json.loads(path.read_text())
    for each in record["rows"]:
        each["case"] = "another"
    path.write_text(json.dumps(record))
    done = run(*words, "--case", "a c", "--case", "b", "--rounds", "7")
    assert done.exit_code == 0 and measured[-1] == "generate, 7 rounds, a c, b"
    rows = json.loads(path.read_text())["rows"]
    assert [each["case"] for each in rows] == ["another"] * 2 + ["a case"] * 2
    path.write_text(json.dumps({**record, "environment": {**ENVIRONMENT, "commit": "1"}}))
    before = path.read_bytes()
    done = run(*words, "--case", "a c")
    assert done.exit_code == cli.ExitCode.REFUSED and path.read_bytes() == before
    assert "its cases are of commit 1, these of 0000000; measure all of them" in done.stderr
    assert run(*words).exit_code == 0 and len(json.loads(path.read_text())["rows"]) == 2


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
    def wrong(name: str, **options: Any) -> Mapping[str, Any]:
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
    page = benchmarks.module("summary").page([result], {})
    assert "| b | all | failed: b: relative difference 1e+00, expected at most 0.01 |" in page
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
    ours = {"contender": OURS, "median": 4.0, "floor": 1.0, "fraction": 0.5, "samples": [4.0]}
    rows = [
        {**ours, "case": "a", "rate": 6.0, "extra": {"peak_gib": 8.0}},
        {**ours, "case": "b", "rate": 2.0, "extra": {}},
        {"case": "a", "contender": "torch", "samples": [2.0], "extra": {"peak_gib": 2.0}},
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


def test_times_are_compared_round_by_round(benchmarks: bench.Benchmarks) -> None:
    """The card drifts: of most rounds ours is nine tenths, of the medians twice as much."""
    targets = benchmarks.module("targets")
    target = targets.Target.parse(aim(value="time", of="another"))

    def reached(ours: list[float], others: list[float]) -> float:
        rows = row(OURS, ours, "a"), row("another", others, "a")
        (found,) = targets.compare([target], [result_of(*rows, device="NVIDIA H200")])
        return float(found.number)

    assert reached([0.9, 1.8, 3.6], [1.0, 1.0, 4.0]) == pytest.approx(0.9)
    assert reached([0.9, 1.8, 3.6], [1.0, 1.0]) == pytest.approx(1.8), "rounds are not the same"


def test_another_gpu_stands_for_the_one_that_targets_are_of(
    benchmarks: bench.Benchmarks,
) -> None:
    targets, summary = benchmarks.module("targets"), benchmarks.module("summary")
    wanted, other, none = (measured_on(d) for d in ("NVIDIA H200", "NVIDIA H100", "cpu"))
    entries = [targets.Target.parse(aim(value="fraction"))]
    for results, device in (
        ([wanted, other], "H200"),
        ([other, wanted], "H200"),
        ([other], "H100"),
    ):
        (found,) = targets.compare(entries, results)
        assert found.device == device
        assert f"| {device} |" in summary.aims([found])
    assert not list(targets.compare(entries, [none]))


def test_a_target_that_was_not_measured_is_not_met(benchmarks: bench.Benchmarks) -> None:
    targets, summary = benchmarks.module("targets"), benchmarks.module("summary")
    result = measured_on("NVIDIA H200")
    entries = [aim(value="fraction", at_least={"c": 0}), aim(value="fraction", benchmark="mlp")]
    found = list(targets.compare(map(targets.Target.parse, entries), [result]))
    assert [(each.case, each.number, each.met) for each in found] == [
        ("c", None, False),
        ("a", None, False),
    ]
    page = summary.aims(found)
    assert "0 of 2 are met" in page and page.count("| not measured |  | **no** |") == 2


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
    missing = [each for each in found if each.number is None]
    assert not missing, "a case is misspelt"
    assert summary.aims(found).count("\n| ") == len(found) + 1


def test_every_benchmark_has_its_place_on_the_page(benchmarks: bench.Benchmarks) -> None:
    run, summary = benchmarks.module("run"), benchmarks.module("summary")
    assert {*run.GPU, *run.CPU} <= {*summary.TITLES}


def test_a_benchmark_that_fails_loses_no_other(
    flawed: Any,
    benchmarks: bench.Benchmarks,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """One that cannot begin, and one of which nothing is right, leave no record."""
    runner, common = benchmarks.module("run"), benchmarks.module("common")
    pointwise, gemms = benchmarks.module("pointwise"), benchmarks.module("gemms")
    monkeypatch.setattr(runner, "GPU", {})
    cpu = {"pointwise": ("pointwise", "pointwise"), "dense": ("gemms", "dense"), **runner.CPU}
    monkeypatch.setattr(runner, "CPU", cpu)
    monkeypatch.setattr(pointwise, "pointwise", lambda: 1 // 0)

    def wrong() -> list[Any]:
        raise SystemExit("wrong")

    monkeypatch.setattr(gemms, "dense", lambda: [common.Case("d", wrong)])
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


@pytest.mark.slow
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


@pytest.mark.slow
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
    assert "\n-          - {when: {k: {ge: 6144}}" in done.stdout
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

    monkeypatch.setattr(module.profiled, "profiled", profiled)
    monkeypatch.setattr(module, "_launches", lambda ran: ran)
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
    module = benchmarks.module("profiled")
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


@pytest.mark.slow
def test_host_time_of_every_module_and_recipe(
    benchmarks: bench.Benchmarks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the reference, in bursts of one call."""
    common, host = benchmarks.module("common"), benchmarks.module("host")
    monkeypatch.setattr(common, "DEVICE", "cpu")
    for name, value in (("BURST", 1), ("BURSTS", 1), ("TOKENS", 20), ("WIDTH", 32)):
        monkeypatch.setattr(host, name, value)
    cores = os.sched_getaffinity(0)
    with common.rounds_of(1):
        rows = common.with_ratios(common.outcomes(host.host()))
    assert os.sched_getaffinity(0) == cores
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
    ours_case = cases["forward: Linear"]
    ratio = ours_case["median"] / linear["median"]
    assert ours_case["extra"] == {"times_nn_linear": pytest.approx(ratio, rel=1e-3)}
    assert ours_case["paired"]["nn.Linear"]["median"] == ours_case["extra"]["times_nn_linear"]


def test_the_process_is_pinned_with_its_threads(benchmarks: bench.Benchmarks) -> None:
    host = benchmarks.module("host")
    before = os.sched_getaffinity(0)
    stop, seen = threading.Event(), []
    thread = threading.Thread(target=stop.wait)
    thread.start()
    with host.pinned(1):
        seen = [os.sched_getaffinity(each) for each in (0, thread.native_id)]
    assert seen == [{max(before)}] * 2
    assert os.sched_getaffinity(thread.native_id) == before == os.sched_getaffinity(0)
    stop.set()
    thread.join()


def test_groups_of_host_calls_fill_the_tokens(
    benchmarks: bench.Benchmarks, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = benchmarks.module("host")
    monkeypatch.setattr(benchmarks.module("common"), "DEVICE", "cpu")
    for experts, sizes in ((8, [16] * 8), (512, [1] * 128 + [0] * 384), (100, [2] * 28 + [1] * 72)):
        assert host._routing("grouped_linear", experts)[0].tolist() == sizes


# GEMMs


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
def test_grouped_gemms_equal_torchs(
    benchmarks: bench.Benchmarks, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """On the reference, with nothing timed: what is compared are contenders' results."""
    common, gemms = benchmarks.module("common"), benchmarks.module("gemms")
    monkeypatch.setattr(common, "DEVICE", "cpu")
    monkeypatch.setattr(common, "L2_BYTES", 16)
    monkeypatch.setattr(common, "copy_rate", lambda: 1e12)
    monkeypatch.setattr(gemms, "DENSE", 8)
    monkeypatch.setattr(
        common,
        "compare",
        lambda contenders: {name: [float(run(1).numel())] for name, run in contenders.items()},
    )
    cases = list(getattr(gemms, name)(quick=True))
    kinds = ["fprop", "dgrad", "wgrad"] if name == "grouped" else ["wgrad, added"]
    named = ["small_up", "small_down"]
    if name == "grouped":
        named += [f"small_up {draw}" for draw in ("uniform", "zipf", "hot")]
    assert [case.name for case in cases] == [f"{each} {kind}" for each in named for kind in kinds]
    for case in cases:
        rows = {row.contender: row for row in case.measure()}
        usual = name == "grouped" and case.name.count(" ") == 1
        assert [*rows] == [OURS, "torch", *(["fusegen rounded groups"] if usual else [])]
        assert len({row.median for row in rows.values()}) == 1


def test_draws_fill_the_tokens_and_are_what_they_say(
    benchmarks: bench.Benchmarks, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = benchmarks.module("shapes")
    monkeypatch.setattr(benchmarks.module("common"), "DEVICE", "cpu")
    for expert in (*shapes.EXPERTS, *shapes.MORE_EXPERTS):
        assert expert.tokens % expert.top_k == 0
        for draw in shapes.DRAWS:
            sizes = shapes.splits(expert.groups, expert.tokens, draw)
            assert int(sizes.sum()) == expert.tokens and len(sizes) == expert.groups
            assert bool((sizes >= 0).all())
            mean, largest = expert.tokens / expert.groups, int(sizes.max())
            empty = int((sizes == 0).sum())
            if draw == "uniform":
                assert largest - int(sizes.min()) <= expert.groups
            elif draw == "hot":
                assert abs(largest - expert.tokens / 2) <= expert.groups and empty == 0
            elif draw == "zipf":
                assert empty >= -(-expert.groups // 10) and largest > 2 * mean
            else:
                assert 1.2 * mean < largest < 4 * mean
        usual = shapes.splits(expert.groups, expert.tokens).tolist()
        assert usual == shapes.splits(expert.groups, expert.tokens, shapes.DRAW).tolist()


# Floors

H, F, E, T = 2048, 768, 128, 65536
LENGTHS = {"H": H, "F": F, "E": E, "T": T}
COPY = 4e12


@pytest.fixture
def floors(benchmarks: bench.Benchmarks) -> Any:
    return benchmarks.module("floors")


def rates_of(floors: Any, plan: Any) -> Any:
    """An FP8 GEMM takes half the time of one in 16 bits, with fast sums a third."""
    rates = {
        mode: (3e15 if mode.fast else 2e15) if mode.formats else 1e15 for mode in floors.modes(plan)
    }
    return floors.Rates(rates, COPY)


def test_the_floor_of_bf16_is_gemms_and_activations(floors: Any) -> None:
    """By hand: three GEMMs of each linear, and the activation's bytes."""
    plan = floors.plan_of("grouped_mlp__bf16", ARCH)
    assert {str(mode) for mode in floors.modes(plan)} == {"bf16"}
    found = floors.floor(plan, LENGTHS, [T // E] * E, rates_of(floors, plan))
    up, down = (2 * T * 2 * F * H / 1e15 * 1e3, 2 * T * F * H / 1e15 * 1e3)
    weights = [2 * (E * n * k + T * (n + k)) / COPY * 1e3 for n, k in ((2 * F, H), (H, F))]
    assert found.gemms == pytest.approx(3 * (max(up, weights[0]) + max(down, weights[1])), 1e-3)
    # The forward's is in fc1's epilogue. da, h -> dh in 16 bits; probabilities and their gradients
    # are rows of fp32.
    elements = T * F * (2 + 2 * 2 + 2 * 2)
    assert found.activation == pytest.approx((elements + 2 * 4 * T) / COPY * 1e3, rel=1e-3)
    assert found.quantise == 0
    assert found.total == found.gemms + found.activation


@pytest.mark.slow
def test_every_recipe_has_a_floor_of_its_own(floors: Any) -> None:
    totals = {}
    for recipe in floors.recipes():
        plan = floors.plan_of(f"grouped_mlp__{recipe}", ARCH)
        totals[recipe] = floors.floor(plan, LENGTHS, [T // E] * E, rates_of(floors, plan))
    names = {
        recipe: {str(m) for m in floors.modes(floors.plan_of(f"grouped_mlp__{recipe}", ARCH))}
        for recipe in totals
    }
    assert names["fp8_delayed"] == {"e4m3_e4m3_fast", "e5m2_e4m3_split"} == names["fp8_current"]
    assert names["fp8_rowwise"] == {"e4m3_e4m3_fast", "e4m3_e4m3_split"}
    assert names["fp8_block"] == {"e4m3_e4m3_split"}
    assert names["mxfp8"] == names["nvfp4"] == {"bf16"}, "emulated"
    # x, dy once read, twice written: 4 bytes to an element; weights once in each direction: 6.
    weights, tokens = E * 3 * F * H, 2 * T * H
    by_hand = (6 * weights + 4 * tokens) / COPY * 1e3
    assert totals["fp8_delayed"].quantise == pytest.approx(by_hand, rel=0.02)
    assert totals["fp8_delayed"].gemms < totals["fp8_block"].gemms < totals["bf16"].gemms
    assert totals["mxfp8"].quantise > 2 * totals["fp8_block"].quantise, "codes are decoded"
    cached = floors.plan_of("grouped_mlp__fp8_block__cached_weights", ARCH)
    without = floors.floor(cached, LENGTHS, [T // E] * E, rates_of(floors, cached)).quantise
    assert without == pytest.approx(4 * tokens / COPY * 1e3, rel=0.05), "and scales"


def test_what_is_added_to_main_grad_is_read_and_written_in_fp32(floors: Any) -> None:
    slow = floors.Rates({floors.Mode(): 1e30}, COPY)
    plain, adding = (
        floors.floor(floors.plan_of(f"grouped_mlp__bf16{each}", ARCH), LENGTHS, [T // E] * E, slow)
        for each in ("", "__add_to_main_grad")
    )
    weights = E * 3 * F * H
    more = adding.gemms - plain.gemms
    assert more == pytest.approx((8 - 2) * weights / COPY * 1e3, rel=1e-6)


def test_tiles_load_what_the_schedule_says(floors: Any) -> None:
    """Against every cluster's step, one by one, as raster.cuh has them."""
    from fusegen.families.wgmma import WgmmaConfig

    def steps(rows: int, columns: int, cluster: int) -> tuple[int, int]:
        if cluster == 1:
            return rows * columns, rows * columns
        a = b = 0
        for _ in range(columns // 2):
            for position in range(rows):
                alone = position == rows // 2 * 2
                a, b = a + (1 if alone else 2), b + (2 if alone else 1)
        for pair in range((rows + 1) // 2 if columns % 2 else 0):
            a, b = a + (1 if 2 * pair + 1 == rows else 2), b + 1
        return a, b

    for cluster in (1, 2):
        for rows in range(1, 8):
            for columns in range(1, 6):
                assert floors._blocks(rows, columns, cluster) == steps(rows, columns, cluster)
    point = WgmmaConfig.parse("cooperative_128x256x64_2x1")
    sizes = Case(2, 300, 256, 512)
    got = floors.loads(GemmKind.FPROP, point, sizes, [300, 0], (2, 2))
    assert got == 512 * 2 * (3 * 128 + 2 * 256), "three row blocks: two share B, one is alone"


def test_l2_bytes_depend_on_how_groups_are_drawn(floors: Any) -> None:
    plan = floors.plan_of("grouped_mlp__fp8_block", ARCH)
    rates = rates_of(floors, plan)
    even, hot = [T // E] * E, [T // 2, *[T // 2 // (E - 1)] * (E - 1)]
    assert sum(hot) <= T
    found = {
        name: floors.floor(plan, LENGTHS, sizes, rates)
        for name, sizes in (("even", even), ("hot", hot))
    }
    assert found["even"].total == found["hot"].total
    assert found["even"].l2_bytes < found["hot"].l2_bytes, "groups of 258 are three row blocks"
    none = floors.Rates(dict.fromkeys(rates.gemms, 1e30), COPY)
    once = floors.floor(plan, LENGTHS, even, none).total * COPY / 1e3
    assert found["even"].l2_bytes > 1.5 * once, "tiles load operands again and again"


# The expert MLP


@pytest.fixture
def mlp(benchmarks: bench.Benchmarks, monkeypatch: pytest.MonkeyPatch) -> Any:
    """On the reference, torch's part not compiled, each contender timed once."""
    common, dense = benchmarks.module("common"), benchmarks.module("dense")
    monkeypatch.setattr(common, "DEVICE", "cpu")
    monkeypatch.setattr(common, "copy_rate", lambda: 1e10)
    monkeypatch.setattr(dense, "SIZE", 32)
    module = benchmarks.module("mlp")
    for name in ("_gathered", "_summed"):
        monkeypatch.setattr(module, name, getattr(module, name)._torchdynamo_orig_callable)
    monkeypatch.setattr(module.torch, "compile", lambda function, **options: function)
    return module


@pytest.mark.slow
def test_the_expert_mlp_under_every_recipe_and_choice(
    mlp: Any, benchmarks: bench.Benchmarks
) -> None:
    common = benchmarks.module("common")
    cases = list(mlp.mlp(quick=True))
    draws = ["small uniform", "small zipf", "small hot"]
    assert [case.name for case in cases] == ["small", "small main_grad", "small permuted", *draws]
    with common.rounds_of(1):
        rows = {(row.case, row.contender): row for row in common.outcomes(mlp.mlp(quick=True))}
    assert not any(isinstance(row, common.Failure) for row in rows.values())
    everybody = {who for case, who in rows if case == "small"}
    recipes = {f"{OURS} {each}" for each in api.load_specs().recipes if each != "bf16"}
    cached = {f"{OURS} {each} cached_weights" for each in ("fp8_block", "fp8_delayed")}
    assert everybody >= recipes | cached | {f"{each}, refresh" for each in cached}
    assert everybody >= {OURS, "torch compiled", "torch eager"}
    some = {"torch compiled", OURS, f"{OURS} fp8_block", f"{OURS} fp8_delayed"}
    for name in ("small main_grad", "small permuted", *draws):
        kept = cached if name in draws else set()
        assert {who for case, who in rows if case == name} == some | kept
    for (_, who), row in rows.items():
        if who.endswith(", refresh"):
            assert row.floor is None and not row.extra
            continue
        parts = [row.extra[f"floor_{part}_ms"] for part in ("products", "quantise", "activation")]
        assert row.floor == pytest.approx(sum(parts)) and row.extra["l2_gb"] > 0
        assert row.fraction == pytest.approx(row.floor / row.median, rel=1e-4)
    floors = {who: row.floor for (case, who), row in rows.items() if case == "small"}
    assert floors["torch compiled"] == floors[OURS] == floors["torch eager"]
    assert floors[f"{OURS} fp8_block cached_weights"] < floors[f"{OURS} fp8_block"]


@pytest.mark.slow
def test_others_are_held_against_the_floor_of_their_recipe(mlp: Any) -> None:
    assert mlp._cell_of("torchao fp8_rowwise") == "grouped_mlp__fp8_rowwise"
    assert mlp._cell_of("TransformerEngine") == "grouped_mlp__bf16"


def test_a_wrong_expert_mlp_is_not_timed(mlp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    common = mlp.common
    summed = mlp._summed
    calls = []

    def wrong(y: Any, inverse: Any, top_k: int) -> Any:
        calls.append(None)
        return summed(y, inverse, top_k) * (1 if len(calls) < 5 else 1.5)

    monkeypatch.setattr(mlp, "_summed", wrong)
    with common.rounds_of(1):
        rows = common.outcomes(mlp.mlp(quick=True), ["permuted"])
    failed = [row.contender for row in rows if isinstance(row, common.Failure)]
    assert failed == [OURS, f"{OURS} fp8_block", f"{OURS} fp8_delayed"]


def test_the_permutation_is_its_own_transpose(mlp: Any) -> None:
    torch: Any = importlib.import_module("torch")
    tokens, top_k, width = 6, 2, 3
    rows = torch.randperm(tokens * top_k)
    inverse = torch.argsort(rows)
    x = torch.randn(tokens, width, dtype=torch.float64, requires_grad=True)
    y = torch.randn(tokens * top_k, width, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: mlp.Gather.apply(x, rows, inverse, top_k), x)
    assert torch.autograd.gradcheck(lambda y: mlp.Scatter.apply(y, rows, inverse, top_k), y)
    gathered = mlp.Gather.apply(x, rows, inverse, top_k)
    assert torch.allclose(mlp.Scatter.apply(gathered, rows, inverse, top_k), top_k * x)


def test_what_a_forward_holds_is_counted_before_the_backward(
    mlp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of made-up memory: 100 before, 170 when gradients are asked for, 16 of them the result."""
    torch: Any = importlib.import_module("torch")
    x = torch.ones(4, requires_grad=True)
    allocated = iter((100, 170))
    monkeypatch.setattr(mlp, "_allocated", lambda: next(allocated))

    def step() -> Any:
        return torch.autograd.grad(2 * x, (x,), torch.ones(4))

    before = torch.autograd.grad
    assert mlp.held_gib(step) * 2**30 == 170 - 100 - 16
    assert torch.autograd.grad is before


# FP8 GEMMs that ship


@pytest.fixture
def dispatch(benchmarks: bench.Benchmarks) -> Any:
    """Of the fast tests alone: others import a library that is called `kernels`, too."""
    return benchmarks.module("kernels.dispatch")


def test_what_ships_has_the_formats_of_its_recipes(dispatch: Any) -> None:
    found = {each.mode: "_".join(each.formats) for each in dispatch.shipped(ARCH)}
    assert found == {
        "fprop tensor fast": "e4m3_e4m3",
        "fprop row fast": "e4m3_e4m3",
        "fprop block split": "e4m3_e4m3",
        "dgrad tensor split": "e5m2_e4m3",
        "dgrad row split": "e4m3_e4m3",
        "dgrad block split": "e4m3_e4m3",
        "wgrad tensor split": "e5m2_e4m3",
        "wgrad row split": "e4m3_e4m3",
        "wgrad block split": "e4m3_e4m3",
    }
    assert all(each.kernels.name in str(GENERATED_HEADERS) for each in dispatch.shipped(ARCH))


GENERATED_HEADERS = sorted((ROOT / "generated" / ARCH / "csrc" / "dispatch").glob("gemm_fp8_*.h"))


def test_gemms_go_through_the_dispatch_functions(dispatch: Any, tmp_path: Path) -> None:
    """Kernels are made up: each says its name, which is that of the tile the rules choose."""
    kernels = bench.find().module("kernels.fp8_kernels")
    sets, csrc = dispatch.shipped(ARCH), ROOT / "generated" / ARCH / "csrc"
    names = [each.kernels.name for each in sets]
    namespace = read_sources(csrc / "sources.cmake").namespace
    made = []
    for name in names:
        header = (csrc / "dispatch" / f"{name}.h").read_text()
        for kernel in re.findall(r"Status\s+(\w+)\(\s*const fusegen::Fp8GemmArguments& in", header):
            if kernel != name:
                made.append(
                    f"fusegen::Status {kernel}(const fusegen::Fp8GemmArguments&, fusegen::Stream&)"
                    f' {{ return {{0, "{kernel}"}}; }}'
                )
    text = dispatch._launchers(namespace, names)
    text += f"namespace {namespace} {{\n" + "\n".join(made) + "\n}\n"
    (tmp_path / "launch.cpp").write_text(text)
    tools = find_toolchain()
    folders = [("-isystem", str(f)) for f in (tools.torch.include, *tools.cuda_include)]
    command = [tools.host_compiler, *HOST_FLAGS, *HOST_STRICT, "-shared", f"-I{csrc}"]
    command += [word for pair in folders for word in pair]
    subprocess.run([*command, tmp_path / "launch.cpp", "-o", tmp_path / "l.so"], check=True)
    library = ctypes.CDLL(str(tmp_path / "l.so"))
    chosen = set()
    for case in (Case(8, 32768, 4096, 14336), Case(128, 65536, 1536, 2048), Case(4, 512, 512, 64)):
        for each in sets:
            gemm = kernels.GemmArguments(*[None] * 5, case.tokens, case.groups, case.n, case.k, 132)
            arguments, call = kernels._Fp8Gemm(gemm), ctypes.c_char_p()
            stream = kernels.Stream(None, False)
            launch = getattr(library, f"launch_{each.kernels.name}")
            assert launch(*map(ctypes.byref, (arguments, stream, call))) == 0
            tile = each.target(case).tile.name
            assert call.value.decode() == f"{each.kernels.name}_bfloat16_{tile}"
            chosen.add(tile)
    assert len(chosen) > 3


def test_only_the_units_of_what_ships_are_linked(dispatch: Any) -> None:
    names = [each.kernels.name for each in dispatch.shipped(ARCH)]
    units = read_sources(ROOT / "generated" / ARCH / "csrc" / "sources.cmake").kernel_sources
    linked = [each for each in units if dispatch._belongs(each, names)]
    assert len(linked) == sum(len(each.kernels.units) for each in dispatch.shipped(ARCH))
    assert not any("_add_" in each for each in linked)


def test_the_dispatch_library_is_built_once_for_its_sources(
    dispatch: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    built: list[Path] = []

    def build(folder: Path) -> None:
        built.append(folder)
        library = folder / "lib" / f"{read_sources(folder / 'csrc' / 'sources.cmake').namespace}.so"
        library.parent.mkdir(exist_ok=True)
        library.touch()

    stale: dict[str, str] = {}
    monkeypatch.setattr(dispatch, "FOLDER", tmp_path / "dispatch")
    monkeypatch.setattr(dispatch.bundle_build, "build", build)
    monkeypatch.setattr(dispatch.bundle_build, "stale_cells", lambda folder: stale)
    bundle = ROOT / "generated" / ARCH
    names = [each.kernels.name for each in dispatch.shipped(ARCH)]
    library = dispatch._built(bundle, names)
    assert library.is_file() and library == dispatch._built(bundle, names)
    assert built == [tmp_path / "dispatch"]
    stale["dispatch"] = "other sources"
    dispatch._built(bundle, names)
    assert len(built) == 2
    sources = read_sources(tmp_path / "dispatch" / "csrc" / "sources.cmake")
    units = read_sources(bundle / "csrc" / "sources.cmake").kernel_sources
    assert sources.host_sources == ("launch.cpp",)
    assert sources.kernel_sources == tuple(u for u in units if dispatch._belongs(u, names))


def test_fp8_gemms_are_checked_and_named(
    benchmarks: bench.Benchmarks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By address arithmetic in float64; with one that is wrong."""
    common, dense = benchmarks.module("common"), benchmarks.module("dense")
    module = benchmarks.module("kernels.gemm_fp8_bench")
    monkeypatch.setattr(common, "DEVICE", "cpu")
    monkeypatch.setattr(common, "copy_rate", lambda: 1e10)
    monkeypatch.setattr(dense, "SIZE", 32)
    emulation = module._emulation

    def wrong(shipped: Any, target: Any) -> Any:
        gemm = emulation(shipped, target)

        def run(problem: Any, operands: Any, d: Any, splits: Any) -> None:
            gemm(problem, operands, d, splits)
            d.mul_(1.1 if shipped.mode == "dgrad row split" else 1)

        return run

    monkeypatch.setattr(module, "_emulation", wrong)
    with common.rounds_of(1):
        rows = common.outcomes(module.run(quick=True), ["dgrad"])
    assert [(row.case, row.contender) for row in rows] == [
        ("small_up dgrad tensor split", OURS),
        ("small_up dgrad row split", "all"),
        ("small_up dgrad block split", OURS),
    ]
    assert "small_up dgrad row split fusegen: relative difference" in rows[1].error
    assert rows[0].fraction is not None and "dense" in rows[0].paired


# Turns and ratios


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 11, 16])
def test_neighbours_are_balanced_over_a_cycle(benchmarks: bench.Benchmarks, count: int) -> None:
    pairs = benchmarks.module("pairs")
    cycle = count if count % 2 == 0 else 2 * count
    rounds = list(pairs.orders(range(count), cycle))
    assert all(sorted(each) == list(range(count)) for each in rounds)
    following = Counter(two for each in rounds for two in pairwise(each))
    assert set(following.values()) <= {cycle // count}
    assert len(following) == count * (count - 1)
    places = Counter((place, who) for each in rounds for place, who in enumerate(each))
    assert set(places.values()) == {cycle // count}


def test_rounds_beyond_a_cycle_are_in_other_orders(benchmarks: bench.Benchmarks) -> None:
    pairs = benchmarks.module("pairs")
    rounds = list(pairs.orders("abcd", 12))
    assert len(rounds) == 12 and rounds == list(pairs.orders("abcd", 12))
    assert rounds[:4] != rounds[4:8] != rounds[8:]
    assert list(pairs.orders("abcd", 12, seed=2)) != rounds


def test_intervals_are_order_statistics(benchmarks: bench.Benchmarks) -> None:
    ratio = benchmarks.module("pairs").ratio
    assert ratio([2.0] * 5, [1.0] * 5) == benchmarks.module("pairs").Ratio(2.0, None, None)
    six = ratio([1.0, 6.0, 2.0, 5.0, 3.0, 4.0], [1.0] * 6)
    assert (six.low, six.median, six.high) == (1.0, 3.5, 6.0), "1 - 2 / 2^6 is 0.97"
    fifteen = ratio([float(each) for each in range(1, 16)], [1.0] * 15)
    assert (fifteen.low, fifteen.median, fifteen.high) == (4.0, 8.0, 12.0), "0.965, next is 0.88"
    drift = [1.0, 1.5, 2.0, 2.5, 3.0, 3.5]
    paired = ratio([1.1 * each for each in drift], drift)
    assert paired.low == pytest.approx(1.1) == paired.high, "drift of the card is in neither"
    with pytest.raises(ValueError, match="zip"):
        ratio([1.0], [1.0, 2.0])


def test_the_interval_holds_the_median_as_often_as_it_says(benchmarks: bench.Benchmarks) -> None:
    ratio, numbers = benchmarks.module("pairs").ratio, random.Random(4)
    held = 0
    for _ in range(2000):
        found = ratio([numbers.lognormvariate(0, 0.1) for _ in range(15)], [1.0] * 15)
        held += found.low <= 1 <= found.high
    assert 0.95 < held / 2000 < 0.98


def test_contenders_take_turns(
    benchmarks: bench.Benchmarks, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = benchmarks.module("common")
    monkeypatch.setattr(common, "DEVICE", "cpu")
    monkeypatch.setattr(common, "REST_SECONDS", 0.0)
    monkeypatch.setattr(common, "calls_per_block", lambda run, seconds: 1)
    ran: list[str] = []
    contenders = {name: lambda _, name=name: ran.append(name) for name in "abcd"}
    assert {len(each) for each in common.compare(contenders).values()} == {common.ROUNDS}
    assert common.ROUNDS >= 15
    rounds = [ran[at : at + 4] for at in range(0, len(ran), 4)]
    assert all(sorted(each) == list("abcd") for each in rounds) and rounds[0] != rounds[1]
    ran.clear()
    with common.rounds_of(3):
        common.compare(contenders)
        common.compare(contenders, rounds=2)
    assert len(ran) == 4 * (3 + 2) and common.ROUNDS >= 15


def test_rows_have_ratios_to_the_baselines_of_their_rounds(benchmarks: bench.Benchmarks) -> None:
    common = benchmarks.module("common")
    times = {OURS: [1.0] * 6 + [9.0], "torch": [2.0] * 6 + [18.0], "other": [3.0] * 7}
    rows = [common.row("a", who, "ms", each) for who, each in times.items()]
    ours, torchs, other = common.with_ratios(rows)
    assert ours["times_ours"] == 1 and ours["paired"].keys() == {"torch"}
    assert ours["paired"]["torch"] == {"median": 0.5, "low": 0.5, "high": 0.5}
    assert torchs["paired"].keys() == {OURS} and torchs["times_ours"] == 2
    assert other["paired"].keys() == {OURS, "torch"} and other["times_ours"] == 3
    uneven = common.with_ratios([rows[0], common.row("a", "torch", "ms", [4.0])])
    assert uneven[1]["times_ours"] == 4 and uneven[1]["paired"][OURS]["low"] is None
    assert "x3.000 of fusegen's time [0.333, 3.000]" in common.describe(other)


# Clocks and power


class FakeNvml:
    """NVML, as far as it is asked."""

    def __init__(self, **failing: int) -> None:
        self.failing = failing
        self.uuid = b""

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name == "nvmlDeviceGetHandleByUUID":
                self.uuid = arguments[0].value
            if name == "nvmlDeviceGetClockInfo":
                assert arguments[1] == 1
                arguments[2]._obj.value = 1695
            if name == "nvmlDeviceGetFieldValues":
                assert arguments[1] == 1 and arguments[2]._obj.field == 186
                arguments[2]._obj.value = 694_500
                arguments[2]._obj.status = self.failing.get("field", 0)
            return self.failing.get(name, 0)

        return call


def test_clock_and_power_are_read(benchmarks: bench.Benchmarks) -> None:
    meter = benchmarks.module("meter")
    assert ctypes.sizeof(meter._FieldValue) == 40, "nvmlFieldValue_t"
    for uuid in ("12-ab", "GPU-12-ab"):
        nvml = FakeNvml()
        assert meter.Meter(uuid, nvml).read() == meter.Reading(1695.0, 694.5)
        assert nvml.uuid == b"GPU-12-ab"
    with pytest.raises(meter.MeterError, match="nvmlDeviceGetHandleByUUID: 6"):
        meter.Meter("x", FakeNvml(nvmlDeviceGetHandleByUUID=6))
    with pytest.raises(meter.MeterError, match="field 186"):
        meter.Meter("x", FakeNvml(field=3)).read()


def test_rows_say_what_the_card_did(benchmarks: bench.Benchmarks) -> None:
    common = benchmarks.module("common")
    readings = [common.Reading(1700.0, 650.0), common.Reading(1650.0, 700.0)]
    row = common.row("a", OURS, "ms", common.Samples([1.0, 2.0], readings))
    assert row.clocks == (1700.0, 1650.0) and row.watts == (650.0, 700.0)
    assert common.row("a", OURS, "ms", [1.0]).clocks == ()


def test_large_tensors_are_compared_in_pieces(
    benchmarks: bench.Benchmarks, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch: Any = importlib.import_module("torch")
    common = benchmarks.module("common")
    a, b = torch.randn(7, 5), torch.randn(7, 5)
    expected = float((a - b).norm() / b.norm())
    for piece in (1, 4, 1000):
        monkeypatch.setattr(common, "PIECE", piece)
        assert common.distance(a, b) == pytest.approx(expected)
    b[3, 2] = float("nan")
    with pytest.raises(SystemExit, match="relative difference nan"):
        common.require_close("a case", a, b)


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
