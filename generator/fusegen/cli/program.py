"""The program `fusegen`: finds the verb, loads it, and turns what it raises into an exit code."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from .. import __version__
from .exits import ExitCode, failed, interrupted, show_spec_warnings
from .options import JSON_FLAG, did_you_mean, examples
from .verbs import VERBS


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
    """The group of all verbs; the one place where errors become messages and exit codes."""

    def main(self, args: Sequence[str] | None = None, *more: Any, **extra: Any) -> Any:
        """Run one command line and end the process."""
        words = sys.argv[1:] if args is None else list(args)
        # Asked of the words: an error may come before they are parsed.
        as_json = JSON_FLAG in words
        if os.environ.get("NO_COLOR"):
            extra["color"] = False  # Otherwise click decides by whether it writes to a terminal.
        with warnings.catch_warnings():
            show_spec_warnings()
            try:
                code = super().main(args, *more, **{**extra, "standalone_mode": False})
            except Exception as error:
                code = failed(error, as_json=as_json)
            except KeyboardInterrupt:
                code = interrupted(as_json=as_json)
        sys.exit(int(code) if isinstance(code, int) else ExitCode.OK)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The verbs, none of them loaded."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load one verb."""
        if cmd_name not in VERBS:
            return None
        command: click.Command = importlib.import_module(VERBS[cmd_name].module).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of verbs in `--help`, which loads none of them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, verb.summary) for name, verb in VERBS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a verb; an unknown one ends with the closest name."""
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            ctx.fail(f"unknown command {args[0]!r}{did_you_mean(args[0], VERBS)}")
        return super().resolve_command(ctx, args)


@click.group(
    cls=Program,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples("fusegen list modules", "fusegen generate --target cpu"),
)
@click.version_option(__version__, prog_name="fusegen")
def program() -> None:
    """Write specialised, fused PyTorch modules ahead of time.

    Exit codes: 0 fine, 1 drift or conflicts, 2 usage, 3 bad spec or template, 4 refused, 5 build
    failed, 123 internal error. FUSEGEN_TRACEBACK=1 shows the Python traceback of any error.
    """
