"""A whole sweep: what to measure, the rules that follow from it, and the spec that states them."""

from __future__ import annotations

import difflib
import shutil
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..checks.archs import reach_problems, variants_of
from ..checks.load import load
from ..families.gpus import Gpu
from ..families.registry import known_family
from ..ir.kernel import GemmKind
from ..spec.arch import ArchSpec, RuleSpec
from ..spec.load import SpecSet
from ..spec.points import parse_point
from ..spec.usage import UsageError
from .cases import Case, Measured, Sample
from .fit import Choice, choose, chosen
from .model import Kernel, chosen_by_model, modelled
from .rewrite import marked, printed, with_rules
from .variants import family_named


@dataclass(frozen=True, slots=True)
class Tuned:
    """What a sweep of one family found.

    Attributes:
        arch, family: what was swept.
        measured: the samples.
        choices: rules by kind; kinds that no recipe runs have none and stay as they are.
        gpu: whose model gave the times; empty where they were measured.
    """

    arch: str
    family: str
    measured: Measured
    choices: Mapping[GemmKind, Choice]
    gpu: str = ""

    def to_json(self) -> dict[str, object]:
        """What was chosen, without the samples."""
        return {
            "arch": self.arch,
            "family": self.family,
            "left_out": self.measured.left_out,
            **({"model": self.gpu} if self.gpu else {}),
            "kinds": {kind.value: _choice_json(each) for kind, each in self.choices.items()},
        }


def _choice_json(choice: Choice) -> dict[str, object]:
    return {
        "cases": choice.samples,
        "before": [printed(rule) for rule in choice.before],
        "after": [printed(rule) for rule in choice.after],
        "loss": [asdict(choice.loss_before), asdict(choice.loss_after)],
    }


def tune(
    specs: SpecSet, arch: str, family: str, measured: Measured, models: Sequence[Case] = ()
) -> Tuned:
    """Fit the rules of every kind that was measured, among all points that were.

    Those that the arch does not list any more, since an earlier fit had no rule for them, too.

    Args:
        models: GEMMs whose cases count for more.

    Raises:
        UsageError: an unknown family, or samples that lack one of its points.
    """
    choices = {}
    for kind, spec in family_named(specs.archs[arch], family).kinds.items():
        samples = [sample for sample in measured.samples if sample.kind is kind]
        points = [point.name for point in spec.points]
        for point in points:
            if any(point not in sample.times for sample in samples):
                raise UsageError(
                    f"{family} {kind.value}: {point} was not measured on every case; measure anew"
                )
        if samples:
            anywhere = _launched_anywhere(specs.archs[arch], family, kind, samples)
            choices[kind] = chosen(samples, spec.select, models, anywhere=anywhere)
    return Tuned(arch, family, measured, choices)


def _launched_anywhere(
    arch: ArchSpec, family: str, kind: GemmKind, samples: Sequence[Sample]
) -> Collection[str] | None:
    """Points that every GPU which runs the code has the memory for; None where nothing is known."""
    spec = arch.kernels[family]
    known = known_family(spec.template or family)
    if known is None or known.configured is None:
        return None
    variants, configured = variants_of(kind, family, spec, known), known.configured
    points = {name: parse_point(name) for sample in samples for name in sample.times}
    return {
        name
        for name, point in points.items()
        if not [*reach_problems(configured, kind, point, variants, arch)]
    }


