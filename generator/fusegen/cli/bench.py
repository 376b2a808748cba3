"""`fusegen bench`: runs the benchmarks of the checkout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import completion
from .exits import ExitCode
from .options import FOLDER, examples, json_flag
from .output import answer, say

if TYPE_CHECKING:
    from ..commands.bench import Benchmarks


@click.command(
    "bench",
    epilog=examples("fusegen bench grouped mlp --check", "fusegen bench --sweep gemm_sm90"),
)
@click.argument("names", nargs=-1, shell_complete=completion.benchmark)
@click.option("--check", is_flag=True, help="Write nothing; exit 1 where a ratio got worse.")
@click.option(
    "--case",
    "cases",
    metavar="TEXT",
    multiple=True,
    help="Measure the cases whose names hold this; the record of the day keeps its others. "
    "Repeatable.",
)
@click.option("--rounds", type=click.IntRange(min=1), help="Turns of every contender.")
@click.option(
    "--sweep",
    "families",
    metavar="FAMILY",
    multiple=True,
    shell_complete=completion.family,
    help="Find the selection rules of a kernel family and write them into the spec of the "
    "visible GPU's architecture. Repeatable.",
)
@click.option(
    "--quick",
    is_flag=True,
    help="Sweep a part of the sizes; of benchmarks, smaller cases, which are not recorded.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=1),
    help="Time to measure each family of a sweep; what it is too short for is left out evenly.",
)
@click.option("--recorded", is_flag=True, help="Sweep without measuring: fit what is on record.")
@click.option(
    "--model",
    metavar="GPU",
    help="Sweep without a GPU: rules of this GPU's architecture by what its data sheet promises, "
    "marked as not measured.",
)
@click.option(
    "--first-light",
    metavar="ARCH",
    help="The first run on a GPU: tests, rules of all families, sanitizer, benchmarks, and the "
    "records of all that.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Leave the spec as it is, and print the difference; of a first run, print its commands.",
)
@click.option(
    "--results",
    type=FOLDER,
    help="Folder of records; by default `benchmarks/results` of the checkout.",
)
@json_flag
def command(
    names: tuple[str, ...],
    check: bool,
    cases: tuple[str, ...],
    rounds: int | None,
    families: tuple[str, ...],
    quick: bool,
    seconds: float | None,
    recorded: bool,
    model: str | None,
    first_light: str | None,
    dry_run: bool,
    results: Path | None,
    as_json: bool,
) -> int:
    """Run benchmarks of the checkout by NAMES, by default all that run on this machine.

    Records go to --results; a case that fails stands in them with its error, and in the end makes
    the exit code 4. `summary` writes docs/performance.md from the records of the checkout. A
    --check compares with the newest record of the same device: time of others over ours, and our
    part of the ceiling, beyond the recorded spread and 5 %.
    """
    # Late: help needs none of it.
    from ..commands import bench as benchmarks

    if first_light:
        if names or check or cases or rounds or families or quick or seconds or recorded or model:
            raise click.UsageError("--first-light goes with --dry-run, --json and nothing else")
        return _first_light(first_light, dry_run=dry_run, as_json=as_json)
    found = benchmarks.find()
    if families:
        if names or check:
            raise click.UsageError("--sweep goes neither with names nor with --check")
        if cases or rounds:
            raise click.UsageError("--case and --rounds go with benchmarks, not with --sweep")
        if model and (recorded or seconds):
            raise click.UsageError(
                "--model measures nothing: it goes with no --recorded or --seconds"
            )
        swept = found.sweep(
            families,
            quick=quick,
            seconds=seconds,
            recorded=recorded,
            dry_run=dry_run,
            folder=results,
            model=model or "",
        )
        _show_sweep(swept, dry_run=dry_run, as_json=as_json)
        return ExitCode.OK
    if seconds or recorded or model or dry_run:
        raise click.UsageError("--seconds, --recorded, --model and --dry-run go with --sweep")
    chosen = found.chosen(names)
    if quick:
        found.require_quick(names)
        if check:
            raise click.UsageError("--quick and --check: nothing quick is on record")
    if check:
        if cases or rounds:
            raise click.UsageError("--check compares all cases: it goes with no --case or --rounds")
        return _check_benchmarks(found, chosen, results, as_json)

    def run(name: str) -> tuple[Mapping[str, Any], list[str]]:
        return _run_benchmark(found, name, results, quick, rounds, cases)

    return _run_benchmarks(found, chosen, run, as_json=as_json)


def _first_light(arch: str, *, dry_run: bool, as_json: bool) -> int:
    # Late: help needs none of it.
    from ..commands import first_light

    steps = first_light.first_light(arch, dry_run=dry_run, say=say)
    if as_json:
        rows = [{"what": step.what, "command": step.line} for step in steps]
        answer({"arch": arch, "ran": not dry_run, "steps": rows})
    elif dry_run:
        width = max(len(step.what) for step in steps)
        click.echo("\n".join(f"{step.what:<{width}}  {step.line}" for step in steps))
    return ExitCode.OK


def _run_benchmarks(
    found: Benchmarks,
    names: Sequence[str],
    run: Callable[[str], tuple[Mapping[str, Any], list[str]]],
    *,
    as_json: bool,
) -> int:
    """Run them all, whatever fails of them, and say so at the end."""
    # Late: help needs none of it.
    from ..commands.bench import BenchError

    data: list[Mapping[str, Any]] = []
    failed: list[str] = []
    for name in names:
        say(f"benchmark {name}")
        try:
            result, lines = run(name)
        except BenchError as error:
            result, lines = {"name": name, "error": str(error), "files": []}, []
            failed.append(str(error))
        failed += found.failures(result)
        data.append(result)
        if not as_json and lines:
            click.echo("\n".join(lines))
    if as_json:
        answer({"benchmarks": data})
    for line in failed:
        say(line)
    return ExitCode.REFUSED if failed else ExitCode.OK


def _run_benchmark(
    found: Benchmarks,
    name: str,
    folder: Path | None,
    quick: bool,
    rounds: int | None,
    cases: Sequence[str],
) -> tuple[Mapping[str, Any], list[str]]:
    """What one gives, with the files it is in, and the lines that say it."""
    if name == "summary":
        files = [str(path) for path in found.summarise()]
        return {"name": name, "files": files}, files
    result = found.measure(name, quick=quick, rounds=rounds, cases=cases)
    files = [] if quick else [str(found.save(result, folder, partial=bool(cases)))]
    return {**result, "files": files}, [*found.lines(result), *files]


def _check_benchmarks(
    found: Benchmarks, names: Sequence[str], folder: Path | None, as_json: bool
) -> int:
    # Late: help needs none of it.
    from ..commands.bench import BenchError

    records = found.records(names, folder)
    findings = []
    failed: list[str] = []
    for name, record in records.items():
        say(f"benchmark {name}, against that of {record['environment']['date'][:10]}")
        try:
            measured = found.measure(name)
        except BenchError as error:
            failed.append(str(error))
            continue
        failed += found.failures(measured)
        findings += found.findings(measured, record)
    worse = [each for each in findings if each.worse]
    if as_json:
        rows = [{**asdict(each), "worse": each.worse} for each in findings]
        answer({"worse": bool(worse), "findings": rows})
    else:
        for each in findings:
            click.echo(f"{'worse' if each.worse else 'note '}  {each}")
        if not worse and not failed:
            say(f"no ratio is worse than its record: {', '.join(names)}")
    for line in failed:
        say(line)
    if worse:
        return ExitCode.DRIFT
    return ExitCode.REFUSED if failed else ExitCode.OK


def _show_sweep(swept: Any, *, dry_run: bool, as_json: bool) -> None:
    # Late: help needs none of it.
    from ..tuning.tune import report

    if as_json:
        answer(
            {
                "families": [each.to_json() for each in swept.tuned],
                "files": [str(path) for path in swept.records],
                "spec": str(swept.spec),
                "written": bool(swept.difference) and not dry_run,
                "diff": swept.difference,
            }
        )
        return
    lines = [line for each in swept.tuned for line in report(each)]
    click.echo("\n".join([*lines, *map(str, swept.records)]))
    if not swept.difference:
        say("the rules stay as they are")
    elif dry_run:
        click.echo(swept.difference, nl=False)
    else:
        click.echo(str(swept.spec))
        say(
            "wrote the rules; see that the comments beside them still hold; next: fusegen "
            "generate, fusegen build, and the tests on a GPU"
        )
