"""The command line: parses, calls `fusegen.api`, prints, sets the exit code.

Nothing heavy is imported before a command runs, so that `--help` answers at once. The answer goes
to stdout, everything else to stderr.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from . import __version__
from .columns import aligned

if TYPE_CHECKING:
    from .api import BundleReport, Generated, PlanRow, Sources
    from .bench import Benchmarks
    from .build.library import BuildReport, Progress

TRACEBACK = "FUSEGEN_TRACEBACK"
"""Environment variable; `1` prints the Python traceback of every error."""

KINDS = ("ops", "fusions", "modules", "recipes", "archs", "targets")
NEW_KINDS = ("recipe", "op", "arch", "module")

F = TypeVar("F", bound=Callable[..., Any])


class ExitCode(IntEnum):
    """What a run ended with."""

    OK = 0
    DRIFT = 1
    USAGE = 2
    SPEC = 3
    REFUSED = 4
    BUILD = 5
    INTERNAL = 123
    INTERRUPTED = 130


def main() -> NoReturn:
    """The program `fusegen`."""
    # Specs, expressions and plans live until the process ends: looking through them for garbage as
    # often as Python does by default takes a tenth of the time and finds nothing. Looking through
    # all of it once more at the end, before the memory is given back anyway, takes another tenth.
    # Every built-in target together makes some 120,000 objects.
    gc.set_threshold(500_000)
    atexit.register(gc.freeze)
    program(prog_name="fusegen")
    raise AssertionError("the group ends the process")


class Program(click.Group):
    """The group of all commands; the one place where errors become messages and exit codes."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run one command line and end the process."""
        if os.environ.get("NO_COLOR"):
            extra["color"] = False  # Otherwise click decides by whether it writes to a terminal.
        with warnings.catch_warnings():
            _show_spec_warnings()
            try:
                code = super().main(*args, **{**extra, "standalone_mode": False})
            except Exception as error:
                code = _failed(error)
            except KeyboardInterrupt:
                _say("interrupted")
                code = ExitCode.INTERRUPTED
        sys.exit(int(code) if isinstance(code, int) else ExitCode.OK)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command; an unknown one ends with the closest name."""
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            ctx.fail(f"unknown command {args[0]!r}{_did_you_mean(args[0], self.commands)}")
        return super().resolve_command(ctx, args)


def _one_of(
    what: str, choices: Sequence[str]
) -> Callable[[click.Context, click.Parameter, str | None], str | None]:
    """A check of an argument that may be one of a few words; the error names the closest."""

    def check(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
        if value is not None and value not in choices:
            hint = _did_you_mean(value, choices)
            raise click.UsageError(f"unknown {what} {value!r}{hint}", ctx)
        return value

    return check


def _did_you_mean(word: str, choices: Iterable[str]) -> str:
    from .spec.diagnostics import did_you_mean

    return did_you_mean(word, choices)


def _failed(error: Exception) -> int:
    """Print an error and choose its exit code."""
    if os.environ.get(TRACEBACK) == "1":
        traceback.print_exception(error)
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, click.ClickException):
        error.show()
        return error.exit_code
    if isinstance(error, click.Abort):
        _say("interrupted")
        return ExitCode.INTERRUPTED
    if isinstance(error, BrokenPipeError):
        # The reader has left (`| head`); closing stdout again would only complain.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        return ExitCode.OK
    code = _code_of(error)
    if code is ExitCode.INTERNAL:
        _say(
            f"internal error: {type(error).__name__}: {error}\n"
            f"This is a fault of fusegen {__version__}, not yours. Please report it with the "
            f"command line and the output of the same command with {TRACEBACK}=1 in front."
        )
    elif isinstance(error, OSError) and error.filename:
        _say(f"{error.filename}: {error.strerror}")
    else:
        _say(str(error))
    return code


def _code_of(error: Exception) -> ExitCode:
    """The exit code of an error that a command raised."""
    from .bench import BenchError
    from .build.toolchain import BuildError
    from .demo.run import DemoError
    from .emit.fileset import RenderError
    from .publish.lock import LockError
    from .publish.publish import PublishError
    from .selection import UsageError
    from .spec.diagnostics import SpecError
    from .spec.scaffold import ExistsError

    known: tuple[tuple[type[Exception], ExitCode], ...] = (
        (UsageError, ExitCode.USAGE),
        (DemoError, ExitCode.USAGE),
        (SpecError, ExitCode.SPEC),
        (RenderError, ExitCode.SPEC),
        (PublishError, ExitCode.REFUSED),
        (LockError, ExitCode.REFUSED),
        (ExistsError, ExitCode.REFUSED),
        # A folder that may not be written to, a full disk: the system refuses.
        (OSError, ExitCode.REFUSED),
        (BenchError, ExitCode.REFUSED),
        (BuildError, ExitCode.BUILD),
    )
    return next((code for kind, code in known if isinstance(error, kind)), ExitCode.INTERNAL)


def _show_spec_warnings() -> None:
    """Warnings of ours are messages, each once; others look as ever."""
    others = warnings.showwarning
    seen: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if category.__name__ != "SpecWarning":
            others(message, category, *where, **more)
        elif str(message) not in seen:
            seen.add(str(message))
            _say(f"warning: {message}")

    warnings.showwarning = show


def _say(text: str) -> None:
    """A message on stderr."""
    click.echo(f"fusegen: {text}", err=True)


def _answer(data: object) -> None:
    """A JSON document on stdout."""
    click.echo(json.dumps(data, indent=2, ensure_ascii=False))


# ---- options that several commands share


def _folders(command: F) -> F:
    directory = click.Path(path_type=Path, file_okay=False)
    command = click.option(
        "--templates",
        type=directory,
        multiple=True,
        help="Also read templates from this folder. Repeatable.",
    )(command)
    return click.option(
        "--specs",
        type=directory,
        multiple=True,
        help="Also read specs from this folder. Repeatable.",
    )(command)


def _no_fusion(command: F) -> F:
    return click.option(
        "--no-fusion",
        "no_fusions",
        metavar="NAME",
        multiple=True,
        help="Leave this fusion out. Repeatable.",
    )(command)


def _json(command: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Answer in JSON.")(command)


def _cells(command: F) -> F:
    for name, text in (
        ("option", "Choice that the modules offer at generation time. Repeatable."),
        ("recipe", "Recipe. Repeatable."),
        ("module", "Module. Repeatable."),
        ("arch", "Architecture, or `native` for that of the visible GPU. Repeatable."),
        ("target", "Named selection of archs, modules and recipes. Repeatable."),
    ):
        command = click.option(f"--{name}", f"{name}s", multiple=True, help=text)(command)
    return command


def _out(text: str, default: Path | None = Path("generated")) -> Callable[[F], F]:
    return click.option(
        "--out",
        type=click.Path(path_type=Path, file_okay=False),
        default=default,
        show_default=default is not None,
        help=text,
    )


def _sources(specs: tuple[Path, ...], templates: tuple[Path, ...]) -> Sources:
    from .api import Sources

    return Sources(specs, templates)


def _examples(*lines: str) -> str:
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in lines)))


# ---- commands


@click.group(
    cls=Program,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=_examples("fusegen list modules", "fusegen generate --target cpu"),
)
@click.version_option(__version__, prog_name="fusegen")
def program() -> None:
    """Write specialised, fused PyTorch modules ahead of time.

    Exit codes: 0 fine, 1 drift, 2 usage, 3 bad spec or template, 4 refused, 5 build failed,
    123 internal error. FUSEGEN_TRACEBACK=1 shows the Python traceback of any error.
    """


@program.command(
    "list",
    short_help="Show what exists.",
    epilog=_examples("fusegen list", "fusegen list recipes --json"),
)
@click.argument(
    "kind", required=False, callback=_one_of("kind", KINDS), metavar=f"[{'|'.join(KINDS)}]"
)
@_folders
@_json
def list_command(
    kind: str | None, specs: tuple[Path, ...], templates: tuple[Path, ...], as_json: bool
) -> None:
    """Show what exists: ops, fusions, modules, recipes, archs and targets."""
    from . import api

    entries = api.list_specs(kind, _sources(specs, templates))
    if as_json and kind:
        _answer([entry.to_json() for entry in entries])
    elif as_json:
        _answer({each: [e.to_json() for e in entries if e.kind == each] for each in KINDS})
    else:
        rows = [(entry.name, entry.summary) for entry in entries]
        if kind is None:
            rows = [(f"{entry.kind}/{entry.name}", entry.summary) for entry in entries]
        _show_rows(rows)


@program.command(
    short_help="Say what one module does and costs.",
    epilog=_examples(
        "fusegen explain grouped_mlp bf16 sm_90a", "fusegen explain linear bf16 cpu --json"
    ),
)
@click.argument("module")
@click.argument("recipe")
@click.argument("arch")
@click.option("--option", "options", multiple=True, help="Choice of the module. Repeatable.")
@_no_fusion
@_folders
@_json
def explain(
    module: str,
    recipe: str,
    arch: str,
    options: tuple[str, ...],
    no_fusions: tuple[str, ...],
    specs: tuple[Path, ...],
    templates: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Say what one module does, keeps, runs and costs, or why it cannot be made."""
    from . import api

    found = api.explain(module, recipe, arch, _sources(specs, templates), options, no_fusions)
    if as_json:
        _answer({"version": 1, **found.to_json()})
    else:
        click.echo("\n".join(found.lines))


