"""What `fusegen bench` asks of the checkout's `benchmarks/`: which run here, and running them.

They are development tools: no wheel carries them, and they need PyTorch where this does not. What
they print while they run goes to stderr.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..build import gpu
from ..publish import paths
from ..spec.usage import UsageError, known

FOLDER = "benchmarks"


class BenchError(Exception):
    """A benchmark that cannot begin, or measures nothing: nothing is recorded."""


@dataclass(frozen=True, slots=True)
class Benchmarks:
    """The benchmarks of the checkout, by the functions of their modules."""

    folder: Path

    def module(self, name: str) -> Any:
        """One of their modules."""
        with _ended_by_errors():
            return importlib.import_module(name)

    @property
    def names(self) -> tuple[str, ...]:
        """Of all benchmarks, and of what writes the page about them."""
        return tuple(self.module("run").NAMES)

    def chosen(self, names: Sequence[str]) -> tuple[str, ...]:
        """The named ones; without names, all benchmarks that run here and need nothing else.

        Raises:
            UsageError: an unknown name, or one that needs a GPU where there is none.
        """
        run = self.module("run")
        for name in names:
            known("benchmark", name, self.names)
        lacking = _lacking()
        if names and lacking and set(names) & set(run.GPU):
            refused = next(name for name in names if name in run.GPU)
            here = ", ".join(run.CPU)
            raise UsageError(f"{refused} needs a GPU, and {lacking}; what runs here: {here}")
        if names:
            return tuple(dict.fromkeys(names))
        on_gpu = (name for name in run.GPU if name not in run.ON_REQUEST)
        return tuple(run.CPU) if lacking else (*on_gpu, *run.CPU)

    def results(self, folder: Path | None) -> Path:
        """Where results are: the checkout's own folder, unless another one is named."""
        own: Path = self.module("common").RESULTS
        return folder or own

    def require_quick(self, names: Sequence[str]) -> None:
        """Refuse names that have no quick form.

        Raises:
            UsageError: one has none, or there are no names.
        """
        quick = self.module("run").QUICK
        if not names or not set(names) <= set(quick):
            raise UsageError(f"--quick goes with --sweep, and with these: {', '.join(quick)}")

    def measure(
        self,
        name: str,
        *,
        quick: bool = False,
        rounds: int | None = None,
        cases: Sequence[str] = (),
    ) -> Mapping[str, Any]:
        """Run one benchmark; nothing is written.

        A case that fails stands among the rows, and loses no other.

        Args:
            name: of the benchmark.
            quick: a smaller form of it.
            rounds: turns of every contender, by default as many as the benchmarks say.
            cases: parts of the names of cases to measure; without any, all.

        Raises:
            BenchError: it fails before its first case, or all of it is wrong.
        """
        with _ended_by_errors():
            try:
                result: Mapping[str, Any] = self.module("run").measure(
                    name, quick=quick, rounds=rounds, cases=cases
                )
            except Exception as error:
                traceback.print_exception(error)
                raise BenchError(f"{name}: {type(error).__name__}: {error}") from error
            return result

    def failures(self, result: Mapping[str, Any]) -> list[str]:
        """The cases of a result that failed, for people."""
        common = self.module("common")
        return [common.describe(each) for each in common.failures(result)]

    def save(
        self, result: Mapping[str, Any], folder: Path | None, *, partial: bool = False
    ) -> Path:
        """Record a result.

        Args:
            result: what was measured.
            folder: of results, by default the checkout's.
            partial: it has some cases; those that the record of the day has besides stay.

        Raises:
            BenchError: the others of that record are of another commit.
        """
        with _ended_by_errors():
            path: Path = self.module("common").save(result, self.results(folder), partial=partial)
            return path

    def lines(self, result: Mapping[str, Any]) -> Iterator[str]:
        """A result's rows for people."""
        yield from map(self.module("common").describe, result["rows"])

    def summarise(self) -> list[Path]:
        """Write `docs/performance.md` and its figures from the checkout's results.

        Raises:
            BenchError: there are none.
        """
        with _ended_by_errors():
            written: list[Path] = self.module("run").summarise()
            return written

    def records(self, names: Sequence[str], folder: Path | None) -> dict[str, Mapping[str, Any]]:
        """The newest record on this device of every named benchmark.

        Raises:
            UsageError: one has none that can be compared with.
        """
        checking, common, run = map(self.module, ("checking", "common", "run"))
        newest = common.newest(self.results(folder))
        found = {}
        for name in names:
            if name == run.SUMMARY:
                raise UsageError(f"--check: {name} measures nothing; name benchmarks")
            facts = common.gpu_environment() if name in run.GPU else common.environment()
            try:
                found[name] = checking.record_of(name, facts["device"], newest)
            except checking.NoRecordError as error:
                raise UsageError(f"--check: {error}") from None
        return found

    def findings(self, measured: Mapping[str, Any], record: Mapping[str, Any]) -> list[Any]:
        """What is worse than its record, or was not measured."""
        found: list[Any] = self.module("checking").findings(measured, record)
        return found

    def sweep(
        self,
        families: Sequence[str],
        *,
        quick: bool = False,
        seconds: float | None = None,
        recorded: bool = False,
        dry_run: bool = False,
        folder: Path | None = None,
        model: str = "",
    ) -> Any:
        """Fit selection rules to measurements; see `sweep.sweep` of the benchmarks.

        Raises:
            UsageError: an unknown family, no GPU to measure on, none of that name to model, or
                nothing on record.
            SpecError: the specs would not be valid with the rules found.
            BenchError: points disagree on a result.
        """
        module, results = self.module("sweep"), self.results(folder)
        options = module.Options(quick, seconds, recorded, dry_run, results, model)
        if model:
            arch = module.modelled_arch(model)
        elif recorded:
            arch = module.recorded(families[0], results).arch
        else:
            arch = _visible_arch(module.visible_arch)
        with _ended_by_errors():
            return module.sweep(families, arch, options)


def find() -> Benchmarks:
    """The benchmarks of the checkout that this program runs from.

    Raises:
        UsageError: it runs from a wheel, or the checkout lacks them.
    """
    root = paths.checkout()
    if root is None or not (root / FOLDER / "run.py").is_file():
        raise UsageError(
            "the benchmarks are part of fusegen's repository, not of what is installed; clone it, "
            "and in it run: pip install -e '.[torch]'"
        )
    folder = root / FOLDER
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return Benchmarks(folder)


def _lacking() -> str | None:
    """Why nothing runs on a GPU here, or None where it does."""
    if gpu.visible_capability() is None:
        return "there is no visible NVIDIA GPU"
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed (pip install torch)"
    return None


def _visible_arch(find_arch: Callable[[], str | None]) -> str:
    lacking = _lacking()
    if lacking:
        raise UsageError(
            f"--sweep measures on a GPU, and {lacking}; --recorded fits the measurements on record"
        )
    arch = find_arch()
    if arch is None:
        raise UsageError("--sweep: no architecture of the specs is that of the visible GPU")
    return arch


@contextmanager
def _ended_by_errors() -> Iterator[None]:
    """Benchmarks are scripts too: what ends those with a message is an error here."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except SystemExit as error:
        raise BenchError(str(error)) from None
