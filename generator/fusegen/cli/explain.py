"""`fusegen explain`: one module, in words."""

from __future__ import annotations

from pathlib import Path

import click

from .options import examples, folders, json_flag, no_fusion, verify_flag
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
@click.option("--after", metavar="PASS", help="Print the draft as it is after this pass.")
@verify_flag
@no_fusion
@folders
@json_flag
def command(
    module: str,
    recipe: str,
    arch: str,
    after: str | None,
    verify: bool,
    options: tuple[str, ...],
    no_fusions: tuple[str, ...],
    specs: tuple[Path, ...],
    templates: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Say what one module does, keeps, runs and costs, or why it cannot be made."""
    # Late: help needs none of it.
    from ..commands import plans
    from ..publish.folders import Folders

    folders = Folders(specs, templates)
    if after:
        draft = plans.draft_after(
            after, module, recipe, arch, folders, options, no_fusions, verify=verify
        )
        if as_json:
            answer({"version": 1, "after": after, "text": draft.splitlines()})
        else:
            click.echo(draft, nl=False)
        return
    found = plans.explain(module, recipe, arch, folders, options, no_fusions, verify=verify)
    if as_json:
        answer({"version": 1, **found.to_json()})
    else:
        click.echo("\n".join(found.lines))
