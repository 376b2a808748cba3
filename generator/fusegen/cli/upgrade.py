"""`fusegen upgrade`: bundles brought up to this fusegen, edits and all."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

import click

from .exits import ExitCode
from .options import FOLDER, examples, folders, json_flag, verify_flag
from .output import answer, say


@click.command(
    "upgrade",
    epilog=examples(
        "fusegen upgrade third_party/experts",
        "fusegen upgrade third_party/experts --on-edit merge",
    ),
)
@click.argument("dest", type=FOLDER)
@click.option(
    "--on-edit",
    type=click.Choice(["refuse", "merge", "take-new"]),
    default="refuse",
    show_default=True,
    help="What becomes of a file that you have edited and that there is new output for.",
)
@click.option(
    "--old-fusegen",
    metavar="COMMAND",
    help="Command that runs the fusegen which wrote the bundle, such as `uvx fusegen==0.1.0`, for "
    "the base of a merge where git has lost it.",
)
@verify_flag
@folders
@json_flag
def command(
    dest: Path,
    on_edit: str,
    old_fusegen: str | None,
    verify: bool,
    specs: tuple[Path, ...],
    templates: tuple[Path, ...],
    as_json: bool,
) -> int:
    """Make the bundle DEST anew, or those in the folder DEST, and keep what you have edited.

    Your edits are merged with the new output as git merges branches; the base is what fusegen
    wrote. Exit 1 if conflicts are left, which stand in the files; 4, with nothing written, if a
    file is not committed or not to be merged. A deleted file comes back.
    """
    # Late: help needs none of it.
    from .. import api
    from ..publish.changes import PRISTINE_NAME
    from . import differences

    done = api.upgrade(
        dest,
        api.OnEdit(on_edit),
        api.Folders(specs, templates),
        old_fusegen=old_fusegen,
        verify=verify,
    )
    left = api.conflicts(done)
    if as_json:
        rows = [{"bundle": str(b), "path": c.path, "kind": c.kind.value} for b, c in left]
        answer({**differences.generated_json(done, with_diff=False), "conflicts": rows})
    else:
        for report in done.bundles:
            differences.show_summary(report, listing=False)
        for bundle, change in left:
            kind = "conflict" if change.conflicted else "not generated any more, yours now"
            click.echo(f"{kind}  {bundle / change.path}")
    if done.refused:
        differences.show_refused(done)
        return ExitCode.REFUSED
    if left:
        say("edit the files above until they are as you want them, run their tests, then commit")
    written = [report.bundle for report in done.bundles if report.regenerates]
    if any((bundle / PRISTINE_NAME).exists() for bundle in written):
        say(f"commit {PRISTINE_NAME} with the rest, for the next merge: git add {quote(str(dest))}")
    return ExitCode.DRIFT if left else ExitCode.OK
