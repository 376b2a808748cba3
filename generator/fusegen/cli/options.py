"""Options and arguments that several verbs share, and how their help looks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from . import completion

F = TypeVar("F", bound=Callable[..., Any])

KINDS = ("ops", "fusions", "modules", "recipes", "archs", "targets")
"""Folders of specs, by which `list` and `validate` call their kinds."""

JSON_FLAG = "--json"

FOLDER = click.Path(path_type=Path, file_okay=False)
"""Type of an option or argument that names a folder."""


def folders(command: F) -> F:
    """`--specs` and `--templates`, as `specs` and `templates`."""
    command = click.option(
        "--templates",
        type=FOLDER,
        multiple=True,
        help="Also read templates from this folder. Repeatable.",
    )(command)
    return click.option(
        "--specs",
        type=FOLDER,
        multiple=True,
        help="Also read specs from this folder. Repeatable.",
    )(command)


def no_fusion(command: F) -> F:
    """`--no-fusion`, as `no_fusions`."""
    return click.option(
        "--no-fusion",
        "no_fusions",
        metavar="NAME",
        shell_complete=completion.fusion,
        multiple=True,
        help="Leave this fusion out. Repeatable.",
    )(command)


def verify_flag(command: F) -> F:
    """`--verify`, as `verify`."""
    text = "Check the rules of the IR after every pass."
    return click.option("--verify", is_flag=True, help=text)(command)


def json_flag(command: F) -> F:
    """`--json`, as `as_json`."""
    text = "Answer in JSON, errors too."
    return click.option(JSON_FLAG, "as_json", is_flag=True, help=text)(command)


def cells(command: F) -> F:
    """`--target`, `--arch`, `--module`, `--recipe` and `--option`, which select cells."""
    options: tuple[tuple[str, completion.Complete, str], ...] = (
        ("option", completion.option, "Choice that the modules offer at generation time."),
        ("recipe", completion.recipe, "Recipe."),
        ("module", completion.module, "Module."),
        (
            "arch",
            completion.arch,
            "Architecture, `native` for that of the visible GPU, `all` for one bundle of all.",
        ),
        ("target", completion.target, "Named selection of archs, modules and recipes."),
    )
    for name, complete, text in options:
        command = click.option(
            f"--{name}",
            f"{name}s",
            multiple=True,
            shell_complete=complete,
            help=f"{text} Repeatable.",
        )(command)
    return command


def out(text: str, default: Path | None = Path("generated")) -> Callable[[F], F]:
    """`--out`, a folder of bundles."""
    return click.option(
        "--out", type=FOLDER, default=default, show_default=default is not None, help=text
    )


def one_of(
    what: str, choices: Sequence[str]
) -> Callable[[click.Context, click.Parameter, str | None], str | None]:
    """A check of an argument that may be one of a few words; the error names the closest."""

    def check(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
        if value is not None and value not in choices:
            hint = did_you_mean(value, choices)
            raise click.UsageError(f"unknown {what} {value!r}{hint}", ctx)
        return value

    return check


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """The end of an error message that helps with an unknown word."""
    # Late: difflib is needed where a word is wrong only.
    from ..spec.diagnostics import did_you_mean as hint

    return hint(word, choices)


def examples(*lines: str) -> str:
    """The end of a verb's help."""
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in lines)))
