"""`fusegen vendor`: bundles in a repository of one's own."""

from __future__ import annotations

from pathlib import Path

import click

from .exits import ExitCode
from .options import FOLDER, cells, examples, folders, json_flag, no_fusion, verify_flag
from .output import answer, say


@click.command(
    "vendor",
    epilog=examples(
        "fusegen vendor third_party/experts --target hopper --namespace acme",
        "fusegen vendor experts --arch cpu --module silu --recipe bf16 --namespace acme",
    ),
)
@click.argument("dest", type=FOLDER)
@cells
@click.option(
    "--namespace",
    metavar="PREFIX",
    required=True,
    help="Prefix of the namespaces of your copy's ops, such as the name of your project.",
)
@no_fusion
@verify_flag
@folders
@json_flag
def command(
    dest: Path,
    targets: tuple[str, ...],
    archs: tuple[str, ...],
    modules: tuple[str, ...],
    recipes: tuple[str, ...],
    options: tuple[str, ...],
    namespace: str,
    no_fusions: tuple[str, ...],
    verify: bool,
    specs: tuple[Path, ...],
    templates: tuple[Path, ...],
    as_json: bool,
) -> int:
    """Write bundles into DEST, a folder of your repository, and nothing that they do not need.

    DEST gets a folder per architecture, and becomes a package. Copies of different namespaces and
    versions work in one process.
    """
    # Late: help needs none of it.
    from .. import api
    from ..spec.usage import command_line
    from . import differences

    request = api.Request(
        dest,
        targets,
        archs,
        modules,
        recipes,
        options,
        namespace=namespace,
        folders=api.Folders(specs, templates),
        no_fusions=no_fusions or None,
    )
    done = api.vendor(request, verify=verify)
    differences.show_unsupported(done)
    if as_json:
        answer(differences.generated_json(done, with_diff=False))
    else:
        for report in done.bundles:
            differences.show_summary(report, listing=False)
    if done.refused:
        differences.show_refused(done)
        return ExitCode.REFUSED
    if any(report.regenerates for report in done.bundles):
        upgrade = command_line("upgrade", dest)
        say(f"commit {dest} as it is, so that `{upgrade}` can merge your edits")
    return ExitCode.OK
