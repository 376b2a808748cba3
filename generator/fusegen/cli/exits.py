"""Exit codes, and what an error prints before it becomes one."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from enum import IntEnum
from typing import Any

import click

from .. import __version__
from .output import say

TRACEBACK = "FUSEGEN_TRACEBACK"
"""Environment variable; `1` prints the Python traceback of every error."""


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


def failed(error: Exception) -> int:
    """Print an error and choose its exit code."""
    if os.environ.get(TRACEBACK) == "1":
        traceback.print_exception(error)
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, click.ClickException):
        error.show()
        return error.exit_code
    if isinstance(error, click.Abort):
        return interrupted()
    if isinstance(error, BrokenPipeError):
        # The reader has left (`| head`); closing stdout again would only complain.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        return ExitCode.OK
    code = _code_of(error)
    if code is ExitCode.INTERNAL:
        say(
            f"internal error: {type(error).__name__}: {error}\n"
            f"This is a fault of fusegen {__version__}, not yours. Please report it with the "
            f"command line and the output of the same command with {TRACEBACK}=1 in front."
        )
    elif isinstance(error, OSError) and error.filename:
        say(f"{error.filename}: {error.strerror}")
    else:
        say(str(error))
    return code


def interrupted() -> ExitCode:
    """Say that the user has stopped the run."""
    say("interrupted")
    return ExitCode.INTERRUPTED


def _code_of(error: Exception) -> ExitCode:
    """The exit code of an error that a verb raised."""
    # Late: what raises these is loaded by the verbs that need it.
    from ..extensions import ExtensionError

    if isinstance(error, ExtensionError):  # which the others cannot be loaded beside
        return ExitCode.USAGE
    from ..build.toolchain import BuildError
    from ..commands.bench import BenchError
    from ..commands.scaffold import ExistsError
    from ..emit.fileset import RenderError
    from ..publish.git import GitError
    from ..publish.lock import LockError
    from ..publish.publish import PublishError
    from ..spec.diagnostics import SpecError
    from ..spec.usage import UsageError

    known: tuple[tuple[type[Exception], ExitCode], ...] = (
        (UsageError, ExitCode.USAGE),
        (SpecError, ExitCode.SPEC),
        (RenderError, ExitCode.SPEC),
        (PublishError, ExitCode.REFUSED),
        (LockError, ExitCode.REFUSED),
        (GitError, ExitCode.REFUSED),
        (ExistsError, ExitCode.REFUSED),
        # A folder that may not be written to, a full disk: the system refuses.
        (OSError, ExitCode.REFUSED),
        (BenchError, ExitCode.REFUSED),
        (BuildError, ExitCode.BUILD),
    )
    return next((code for kind, code in known if isinstance(error, kind)), ExitCode.INTERNAL)


def show_spec_warnings() -> None:
    """Warnings of ours are messages, each once; others look as ever."""
    others = warnings.showwarning
    seen: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if category.__name__ != "SpecWarning":
            others(message, category, *where, **more)
        elif str(message) not in seen:
            seen.add(str(message))
            say(f"warning: {message}")

    warnings.showwarning = show
