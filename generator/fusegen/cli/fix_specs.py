"""`fusegen fix-specs`: rewrites specs of an older edition."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .exits import ExitCode
from .options import examples, json_flag
from .output import answer, say

if TYPE_CHECKING:
    from ..commands.fix_specs import Rewrite


@click.command(
    "fix-specs",
    epilog=examples("fusegen fix-specs my_specs --diff", "fusegen fix-specs my_specs"),
)
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path), metavar="[PATH]...")
@click.option("--check", is_flag=True, help="Write nothing; exit 1 if anything would change.")
@click.option("--diff", "show_diff", is_flag=True, help="Write nothing; print the changes.")
@json_flag
def command(paths: tuple[Path, ...], check: bool, show_diff: bool, as_json: bool) -> int:
    """Rewrite specs of an older edition in the current one.

    PATH is a spec folder, or one spec in the folder of its kind; by default it is `specs` here.
    What an edition changed is changed, and nothing else: comments, order and layout stay. All files
    are rewritten or, where one cannot be, none.
    """
    # Late: help needs none of it.
    from ..commands.fix_specs import fix_specs, stale_schemas
    from ..commands.scaffold import default_folder

    places = paths or (default_folder(),)
    writing = not (check or show_diff)
    found = fix_specs(places, write=writing)
    diff = "".join(each.diff() for each in found)
    if as_json:
        data: dict[str, object] = {"drifted": bool(found), "written": writing and bool(found)}
        data["files"] = [each.to_json() for each in found]
        answer(data | ({"diff": diff} if show_diff else {}))
    elif show_diff:
        click.echo(diff, nl=False)
    else:
        for each in found:
            click.echo(f"{each.path}  edition {each.edition}: {_what(each)}")
    if not found:
        say("all specs are of the current edition")
    for place in stale_schemas(places) if writing else ():
        say(f"next, for editors:\n  fusegen schema --specs {place}")
    return ExitCode.DRIFT if check and found else ExitCode.OK


def _what(rewrite: Rewrite) -> str:
    """What changes in a file, in a line."""
    return f"without {', '.join(rewrite.removed)}" if rewrite.removed else "its number alone"
