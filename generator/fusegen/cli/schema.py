"""`fusegen schema`: what editors check and complete specs by."""

from __future__ import annotations

from pathlib import Path

import click

from . import completion
from .options import FOLDER, examples, json_flag, one_of
from .output import answer

KINDS = ("op", "fusion", "module", "recipe", "arch", "target")


@click.command(
    "schema", epilog=examples("fusegen schema recipe", "fusegen schema --specs my_specs")
)
@click.argument(
    "kind",
    required=False,
    callback=one_of("kind", KINDS),
    metavar=f"[{'|'.join(KINDS)}]",
    shell_complete=completion.choices(KINDS),
)
@click.option(
    "--specs",
    type=FOLDER,
    help="Write the schemas of all kinds into `schema` of this spec folder, where the first line "
    "of a spec from `fusegen new` has editors look.",
)
@json_flag
def command(kind: str | None, specs: Path | None, as_json: bool) -> None:
    """Print the JSON Schema of a kind of spec, or write those of all kinds for editors."""
    # Late: help needs none of it.
    from ..commands import schemas

    if (kind is None) == (specs is None):
        raise click.UsageError("name a kind to print, or a folder to write to with --specs")
    if kind is not None:
        text = schemas.schema_of(kind)
        if as_json:
            answer({"kind": kind, "schema": schemas.data_of(kind)})
        else:
            click.echo(text, nl=False)
        return
    assert specs is not None
    written = schemas.write(specs)
    if as_json:
        answer({"files": [str(path) for path in written]})
        return
    for path in written:
        click.echo(str(path))
