"""Targets: what they name is there, once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..ir.naming import Cell
from ..spec.cells import with_options
from ..spec.diagnostics import Problem
from ..spec.load import Source, SpecSet
from ..spec.serving import ALL, arch_meant
from ..spec.target import Kept, TargetSpec
from ..spec.usage import UsageError
from .common import unknown


def check_target(target: TargetSpec, specs: SpecSet, source: Source) -> Iterator[Problem]:
    """Every problem of a target."""
    named: Mapping[str, tuple[tuple[str, ...], Mapping[str, object]]] = {
        "archs": (target.archs, {**specs.archs, ALL: None}),
        "modules": (target.modules, specs.modules),
        "recipes": (target.recipes, specs.recipes),
    }
    for key, (words, known) in named.items():
        if not words:
            yield source.problem(f"a target needs {key}; name at least one", key)
        for index, word in enumerate(words):
            if key == "archs" and word not in known:
                hint = arch_meant(word, specs, known)
                yield source.problem(f"unknown arch {word!r}{hint}", key, index)
            else:
                yield from unknown(source, key[:-1], word, known, key, index)
            if word in words[:index]:
                yield source.problem(f"{word!r} is listed twice; remove one", key, index)
    if ALL in target.archs and target.kept is Kept.DIGESTS:
        what = f"a bundle for {ALL} has files of its cells; leave out kept, or name the archs"
        yield source.problem(what, "kept")
    if target.every_option and target.options:
        what = "with every_option each choice comes by itself; leave out options"
        yield source.problem(what, "options")
    yield from _options(target, specs, source)


def _options(target: TargetSpec, specs: SpecSet, source: Source) -> Iterator[Problem]:
    """Every module offers every choice, and no two are of one option."""
    for module in sorted({*target.modules} & {*specs.modules}):
        try:
            with_options(specs, [Cell(module, "any")], target.options)
        except UsageError as error:
            yield source.problem(str(error), "options")
