"""What a run says of every option and every activation: which cells, and how they stand today."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from entries import State
from matrix import BundleFacts, table_row

USES = ("alone", "in an expert MLP", "merged with quantisation")

_POINTWISE = re.compile(
    r"kernels/pointwise_(?P<name>\w+?)(?:_without_\w+)?(?:_with_\w+?)?(?:_interleaved_\d+)?"
    r"_(?:forward|backward)(?P<merged>_quantize_\w+)?\.cu"
)


def words_of(cell: str) -> tuple[str, ...]:
    """The options in a cell's name."""
    return tuple(cell.split("__")[2:])


def by_option(cells: Iterable[str]) -> dict[str, list[str]]:
    """Cells of every option, sorted."""
    found: dict[str, list[str]] = {}
    for cell in sorted(cells):
        for word in words_of(cell):
            found.setdefault(word, []).append(cell)
    return dict(sorted(found.items()))


def by_activation(owners: Mapping[str, set[str]]) -> dict[str, dict[str, list[str]]]:
    """Cells without options of every activation and use, by the units that a cell is made of."""
    found: dict[str, dict[str, list[str]]] = {}
    for cell, units in sorted(owners.items()):
        matches = [match for unit in sorted(units) if (match := _POINTWISE.fullmatch(unit))]
        if not matches or words_of(cell):
            continue
        multiplies = any(unit.startswith("kernels/gemm_") for unit in units)
        merged = any(match["merged"] for match in matches)
        use = USES[multiplies + merged]
        for name in {match["name"] for match in matches}:
            found.setdefault(name, {each: [] for each in USES})[use].append(cell)
    return dict(sorted(found.items()))


REPLAYED = "reduce-overhead"


def ran(
    owners: Mapping[str, set[str]], tests: Mapping[str, int], replayed: Mapping[str, int]
) -> dict[str, object]:
    """The ledger's index of a run: passed tests by cell, by option and by activation and use.

    Args:
        owners: units of every cell.
        tests: passed tests of cells.
        replayed: those under `torch.compile(mode="reduce-overhead")`.
    """

    def counted(cells: Iterable[str]) -> dict[str, int]:
        return {cell: tests[cell] for cell in cells if cell in tests}

    activations = by_activation(owners).items()
    return {
        "options": {word: counted(cells) for word, cells in by_option(owners).items()},
        "activations": {
            name: {use: counted(cells) for use, cells in uses.items()} for name, uses in activations
        },
        REPLAYED: by_module(replayed),
    }


def counts(index: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Passed tests by cell, and those under `torch.compile`, that an index was made of."""
    by_word, by_use = index.get("options", {}), index.get("activations", {})
    every = [*by_word.values(), *(cells for uses in by_use.values() for cells in uses.values())]
    tests = {cell: count for cells in every for cell, count in cells.items()}
    modules = index.get(REPLAYED, {}).items()
    return tests, {f"{m}__{recipe}": n for m, recipes in modules for recipe, n in recipes.items()}


def by_module(tests: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Tests of cells by module and recipe."""
    found: dict[str, dict[str, int]] = {}
    for cell, count in sorted(tests.items()):
        module, _, recipe = cell.partition("__")
        found.setdefault(module, {})[recipe] = count
    return found


# ---- tables


class Choices:
    """Both bundles of an architecture, the committed one and that of further cells."""

    def __init__(self, facts: Sequence[BundleFacts]) -> None:
        self.arch = facts[0].arch
        self._ran = " and ".join(sorted({each.ran for each in facts if each.ran}))
        self.owners = {cell: units for each in facts for cell, units in each.owners.items()}
        self._states = {cell: each.state(cell) for each in facts for cell in each.owners}

    def evidence(self, cells: Sequence[str]) -> str:
        """How these cells stand, in few words."""
        if not cells:
            return "none"
        current = sum(self._states[cell] is State.CURRENT for cell in cells)
        if current == len(cells):
            return self._ran
        if all(self._states[cell] is State.NEVER for cell in cells):
            return "never ran"
        return f"{current} of {len(cells)} ran as they are"

    def replayed(self, tests: Mapping[str, Mapping[str, int]]) -> str:
        """What ran compiled into CUDA graphs, by the ledger's index, and what is stale of it."""
        modules = []
        for module, recipes in tests.items():
            words = [recipe + self._stale(f"{module}__{recipe}") for recipe in recipes]
            modules.append(f"`{module}` ({', '.join(words)})")
        return f'`torch.compile(mode="{REPLAYED}")`: {"; ".join(modules) or "never ran"}'

    def _stale(self, cell: str) -> str:
        return "" if self._states.get(cell) is State.CURRENT else " stale"

    def behind(self) -> list[str]:
        """A line per option and activation of which not every cell ran as it is."""
        lines = []
        for word, cells in by_option(self.owners).items():
            lines.append((f"option {word}", self.evidence(cells)))
        for name, uses in by_activation(self.owners).items():
            lines += [(f"{name} {use}", self.evidence(cells)) for use, cells in uses.items()]
        return [f"{what}: {said}" for what, said in lines if said not in (self._ran, "none")]


def tables(every: Sequence[Choices]) -> list[str]:
    """The table of options and that of activations, of all architectures, as lines of Markdown."""
    archs = [f"`{each.arch}`" for each in every]
    heads = ["option", "alone", "together with", *archs]
    lines = [table_row(heads), "|" + "---|" * len(heads)]
    options = [by_option(each.owners) for each in every]
    for word in _union(options):
        own = [found.get(word, []) for found in options]
        cells = _union(own)
        alone = [cell for cell in cells if words_of(cell) == (word,)]
        others = sorted({o for cell in cells for o in words_of(cell)} - {word})
        together = ", ".join(f"`{other}`" for other in others)
        said = [each.evidence(of_arch) for each, of_arch in zip(every, own, strict=True)]
        lines.append(table_row([f"`{word}`", _listed(alone), together, *said]))
    heads = ["pointwise op", *USES]
    lines += ["", table_row(heads), "|" + "---|" * len(heads)]
    activations = [by_activation(each.owners) for each in every]
    for name in _union(activations):
        own_uses = [found.get(name, {}) for found in activations]
        shown = [_use(every, [uses.get(use, []) for uses in own_uses]) for use in USES]
        lines.append(table_row([f"`{name}`", *shown]))
    return lines


def _union(parts: Iterable[Iterable[str]]) -> list[str]:
    return sorted({each for part in parts for each in part})


def _use(every: Sequence[Choices], own: Sequence[Sequence[str]]) -> str:
    """Recipes, and how cells stand; on each architecture where they do not stand alike."""
    recipes = _union([cell.split("__")[1] for cell in cells] for cells in own)
    if not recipes:
        return "none"
    said = {each.arch: each.evidence(cells) for each, cells in zip(every, own, strict=True)}
    words = [f"{what} (`{arch}`)" for arch, what in said.items()]
    alike = len({*said.values()}) == 1
    return f"{', '.join(recipes)}: {next(iter(said.values())) if alike else ', '.join(words)}"


def _listed(cells: Sequence[str]) -> str:
    """Recipes per module."""
    pairs = [cell.split("__")[:2] for cell in cells]
    return "; ".join(
        f"`{module}`: {', '.join(recipe for _, recipe in group)}"
        for module, group in groupby(pairs, key=lambda pair: pair[0])
    )
