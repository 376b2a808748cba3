"""The steps of a run on a GPU; what each finds lies in a file until all have ended.

Each may run on a machine of its own: what a step finds says from which sources, and is refused
beside others.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bundles
import matrix
from entries import LedgerError
from units import hash_units

HERE = Path(__file__).resolve().parent
FOUND = bundles.ROOT / "build" / "gpu"
LARGE = HERE / "test_large.py"  # has no room on a GPU beside other tests
STATEMENT = "units.json"  # beside the library: what it was built from
NO_TESTS = 5  # pytest's exit code
Units = Collection[str] | None
"""Of a bundle, those that a step is about: of cells that have one of them; None for all."""
LEDGER = "python tests/gpu/ledger.py"


# ---- build


def build_bundle(folder: Path, jobs: int | None = None) -> None:
    """Build the library, and state beside it what it was built from."""
    from fusegen.build.library import build

    hashes = hash_units(folder)
    library = build(folder, jobs=jobs).library
    statement = {"library": _sha256(library), "units": hashes}
    (library.parent / STATEMENT).write_text(json.dumps(statement, indent=1, sort_keys=True) + "\n")


def verify_build(folder: Path) -> None:
    """Hold a library that was built elsewhere against the sources beside it.

    Raises:
        LedgerError: it was built from other sources, or does not say from which.
    """
    remedy = f"build it here, or where nvcc is: {LEDGER} build"
    library = bundles.library_of(folder)
    path = folder / "lib" / STATEMENT
    if library is None or not path.exists():
        raise LedgerError(f"{folder}: no library that says what it was built from; {remedy}")
    statement = json.loads(path.read_text("utf-8"))
    if statement["library"] != _sha256(library):
        raise LedgerError(f"{library}: not the library that {path} speaks of; {remedy}")
    if statement["units"] != hash_units(folder):
        raise LedgerError(f"{library}: built from other sources than lie here; {remedy}")


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def bundles_here(wanted: Sequence[str] = ()) -> list[Path]:
    """Every bundle that this machine's GPU runs: the committed ones and the further ones.

    Args:
        wanted: names in the ledger that narrow them.

    Raises:
        LedgerError: no GPU, no bundle for it, an unknown name, where none is named not all further
            ones, or a library of other sources.
    """
    import torch

    if not torch.cuda.is_available():
        raise LedgerError("torch sees no GPU on this machine")
    capability = torch.cuda.get_device_capability()
    found = [
        folder
        for folder in (*bundles.compiled_bundles(), *bundles.further_bundles())
        if bundles.code_on(folder, capability)
    ]
    committed = [folder for folder in found if folder.parent == bundles.GENERATED]
    if not committed:
        raise LedgerError(f"no bundle in generated/ runs on capability {capability}")
    for folder in () if wanted else committed:
        for kind in _kinds_beside(folder, capability):
            if bundles.BUILD / kind / folder.name not in found:
                what = bundles.FURTHER[kind]
                raise LedgerError(f"{folder.name}: no bundle of {what}; run: {LEDGER} build")
    names = [bundles.key_of(folder) for folder in found]
    for name in wanted:
        if name not in names:
            raise LedgerError(f"{name!r}: no bundle here; there are {', '.join(names)}")
    found = [folder for folder in found if not wanted or bundles.key_of(folder) in wanted]
    for folder in found:
        verify_build(folder)
    return found


def is_here(arch: str) -> bool:
    """Whether the GPU of this machine, if it has one, is of an architecture."""
    import torch

    if not torch.cuda.is_available():
        return False
    capability = torch.cuda.get_device_capability()
    return bundles.code_on(bundles.GENERATED / arch, capability) is bundles.Code.SASS


def _kinds_beside(folder: Path, capability: tuple[int, int]) -> tuple[str, ...]:
    """The further bundles that a GPU tests beside a committed one."""
    if not bundles.is_representative(folder):
        return (bundles.EVIDENCE, bundles.WRITTEN)
    own = bundles.code_on(folder, capability) is bundles.Code.SASS
    return (bundles.WHOLE,) if own else ()


# ---- what a step found


def keep(step: str, folder: Path, said: Mapping[str, Any], units: Units = None) -> None:
    """Write down what a step found of a bundle, on which machine, from which sources."""
    FOUND.mkdir(parents=True, exist_ok=True)
    every = hash_units(folder)
    seen = {unit: value for unit, value in every.items() if units is None or unit in units}
    found = {"units": seen, "machine": machine(folder), "said": said}
    _kept(step, folder).write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", "utf-8")


def cells_with(folder: Path, units: Collection[str]) -> list[str]:
    """Cells of a bundle that have one of these units, sorted."""
    owned = matrix.read_owners((folder / "fusegen.lock").read_text("utf-8"))
    return sorted(cell for cell, own in owned.items() if not own.isdisjoint(units))


def ran(folder: Path) -> bool:
    """Whether a step said anything of a bundle."""
    return any(has_found(step, folder) for step in ("test", "sanitize"))


def has_found(step: str, folder: Path) -> bool:
    """Whether a step ended on a bundle, whatever lies here now."""
    return _kept(step, folder).exists()


def found_in(step: str, folder: Path) -> dict[str, Any]:
    """What a step found: its words under "said", its "machine" and the "units" that it saw.

    Raises:
        LedgerError: it did not end, or saw no unit as it lies here.
    """
    path = _kept(step, folder)
    if not has_found(step, folder):
        raise LedgerError(f"{path}: missing; run: {LEDGER} {step}")
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    if found["units"].items().isdisjoint(hash_units(folder).items()):
        raise LedgerError(f"{path}: found on other sources than lie here; run: {LEDGER} {step}")
    return found


def _kept(step: str, folder: Path) -> Path:
    return FOUND / f"{bundles.key_of(folder).replace(' ', '_')}.{step}.json"


def machine(folder: Path) -> dict[str, str]:
    """The GPU and what runs on it of a bundle, in the ledger's words; the date is today's, UTC."""
    import torch

    code = bundles.code_on(folder, torch.cuda.get_device_capability())
    return {
        "device": torch.cuda.get_device_name(),
        "code": code.value if code else "",
        "driver": _driver_version(),
        "torch": torch.__version__.partition("+")[0],
        "cuda": str(torch.version.cuda),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }


def _driver_version() -> str:
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 else "unknown"


# ---- tests


@dataclass(frozen=True)
class Suite:
    """Tests of folders or files, and the bundle that they test; `alone` where others wait."""

    name: str
    paths: tuple[Path, ...]
    bundle: Path
    words: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    alone: bool = False
    part: bool = False  # tests of some units alone, of which it may have none

    @property
    def files(self) -> int:
        """How many files of tests there are."""
        return sum(len(list(p.glob("test_*.py"))) if p.is_dir() else 1 for p in self.paths)


def suites_of(folder: Path, units: Units = None) -> list[Suite]:
    """The generated tests of a bundle and those of this folder that its cells have.

    A bundle of further cells has its own alone: the modules and recipes are the committed one's.
    So has one of a few cells that stand for an architecture.  Of some units there are their cells'
    own tests, and of those of this folder the ones that name these.
    """
    key, own = bundles.key_of(folder).replace(" ", "_"), folder / "tests"
    files: tuple[Path, ...] = (own,)
    named: tuple[str, ...] = ()
    if units is not None:
        cells = cells_with(folder, units)
        files = tuple(filter(Path.exists, (own / f"test_{cell}.py" for cell in cells)))
        named = ("-k", " or ".join(cells))
    # What runs on the CPU runs there in every test; here it would only keep the GPU waiting.
    suites = [Suite(f"{key}.generated", files, folder, ("-k", "not cpu"))] if files else []
    part = units is not None
    own_alone = bundles.kind_of(folder) == bundles.EVIDENCE
    if not own_alone and bundles.cells_of(folder, "grouped_linear"):  # what the tests here run
        chosen = ((bundles.BUNDLE_VARIABLE, str(folder)),)
        words = (f"--ignore={LARGE}", *named)
        suites.append(Suite(f"{key}.gpu", (HERE,), folder, words, chosen, part=part))
        if bundles.has_shipped(folder):
            suites.append(
                Suite(f"{key}.large", (LARGE,), folder, named, chosen, alone=True, part=part)
            )
    return suites


def test(folders: Mapping[Path, Units]) -> None:
    """Run tests of these bundles, most suites side by side, and keep how many passed.

    Raises:
        LedgerError: one failed, or none ran.
    """
    FOUND.mkdir(parents=True, exist_ok=True)
    suites = [suite for folder, units in folders.items() for suite in suites_of(folder, units)]
    together = [suite for suite in suites if not suite.alone]
    workers = workers_of([suite.files for suite in together])
    with ThreadPoolExecutor(max(1, len(together))) as pool:
        ended = dict(zip(together, pool.map(run_pytest, together, workers), strict=True))
    ended |= {suite: run_pytest(suite, 1) for suite in suites if suite.alone}
    wrong = [suite.name for suite in suites if ended[suite] is None]
    for folder, units in folders.items():
        own = [passed for suite, passed in ended.items() if suite.bundle == folder]
        passed = [each for each in own if each is not None]
        if len(passed) < len(own):
            continue
        if any(passed):
            keep("test", folder, _said(passed, folder), units)
        else:
            wrong.append(f"{bundles.key_of(folder)}, of which none ran")
    if wrong:
        raise LedgerError(f"tests failed in {', '.join(wrong)}; logs are in {FOUND}")


def workers_of(files: Sequence[int]) -> list[int]:
    """Processes for suites of so many files: in proportion, but four where there are cores."""
    cores = os.cpu_count() or 1
    return [max(min(cores, 4), cores * count // sum(files)) for count in files]


def run_pytest(suite: Suite, workers: int) -> list[tuple[str, str]] | None:
    """Module and name of every test that passed, or None where one failed; the log is a file.

    Of a suite's tests none may be those of some units; a whole suite of which none passed failed.
    """
    result, log = FOUND / f"{suite.name}.xml", FOUND / f"{suite.name}.log"
    result.unlink(missing_ok=True)
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=15"]
    words += [*map(str, suite.paths), *suite.words, f"--junitxml={result}"]
    if importlib.util.find_spec("xdist"):  # a GPU has room for several processes
        words += ["-n", str(workers)]
    environment = {
        # Processes are many already: none needs threads or compilers of its own.
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        **os.environ,
        **dict(suite.environment),
    }
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as stream:
        done = subprocess.run(
            words, env=environment, stdout=stream, stderr=subprocess.STDOUT, check=False
        )
    seconds = time.monotonic() - started
    lines = log.read_text("utf-8", "replace").splitlines()
    print(f"{suite.name}: {lines[-1] if lines else 'no output'} ({seconds:.0f} s)", flush=True)
    if done.returncode == 0 or (done.returncode == NO_TESTS and suite.part):
        found = passed(result.read_text("utf-8"))
        return found if found or suite.part else None
    print("\n".join(line for line in lines if line.startswith(("FAILED", "ERROR", "E  ")))[-4000:])
    return None


def passed(junit: str) -> list[tuple[str, str]]:
    """Module and name of the passed tests of a JUnit report."""
    cases = xml.etree.ElementTree.fromstring(junit).iter("testcase")
    return [
        (case.get("classname", "").rpartition(".")[2], case.get("name", ""))
        for case in cases
        if all(child.tag not in ("failure", "error", "skipped") for child in case)
    ]


_REPLAYED = re.compile(r"\[(?:\w+-)*?(?P<cell>\w+)-reduce-overhead\]$")


def _said(suites: Sequence[list[tuple[str, str]]], folder: Path) -> dict[str, Any]:
    """All passed tests; by cell, those printed for it, and those compiled into CUDA graphs."""
    tests = [test for suite in suites for test in suite]
    files = {path.stem for path in (folder / "tests").glob("test_*.py")}
    cells = Counter(module.removeprefix("test_") for module, _ in tests if module in files)
    matches = (_REPLAYED.search(name) for _, name in tests)
    names = (match["cell"] for match in matches if match)
    replayed = Counter(name if "__" in name else f"{name}__bf16" for name in names)
    return {"tests": len(tests), "cells": cells, "reduce-overhead": replayed}


# ---- sanitizer


def sanitize(folders: Mapping[Path, Units]) -> None:
    """Run kernels of these bundles under compute-sanitizer, and keep what it says.

    Raises:
        LedgerError: it found something, or broke off.
    """
    import sanitize as tools

    hands = max(1, (os.cpu_count() or 1) // (len(tools.TOOLS) * len(folders)))
    reports = tools.sanitize(folders, hands)
    problems = []
    for folder, units in folders.items():
        if reports is None:
            keep("sanitize", folder, {"sanitizer": "not installed"}, units)
            continue
        said = reports[folder]
        if isinstance(said, tools.SanitizeError):
            problems.append(f"{bundles.key_of(folder)}: {said}")
            continue
        tools.print_report(folder, said)
        if all(report.clean for report in said):
            words = " and ".join(report.tool for report in said) + " clean"
            keep("sanitize", folder, {"sanitizer": words}, units)
        else:
            problems.append(f"{bundles.key_of(folder)}: problems were found")
    if problems:
        text = "\n".join(problems)
        raise LedgerError(f"compute-sanitizer; these bundles are not recorded:\n{text}")
