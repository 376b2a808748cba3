"""`fusegen list`: what exists."""

from __future__ import annotations

from pathlib import Path

import click

from .options import KINDS, examples, folders, json_flag, one_of
from .output import answer, show_rows


@click.command(
    "list",
    epilog=examples("fusegen list", "fusegen list recipes --json"),
)
@click.argument(
    "kind", required=False, callback=one_of("kind", KINDS), metavar=f"[{'|'.join(KINDS)}]"
)
@folders
@json_flag
def command(
    kind: str | None, specs: tuple[Path, ...], templates: tuple[Path, ...], as_json: bool
) -> None:
    """Show what exists: ops, fusions, modules, recipes, archs and targets."""
    # Late, as in every verb: its help needs none of it.
    from ..commands import listing
    from ..publish.folders import Folders

    entries = listing.list_specs(kind, Folders(specs, templates))
    if as_json and kind:
        answer([entry.to_json() for entry in entries])
    elif as_json:
        answer({each: [e.to_json() for e in entries if e.kind == each] for each in KINDS})
    else:
        rows = [(entry.name, entry.summary) for entry in entries]
        if kind is None:
            rows = [(f"{entry.kind}/{entry.name}", entry.summary) for entry in entries]
        show_rows(rows)
