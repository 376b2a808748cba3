"""`fusegen eject`: a module that becomes one's own."""

from __future__ import annotations

from pathlib import Path

import click

from .options import FOLDER, examples, folders, json_flag
from .output import answer, say


@click.command(
    "eject",
    epilog=examples(
        "fusegen eject third_party/experts grouped_mlp__fp8_block",
        "fusegen eject third_party/experts/cpu silu",
    ),
)
@click.argument("dest", type=FOLDER)
@click.argument("module")
@folders
@json_flag
def command(
    dest: Path, module: str, specs: tuple[Path, ...], templates: tuple[Path, ...], as_json: bool
) -> None:
    """Make MODULE of the bundle DEST, or of those in the folder DEST, your own.

    Its files move to `ejected/` as they are, with copies of all that they need; `<MODULE>.py` stays
    and imports from there. From then on fusegen neither checks nor changes any of them.
    """
    # Late: help needs none of it.
    from .. import api
    from ..commands.build import SOURCES
    from ..spec.usage import command_line

    done = api.eject(dest, module, api.Folders(specs, templates))
    if as_json:
        answer({"ejected": [each.to_json() for each in done]})
        return
    for each in done:
        click.echo(f"{each.cell} is yours: {each.folder}")
    places = (path for each in done for path in (each.bundle, each.folder))
    built = dict.fromkeys(str(path) for path in places if (path / SOURCES).exists())
    if built:
        say(f"to build the kernels, each by itself now: {command_line('build', *built)}")
