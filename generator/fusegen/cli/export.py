"""`fusegen export`: bundles in the layout of other tools."""

from __future__ import annotations

from pathlib import Path

import click

from .options import FOLDER, examples, json_flag, one_of
from .output import answer

FORMATS = ("kernels",)


@click.command(
    "export",
    epilog=examples(
        "fusegen export kernels third_party/experts --out hub/experts",
        "fusegen export kernels third_party/experts/sm_90a --out hub/v2 --version 2",
    ),
)
@click.argument("format_name", metavar="FORMAT", callback=one_of("format", FORMATS))
@click.argument("dest", type=FOLDER)
@click.option("--out", type=FOLDER, required=True, help="Folder of the repository to write.")
@click.option("--name", help="Name of the kernel; by default the prefix of the namespace.")
@click.option(
    "--version", type=click.IntRange(min=0), default=1, show_default=True, help="Of the kernel."
)
@json_flag
def command(
    format_name: str, dest: Path, out: Path, name: str | None, version: int, as_json: bool
) -> None:
    """Write the bundle DEST, or those in the folder DEST, in another tool's layout.

    FORMAT is `kernels`: a repository that Hugging Face's library of this name loads, with each
    bundle as `build/<variant>`. Bundles with kernels have to be built before.
    """
    # Late: help needs none of it.
    from .. import api

    done = api.export_kernels(dest, out, name=name, version=version)
    if as_json:
        answer({"exported": [each.to_json() for each in done]})
        return
    for each in done:
        click.echo(f"{each.folder}  {each.name} {each.version}, from {each.bundle}")
