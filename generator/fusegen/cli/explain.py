"""`fusegen explain`: one module, in words."""

from __future__ import annotations

from pathlib import Path

import click

from . import completion
from .options import examples, folders, json_flag, no_fusion, verify_flag
from .output import answer


@click.command(
    "explain",
    epilog=examples(
        "fusegen explain grouped_mlp bf16 sm_90a", "fusegen explain linear bf16 cpu --json"
    ),
)
@click.argument("module", shell_complete=completion.module)
@click.argument("recipe", shell_complete=completion.recipe)
@click.argument("arch", shell_complete=completion.arch)
@click.option(
    "--option",
    "options",
    multiple=True,
    shell_complete=completion.option,
    help="Choice of the module. Repeatable.",
)
@click.option(
    "--after",
    metavar="PASS",
    shell_complete=completion.pass_,
    help="Print the draft as it is after this pass.",
)
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
            answer({"after": after, "text": draft.splitlines()})
        else:
            click.echo(draft, nl=False)
        return
    found = plans.explain(module, recipe, arch, folders, options, no_fusions, verify=verify)
    if as_json:
        answer({**found.to_json()})
    else:
        click.echo("\n".join(found.lines))
