"""Exit codes, and what an error prints before it becomes one."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from .. import __version__
from .output import answer, say

if TYPE_CHECKING:
    from ..spec.diagnostics import Problem

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


MEANINGS: Mapping[ExitCode, str] = {
    ExitCode.OK: "it is done",
    ExitCode.DRIFT: "what is on the disk is not what the specs give, or a benchmark got worse",
    ExitCode.USAGE: "the command line names something that is not there, or asks for too much",
    ExitCode.SPEC: "a spec or a template is wrong",
    ExitCode.REFUSED: "files, a lock or the system stand in the way; nothing was written",
    ExitCode.BUILD: "kernels cannot be compiled or linked",
    ExitCode.INTERNAL: "a fault of fusegen itself",
    ExitCode.INTERRUPTED: "stopped by Ctrl-C",
}
"""What each code says, for people."""


class Failure(NamedTuple):
    """An error that is somebody's to mend.

    Attributes:
        code: that the program ends with.
        kind: of error, as JSON and docs/troubleshooting.md call it.
    """

    code: ExitCode
    kind: str


INTERNAL = Failure(ExitCode.INTERNAL, "internal")
INTERRUPTED = Failure(ExitCode.INTERRUPTED, "interrupted")
USAGE = Failure(ExitCode.USAGE, "usage")
EXTENSION = Failure(ExitCode.USAGE, "extension")


def failed(error: Exception, *, as_json: bool = False) -> int:
    """Print an error, with `as_json` as an answer, too, and choose its exit code."""
    if os.environ.get(TRACEBACK) == "1":
        traceback.print_exception(error)
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, click.Abort):
        return interrupted(as_json=as_json)
    if isinstance(error, BrokenPipeError):
        # The reader has left (`| head`); closing stdout again would only complain.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        return ExitCode.OK
    if isinstance(error, click.ClickException):
        failure, message = USAGE, error.format_message()
        error.show()
    else:
        failure = failure_of(error)
        message = _message(error, failure)
        say(message)
    if as_json:
        _answer_error(failure, message, _problems(error))
    return failure.code


def interrupted(*, as_json: bool = False) -> ExitCode:
    """Say that the user has stopped the run."""
    say("interrupted")
    if as_json:
        _answer_error(INTERRUPTED, "interrupted")
    return ExitCode.INTERRUPTED


def _answer_error(
    failure: Failure, message: str, problems: Sequence[Mapping[str, object]] = ()
) -> None:
    """An error as data; problems of specs are listed with their places, too."""
    told: dict[str, object] = {"kind": failure.kind, "exit_code": int(failure.code)}
    told["message"] = message
    answer({"error": told | ({"problems": [*problems]} if problems else {})})


def _message(error: Exception, failure: Failure) -> str:
    if failure is INTERNAL:
        return (
            f"internal error: {type(error).__name__}: {error}\n"
            f"This is a fault of fusegen {__version__}, not yours. Please report it with the "
            f"command line and the output of the same command with {TRACEBACK}=1 in front."
        )
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _problems(error: Exception) -> list[dict[str, object]]:
    """What is wrong with which place of a spec, where that is what the error says."""
    # Late: what raises it is loaded by the verbs that need it.
    from ..spec.diagnostics import SpecError

    return problems_json(error.problems) if isinstance(error, SpecError) else []


def problems_json(problems: Iterable[Problem]) -> list[dict[str, object]]:
    """Problems of specs as data."""
    return [
        {"file": p.loc.file, "line": p.loc.line, "column": p.loc.column, "message": p.message}
        for p in problems
    ]


def failure_of(error: Exception) -> Failure:
    """The exit code and the kind of an error that a verb raised."""
    # Late: what raises these is loaded by the verbs that need it.
    from ..extensions import ExtensionError

    if isinstance(error, ExtensionError):  # which the others cannot be loaded beside
        return EXTENSION
    return next((found for kind, found in known_errors() if isinstance(error, kind)), INTERNAL)


def known_errors() -> tuple[tuple[type[Exception], Failure], ...]:
    """Errors that verbs raise, and what becomes of each; the first that fits counts."""
    # Late, as above.
    from ..build.toolchain import BuildError
    from ..commands.bench import BenchError
    from ..commands.scaffold import ExistsError
    from ..emit.fileset import RenderError
    from ..publish.git import GitError
    from ..publish.lock import LockError
    from ..publish.publish import BusyError, PublishError, RefusedError
    from ..spec.diagnostics import SpecError
    from ..spec.usage import UsageError

    return (
        (UsageError, USAGE),
        (SpecError, Failure(ExitCode.SPEC, "spec")),
        (RenderError, Failure(ExitCode.SPEC, "template")),
        (RefusedError, Failure(ExitCode.REFUSED, "edited")),
        (BusyError, Failure(ExitCode.REFUSED, "busy")),
        (PublishError, Failure(ExitCode.REFUSED, "bundle")),
        (LockError, Failure(ExitCode.REFUSED, "lock")),
        (GitError, Failure(ExitCode.REFUSED, "git")),
        (ExistsError, Failure(ExitCode.REFUSED, "exists")),
        # A folder that may not be written to, a full disk: the system refuses.
        (OSError, Failure(ExitCode.REFUSED, "system")),
        (BenchError, Failure(ExitCode.REFUSED, "bench")),
        (BuildError, Failure(ExitCode.BUILD, "build")),
    )


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
