"""C++ that launchers are written in: addresses, conditions, and calls with named arguments."""

from __future__ import annotations

from collections.abc import Callable

from ...ir import dtypes
from ...ir.dtypes import DType
from ...ir.step import Step

Reading = Callable[[str | None], str]
"""A buffer's name to the source of its address; null where there is none."""


def scalar_type(dtype: DType) -> str:
    return "io" if dtype is DType.IO else f"ScalarType::{dtypes.info(dtype).scalar_type}"


def floats(address: str) -> str:
    return address if address == "nullptr" else f"floats({address})"


def writable(buffer: str, when: str) -> str:
    return f"{when} ? writable({buffer}) : nullptr" if when else f"writable({buffer})"


def filled(step: Step, kind: str, fields: dict[str, str], io: str = "io") -> list[str]:
    """A launch whose struct is filled field by field; empty fields keep their defaults."""
    return [
        "{",
        f"  {kind} arguments{{}};",
        *(f"  arguments.{name} = {value};" for name, value in fields.items() if value),
        f"  check(kCell, {step.kernels}({io}, arguments, stream));",
        "}",
    ]


def call(step: Step, kind: str, words: list[str]) -> list[str]:
    """One launch: arguments by name, one a line."""
    return [
        "check(kCell,",
        f"      {step.kernels}(io,",
        f"          {kind}{{",
        *(f"              {word}," for word in words),
        "          },",
        "          stream));",
    ]
