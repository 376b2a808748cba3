"""`fusegen generate`: writes bundles."""

from __future__ import annotations

from pathlib import Path

import click

from .exits import ExitCode
from .options import cells, examples, folders, json_flag, no_fusion, verify_flag
from .options import out as out_option
from .output import answer


@click.command(
    "generate",
    epilog=examples(
        "fusegen generate --target cpu --target hopper",
        "fusegen generate --arch sm_90a --module grouped_mlp --recipe bf16 --namespace acme",
    ),
)
@cells
@click.option("--remove", is_flag=True, help="Take the named modules away instead.")
@out_option("Folder that holds one bundle per architecture.")
@click.option(
    "--namespace",
    metavar="PREFIX",
    help="Prefix of the bundles' op namespaces, `fusegen` unless a bundle records another. Two "
    "bundles of one namespace cannot be imported into one process.",
)
@click.option("--check", is_flag=True, help="Write nothing; exit 1 if anything would change.")
@click.option("--diff", "show_diff", is_flag=True, help="Write nothing; print the changes.")
@click.option("--dry-run", is_flag=True, help="Write nothing; say which files would change.")
@click.option("--no-prune", is_flag=True, help="Keep files that are no longer generated.")
@click.option("--accept-format", is_flag=True, help="Overwrite files that were only laid out anew.")
@no_fusion
@click.option("--all-fusions", is_flag=True, help="Leave out no fusion that the bundles did.")
@verify_flag
@folders
@json_flag
def command(
    targets: tuple[str, ...],
    archs: tuple[str, ...],
    modules: tuple[str, ...],
    recipes: tuple[str, ...],
    options: tuple[str, ...],
    remove: bool,
    out: Path,
    namespace: str | None,
    check: bool,
    show_diff: bool,
    dry_run: bool,
    no_prune: bool,
    accept_format: bool,
    no_fusions: tuple[str, ...],
    all_fusions: bool,
    verify: bool,
    specs: tuple[Path, ...],
    templates: tuple[Path, ...],
    as_json: bool,
) -> int:
    """Write bundles: standalone packages of generated modules.

    A target replaces what the bundles it names hold; --arch, --module and --recipe add to it, and
    with --remove take away. Without any of them every bundle below --out is made anew from what
    its lock records. --no-fusion and --all-fusions are about whole bundles; locks record them.
    """
    # Late: help needs none of it.
    from .. import api
    from . import differences

    if no_fusions and all_fusions:
        raise click.UsageError("--all-fusions leaves none out; remove it, or --no-fusion")
    request = api.Request(
        out,
        targets,
        archs,
        modules,
        recipes,
        options,
        remove,
        namespace,
        api.Folders(specs, templates),
        no_fusions if no_fusions or all_fusions else None,
    )
    writing = not (check or show_diff or dry_run)
    done = api.generate(
        request,
        api.Policy.WRITE if writing else api.Policy.COMPARE,
        prune=not no_prune,
        accept_format=accept_format,
        verify=verify,
    )
    differences.show_unsupported(done)
    if as_json:
        answer(differences.generated_json(done, with_diff=show_diff))
    else:
        if show_diff:
            differences.show_diff(done)
        for report in done.bundles:
            differences.show_summary(report, listing=dry_run or check)
        differences.show_schemas(done)
        differences.show_next(done)
    if check:
        return ExitCode.DRIFT if done.drifted else ExitCode.OK
    if done.refused:
        differences.show_refused(done)
        return ExitCode.REFUSED
    return ExitCode.OK
