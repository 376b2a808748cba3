"""The first run on a GPU that nobody had: tests, oracles, selection rules, benchmarks, records.

What is generated for such a GPU was compiled, and perhaps ran as a twin; its selection rules are
from a model.  Each step is a command of its own, which may be run again by itself; the first that
fails ends the run, because what follows would say nothing.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..build import gpu
from ..emit.manifest import MANIFEST
from ..publish import paths
from ..publish.folders import BUILTIN, load_specs
from ..publish.lock import LOCK_NAME
from ..spec.kinds import SpecKind
from ..spec.load import SpecSet
from ..spec.serving import arch_of
from ..spec.usage import UsageError, command_line, spec_named
from ..tuning.variants import can_sweep
from .bench import BenchError

_FUSEGEN = "fusegen"
_PYTHON = "python"
_LEDGER = "tests/gpu/ledger.py"
_ORACLES = "tests/gpu/oracles.py"


@dataclass(frozen=True, slots=True)
class Step:
    """One command of the run.

    Attributes:
        what: for people.
        words: of the command, as somebody in the checkout would type it.
    """

    what: str
    words: tuple[str, ...]

    @property
    def line(self) -> str:
        """The command as a shell takes it."""
        return (
            command_line(*self.words[1:]) if self.words[0] == _FUSEGEN else shlex.join(self.words)
        )

    @property
    def process(self) -> tuple[str, ...]:
        """The same for the Python that runs now, whatever PATH has."""
        first = {_FUSEGEN: (sys.executable, "-m", "fusegen"), _PYTHON: (sys.executable,)}
        return (*first[self.words[0]], *self.words[1:])


Run = Callable[[Sequence[str], Path], int]
"""Runs a command in a folder; returns its exit code."""


def plan(arch: str, specs: SpecSet) -> tuple[Step, ...]:
    """The steps for an architecture, in their order.

    Rules change which kernel runs, so what was tested before them is tested again.

    Raises:
        UsageError: an unknown architecture, one without kernels, or no bundle of it is committed.
    """
    spec = specs.archs[spec_named(specs, SpecKind.ARCHS, arch)]
    root = _checkout()
    if not spec.has_kernels:
        raise UsageError(f"--first-light: {arch} has no kernels, so there is nothing to run first")
    if not (root / "generated" / arch / LOCK_NAME).is_file():
        raise UsageError(
            f"--first-light: generated/{arch} holds no bundle; make one: "
            + command_line(
                "generate", "--arch", arch, "--module", "grouped_mlp", "--recipe", "bf16"
            )
        )
    families = [name for name, family in spec.kernels.items() if can_sweep(family)]
    is_part = (root / "generated" / arch / MANIFEST).is_file()
    return tuple(_steps(arch, f"{arch} whole" if is_part else arch, families))


def _steps(arch: str, bundle: str, families: Sequence[str]) -> Iterator[Step]:
    """The steps with a bundle of all modules, by its name in the ledger."""
    build = Step("compile the bundle", (_PYTHON, _LEDGER, "build", bundle))
    test = Step("run its tests on the GPU", (_PYTHON, _LEDGER, "test", bundle))
    yield from (build, test)
    yield Step("compare GEMMs with those of CUTLASS's builders", (_PYTHON, _ORACLES, arch))
    if families:
        swept = tuple(word for name in families for word in ("--sweep", name))
        yield Step("measure tiles, and write selection rules", (_FUSEGEN, "bench", *swept))
        yield Step("make the bundle with these rules", (_FUSEGEN, "generate", "--arch", arch))
        yield from (build, test)
    yield Step("run all kernels under compute-sanitizer", (_PYTHON, _LEDGER, "sanitize", bundle))
    yield Step("record what ran", (_PYTHON, _LEDGER, "record"))
    yield Step("measure against other libraries", (_FUSEGEN, "bench"))
    yield Step("print README's matrix", (_PYTHON, _LEDGER, "readme"))
    yield Step("print the pages", (_PYTHON, "docs/pages.py"))


def first_light(
    arch: str,
    *,
    dry_run: bool = False,
    run: Run | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Step, ...]:
    """Run all steps, or none.

    Args:
        arch: of the visible GPU.
        dry_run: only plan.
        run: runs commands; by default as processes whose output is shown.
        say: hears of every step before it runs.

    Raises:
        UsageError: as `plan`; or the visible GPU is not of that architecture.
        BenchError: a step failed; what the message names may be run again.
    """
    specs = load_specs(BUILTIN)
    steps = plan(arch, specs)
    if dry_run:
        return steps
    here = arch_of(gpu.visible_capability(), specs)
    if here != arch:
        found = f"that of the visible GPU is {here}" if here else "there is no visible NVIDIA GPU"
        raise UsageError(f"--first-light {arch}: {found}; --dry-run prints what would run")
    for number, step in enumerate(steps, 1):
        say(f"{number} of {len(steps)}: {step.what}: {step.line}")
        code = (run or _run)(step.process, _checkout())
        if code:
            raise BenchError(
                f"{step.what} failed with exit code {code}; when that is mended, run it alone:"
                f" {step.line}; then begin again: {command_line('bench', '--first-light', arch)}"
            )
    return steps


def _run(words: Sequence[str], folder: Path) -> int:
    return subprocess.run(words, cwd=folder, check=False).returncode


def _checkout() -> Path:
    root = paths.checkout()
    if root is None:
        raise UsageError(
            "--first-light runs in fusegen's repository, which has the tests of kernels; clone it"
        )
    return root
