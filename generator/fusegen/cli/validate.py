"""`fusegen validate`: every problem of the specs."""

from __future__ import annotations

from pathlib import Path

import click

from .exits import ExitCode, problems_json
from .options import KINDS, examples, folders, json_flag
from .output import answer, say


@click.command(
    "validate",
    epilog=examples("fusegen validate", "fusegen validate --specs my_specs --json"),
)
@folders
@json_flag
def command(specs: tuple[Path, ...], templates: tuple[Path, ...], as_json: bool) -> int:
    """Check all specs and show every problem with its place."""
    # Late: help needs none of it.
    from ..commands import listing
    from ..publish.folders import Folders, spec_folders
    from ..spec.diagnostics import SpecError
    from ..spec.usage import command_line, unread_specs

    try:
        entries = listing.validate(Folders(specs, templates))
    except SpecError as error:
        if not as_json:
            raise
        answer({"valid": False, "problems": problems_json(error.problems)})
        return ExitCode.SPEC
    unread = unread_specs(spec_folders(specs))
    if unread:
        say(f"{unread} is not read: {command_line('validate', '--specs', unread)}")
    counts = {kind: sum(entry.kind == kind for entry in entries) for kind in KINDS}
    if as_json:
        answer({"valid": True, "problems": [], "counts": counts})
    else:
        listed = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        click.echo(f"{len(entries)} specs are valid: {listed}")
    return ExitCode.OK
