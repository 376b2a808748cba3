"""`fusegen explain`: one module, in words."""

from __future__ import annotations

from pathlib import Path

import click

from . import colours, completion
from .options import examples, folders, json_flag, no_fusion, verify_flag
from .output import answer


@click.command(
    "explain",
    epilog=examples(
        "fusegen explain grouped_mlp bf16 sm_90a",
        "fusegen explain linear bf16 sm_90a --sizes T=8192,K=4096,N=4096 --gpu h200",
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
@click.option(
    "--sizes",
    metavar="T=65536,...",
    help="Sizes of all dimensions, by symbol or keyword: print numbers, too.",
)
@click.option(
    "--gpu",
    metavar="NAME",
    shell_complete=completion.gpu,
    help="GPU whose floors the numbers have; by default one that the architecture is for.",
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
    sizes: str | None,
    gpu: str | None,
    verify: bool,
    options: tuple[str, ...],
    no_fusions: tuple[str, ...],
    specs: tuple[Path, ...],
    templates: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Say what one module does, keeps, runs and costs, or why it cannot be made.

    With --sizes also in numbers: operations, bytes, and the least time that a GPU needs for them by
    its data sheet.
    """
    # Late: help needs none of it.
    from ..commands import plans
    from ..publish.folders import Folders

    folders = Folders(specs, templates)
    if gpu and not sizes:
        raise click.UsageError("--gpu goes with --sizes: floors are those of sizes")
    if after and sizes:
        raise click.UsageError("--after prints a draft, which has no numbers; leave --sizes out")
    if after:
        draft = plans.draft_after(
            after, module, recipe, arch, folders, options, no_fusions, verify=verify
        )
        if as_json:
            answer({"after": after, "text": draft.splitlines()})
        else:
            click.echo(draft, nl=False)
        return
    found = plans.explain(
        *(module, recipe, arch, folders, options, no_fusions),
        verify=verify,
        sizes=sizes,
        gpu=gpu,
    )
    if as_json:
        answer({**found.to_json()})
    else:
        click.echo("\n".join(colours.coloured(colours.fitted(found.lines))))
