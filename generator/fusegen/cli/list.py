"""`fusegen list`: what exists."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from . import completion
from .options import KINDS, examples, folders, json_flag, one_of
from .output import answer, show_rows

if TYPE_CHECKING:
    from ..commands.listing import ExtensionEntry, OptionEntry

OPTIONS = "options"
EXTENSIONS = "extensions"
LISTED = (*KINDS, OPTIONS, EXTENSIONS)


@click.command(
    "list",
    epilog=examples("fusegen list options", "fusegen list recipes --json"),
)
@click.argument(
    "kind",
    required=False,
    callback=one_of("kind", LISTED),
    metavar=f"[{'|'.join(LISTED)}]",
    shell_complete=completion.choices(LISTED),
)
@folders
@json_flag
def command(
    kind: str | None, specs: tuple[Path, ...], templates: tuple[Path, ...], as_json: bool
) -> None:
    """Show what exists: specs by kind, options of modules, and installed extensions."""
    # Late, as in every verb: its help needs none of it.
    from ..commands import listing
    from ..publish.folders import Folders

    if kind == OPTIONS:
        _show_options(listing.list_options(Folders(specs, templates)), as_json)
        return
    if kind == EXTENSIONS:
        _show_extensions(listing.list_extensions(), as_json)
        return
    entries = listing.list_specs(kind, Folders(specs, templates))
    if as_json:
        kinds = [kind] if kind else KINDS
        answer({each: [e.to_json() for e in entries if e.kind == each] for each in kinds})
    else:
        rows = [(entry.name, entry.summary) for entry in entries]
        if kind is None:
            rows = [(f"{entry.kind}/{entry.name}", entry.summary) for entry in entries]
        show_rows(rows)


def _show_options(options: Sequence[OptionEntry], as_json: bool) -> None:
    """Each option with its choices, and where it applies."""
    if as_json:
        answer({OPTIONS: [option.to_json() for option in options]})
        return
    for option in options:
        click.echo(f"{option.name}: {option.summary}")
        for word, summary in option.choices.items():
            default = " (default)" if word == option.default else ""
            click.echo(f"  {word}{default}: {summary}")
        click.echo(f"  modules: {', '.join(option.modules)}")
        click.echo(f"  recipes: {', '.join(option.recipes)}")


def _show_extensions(found: Sequence[ExtensionEntry], as_json: bool) -> None:
    """Each extension with its package, and what it adds."""
    if as_json:
        answer({EXTENSIONS: [each.to_json() for each in found]})
        return
    for each in found:
        click.echo(f"{each.name}: {each.package} {each.version} ({each.digest[:12]})")
        click.echo(f"  steps: {', '.join(each.steps) or 'none'}")
        click.echo(f"  families: {', '.join(each.families) or 'none'}")
