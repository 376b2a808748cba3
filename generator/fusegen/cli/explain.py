"""`fusegen explain`: one module, in words."""

from __future__ import annotations

from pathlib import Path

import click

from .options import examples, folders, json_flag
from .output import answer


@click.command(
    "explain",
    epilog=examples(
        "fusegen explain grouped_mlp bf16 sm_90a", "fusegen explain linear bf16 cpu --json"
    ),
)
@click.argument("module")
@click.argument("recipe")
@click.argument("arch")
@click.option("--option", "options", multiple=True, help="Choice of the module. Repeatable.")
@folders
@json_flag
def command(
    module: str,
    recipe: str,
    arch: str,
    options: tuple[str, ...],
    specs: tuple[Path, ...],
    templates: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Say what one module does, keeps, runs and costs, or why it cannot be made."""
    # Late: help needs none of it.
    from ..commands import plans
    from ..publish.folders import Folders

    found = plans.explain(module, recipe, arch, Folders(specs, templates), options)
    if as_json:
        answer({"version": 1, **found.to_json()})
    else:
        click.echo("\n".join(found.lines))
