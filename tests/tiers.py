"""Which tests run when.  Every test is in one tier, and nothing but this file says in which.

``pytest --tier NAME`` runs a tier, ``--tier all`` what CI runs; the Makefile has targets of them.
``--record FILE`` writes which tests ran; ``python tests/tiers.py FILE... --all FILE`` then says
which test of all ran in no tier, or in two.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

BUNDLE_TESTS = "generated/*/tests"
COMPILING = ("compiles", "opcheck")
"""Words in the names of a bundle's tests that trace or compile what they test."""


@dataclass(frozen=True)
class Tier:
    """Tests that run together.

    Attributes:
        name: of the tier.
        places: folders and files, relative to the repository; patterns.  What is in the places of
            several tiers is in the first of them.
    """

    name: str
    places: tuple[str, ...]

    def holds(self, path: str) -> bool:
        """Whether a file or a folder lies in one of the places."""
        parents = [path, *map(str, PurePosixPath(path).parents)]
        return any(fnmatch(each, place) for each in parents for place in self.places)


FAST = Tier(
    "fast",
    (
        "tests/unit",
        "tests/errors",
        "tests/golden",
        "tests/numerics",
        "tests/promises",
        "generated/cpu/tests",
    ),
)
BROAD = Tier("broad", ("tests/unit", "tests/errors"))
"""Parameters of fast tests beside a few."""

OPTIONS = Tier("options", ("tests/generated", "tests/walkthroughs", BUNDLE_TESTS))
KERNELS = Tier("kernels", ("tests/compile",))
GPU = Tier("gpu", ("tests/gpu",))
SLOW_PLACES = (
    "tests/errors",
    "tests/golden",
    "tests/promises",
    "tests/unit",
    "generated/cpu/tests",
)
"""Places of the fast tier some of whose tests are in the tier of options instead."""

EXHAUSTIVE = Tier("exhaustive", (*SLOW_PLACES[:-1], "tests/generated", "tests/compile"))
"""Parameters of tests beside a sample of them."""

TIERS = (FAST, BROAD, OPTIONS, KERNELS, GPU, EXHAUSTIVE)
ALL = (FAST, BROAD, OPTIONS, KERNELS)
"""What CI runs."""

FEW = {"fast": 3, "options": 2, "kernels": 2}
"""Parameters of one test that its tier runs, where another one runs the rest: fewer where tests
compile or train."""

LONGEST = (
    "tests/generated/test_sampled_options.py",
    "tests/unit/test_chains.py",
    "tests/unit/test_verify.py",
)
"""Files that run first, so that no worker is left with one of them when the other has ended."""


def chosen(name: str) -> tuple[Tier, ...]:
    """The tiers of a name, which may be "all"."""
    return ALL if name == "all" else tuple(tier for tier in TIERS if tier.name == name)


def tier_at(path: str) -> Tier | None:
    """The tier of a file, as far as its place says so."""
    return next((tier for tier in TIERS if tier.holds(path)), None)


def tier_of(path: str, function: str, markers: Collection[str]) -> Tier | None:
    """The tier of a test.

    Args:
        path: of its file, relative to the repository.
        function: its name.
        markers: that it has.

    Raises:
        ValueError: it is marked as slow where the tier of options does not look.
    """
    tier = tier_at(path)
    if tier is not FAST:
        return tier
    compiling = _is_of_bundle(path) and any(word in function for word in COMPILING)
    if "slow" not in markers and not compiling:
        return FAST
    if not any(path.startswith(f"{place}/") for place in SLOW_PLACES):
        raise ValueError(f"{path}: {function} is slow; add its folder to SLOW_PLACES in {__file__}")
    return OPTIONS


def _is_of_bundle(path: str) -> bool:
    return fnmatch(path, f"{BUNDLE_TESTS}/*")


def tiers_of(tests: Collection[str], path: str, tier: Tier) -> dict[str, Tier]:
    """The tiers of one test's parameters: a sample of many is in the tier that it belongs to.

    Args:
        tests: their ids.
        path: of its file, relative to the repository.
        tier: that it belongs to.
    """
    if tier is FAST and BROAD.holds(path):
        others = BROAD
    elif tier in (OPTIONS, KERNELS) and not _is_of_bundle(path):
        others = EXHAUSTIVE
    else:
        return dict.fromkeys(tests, tier)
    sample_of_them = spread(tests, FEW[tier.name])
    return {each: tier if each in sample_of_them else others for each in tests}


def spread(tests: Collection[str], most: int) -> set[str]:
    """The ids of one test's parameters that stand for the others: as good as any, and the same ones
    as long as they are there."""
    return {*sorted(tests, key=lambda each: hashlib.sha256(each.encode()).digest())[:most]}


def may_hold(tiers: Collection[Tier], path: str) -> bool:
    """Whether a file or a folder has, or leads to, tests of these tiers."""
    slow = SLOW_PLACES if OPTIONS in tiers else ()
    slow += BROAD.places if BROAD in tiers else ()
    slow += EXHAUSTIVE.places if EXHAUSTIVE in tiers else ()
    if tier_at(path) in tiers or any(f"{path}/".startswith(f"{place}/") for place in slow):
        return True
    depth = len(PurePosixPath(path).parts)
    places = (place.split("/") for place in (*slow, *(p for tier in tiers for p in tier.places)))
    return any(depth < len(parts) and fnmatch(path, "/".join(parts[:depth])) for parts in places)


def first_with_each_option(cells: Iterable[str]) -> dict[str, str]:
    """The first cell, sorted, that has an option, for every option."""
    first: dict[str, str] = {}
    for cell in sorted(cells):
        for word in cell.split("__")[2:]:
            first.setdefault(word, cell)
    return first


def sample(cells: Iterable[str]) -> set[str]:
    """Cells that stand for the others: the first, sorted, of every module, format and option.

    A format is the first word of a recipe: `bf16`, `fp8`, `mxfp8`, `nvfp4`.
    """
    ordered = sorted(cells)
    first: dict[tuple[str, str], str] = {}
    for cell in ordered:
        module, recipe = cell.split("__")[:2]
        for key in (("module", module), ("format", recipe.split("_")[0])):
            first.setdefault(key, cell)
    return {*first.values(), *first_with_each_option(ordered).values()}


def cell_of(path: Path) -> str:
    """The cell that a file of a bundle's tests is of."""
    return path.stem.removeprefix("test_")


# ---- did every test run, and only once?


def problems(every: Iterable[str], ran: Iterable[Iterable[str]]) -> list[str]:
    """What is wrong with the tests that the tiers ran, one line each.

    Args:
        every: all tests.
        ran: those of each tier.
    """
    counts = Counter(test for tests in ran for test in tests)
    known = set(every)
    missed = [f"{test}: in no tier" for test in sorted(known - counts.keys())]
    strange = [f"{test}: ran, but is not collected" for test in sorted(counts.keys() - known)]
    twice = [f"{test}: ran {n} times" for test, n in sorted(counts.items()) if n > 1]
    return [*missed, *strange, *twice]


def main(words: list[str]) -> int:
    """``FILE... --all FILE``: compare what the tiers ran with all tests."""
    *tiers, flag, everything = words
    if flag != "--all" or not tiers:
        print(__doc__, file=sys.stderr)
        return 2
    ran = [Path(file).read_text("utf-8").splitlines() for file in tiers]
    every = Path(everything).read_text("utf-8").splitlines()
    wrong = problems(every, ran)
    print(*wrong[:50], sep="\n", end="\n" if wrong else "", file=sys.stderr)
    print(f"{len(every)} tests in {len(tiers)} tiers, {len(wrong)} of them in none or in two")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