@program.command(
    short_help="Check all specs.",
    epilog=_examples("fusegen validate", "fusegen validate --specs my_specs --json"),
)
@_folders
@_json
def validate(specs: tuple[Path, ...], templates: tuple[Path, ...], as_json: bool) -> int:
    """Check all specs and show every problem with its place."""
    from . import api
    from .spec.diagnostics import SpecError

    try:
        entries = api.validate(_sources(specs, templates))
    except SpecError as error:
        if not as_json:
            raise
        problems = [
            {"file": p.loc.file, "line": p.loc.line, "column": p.loc.column, "message": p.message}
            for p in error.problems
        ]
        _answer({"version": 1, "valid": False, "problems": problems})
        return ExitCode.SPEC
    counts = {kind: sum(entry.kind == kind for entry in entries) for kind in KINDS}
    if as_json:
        _answer({"version": 1, "valid": True, "problems": [], "counts": counts})
    else:
        listed = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        click.echo(f"{len(entries)} specs are valid: {listed}")
    return ExitCode.OK


@program.command(
    short_help="Show what would be made, and what cannot.",
    epilog=_examples("fusegen plan --target hopper", "fusegen plan --arch sm_90a --module linear"),
)
@_cells
@_folders
@_json
def plan(
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
    from . import api

    query = api.Query(targets, archs, modules, recipes, options)
    rows = api.plan(query, _sources(specs, templates))
    if as_json:
        _answer({"version": 1, "modules": [row.to_json() for row in rows]})
    else:
        head = ("MODULE", "RECIPE", "ARCH", "STATUS", "KERNELS", "REASON")
        _show_rows([head, *map(_plan_row, rows)])


def _show_rows(rows: Iterable[tuple[str, ...]]) -> None:
    for line in aligned(rows):
        click.echo(line)


def _plan_row(row: PlanRow) -> tuple[str, ...]:
    name = " ".join((row.module, *row.options))
    return (name, row.recipe, row.arch, row.status, str(len(row.kernels)), row.reason)


@program.command(
    short_help="Write bundles of generated modules.",
    epilog=_examples(
        "fusegen generate --target cpu --target hopper",
        "fusegen generate --arch sm_90a --module grouped_mlp --recipe bf16 --namespace acme",
    ),
)
@_cells
@click.option("--remove", is_flag=True, help="Take the named modules away instead.")
@_out("Folder that holds one bundle per architecture.")
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
@_no_fusion
@click.option("--all-fusions", is_flag=True, help="Leave out no fusion that the bundles did.")
@_folders
@_json
def generate(
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
    specs: tuple[Path, ...],
    templates: tuple[Path, ...],
    as_json: bool,
) -> int:
    """Write bundles: standalone packages of generated modules.

    A target replaces what the bundles it names hold; --arch, --module and --recipe add to it, and
    with --remove take away. Without any of them every bundle below --out is made anew from what
    its lock records. --no-fusion and --all-fusions are about whole bundles; locks record them.
    """
    from . import api

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
        _sources(specs, templates),
        no_fusions if no_fusions or all_fusions else None,
    )
    writing = not (check or show_diff or dry_run)
    done = api.generate(
        request,
        api.Policy.WRITE if writing else api.Policy.COMPARE,
        prune=not no_prune,
        accept_format=accept_format,
    )
    _show_unsupported(done)
    if as_json:
        _answer(_generated_json(done, with_diff=show_diff))
    else:
        if show_diff:
            _show_diff(done)
        for report in done.bundles:
            _show_summary(report, listing=dry_run or check)
        _show_schemas(done)
    if check:
        return ExitCode.DRIFT if done.drifted else ExitCode.OK
    if done.refused:
        _show_refused(done)
        return ExitCode.REFUSED
    return ExitCode.OK


