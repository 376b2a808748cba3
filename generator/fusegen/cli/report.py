"""`fusegen report`: a page about the modules of bundles."""

from __future__ import annotations

from pathlib import Path

import click

from . import completion
from .options import FOLDER, examples, folders, json_flag
from .output import answer, say

FILE = Path("fusegen-report.html")


@click.command(
    "report",
    epilog=examples(
        "fusegen report third_party/experts",
        "fusegen report generated/sm_90a --sizes T=65536,E=64,H=2048,F=1408 --gpu h200",
    ),
)
@click.argument("dest", nargs=-1, required=True, type=FOLDER)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=FILE,
    show_default=True,
    help="File to write; one that is no report is not written over.",
)
@click.option(
    "--sizes",
    metavar="T=65536,...",
    help="Sizes of dimensions, by symbol or keyword, of which every module takes its own: numbers "
    "beside the formulas.",
)
@click.option(
    "--gpu",
    metavar="NAME",
    shell_complete=completion.gpu,
    help="GPU whose floors the numbers have; by default one that the architecture is for.",
)
@click.option(
    "--results",
    type=FOLDER,
    help="Folder with records of `fusegen bench`, to show what was measured; by default that of "
    "the checkout, if fusegen runs from one.",
)
@folders
@json_flag
def command(
    dest: tuple[Path, ...],
    out: Path,
    sizes: str | None,
    gpu: str | None,
    results: Path | None,
    specs: tuple[Path, ...],
    templates: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Write a page about the modules of bundles: their plans as graphs, their support, figures.

    DEST is a bundle, or a folder of bundles. The page is one file of HTML that loads nothing. It
    shows what the specs of the bundles give, and says which files on the disk are not that.
    """
    # Late: help needs none of it.
    from .. import api

    found = api.report(
        dest, out, api.Folders(specs, templates), sizes=sizes, gpu=gpu, results=results
    )
    for bundle, how in found.unlike.items():
        say(f"{bundle} is not what its specs give, which is what the report shows: {how}")
    for cell, names in found.lacking.items():
        say(f"{cell} has no numbers: --sizes lacks {', '.join(names)}")
    if as_json:
        answer(found.to_json())
    else:
        click.echo(str(found.path))
