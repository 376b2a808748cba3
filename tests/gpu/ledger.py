"""The ledger: which kernels ran, tested, on which device, and whether they changed since.

    python tests/gpu/ledger.py run [--no-build]   the four steps that follow, on this GPU
    python tests/gpu/ledger.py build [--jobs N] [BUNDLE...]  generate the further bundles and build
    python tests/gpu/ledger.py test [BUNDLE...]   run the tests of all bundles, several at a time
    python tests/gpu/ledger.py sanitize [BUNDLE...]  run all kernels under compute-sanitizer
    python tests/gpu/ledger.py test --changed   either: cells that have not run as they are
    python tests/gpu/ledger.py record [--untested-memory]  write what both found into the ledger
    python tests/gpu/ledger.py report             current, stale or never ran, per bundle
    python tests/gpu/ledger.py check              exit code 1 if anything that ran is stale
    python tests/gpu/ledger.py readme             write the support matrix of README.md
    python tests/gpu/ledger.py readme --check     the report; exit code 1 if the matrix is stale

The steps may run on different machines: `build` needs the generator and nvcc, the next two need a
GPU and what `build` left in `generated/*/lib`, `build/evidence` and `build/written`; what they
find lies in `build/gpu`, where `record` reads it; asked to, it takes tests of bundles that
`sanitize` has not seen, and the ledger says so.

There are the committed bundles and two further ones of each architecture, which no user has but
whoever asks for their cells: every option, usual combinations of options and every activation
(evidence.py), and what users may write themselves (written.py).  Of an architecture of which a part
is committed there is one with all modules and recipes (whole.py), which is generated where `build`
is asked for it by name or finds such a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import bundles
import choices
import matrix
import steps
from entries import Entries, Entry, LedgerError, State, combine, gaps, state_of
from units import hash_units

HERE = Path(__file__).resolve().parent
LEDGER = HERE / "ledger.json"
README = bundles.ROOT / "README.md"
UPDATE = "python tests/gpu/ledger.py readme"
VERSION = 1

Index = Mapping[str, Mapping[str, object]]
"""By architecture: what ran for every option and every activation, as `choices.ran` says it."""


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
        return {
            key: {unit: Entry(**entry) for unit, entry in units.items()}
            for key, units in _read(path)["bundles"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LedgerError(f"{path}: no ledger: {error!r}; take it from git") from error


def _read(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text("utf-8"))
    if data["version"] != VERSION:
        raise LedgerError(f"{path}: version {data['version']}, expected {VERSION}")
    return data


def load_index(path: Path | None = None) -> dict[str, dict[str, Any]]:
    """What ran for every option and activation, by architecture, as `choices.ran` says it."""
    path = LEDGER if path is None else path
    index: dict[str, dict[str, Any]] = _read(path).get("ran", {}) if path.exists() else {}
    return index


def dump(entries: Entries, index: Index) -> str:
    """Sorted JSON with one line per unit, per option and per activation."""
    units = {
        key: {unit: asdict(entry) for unit, entry in known.items()}
        for key, known in entries.items()
    }
    return (
        f'{{\n  "version": {VERSION},\n  "bundles": {_lines(units, 2)},\n'
        f'  "ran": {_lines(index, 3)}\n}}\n'
    )


def _lines(value: Any, depth: int, indent: str = "  ") -> str:
    """JSON whose objects are broken into lines down to a depth."""
    if depth == 0 or not value:
        return json.dumps(value, sort_keys=True)
    inner = f"{indent}  "
    body = ",\n".join(
        f"{inner}{json.dumps(key)}: {_lines(value[key], depth - 1, inner)}" for key in sorted(value)
    )
    return f"{{\n{body}\n{indent}}}"


# ---- the repository


def bundle_folders() -> list[Path]:
    """Every committed bundle."""
    return sorted(path.parent for path in bundles.GENERATED.glob("*/fusegen.lock"))


@cache
def further_bundles() -> list[Path]:
    """The bundles for the GPU run alone, brought up to the specs."""
    sys.path.insert(0, str(bundles.ROOT / "generator"))
    import evidence
    import twin
    import whole
    import written

    ran, parts = load(), _parts()
    twin.generate(arch for arch, name in bundles.TWINS.items() if f"{name} {bundles.TWIN}" in ran)
    whole.generate(arch for arch in parts if f"{arch} {bundles.WHOLE}" in ran)
    archs = [each.name for each in bundles.compiled_bundles() if each.name not in parts]
    evidence.generate(archs)
    written.generate(archs)
    return bundles.further_bundles()


def _parts() -> list[str]:
    """Architectures of which a part is committed."""
    return [each.name for each in bundles.compiled_bundles() if bundles.is_representative(each)]


def facts_of(folder: Path, entries: Entries) -> matrix.BundleFacts:
    """What the files of one bundle, those of the bundles that speak for it and the ledger say."""
    return matrix.BundleFacts(
        arch=folder.name,
        cells=tuple(matrix.read_cells((folder / "README.md").read_text("utf-8"))),
        owners=matrix.read_owners((folder / "fusegen.lock").read_text("utf-8")),
        hashes=hash_units(folder),
        entries=entries.get(bundles.key_of(folder), {}),
        digests=_digests_of(folder / bundles.MANIFEST),
        others=tuple((words, facts_of(o, entries)) for words, o in _others(folder)),
        compiled=_all_compiled(folder.name),
    )


def _others(folder: Path) -> Iterator[tuple[str, Path]]:
    """Bundles that speak for a committed one, behind the words that they are called by."""
    if bundles.kind_of(folder):
        return
    named = {
        "every module and recipe:": bundles.BUILD / bundles.WHOLE / folder.name,
        "its": bundles.BUILD / bundles.TWIN / bundles.TWINS.get(folder.name, "none"),
    }
    yield from ((words, other) for words, other in named.items() if other.is_dir())


def _digests_of(manifest: Path) -> tuple[matrix.Cell, ...]:
    return tuple(matrix.read_manifest(manifest.read_text("utf-8"))) if manifest.is_file() else ()


def _all_compiled(arch: str) -> bool:
    """Whether every cell of an architecture is on record as compiled."""
    if not bundles.RECORD.is_file():
        return False
    found = json.loads(bundles.RECORD.read_text("utf-8")).get(arch, {})
    return bool(found.get("complete"))


def choices_of(entries: Entries) -> list[choices.Choices]:
    """Options and activations of every architecture that has a bundle of further cells."""
    further = {f.name: f for f in further_bundles() if bundles.kind_of(f) == bundles.EVIDENCE}
    return [
        choices.Choices([facts_of(folder, entries), facts_of(further[folder.name], entries)])
        for folder in bundles.compiled_bundles()
        if folder.name in further
    ]


def runs_of(arch: str, entries: Entries) -> list[str]:
    """Where and when the further bundles of an architecture ran last, an item of a list each."""
    return [
        f"- `{arch}`, {bundles.FURTHER[bundles.kind_of(folder)]}: {facts_of(folder, entries).run()}"
        for folder in further_bundles()
        if folder.name == arch
    ]


def report() -> int:
    """Print the state of every compiled bundle, and of every option and activation."""
    entries = load()
    for folder in (*bundles.compiled_bundles(), *further_bundles()):
        key = bundles.key_of(folder)
        hashes, known = hash_units(folder), entries.get(key, {})
        state = combine(state_of(hashes, known).values())
        if state is State.NEVER:
            print(f"{key}: never ran (compiled only), {len(hashes)} units")
            continue
        latest = max(known.values(), key=lambda entry: entry.date)
        print(f"{key}: {state.value}, {latest.where} on {latest.date}")
        for line in gaps(hashes, known):
            print(f"  {line}")
    for each in choices_of(entries):
        for line in each.behind():
            print(f"{each.arch}: {line}")
    return 0


def check() -> int:
    """1 where a bundle that claims to have run is stale or incomplete."""
    entries = load()
    if any(bundles.kind_of(bundles.folder_of(key)) for key in entries):
        further_bundles()
    lines = []
    for key, known in sorted(entries.items()):
        lines += [f"{key}: {line}" for line in gaps(hash_units(bundles.folder_of(key)), known)]
    for line in lines:
        print(line, file=sys.stderr)
    if lines:
        print("on a machine with that GPU, run: make gpu-test", file=sys.stderr)
    return 1 if lines else 0


def write_readme(*, only_check: bool) -> int:
    """Write the matrix, or say whether it is as it would be written."""
    entries, index = load(), load_index()
    text = README.read_text("utf-8")
    every = choices_of(entries)  # first: it generates the twins that facts of bundles are read from
    lines = [matrix.matrix(facts_of(folder, entries) for folder in bundle_folders())]
    if every:
        lines += ["", *choices.tables(every), ""]
    for each in every:
        lines += runs_of(each.arch, entries)
        if each.arch in index:
            lines.append(f"- `{each.arch}`, {each.replayed(index[each.arch][choices.REPLAYED])}")
    wanted = matrix.replace_matrix(text, "\n".join(lines))
    if wanted == text:
        return 0
    if only_check:
        print(f"README.md: the support matrix is out of date; run: {UPDATE}", file=sys.stderr)
        return 1
    README.write_text(wanted, "utf-8")
    return 0


# ---- runs


def build(jobs: int | None = None, wanted: Sequence[str] = ()) -> int:
    """Generate the further bundles and build every compiled bundle, to run here or elsewhere.

    Of those named, if any are: committed ones without generating further ones.

    Raises:
        LedgerError: there is none of a name.
    """
    committed = {bundles.key_of(folder): folder for folder in bundles.compiled_bundles()}
    if not wanted:
        import twin

        twin.generate(arch for arch in bundles.TWINS if arch in committed)
    wholes = [
        arch
        for arch in _parts()
        if (f"{arch} {bundles.WHOLE}" in wanted if wanted else steps.is_here(arch))
    ]
    if wholes:
        import whole

        whole.generate(wholes)
    further = (
        {}
        if {*wanted} <= {*committed} and wanted
        else {bundles.key_of(folder): folder for folder in further_bundles()}
    )
    every = committed | further
    if unknown := [name for name in wanted if name not in every]:
        raise LedgerError(f"{unknown[0]!r}: no bundle here; there are {', '.join(every)}")
    for folder in [every[name] for name in wanted or every]:
        steps.build_bundle(folder, jobs)
        print(f"{bundles.key_of(folder)}: built", flush=True)
    return 0


def record(*, untested_memory: bool = False) -> int:
    """Write what tests and sanitizer found into the ledger; other bundles stay as they were.

    Args:
        untested_memory: tests alone are enough of a bundle that the sanitizer has not seen.

    Raises:
        LedgerError: one of the two did not end, saw other sources or ran on another GPU; none ran.
    """
    entries: dict[str, Mapping[str, Entry]] = dict(load())
    said: dict[Path, dict[str, Any]] = {}
    every = (*bundles.compiled_bundles(), *bundles.further_bundles())
    for folder in filter(steps.ran, every):
        tested = steps.found_in("test", folder)
        if untested_memory and not steps.has_found("sanitize", folder):
            sanitized = {**tested, "said": {"sanitizer": "not run"}}
        else:
            sanitized = steps.found_in("sanitize", folder)
        on, beside = tested["machine"], sanitized["machine"]
        if {**on, "date": ""} != {**beside, "date": ""}:
            raise LedgerError(f"{folder}: tested on {on}, sanitized on {beside}; repeat one there")
        here, key = hash_units(folder), bundles.key_of(folder)
        known = {unit: entry for unit, entry in entries.get(key, {}).items() if unit in here}
        entries[key] = known | {
            unit: Entry(
                hash=value,
                tests=tested["said"]["tests"],
                sanitizer=sanitized["said"]["sanitizer"],
                **on,
            )
            for unit, value in here.items()
            if tested["units"].get(unit) == sanitized["units"].get(unit) == value
        }
        said[folder] = tested["said"]
    if not said:
        raise LedgerError(f"{steps.FOUND}: nothing ran; run: {steps.LEDGER} test")
    LEDGER.write_text(dump(entries, _index(said, entries)), "utf-8")
    print(f"recorded in {LEDGER.name}: {', '.join(bundles.key_of(folder) for folder in said)}")
    return 0


def _index(said: Mapping[Path, Mapping[str, Any]], entries: Entries) -> Index:
    """By architecture, what ran for options and activations, by the tests of bundles that ran now,
    and of others what was known of them.

    What users may write themselves is left out: it says nothing of what ships.
    """
    every = (*bundles.compiled_bundles(), *bundles.further_bundles())
    shipped = [folder for folder in every if bundles.kind_of(folder) != bundles.WRITTEN]
    index = load_index()
    for arch, group in groupby(sorted(shipped, key=lambda f: f.name), lambda f: f.name):
        folders = [*group]
        if said.keys().isdisjoint(folders):
            continue
        passed, replayed = choices.counts(index.get(arch, {}))
        for folder in said.keys() & {*folders}:
            passed.update(said[folder]["cells"])
            replayed.update(said[folder][choices.REPLAYED])
        owners = {c: u for f in folders for c, u in facts_of(f, entries).owners.items()}
        index[arch] = choices.ran(owners, passed, replayed)
    return index


def changed_units(folder: Path, entries: Mapping[str, Entry]) -> list[str]:
    """Units of a bundle that never ran, or changed since they did."""
    states = state_of(hash_units(folder), entries)
    return sorted(unit for unit, state in states.items() if state is not State.CURRENT)


def chosen(wanted: Sequence[str] = (), *, changed: bool = False) -> dict[Path, steps.Units]:
    """Bundles that this machine's GPU runs, or those named, whole or with what changed of each."""
    folders = steps.bundles_here(wanted)
    if not changed:
        return dict.fromkeys(folders)
    entries = load()
    units = {f: changed_units(f, entries.get(bundles.key_of(f), {})) for f in folders}
    return {folder: of_it for folder, of_it in units.items() if of_it}