def _generated_json(done: Generated, *, with_diff: bool) -> dict[str, object]:
    data: dict[str, object] = {"version": 1, "drifted": done.drifted, **done.to_json()}
    return data | {"diff": _diff_text(done)} if with_diff else data


def _show_unsupported(done: Generated) -> None:
    for report in done.bundles:
        for cell in report.unsupported:
            _say(f"not made: {cell.cell} for {cell.arch}: {cell.reason}")


def _show_summary(report: BundleReport, *, listing: bool) -> None:
    if listing:
        for change in report.differing:
            click.echo(f"{change.kind.value:<14}  {report.bundle / change.path}")
    note = "; an interrupted publish was completed first" if report.rolled_forward else ""
    click.echo(f"{report.bundle}  {report.changes.summary()}{note}")


def _show_schemas(done: Generated) -> None:
    for schema in done.schemas:
        click.echo(f"{schema.kind:<14}  {schema.path}")


def _show_refused(done: Generated) -> None:
    from .publish.publish import RefusedError

    for report in done.refused:
        _say(str(RefusedError(report.changes)))


def _diff_text(done: Generated) -> str:
    from .publish.changes import unified_diff

    parts = [unified_diff(report.changes) for report in done.bundles]
    return "".join((*parts, *(schema.diff() for schema in done.schemas)))


