"""What `generate` and `check` print of the difference between bundles and the disk."""

from __future__ import annotations

from typing import Any

import click

from ..commands.following import next_steps
from ..commands.report import BundleReport, Generated
from ..emit.manifest import MANIFEST, differing
from ..emit.text.fold import fold
from ..publish.changes import STATES, unified_diff
from ..publish.folders import Folders
from ..publish.publish import RefusedError
from ..publish.remedies import regeneration, whole
from ..spec.usage import command_line
from .output import say

_UNDER_CELLS = len("cells: ")


def generated_json(done: Generated, *, with_diff: bool) -> dict[str, object]:
    """The answer of `--json`."""
    data: dict[str, object] = {"drifted": done.drifted, **done.to_json()}
    return data | {"diff": _diff_text(done)} if with_diff else data


def show_unsupported(done: Generated) -> None:
    """Name the cells of targets that cannot be made, and why."""
    for report in done.bundles:
        for cell in report.unsupported:
            say(f"not made: {cell.cell} for {cell.arch}: {cell.reason}")


def show_summary(report: BundleReport, *, listing: bool) -> None:
    """One line for a bundle; before it, with `listing`, one for every file that differs."""
    if listing:
        for change in report.differing:
            click.echo(f"{change.kind.value:<14}  {report.bundle / change.path}")
    note = "; an interrupted publish was completed first" if report.rolled_forward else ""
    click.echo(f"{report.bundle}  {report.changes.summary()}{note}")
    if report.cells_written:
        for line in fold(f"  cells: {', '.join(report.cells_written)}", _UNDER_CELLS):
            click.echo(line)


def show_next(done: Generated) -> None:
    """What to do with the bundles that were written."""
    steps = next_steps(report for report in done.bundles if report.cells_written)
    if steps:
        say("next:\n" + "\n".join(f"  {step}" for step in steps))


def show_schemas(done: Generated) -> None:
    """One line for every schema file that differs."""
    for schema in done.schemas:
        click.echo(f"{schema.kind:<14}  {schema.path}")


def show_refused(done: Generated) -> None:
    """Say which files were edited by hand, and what to do."""
    for report in done.refused:
        say(str(RefusedError(report.changes)))


def _diff_text(done: Generated) -> str:
    parts = [unified_diff(report.changes) for report in done.bundles]
    return "".join((*parts, *(schema.diff() for schema in done.schemas)))


def show_diff(done: Generated) -> None:
    """A unified diff of all files, in colours where stdout is a terminal."""
    styles = {"+": {"fg": "green"}, "-": {"fg": "red"}, "@": {"fg": "cyan"}}
    for line in _diff_text(done).splitlines(keepends=True):
        bold = line.startswith(("+++", "---"))
        style: dict[str, Any] = {"bold": True} if bold else styles.get(line[0], {})
        click.echo(click.style(line, **style), nl=False)


def show_drift(found: Generated, folders: Folders) -> None:
    """What differs, why it matters, the diff, and the commands that mend it."""
    drifted = [report for report in found.bundles if report.regenerates]
    stale = [report for report in found.bundles if report.stale]
    for report in drifted:
        click.echo(f"{report.bundle} is not what its specs and templates give:")
        for line in _drift_lines(report):
            click.echo(f"  {line}")
    for report in stale:
        click.echo(f"{report.bundle} has a library that was not built from it:")
        for what in dict.fromkeys(report.stale.values()):
            cells = [cell for cell, each in report.stale.items() if each == what]
            click.echo(f"  {what}: {', '.join(cells)}")
    for schema in found.schemas:
        click.echo(f"{schema.path} is {schema.kind}")
    click.echo(
        "Why it matters: what runs is not what the specs say, and whoever generates next would "
        "change it unreviewed."
    )
    show_diff(found)
    # An edited file keeps `generate` from writing any bundle beside it; ways out are said below.
    stuck = {whole(report.bundle).parent for report in found.refused}
    regenerated = [each.bundle for each in drifted if whole(each.bundle).parent not in stuck]
    commands = [regeneration(regenerated, folders.options)] if regenerated else []
    if found.schemas and not drifted:
        commands.append("fusegen generate")
    commands += [command_line("build", report.bundle) for report in stale]
    if any(commands):
        click.echo("\n".join(("To fix it:", *filter(None, commands))))
    show_refused(found)


def _drift_lines(report: BundleReport) -> list[str]:
    lines = [f"{STATES[change.kind]:<14}  {change.path}" for change in report.differing]
    for change in report.differing:
        if change.path == MANIFEST:
            cells = ", ".join(differing(change.before, change.after))
            lines += fold(f"{'':<14}  cells: {cells}", _UNDER_CELLS)
    if report.changes.interrupted:
        lines.append("a publish was cut short here")
    lines += report.extensions
    if not lines:
        lines.append("fusegen.lock records another selection or other files")
    return lines
