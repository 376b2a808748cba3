"""Printing: messages on stderr, answers on stdout."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import click

from .. import __version__
from ..emit.text.columns import aligned

JSON_VERSION = 1
"""Of the format of all answers: keys are added under it, none is taken away or changes meaning."""


def say(text: str) -> None:
    """A message on stderr."""
    click.echo(f"fusegen: {text}", err=True)


def answer(data: Mapping[str, object]) -> None:
    """A JSON document on stdout: the versions of its format and of fusegen, and the data."""
    head = {"version": JSON_VERSION, "fusegen": __version__}
    click.echo(json.dumps({**head, **data}, indent=2, ensure_ascii=False))


def show_rows(rows: Iterable[tuple[str, ...]]) -> None:
    """A table on stdout."""
    for line in aligned(rows):
        click.echo(line)