def _show_diff(done: Generated) -> None:
    styles = {"+": {"fg": "green"}, "-": {"fg": "red"}, "@": {"fg": "cyan"}}
    for line in _diff_text(done).splitlines(keepends=True):
        bold = line.startswith(("+++", "---"))
        style: dict[str, Any] = {"bold": True} if bold else styles.get(line[0], {})
        click.echo(click.style(line, **style), nl=False)


@program.command(
    short_help="Compare bundles with their specs.",
    epilog=_examples("fusegen check", "fusegen check generated/sm_90a vendored/hopper"),
)
@click.argument("bundles", nargs=-1, type=click.Path(path_type=Path, file_okay=False))
@_out("Where to look for bundles if none is named.")
@_folders
@_json
def check(
    bundles: tuple[Path, ...],
    out: Path,
    specs: tuple[Path, ...],
    templates: tuple[Path, ...],
    as_json: bool,
) -> int:
    """Regenerate BUNDLES in memory and compare; exit 1 if they differ from the disk.

    A library that was built from other sources than lie there is a difference, too.

    Without names, every bundle below --out is checked and, inside the checkout of fusegen, the
    JSON Schemas of the specs.
    """
    from . import api

    sources = _sources(specs, templates)
    found = api.check(bundles, out, sources)
    if as_json:
        _answer(_generated_json(found, with_diff=True))
    elif found.drifted:
        _show_drift(found, sources)
    else:
        count = len(found.bundles)
        subject = "1 bundle is what its" if count == 1 else f"{count} bundles are what their"
        _say(f"{subject} specs and templates give")
    return ExitCode.DRIFT if found.drifted else ExitCode.OK


