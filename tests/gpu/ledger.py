"""The ledger: which kernels ran, tested, on which device, and whether they changed since.

    python tests/gpu/ledger.py run [--no-build]   build, test and sanitize on this GPU, then record
    python tests/gpu/ledger.py build              build, and state what from, to run elsewhere
    python tests/gpu/ledger.py report             current, stale or never ran, per bundle
    python tests/gpu/ledger.py check              exit code 1 if anything that ran is stale
    python tests/gpu/ledger.py readme [--check]   the support matrix in README.md

A unit is a file of kernels (csrc/kernels/*.cu) or a launcher (csrc/*.cpp). It is known by the hash
of its text with its own headers put in place and comments taken out, so that a comment makes
nothing stale and a changed header makes stale exactly what uses it.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import bundles
import matrix
from entries import Entries, Entry, LedgerError, State, combine, gaps, state_of

HERE = Path(__file__).resolve().parent
LEDGER = HERE / "ledger.json"
README = bundles.ROOT / "README.md"
UPDATE = "python tests/gpu/ledger.py readme"
VERSION = 1
SIDE_BY_SIDE = 4
STATEMENT = "units.json"  # beside the library: what it was built from


# ---- hashes of units


# Comments are matched beside what may hold their signs without being one: strings, raw strings
# and character constants. A quote between digits is C++'s digit separator, no constant.
_TOKEN = re.compile(
    r"""(?P<raw>R"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)")"""
    r"""|(?P<string>"(?:\\.|[^"\\\n])*")"""
    r"""|(?P<character>(?<![0-9A-Za-z_])'(?:\\.|[^'\\\n])*')"""
    r"""|(?P<comment>//(?:\\\n|[^\n])*|/\*.*?\*/)""",
    re.DOTALL,
)
_INCLUDE = re.compile(r'\s*#\s*include\s+"([^"]+)"')


def strip_comments(text: str) -> str:
    """C++ without comments; each becomes one space, as the language says."""
    return _TOKEN.sub(lambda match: " " if match["comment"] else match[0], text)


def expand(path: Path, root: Path, seen: set[Path] | None = None) -> list[str]:
    """Lines of a unit with quoted includes put in place, once each, and white space normalised.

    Args:
        path: the file.
        root: where includes are looked for besides the folder of the file that names them.
        seen: headers already in place; every header here has `#pragma once`.

    Raises:
        LedgerError: an include that leads nowhere.
    """
    seen = set() if seen is None else seen
    lines: list[str] = []
    for line in strip_comments(path.read_text("utf-8")).splitlines():
        match = _INCLUDE.match(line)
        if match is None:
            words = " ".join(line.split())
            lines += [words] if words else []
            continue
        header = _find(match[1], path.parent, root)
        if header is None:
            raise LedgerError(
                f'{path}: #include "{match[1]}" is in neither {path.parent} nor {root}'
            )
        if header not in seen:
            seen.add(header)
            lines += expand(header, root, seen)
    return lines


def _find(name: str, *folders: Path) -> Path | None:
    paths = ((folder / name).resolve() for folder in folders)
    return next((path for path in paths if path.is_file()), None)


def hash_units(folder: Path) -> dict[str, str]:
    """Hash of every kernel and launcher of a bundle, by its path below csrc/."""
    csrc = folder / "csrc"
    launchers = (path for path in csrc.glob("*.cpp") if path.name != "digests.cpp")
    paths = sorted([*csrc.glob("kernels/*.cu"), *launchers])
    return {
        str(path.relative_to(csrc)): hashlib.sha256(
            "\n".join(expand(path, csrc)).encode()
        ).hexdigest()
        for path in paths
    }


# ---- entries


