"""What to do after a bundle was written: command lines that work where they are read."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Iterable, Iterator

from ..build.toolchain import missing_tools
from ..spec.arch import isa_of
from ..spec.usage import command_line
from .report import BundleReport

_TESTED_WITH = ("torch", "numpy", "pytest")
"""Packages that the tests of a bundle import."""


def next_steps(written: Iterable[BundleReport]) -> tuple[str, ...]:
    """Command lines, in their order, that go on from bundles just written.

    Kernels are built; a bundle without any is tested. What one of them would refuse for want of is
    installed by those before it; where no command installs it, it is said in words instead.
    """
    steps = (step for report in written if report.bundle.is_dir() for step in _steps(report))
    return tuple(dict.fromkeys(steps))


def _steps(report: BundleReport) -> Iterator[str]:
    if (report.bundle / "csrc" / "sources.cmake").is_file():
        missing = missing_tools(isa_of(report.selection.arch))
        yield from (error.remedy or error.what for error in missing)
        if all(error.remedy for error in missing):
            yield command_line("build", report.bundle)
    elif report.selection.cells:
        absent = [name for name in _TESTED_WITH if importlib.util.find_spec(name) is None]
        if absent:
            yield f"pip install {' '.join(absent)}"
        yield shlex.join(("python", "-m", "pytest", str(report.bundle / "tests")))