def on_gpu(step: Callable[[dict[Path, steps.Units]], None], folders: dict[Path, Any]) -> int:
    """Take a step, if there is anything to do."""
    if not folders:
        print("all has run as it is")
        return 0
    step(folders)
    return 0


def run(*, builds: bool) -> int:
    """All steps, here."""
    return (
        (build() if builds else 0)
        or on_gpu(steps.test, chosen())
        or on_gpu(steps.sanitize, chosen())
        or record()
    )


def main(words: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("run").add_argument("--no-build", action="store_true")
    building = verbs.add_parser("build")
    building.add_argument("--jobs", type=int, help="units compiled at a time")
    building.add_argument("bundle", nargs="*", help='such as "sm_90a"; by default all')
    taken = {"test": steps.test, "sanitize": steps.sanitize}
    for verb in taken:
        taking = verbs.add_parser(verb)
        taking.add_argument("bundle", nargs="*", help='such as "sm_90a evidence"')
        taking.add_argument("--changed", action="store_true", help="what has not run as it is")
    plain = {"report": report, "check": check}
    for verb in plain:
        verbs.add_parser(verb)
    verbs.add_parser("record").add_argument("--untested-memory", action="store_true")
    verbs.add_parser("readme").add_argument("--check", action="store_true")
    arguments = parser.parse_args(words)
    try:
        if arguments.verb == "run":
            return run(builds=not arguments.no_build)
        if arguments.verb == "build":
            return build(arguments.jobs, arguments.bundle)
        if arguments.verb == "readme":
            if arguments.check:
                report()
            return write_readme(only_check=arguments.check)
        if arguments.verb == "record":
            return record(untested_memory=arguments.untested_memory)
        if arguments.verb in taken:
            folders = chosen(arguments.bundle, changed=arguments.changed)
            return on_gpu(taken[arguments.verb], folders)
        return plain[arguments.verb]()
    except LedgerError as error:
        print(f"ledger: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
