"""Configurations of one architecture as the SMs of another hold them, for a spec that is copied."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ..checks.archs import point_problems, variants_of
from ..families.family import Family
from ..families.limits import hardware_limits
from ..families.registry import known_family
from ..ir.kernel import GemmKind
from ..spec.arch import ArchSpec, FamilySpec, KindSpec, RuleSpec
from ..spec.usage import UsageError
from ..tuning.fit import tidy
from ..tuning.rewrite import Choices, with_rules

Fitted = Mapping[str, str | None]
"""By the name of a configuration that of what takes its place; None where nothing fits."""


def with_fitting_points(text: str, origin: ArchSpec, name: str, capability: tuple[int, int]) -> str:
    """The text of a copied spec with configurations that fit, and rules that use those.

    A configuration that is too much for an SM gives way to the next lighter one, or goes. Where
    none is left all stay, for the check of the new spec to say why. What fits keeps its text.

    Args:
        text: of the new spec, which has families of the origin's.
        origin: that was copied.
        name: of the new architecture.
        capability: of its GPUs.

    Raises:
        UsageError: points or rules to change do not have lines of their own.
    """
    limits = {**origin.limits, **hardware_limits(capability)}
    for family, spec in origin.kernels.items():
        known = known_family(spec.template or family)
        if not known or not known.configured or known.cannot_run_on(name, capability):
            continue
        fitted = {
            kind: dict(_fitted(kind, each, family, spec, known, limits))
            for kind, each in spec.kinds.items()
        }
        every = {point: use for points in fitted.values() for point, use in points.items()}
        changed = {point: use for point, use in every.items() if use != point}
        if changed and all(any(points.values()) for points in fitted.values()):
            try:
                text = with_rules(text, family, _choices(spec, fitted))
            except ValueError as error:
                raise UsageError(f"{origin.name}, {family}: {error}") from None
            text = _explained(text, family, f"{origin.name} as an SM of {name}", changed)
    return text


def _fitted(
    kind: GemmKind,
    spec: KindSpec,
    name: str,
    family: FamilySpec,
    known: Family,
    limits: Mapping[str, int],
) -> Iterator[tuple[str, str | None]]:
    """Every configuration of a kind, and the first that fits of itself and what is lighter."""
    assert known.configured
    variants = variants_of(kind, name, family, known)
    for point in spec.points:
        choices = (point, *known.configured.lighter(point))
        fitting = (
            each.name
            for each in choices
            if not [*point_problems(known.configured, kind, each, variants, limits)]
        )
        yield point.name, next(fitting, None)


def _choices(family: FamilySpec, fitted: Mapping[GemmKind, Fitted]) -> Choices:
    """The rules of kinds whose configurations are others."""
    return {
        kind: _rules(family.kinds[kind], points)
        for kind, points in fitted.items()
        if any(point != use for point, use in points.items())
    }


def _rules(spec: KindSpec, fitted: Fitted) -> tuple[RuleSpec, ...]:
    """Those rules whose configuration is left; the last one for all that they leave.

    Estimates go: they are of the configurations that were measured, all of them.
    """
    kept = [
        replace(rule, use=use)
        for rule in spec.select
        if rule.use is not None and (use := fitted[rule.use]) is not None
    ]
    return tidy((*kept[:-1], RuleSpec(kept[-1].use)))


def _explained(text: str, family: str, whose: str, changed: Fitted) -> str:
    """What became of configurations, in place of the comment above them, which was of others."""

    def comment(match: re.Match[str]) -> str:
        lines = [
            f"Configurations of {whose} holds them; `fusegen bench --sweep {family}` finds rules."
        ]
        lines += [
            f"{point}: fits as {use}" if use else f"{point}: does not fit"
            for point, use in changed.items()
        ]
        return match["head"] + "".join(f"{match['indent']}# {line}\n" for line in lines)

    return re.sub(
        rf"(?P<head>^( *){re.escape(family)}:.*\n(?:\2 .*\n)*?)"
        r"(?:^ *#.*\n)*(?=(?P<indent> +)kinds:)",
        comment,
        text,
        count=1,
        flags=re.MULTILINE,
    )