def _show_drift(found: Generated, sources: Sources) -> None:
    from .selection import regeneration

    drifted = [report for report in found.bundles if report.regenerates]
    stale = [report for report in found.bundles if report.stale]
    for report in drifted:
        click.echo(f"{report.bundle} is not what its specs and templates give:")
        for line in _drift_lines(report):
            click.echo(f"  {line}")
    for report in stale:
        click.echo(f"{report.bundle} has a library that was not built from it:")
        for what in dict.fromkeys(report.stale.values()):
            cells = [cell for cell, each in report.stale.items() if each == what]
            click.echo(f"  {what}: {', '.join(cells)}")
    for schema in found.schemas:
        click.echo(f"{schema.path} is {schema.kind}")
    click.echo(
        "Why it matters: what runs is not what the specs say, and the next `fusegen generate` "
        "would change it unreviewed."
    )
    _show_diff(found)
    commands = [regeneration([report.bundle for report in drifted], sources.options)]
    if found.schemas and not drifted:
        commands.append("fusegen generate")
    commands += [f"fusegen build {report.bundle}" for report in stale]
    click.echo("\n".join(("To fix it:", *filter(None, commands))))
    _show_refused(found)


def _drift_lines(report: BundleReport) -> list[str]:
    from .publish.changes import ChangeKind

    words = {
        ChangeKind.CREATE: "missing",
        ChangeKind.UPDATE: "changed",
        ChangeKind.PRUNE: "extra",
        ChangeKind.EDITED: "edited by hand",
        ChangeKind.REFORMATTED: "reformatted",
        ChangeKind.UNKNOWN_EXISTS: "in the way",
        ChangeKind.OUTSIDE: "outside the bundle",
    }
    lines = [f"{words[c.kind]:<14}  {c.path}" for c in report.changes if c.kind in words]
    if report.changes.interrupted:
        lines.append("a publish was cut short here")
    if not lines:
        lines.append("fusegen.lock records another selection or other files")
    return lines


@program.command(
    short_help="Compile the kernels of bundles.",
    epilog=_examples("fusegen build generated/sm_90a", "fusegen build generated/sm_90a --jobs 2"),
)
@click.argument(
    "bundles", nargs=-1, required=True, type=click.Path(path_type=Path, file_okay=False)
)
@click.option("--jobs", type=click.IntRange(min=1), help="Units compiled at a time.")
@_json
def build(bundles: tuple[Path, ...], jobs: int | None, as_json: bool) -> None:
    """Compile the kernels of BUNDLES; each gets lib/<namespace>.so."""
    from . import api

    tools = api.find_tools(bundles)
    _say(f"building with {tools.describe()}")
    reports = []
    for bundle in bundles:
        with _progress(bundle) as progress:
            report = api.build(bundle, jobs=jobs, progress=progress, toolchain=tools)
        reports.append(report)
        if not as_json:
            click.echo(_build_line(report))
    if as_json:
        _answer({"version": 1, "bundles": [report.as_dict() for report in reports]})


def _build_line(report: BuildReport) -> str:
    cached = sum(unit.cached for unit in report.units)
    state = "linked" if report.linked else "up to date"
    units = len(report.units)
    return f"{report.library}  {state}: {units} units, {cached} cached, {report.seconds:.1f} s"


class _Bar:
    """A build's progress on stderr: a line per compiled unit and, on a terminal, a bar."""

    def __init__(self, title: str) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
        )

        console = Console(stderr=True)
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._title = title
        self._total = self._done = 0

    def __enter__(self) -> Progress:
        self._bar.start()
        self._task = self._bar.add_task(self._title, total=None)
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def start(self, total: int) -> None:
        """See `fusegen.build.Progress`."""
        self._total = total
        self._bar.update(self._task, total=total)

    def unit_done(self, name: str, *, cached: bool, seconds: float) -> None:
        """See `fusegen.build.Progress`."""
        self._done += 1
        self._bar.advance(self._task)
        if not cached:
            self._line(f"[{self._done}/{self._total}] {name}  {seconds:.1f} s")

    def link_done(self, library: Path, *, cached: bool) -> None:
        """See `fusegen.build.Progress`."""
        if not cached:
            self._line(f"linked {library}")

    def _line(self, text: str) -> None:
        self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)


def _progress(bundle: Path) -> _Bar:
    return _Bar(f"compiling {bundle}")