def tune_by_model(
    specs: SpecSet, arch: str, family: str, gpu: Gpu, cases: Sequence[Case], models: Sequence[Case]
) -> Tuned:
    """Rules of every kind by the model of a GPU, among the points that the arch lists.

    Of one group the estimates themselves choose, of several thresholds that are fitted to the
    model's times of these cases.

    Args:
        models: GEMMs whose cases count for more.

    Raises:
        UsageError: an unknown family, the GPU does not run the arch's code, or nothing is known of
            the family or of the rate of its operands.
    """
    spec = specs.archs[arch]
    own = family_named(spec, family)
    known = known_family(own.template or family)
    if not spec.runs_on(gpu.capability):
        raise UsageError(f"{gpu.name} does not run the code of {arch}")
    if known is None or known.configured is None:
        raise UsageError(f"{family}: nothing is known of its configurations, so nothing of times")
    samples: list[Sample] = []
    choices: dict[GemmKind, Choice] = {}
    for kind, each in own.kinds.items():
        variant = variants_of(kind, family, own, known)[0]
        kernels = {
            point.name: Kernel.of(
                point, dict(known.configured.constants(point, kind, variant, spec.limits))
            )
            for point in each.points
        }
        if lacking := {kernel.bits for kernel in kernels.values()} - {*gpu.rates}:
            raise UsageError(f"{gpu.name}: no rate of operands of {min(lacking)} bits is known")
        found = [*modelled(kind, cases, kernels, gpu)]
        anywhere = _launched_anywhere(spec, family, kind, found)
        choices[kind] = chosen_by_model(found, each.select, kernels, gpu, models, anywhere)
        samples += found
    return Tuned(arch, family, Measured(tuple(samples), 0), choices, gpu.name)


def rewritten(text: str, tuned: Sequence[Tuned]) -> str:
    """The text of an arch's spec with the rules of sweeps; kinds without new ones stay."""
    for each in tuned:
        changed: dict[GemmKind, Sequence[RuleSpec]] = {
            kind: choice.after
            for kind, choice in each.choices.items()
            if choice.after != choice.before
        }
        text = with_rules(text, each.family, changed)
        text = marked(text, each.family, each.choices, measured=not each.gpu)
    return text


def difference(path: Path, new: str) -> str:
    """What writing a spec would change, as a unified diff."""
    old = path.read_text("utf-8").splitlines(keepends=True)
    return "".join(difflib.unified_diff(old, new.splitlines(keepends=True), str(path), str(path)))


def write(path: Path, new: str, root: Path) -> None:
    """Replace a spec below `root`, if the specs are valid with it.

    Raises:
        SpecError: they are not; nothing was written.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(root, Path(folder) / root.name))
        (copy / path.relative_to(root)).write_bytes(new.encode())
        load([copy])
    path.write_bytes(new.encode())


def report(tuned: Tuned, most: int = 10) -> list[str]:
    """What was found: per kind the rules, what they lose, and the cases that lose most."""
    lines = []
    for kind, choice in tuned.choices.items():
        lines.append(
            f"{tuned.family} {kind.value}: {choice.samples} cases, mean regret "
            f"{choice.loss_before} -> {choice.loss_after}"
        )
        lines += [f"  {printed(rule)}" for rule in choice.after]
        before, after = (_points(rules) for rules in (choice.before, choice.after))
        gone, come = sorted(before - after), sorted(after - before)
        lines += [f"  {point}: no case is worth a rule, so it goes" for point in gone]
        lines += [f"  {point}: it is listed again" for point in come]
        lines += _worst(tuned, kind, choice, most)
    if tuned.measured.left_out:
        lines.append(f"{tuned.measured.left_out} cases left out for want of time")
    return lines


def _points(rules: Sequence[RuleSpec]) -> set[str]:
    return {point for rule in rules for point in rule.points}


def _worst(tuned: Tuned, kind: GemmKind, choice: Choice, most: int) -> list[str]:
    """Cases in which the rules lose most, or lost most before."""
    rows = []
    for sample in (each for each in tuned.measured.samples if each.kind is kind):
        sizes, regrets = sample.case.sizes(kind), sample.regrets()
        before, after = choose(choice.before, sizes), choose(choice.after, sizes)
        times = ", ".join(f"{point} {ms:.4g} ms" for point, ms in sample.times.items())
        rows.append(
            (
                max(regrets[before], regrets[after]),
                f"    {sample.case} ({sample.recipe}): {times}; {before} -> {after}, "
                f"{regrets[before]:.1%} -> {regrets[after]:.1%}",
            )
        )
    return [text for lost, text in sorted(rows, reverse=True)[:most] if lost > 0]
