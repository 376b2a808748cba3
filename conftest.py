"""Tiers of tests (`tests/tiers.py`); here, because tests of bundles lie beside those of `tests`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
from tiers import (
    LONGEST,
    TIERS,
    Tier,
    cell_of,
    chosen,
    may_hold,
    sample,
    tier_of,
    tiers_of,
)
from twins import twins

ROOT = Path(__file__).parent
CPU = ROOT / "generated" / "cpu"
CHOSEN = pytest.StashKey[tuple[Tier, ...]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    names = ["all", *(tier.name for tier in TIERS)]
    parser.addoption("--tier", choices=names, help="run the tests of one tier, or of all of CI")
    parser.addoption("--record", type=Path, help="write the ids of the tests that ran to a file")


def pytest_configure(config: pytest.Config) -> None:
    name = config.getoption("tier")
    config.stash[CHOSEN] = chosen(name) if name else ()
    config.pluginmanager.register(Record(config))


class Record:
    """Writes which tests ran, or, where they are only collected, which there are."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._ids: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if self._config.getoption("collectonly"):
            self._ids += [item.nodeid for item in session.items]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or (report.when == "setup" and report.skipped):
            self._ids.append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        file: Path | None = self._config.getoption("record")
        if file and not hasattr(self._config, "workerinput"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(f"{each}\n" for each in sorted(self._ids)), encoding="utf-8")


def pytest_report_header(config: pytest.Config) -> str | None:
    tiers = config.stash[CHOSEN]
    return f"tier: {', '.join(tier.name for tier in tiers)}" if tiers else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import neither what has no test of the tiers nor the tests of a cell whose twin is tested."""
    tiers = config.stash[CHOSEN]
    if not tiers or not collection_path.is_relative_to(ROOT) or collection_path == ROOT:
        return None
    held = may_hold(tiers, collection_path.relative_to(ROOT).as_posix())
    return None if held and not is_spared(collection_path) else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of other tiers; long files go first.

    Raises:
        UsageError: a test is in no tier.
    """
    tiers = config.stash[CHOSEN]
    if not tiers:
        return
    kept, left = [], []
    for item, tier in with_tiers(items):
        (kept if tier in tiers else left).append(item)
    items[:] = sorted(kept, key=lambda item: not is_long(item.path))
    config.hook.pytest_deselected(items=left)


def with_tiers(items: Iterable[pytest.Item]) -> Iterator[tuple[pytest.Item, Tier]]:
    """Each test and its tier; of many parameters of one a sample is in that of its place."""
    found = [(item, tier_of_item(item)) for item in items]
    tests: dict[tuple[str, Path, Tier], list[str]] = defaultdict(list)
    for item, tier in found:
        tests[item.nodeid.partition("[")[0], item.path, tier].append(item.nodeid)
    tiers: dict[str, Tier] = {}
    for (_, path, tier), ids in tests.items():
        tiers |= tiers_of(ids, path.relative_to(ROOT).as_posix(), tier)
    for item, _ in found:
        yield item, tiers[item.nodeid]


def tier_of_item(item: pytest.Item) -> Tier:
    path = item.path.relative_to(ROOT).as_posix()
    markers = {mark.name for mark in item.iter_markers()}
    function = getattr(item, "originalname", None) or item.name
    try:
        tier = tier_of(path, function, markers)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    if tier is None:
        raise pytest.UsageError(f"{path} is in no tier; add its folder to one in tests/tiers.py")
    return tier


@cache
def sampled(folder: Path) -> set[str]:
    """The cells of a bundle's tests that stand for the others."""
    return sample(cell_of(path) for path in folder.glob("test_*__*.py"))


@cache
def spared_cells() -> dict[Path, set[str]]:
    """Cells whose tests run elsewhere, by folder of tests.

    They have a twin in the bundle for the CPU, but for a sample of them, or in a compiled bundle
    that comes before.

    None where there is a GPU, on which a bundle's tests run its kernels too.
    """
    import torch

    if torch.cuda.is_available():
        return {}
    bundles = sorted((p.parent for p in (ROOT / "generated").glob("*/fusegen.lock")), reverse=True)
    compiled = [bundle for bundle in bundles if bundle != CPU]
    spared = {}
    for index, bundle in enumerate(compiled):
        spared[bundle / "tests"] = twins(bundle, CPU) - sampled(bundle / "tests")
        for before in compiled[:index]:
            spared[bundle / "tests"] |= twins(bundle, before)
    return spared


def is_long(path: Path) -> bool:
    """Whether a file is one of those that take longest."""
    return path.relative_to(ROOT).as_posix() in LONGEST


def is_spared(path: Path) -> bool:
    """Whether a file tests a cell whose twin is tested."""
    others = path.is_relative_to(ROOT / "generated") and not path.is_relative_to(CPU)
    return (
        others
        and path.name.startswith("test_")
        and cell_of(path) in spared_cells().get(path.parent, set())
    )