@program.command(
    short_help="Train a small model and compare.",
    epilog=_examples("fusegen demo", "fusegen demo --arch cpu --steps 50 --output curves.svg"),
)
@click.option(
    "--arch",
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
@_out("Folder for the demo's bundle; by default `demo` in fusegen's cache folder.", None)
@_folders
@_json
def demo(
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
    from . import api

    with _Bar("compiling the demo") as progress:
        ready = api.prepare_demo(
            arch, out=out, say=_say, progress=progress, sources=_sources(specs, templates)
        )
    api.demo(ready, steps=steps, output=output, as_json=as_json)


@program.command(
    short_help="Measure, compare with records, tune.",
    epilog=_examples("fusegen bench grouped mlp --check", "fusegen bench --sweep gemm_sm90"),
)
@click.argument("names", nargs=-1)
@click.option("--check", is_flag=True, help="Write nothing; exit 1 where a ratio got worse.")
@click.option(
    "--case",
    "cases",
    metavar="TEXT",
    multiple=True,
    help="Measure the cases whose names hold this; the record of the day keeps its others. "
    "Repeatable.",
)
@click.option("--rounds", type=click.IntRange(min=1), help="Turns of every contender.")
@click.option(
    "--sweep",
    "families",
    metavar="FAMILY",
    multiple=True,
    help="Find the selection rules of a kernel family and write them into the spec of the "
    "visible GPU's architecture. Repeatable.",
)
@click.option(
    "--quick",
    is_flag=True,
    help="Sweep a part of the sizes; of benchmarks, smaller cases, which are not recorded.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=1),
    help="Time to measure each family of a sweep; what it is too short for is left out evenly.",
)
@click.option("--recorded", is_flag=True, help="Sweep without measuring: fit what is on record.")
@click.option("--dry-run", is_flag=True, help="Leave the spec as it is; print the difference.")
@click.option(
    "--results",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of records; by default `benchmarks/results` of the checkout.",
)
@_json
def bench(
    names: tuple[str, ...],
    check: bool,
    cases: tuple[str, ...],
    rounds: int | None,
    families: tuple[str, ...],
    quick: bool,
    seconds: float | None,
    recorded: bool,
    dry_run: bool,
    results: Path | None,
    as_json: bool,
) -> int:
    """Run benchmarks of the checkout by NAMES, by default all that run on this machine.

    Records go to --results; a case that fails stands in them with its error, and in the end makes
    the exit code 4. `summary` writes docs/performance.md from the records of the checkout. A
    --check compares with the newest record of the same device: time of others over ours, and our
    part of the ceiling, beyond the recorded spread and 5 %.
    """
    from . import bench as benchmarks

    found = benchmarks.find()
    if families:
        if names or check:
            raise click.UsageError("--sweep goes neither with names nor with --check")
        if cases or rounds:
            raise click.UsageError("--case and --rounds go with benchmarks, not with --sweep")
        swept = found.sweep(
            families,
            quick=quick,
            seconds=seconds,
            recorded=recorded,
            dry_run=dry_run,
            folder=results,
        )
        _show_sweep(swept, dry_run=dry_run, as_json=as_json)
        return ExitCode.OK
    if seconds or recorded or dry_run:
        raise click.UsageError("--seconds, --recorded and --dry-run go with --sweep")
    chosen = found.chosen(names)
    if quick:
        found.require_quick(names)
        if check:
            raise click.UsageError("--quick and --check: nothing quick is on record")
    if check:
        if cases or rounds:
            raise click.UsageError("--check compares all cases: it goes with no --case or --rounds")
        return _check_benchmarks(found, chosen, results, as_json)

    def run(name: str) -> tuple[Mapping[str, Any], list[str]]:
        return _run_benchmark(found, name, results, quick, rounds, cases)

    return _run_benchmarks(found, chosen, run, as_json=as_json)


def _run_benchmarks(
    found: Benchmarks,
    names: Sequence[str],
    run: Callable[[str], tuple[Mapping[str, Any], list[str]]],
    *,
    as_json: bool,
) -> int:
    """Run them all, whatever fails of them, and say so at the end."""
    from .bench import BenchError

    data: list[Mapping[str, Any]] = []
    failed: list[str] = []
    for name in names:
        _say(f"benchmark {name}")
        try:
            result, lines = run(name)
        except BenchError as error:
            result, lines = {"name": name, "error": str(error), "files": []}, []
            failed.append(str(error))
        failed += found.failures(result)
        data.append(result)
        if not as_json and lines:
            click.echo("\n".join(lines))
    if as_json:
        _answer({"version": 1, "benchmarks": data})
    for line in failed:
        _say(line)
    return ExitCode.REFUSED if failed else ExitCode.OK


def _run_benchmark(
    found: Benchmarks,
    name: str,
    folder: Path | None,
    quick: bool,
    rounds: int | None,
    cases: Sequence[str],
) -> tuple[Mapping[str, Any], list[str]]:
    """What one gives, with the files it is in, and the lines that say it."""
    if name == "summary":
        files = [str(path) for path in found.summarise()]
        return {"name": name, "files": files}, files
    result = found.measure(name, quick=quick, rounds=rounds, cases=cases)
    files = [] if quick else [str(found.save(result, folder, partial=bool(cases)))]
    return {**result, "files": files}, [*found.lines(result), *files]


def _check_benchmarks(
    found: Benchmarks, names: Sequence[str], folder: Path | None, as_json: bool
) -> int:
    from .bench import BenchError

    records = found.records(names, folder)
    findings = []
    failed: list[str] = []
    for name, record in records.items():
        _say(f"benchmark {name}, against that of {record['environment']['date'][:10]}")
        try:
            measured = found.measure(name)
        except BenchError as error:
            failed.append(str(error))
            continue
        failed += found.failures(measured)
        findings += found.findings(measured, record)
    worse = [each for each in findings if each.worse]
    if as_json:
        from dataclasses import asdict

        rows = [{**asdict(each), "worse": each.worse} for each in findings]
        _answer({"version": 1, "worse": bool(worse), "findings": rows})
    else:
        for each in findings:
            click.echo(f"{'worse' if each.worse else 'note '}  {each}")
        if not worse and not failed:
            _say(f"no ratio is worse than its record: {', '.join(names)}")
    for line in failed:
        _say(line)
    if worse:
        return ExitCode.DRIFT
    return ExitCode.REFUSED if failed else ExitCode.OK


def _show_sweep(swept: Any, *, dry_run: bool, as_json: bool) -> None:
    from .tuning.tune import report

    if as_json:
        _answer(
            {
                "version": 1,
                "families": [each.to_json() for each in swept.tuned],
                "files": [str(path) for path in swept.records],
                "spec": str(swept.spec),
                "written": bool(swept.difference) and not dry_run,
                "diff": swept.difference,
            }
        )
        return
    lines = [line for each in swept.tuned for line in report(each)]
    click.echo("\n".join([*lines, *map(str, swept.records)]))
    if not swept.difference:
        _say("the rules stay as they are")
    elif dry_run:
        click.echo(swept.difference, nl=False)
    else:
        click.echo(str(swept.spec))
        _say(
            "wrote the rules; see that the comments beside them still hold; next: fusegen "
            "generate, fusegen build, and the tests on a GPU"
        )


@program.command(
    short_help="Start a spec from a commented file.",
    epilog=_examples(
        "fusegen new recipe my_fp8 --from bf16", "fusegen new op squared_relu --specs my_specs"
    ),
)
@click.argument("kind", callback=_one_of("kind", NEW_KINDS), metavar=f"[{'|'.join(NEW_KINDS)}]")
@click.argument("name")
@click.option("--from", "origin", metavar="NAME", help="Copy this spec, with its comments.")
@click.option(
    "--specs",
    type=click.Path(path_type=Path, file_okay=False),
    help="Spec folder to write to. By default `specs` here; inside the checkout of fusegen, its "
    "own.",
)
def new(kind: str, name: str, origin: str | None, specs: Path | None) -> None:
    """Start a spec: write one YAML file, check it, and say what to do next."""
    from .spec import scaffold

    made = scaffold.new(kind, name, origin=origin, folder=specs)
    click.echo(str(made.path))
    _say("wrote it; next:\n" + "\n".join(f"  {step}" for step in made.steps))
