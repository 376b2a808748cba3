"""`fusegen status`: the state of every file of bundles."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .exits import ExitCode
from .options import FOLDER, examples, folders, json_flag
from .output import answer, show_rows

if TYPE_CHECKING:
    from ..commands.status import BundleStatus


@click.command(
    "status",
    epilog=examples("fusegen status third_party/experts", "fusegen status generated --json"),
)
@click.argument("dest", nargs=-1, required=True, type=FOLDER)
@folders
@json_flag
def command(
    dest: tuple[Path, ...], specs: tuple[Path, ...], templates: tuple[Path, ...], as_json: bool
) -> int:
    """Say what state the files of bundles are in; exit 1 if any is not pristine.

    DEST is a bundle, or a folder of bundles. A file is pristine, edited, reformatted (edited in
    layout only), stale (this fusegen writes another), an orphan (this fusegen writes none),
    missing, in the way, outside the bundle through a link, or in conflict since an upgrade.
    """
    # Late: help needs none of it.
    from .. import api

    found = api.status(dest, api.Folders(specs, templates))
    if as_json:
        answer(found.to_json())
    else:
        for bundle in found.bundles:
            _show(bundle)
    return ExitCode.OK if found.clean else ExitCode.DRIFT


def _show(status: BundleStatus) -> None:
    counts = ", ".join(f"{count} {state}" for state, count in status.counts.items())
    writer = f"fusegen {status.generator}" if status.generator else "an interrupted publish"
    click.echo(f"{status.bundle}  {status.namespace}, by {writer}: {counts}")
    rows = [(f"  {state}", path) for path, state in status.files.items() if state != "pristine"]
    show_rows(rows)
