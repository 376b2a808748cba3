"""`fusegen demo`: trains a small model twice."""

from __future__ import annotations

from pathlib import Path

import click

from ..cli import completion
from ..cli.options import examples, folders, json_flag
from ..cli.options import out as out_option
from ..cli.output import say
from ..cli.progress import Bar


@click.command(
    "demo",
    epilog=examples("fusegen demo", "fusegen demo --arch cpu --steps 50 --output curves.svg"),
)
@click.option(
    "--arch",
    shell_complete=completion.arch,
    help="Architecture; by default that of the visible GPU, or cpu where there is none or its "
    "kernels cannot be built.",
)
@click.option("--steps", type=click.IntRange(min=1), help="Training steps of each model.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("demo.png"),
    show_default=True,
    help="Picture of the curves (.png, .svg or .pdf).",
)
@out_option("Folder for the demo's bundle; by default `demo` in fusegen's cache folder.", None)
@folders
@json_flag
def command(
    arch: str | None,
    steps: int | None,
    output: Path,
    out: Path | None,
    specs: tuple[Path, ...],
    templates: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Train a small mixture-of-experts model with plain PyTorch and with a generated module.

    The bundle is kept in fusegen's cache folder (FUSEGEN_CACHE_DIR, else fusegen below
    XDG_CACHE_HOME, else ~/.cache/fusegen), so that nothing but the picture is left behind.
    """
    # Late: help needs none of it.
    from ..api import Folders
    from .bundle import prepare
    from .run import run_demo

    with Bar("compiling the demo") as progress:
        ready = prepare(
            arch, out=out, say=say, progress=progress, folders=Folders(specs, templates)
        )
    run_demo(ready.folder, ready.arch, steps=steps, output=output, as_json=as_json)
