"""`fusegen check`: bundles against their specs."""

from __future__ import annotations

from pathlib import Path

import click

from .exits import ExitCode
from .options import FOLDER, examples, folders, json_flag, verify_flag
from .options import out as out_option
from .output import answer, say


@click.command(
    "check",
    epilog=examples("fusegen check", "fusegen check generated/sm_90a vendored/hopper"),
)
@click.argument("bundles", nargs=-1, type=FOLDER)
@out_option("Where to look for bundles if none is named.")
@verify_flag
@folders
@json_flag
def command(
    bundles: tuple[Path, ...],
    out: Path,
    verify: bool,
    specs: tuple[Path, ...],
    templates: tuple[Path, ...],
    as_json: bool,
) -> int:
    """Regenerate BUNDLES in memory and compare; exit 1 if they differ from the disk.

    A folder of bundles stands for all in it.

    A library that was built from other sources than lie there is a difference, too.

    Without names, every bundle below --out is checked and, inside the checkout of fusegen, the
    JSON Schemas of the specs.
    """
    # Late: help needs none of it.
    from .. import api
    from . import differences

    folders = api.Folders(specs, templates)
    found = api.check(bundles, out, folders, verify=verify)
    if as_json:
        answer(differences.generated_json(found, with_diff=True))
    elif found.drifted:
        differences.show_drift(found, folders)
    else:
        count = len(found.bundles)
        subject = "1 bundle is what its" if count == 1 else f"{count} bundles are what their"
        say(f"{subject} specs and templates give")
    return ExitCode.DRIFT if found.drifted else ExitCode.OK
