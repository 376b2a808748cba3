"""`fusegen new`: starts a spec."""

from __future__ import annotations

from pathlib import Path

import click

from . import completion
from .options import FOLDER, examples, json_flag, one_of
from .output import answer, say

KINDS = ("recipe", "op", "arch", "module")


@click.command(
    "new",
    epilog=examples(
        "fusegen new recipe my_fp8 --from bf16", "fusegen new op squared_relu --specs my_specs"
    ),
)
@click.argument(
    "kind",
    callback=one_of("kind", KINDS),
    metavar=f"[{'|'.join(KINDS)}]",
    shell_complete=completion.choices(KINDS),
)
@click.argument("name")
@click.option(
    "--from",
    "origin",
    metavar="NAME",
    shell_complete=completion.origin,
    help="Copy this spec, with its comments.",
)
@click.option(
    "--specs",
    type=FOLDER,
    help="Spec folder to write to. By default `specs` here; inside the checkout of fusegen, its "
    "own.",
)
@json_flag
def command(kind: str, name: str, origin: str | None, specs: Path | None, as_json: bool) -> None:
    """Start a spec: write one YAML file, check it, and say what to do next."""
    # Late: help needs none of it.
    from ..commands import scaffold

    made = scaffold.new(kind, name, origin=origin, folder=specs)
    if as_json:
        answer({"path": str(made.path), "next": list(made.steps)})
        return
    click.echo(str(made.path))
    say("wrote it; next:\n" + "\n".join(f"  {step}" for step in made.steps))
