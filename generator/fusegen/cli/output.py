"""Printing: messages on stderr, answers on stdout."""

from __future__ import annotations

import json
from collections.abc import Iterable

import click

from ..emit.text.columns import aligned


def say(text: str) -> None:
    """A message on stderr."""
    click.echo(f"fusegen: {text}", err=True)


def answer(data: object) -> None:
    """A JSON document on stdout."""
    click.echo(json.dumps(data, indent=2, ensure_ascii=False))


def show_rows(rows: Iterable[tuple[str, ...]]) -> None:
    """A table on stdout."""
    for line in aligned(rows):
        click.echo(line)
