"""`fusegen plan`: what would be made, and what cannot."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .options import cells, examples, folders, json_flag
from .output import answer, show_rows

if TYPE_CHECKING:
    from ..commands.plans import PlanRow


@click.command(
    "plan",
    epilog=examples("fusegen plan --target hopper", "fusegen plan --arch sm_90a --module linear"),
)
@cells
@folders
@json_flag
def command(
    targets: tuple[str, ...],
    archs: tuple[str, ...],
    modules: tuple[str, ...],
    recipes: tuple[str, ...],
    options: tuple[str, ...],
    specs: tuple[Path, ...],
    templates: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Show what would be made of a selection, and why the rest cannot be; writes nothing.

    Without options, every module is planned with every recipe on every architecture.
    """
    # Late: help needs none of it.
    from ..commands import plans
    from ..publish.folders import Folders

    query = plans.Query(targets, archs, modules, recipes, options)
    rows = plans.plan(query, Folders(specs, templates))
    if as_json:
        answer({"modules": [row.to_json() for row in rows]})
    else:
        head = ("MODULE", "RECIPE", "ARCH", "STATUS", "KERNELS", "REASON")
        show_rows([head, *map(_plan_row, rows)])


def _plan_row(row: PlanRow) -> tuple[str, ...]:
    name = " ".join((row.module, *row.options))
    return (name, row.recipe, row.arch, row.status, str(len(row.kernels)), row.reason)