def load(path: Path | None = None) -> dict[str, dict[str, Entry]]:
    """Entries by bundle and unit, by default of the project's ledger; none where there is no file.

    Raises:
        LedgerError: the file is no ledger of this version.
    """
    path = LEDGER if path is None else path
    if not path.exists():
        return {}
    try:
        data = json.loads(path.read_text("utf-8"))
        if data["version"] != VERSION:
            raise LedgerError(f"{path}: version {data['version']}, expected {VERSION}")
        return {
            arch: {unit: Entry(**entry) for unit, entry in units.items()}
            for arch, units in data["bundles"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LedgerError(f"{path}: no ledger: {error!r}; take it from git") from error


def dump(entries: Entries) -> str:
    """Sorted JSON with one line per unit."""
    blocks = []
    for arch in sorted(entries):
        units = entries[arch]
        lines = [
            f"      {json.dumps(unit)}: {json.dumps(asdict(units[unit]), sort_keys=True)}"
            for unit in sorted(units)
        ]
        body = ",\n".join(lines)
        blocks.append(
            f"    {json.dumps(arch)}: {{\n{body}\n    }}" if lines else f'    "{arch}": {{}}'
        )
    joined = ",\n".join(blocks)
    content = f"{{\n{joined}\n  }}" if blocks else "{}"
    return f'{{\n  "version": {VERSION},\n  "bundles": {content}\n}}\n'


# ---- the repository


def bundle_folders() -> list[Path]:
    """Every generated bundle."""
    return sorted(path.parent for path in bundles.GENERATED.glob("*/fusegen.lock"))


def facts_of(folder: Path, entries: Entries) -> matrix.BundleFacts:
    """What the files of one bundle and the ledger say."""
    return matrix.BundleFacts(
        arch=folder.name,
        cells=tuple(matrix.read_cells((folder / "README.md").read_text("utf-8"))),
        owners=matrix.read_owners((folder / "fusegen.lock").read_text("utf-8")),
        hashes=hash_units(folder),
        entries=entries.get(folder.name, {}),
    )


def report() -> int:
    """Print the state of every compiled bundle."""
    entries = load()
    for folder in bundles.compiled_bundles():
        hashes, known = hash_units(folder), entries.get(folder.name, {})
        state = combine(state_of(hashes, known).values())
        if state is State.NEVER:
            print(f"{folder.name}: never ran (compiled only), {len(hashes)} units")
            continue
        latest = max(known.values(), key=lambda entry: entry.date)
        print(f"{folder.name}: {state.value}, ran on {latest.device} on {latest.date}")
        for line in gaps(hashes, known):
            print(f"  {line}")
    return 0


def check() -> int:
    """1 where a bundle that claims to have run is stale or incomplete."""
    entries = load()
    lines = []
    for arch, known in sorted(entries.items()):
        folder = bundles.GENERATED / arch
        lines += [f"{arch}: {line}" for line in gaps(hash_units(folder), known)]
    for line in lines:
        print(line, file=sys.stderr)
    if lines:
        print("on a machine with that GPU, run: make gpu-test", file=sys.stderr)
    return 1 if lines else 0


def write_readme(*, only_check: bool) -> int:
    """Write the matrix, or say whether it is as it would be written."""
    entries = load()
    text = README.read_text("utf-8")
    wanted = matrix.replace_matrix(
        text, matrix.matrix(facts_of(f, entries) for f in bundle_folders())
    )
    if wanted == text:
        return 0
    if only_check:
        print(f"README.md: the support matrix is out of date; run: {UPDATE}", file=sys.stderr)
        return 1
    README.write_text(wanted, "utf-8")
    return 0


# ---- builds and runs


def build_bundle(folder: Path) -> None:
    """Build the library, and state beside it what it was built from."""
    sys.path.insert(0, str(bundles.ROOT / "generator"))
    from fusegen.build import build

    hashes = hash_units(folder)
    library = build(folder).library
    statement = {"library": _sha256(library), "units": hashes}
    (library.parent / STATEMENT).write_text(json.dumps(statement, indent=1, sort_keys=True) + "\n")


def verify_build(folder: Path) -> None:
    """Hold a library that was built elsewhere against the sources beside it.

    Raises:
        LedgerError: it was built from other sources, or does not say from which.
    """
    remedy = "build it here without --no-build, or where nvcc is: python tests/gpu/ledger.py build"
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


def run_pytest(path: Path, environment: Mapping[str, str]) -> int:
    """How many tests passed.

    Raises:
        LedgerError: one failed, or none ran.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.xml"
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
        if importlib.util.find_spec("xdist"):  # a GPU has room for several processes
            words += ["-n", str(SIDE_BY_SIDE)]
        done = subprocess.run(
            [*words, f"--junitxml={result}"], env={**os.environ, **environment}, check=False
        )
        if done.returncode != 0:
            raise LedgerError(f"{path}: pytest ended with {done.returncode}; nothing was recorded")
        return count_passed(result.read_text("utf-8"))


def count_passed(junit: str) -> int:
    """Passed tests of a JUnit report."""
    cases = xml.etree.ElementTree.fromstring(junit).iter("testcase")
    return sum(all(child.tag not in ("failure", "error", "skipped") for child in c) for c in cases)


def run_sanitizer(folder: Path) -> str:
    """What compute-sanitizer says, in words for the ledger.

    Raises:
        LedgerError: it found something.
    """
    import sanitize

    try:
        reports = sanitize.sanitize(folder)
    except sanitize.SanitizeError as error:
        raise LedgerError(f"{folder}: {error}") from error
    if reports is None:
        return "not installed"
    sanitize.print_report(folder, reports)
    if not all(tool.clean for tool in reports):
        raise LedgerError(f"{folder}: compute-sanitizer found problems; nothing was recorded")
    return " and ".join(tool.tool for tool in reports) + " clean"


def driver_version() -> str:
    """The GPU driver's version."""
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 else "unknown"


def run_tests(folder: Path) -> dict[str, Entry]:
    """Run all tests of one bundle on this machine's GPU; an entry for each of its units.

    Raises:
        LedgerError: something failed.
    """
    import torch

    hashes = hash_units(folder)
    tests = run_pytest(HERE, {bundles.BUNDLE_VARIABLE: str(folder)})
    tests += run_pytest(folder / "tests", {})
    entry = Entry(
        hash="",
        device=torch.cuda.get_device_name(),
        driver=driver_version(),
        torch=torch.__version__.partition("+")[0],
        cuda=str(torch.version.cuda),
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        tests=tests,
        sanitizer=run_sanitizer(folder),
    )
    return {unit: Entry(**{**asdict(entry), "hash": value}) for unit, value in hashes.items()}


def run(*, build: bool) -> int:
    """Test every bundle that this machine's GPU runs, and record what passed.

    Raises:
        LedgerError: no GPU, no bundle for it, or a failure; bundles before it are recorded.
    """
    import torch

    if not torch.cuda.is_available():
        raise LedgerError("torch sees no GPU on this machine")
    capability = torch.cuda.get_device_capability()
    fitting = [f for f in bundles.compiled_bundles() if bundles.runs_on(f.name, capability)]
    if not fitting:
        raise LedgerError(f"no bundle in generated/ runs on capability {capability}")
    for folder in fitting:
        build_bundle(folder) if build else verify_build(folder)
        entries = {**load(), folder.name: run_tests(folder)}
        LEDGER.write_text(dump(entries), "utf-8")
        print(f"{folder.name}: recorded in {LEDGER.relative_to(bundles.ROOT)}")
    return 0


def build_all() -> int:
    """Build every compiled bundle here, to run it where nvcc is not."""
    for folder in bundles.compiled_bundles():
        build_bundle(folder)
    return 0


def main(words: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("run").add_argument("--no-build", action="store_true")
    for verb in ("build", "report", "check"):
        verbs.add_parser(verb)
    verbs.add_parser("readme").add_argument("--check", action="store_true")
    arguments = parser.parse_args(words)
    try:
        if arguments.verb == "run":
            return run(build=not arguments.no_build)
        if arguments.verb == "readme":
            return write_readme(only_check=arguments.check)
        return {"build": build_all, "report": report, "check": check}[arguments.verb]()
    except LedgerError as error:
        print(f"ledger: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
