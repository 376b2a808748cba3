"""`fusegen build`: compiles the kernels of bundles."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from . import completion
from .options import FOLDER, examples, json_flag
from .output import answer, say
from .progress import Bar

if TYPE_CHECKING:
    from ..build.library import BuildReport


@click.command(
    "build",
    epilog=examples(
        "fusegen build generated/sm_90a --jobs 2", "fusegen build experts --arch native"
    ),
)
@click.argument("folders", metavar="BUNDLES...", nargs=-1, required=True, type=FOLDER)
@click.option(
    "--arch",
    "archs",
    multiple=True,
    shell_complete=completion.arch,
    help="Build only the bundles of this architecture, `native` for that of the visible GPU. "
    "Repeatable.",
)
@click.option("--jobs", type=click.IntRange(min=1), help="Units compiled at a time.")
@json_flag
def command(
    folders: tuple[Path, ...], archs: tuple[str, ...], jobs: int | None, as_json: bool
) -> None:
    """Compile the kernels of BUNDLES; each gets lib/<namespace>.so.

    A folder of bundles stands for those of them that have kernels, a fat bundle for those in it.
    """
    # Late: help needs none of it.
    from ..commands import build

    bundles = build.with_kernels(folders, archs)
    tools = build.find_tools(bundles)
    say(f"building with {tools.describe()}")
    reports = []
    for bundle in bundles:
        with Bar(f"compiling {bundle}") as progress:
            report = build.build(bundle, jobs=jobs, progress=progress, toolchain=tools)
        reports.append(report)
        if not as_json:
            click.echo(_build_line(report))
    if as_json:
        answer({"bundles": [report.as_dict() for report in reports]})


def _build_line(report: BuildReport) -> str:
    cached = sum(unit.cached for unit in report.units)
    state = "linked" if report.linked else "up to date"
    units = len(report.units)
    return f"{report.library}  {state}: {units} units, {cached} cached, {report.seconds:.1f} s"
