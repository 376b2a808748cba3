"""Selection rules from measurements: the sizes, the bundles, the fit, and the spec's new text."""

from __future__ import annotations

import dataclasses
import importlib
import random
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from fusegen import api
from fusegen.build.sources import read_sources
from fusegen.checks.load import load
from fusegen.families.wgmma import WgmmaConfig
from fusegen.ir.kernel import GemmKind, WaveTime
from fusegen.ir.predicate import Comparison, Condition, Predicate, SizeVariable
from fusegen.publish import paths
from fusegen.spec.arch import RuleSpec
from fusegen.spec.diagnostics import SpecError
from fusegen.spec.load import SpecSet
from fusegen.spec.points import parse_point
from fusegen.spec.usage import UsageError
from fusegen.tuning import fit, rewrite, tune, variants, waves
from fusegen.tuning.cases import (
    MOST_BYTES,
    MOST_FLOPS,
    OF_MODELS,
    WIDTHS,
    Case,
    Measured,
    Sample,
    grid,
    measure,
    spread,
    weighted,
)

ARCH, FAMILY = "sm_90a", "gemm_sm90"
MODELS = ((28672, 4096), (4096, 14336), (4096, 7168), (7168, 2048), (1536, 2048), (2048, 768))
CASES = grid([*MODELS, *WIDTHS])
FAMILIES = (
    "gemm_sm90",
    "gemm_fp8_fast_sm90",
    "gemm_fp8_split_sm90",
    "gemm_fp8_block_sm90",
    "gemm_decoded_sm90",
)


@pytest.fixture(scope="module")
def specs() -> SpecSet:
    return api.load_specs()


def rule(use: str, **when: dict[str, int]) -> RuleSpec:
    conditions = (
        Condition(SizeVariable(variable), Comparison(comparison), value)
        for variable, comparisons in when.items()
        for comparison, value in comparisons.items()
    )
    return RuleSpec(use, Predicate(tuple(conditions)))


# Sizes


def test_the_grid_covers_what_it_has_to() -> None:
    for cases in (CASES, grid([*MODELS, *WIDTHS], quick=True)):
        groups = {case.groups for case in cases}
        means = {case.tokens // case.groups for case in cases}
        assert {min(groups), max(groups)} == {1, 512}
        assert {min(means), max(means)} == {16, 16384}
        assert {(case.n, case.k) for case in cases} == {*MODELS, *WIDTHS}
        assert max(case.bytes for case in cases) <= MOST_BYTES
        assert max(case.flops for case in cases) <= MOST_FLOPS
        # Many groups with few tokens each, as in decoding, and few with many.
        assert Case(512, 512 * 16, 1536, 2048) in cases and Case(1, 16384, 4096, 7168) in cases
    assert len(grid([*MODELS, *WIDTHS], quick=True)) < len(CASES) / 5
    assert len(CASES) == len(set(CASES))


def test_a_case_counts_what_it_holds() -> None:
    case = Case(2, 10, 3, 5)
    assert case.flops == 2 * 10 * 3 * 5
    assert case.bytes == 3 * 2 * (10 * 3 + 10 * 5 + 2 * 3 * 5)
    assert not grid([(3, 5)], most_bytes=100)


def test_sizes_are_those_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "gpu")
    selection = importlib.import_module("selection")
    for kind in GemmKind:
        expected = selection.gemm_sizes(kind.value, tokens=630, groups=4, n=384, k=8)
        found = Case(4, 630, 384, 8).sizes(kind)
        assert {variable.value: size for variable, size in found.items()} == expected


def test_every_beginning_is_spread() -> None:
    for count in (0, 1, 2, 7, 64, 100):
        assert sorted(spread(range(count))) == list(range(count))
    first = sorted([*spread(range(1000))][:50])
    gaps = [right - left for left, right in pairwise(first)]
    assert max(gaps) <= 3 * 1000 / 50


def test_a_short_time_leaves_out_evenly() -> None:
    now = [0.0]

    def timer(recipe: str, case: Case) -> Mapping[GemmKind, Mapping[str, float]]:
        now[0] += 2.0
        return {GemmKind.FPROP: {"a": 1.0}}

    todo = [("bf16", case) for case in CASES]
    found = measure(todo, timer, seconds=201, clock=lambda: now[0])
    assert (len(found.samples), found.left_out) == (100, len(CASES) - 100)
    assert now[0] <= 201
    assert {sample.case.groups for sample in found.samples} == {case.groups for case in CASES}
    everything = measure(todo, timer, clock=lambda: now[0])
    assert (len(everything.samples), everything.left_out) == (len(CASES), 0)


def test_a_sample_survives_json() -> None:
    sample = Sample(GemmKind.WGRAD, "bf16", Case(2, 10, 3, 5), {"a": 1.0, "b": 1.5})
    assert Sample.parse(sample.to_json()) == sample
    assert sample.regrets() == {"a": 0.0, "b": 0.5}


# Bundles


@pytest.mark.parametrize("family", FAMILIES)
def test_single_points_are_all_points(specs: SpecSet, family: str) -> None:
    arch = specs.archs[ARCH]
    kinds = arch.kernels[family].kinds
    most = max(len(spec.points) for spec in kinds.values())
    for kind, spec in kinds.items():
        found = []
        for index in range(most):
            changed = variants.single(arch, family, index)
            (point,) = changed.kernels[family].kinds[kind].points
            assert changed.kernels[family].kinds[kind].select == (rule(point.name),)
            found.append(point)
            others = {name: each for name, each in changed.kernels.items() if name != family}
            assert others == {n: each for n, each in arch.kernels.items() if n != family}
        assert set(found) == set(spec.points)


def test_recipes_that_a_family_serves(specs: SpecSet) -> None:
    everything = frozenset(GemmKind)
    assert variants.recipes_of(specs, ARCH, FAMILY) == {"bf16": everything}
    fast = variants.recipes_of(specs, ARCH, "gemm_fp8_fast_sm90")
    assert fast == dict.fromkeys(("fp8_current", "fp8_rowwise"), frozenset({GemmKind.FPROP}))
    assert variants.recipes_of(specs, ARCH, "gemm_fp8_block_sm90")["fp8_block"] == everything


@pytest.mark.parametrize(
    ("arch", "family", "message"),
    [
        (ARCH, "gemm_sm9", "unknown kernel family 'gemm_sm9'.*gemm_sm90"),
        ("cpu", FAMILY, "cpu has no kernels that selection rules choose"),
        (ARCH, "gemm_gather_sm90", "has no GEMMs of grouped_linear, which a sweep measures"),
    ],
)
def test_a_family_that_cannot_be_swept_is_refused(
    specs: SpecSet, arch: str, family: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        variants.family_named(specs.archs[arch], family)


@pytest.mark.parametrize(
    ("family", "recipe"), [(FAMILY, "bf16"), ("gemm_fp8_block_sm90", "fp8_block")]
)
def test_a_variant_dispatches_to_one_point(
    specs: SpecSet, tmp_path: Path, family: str, recipe: str
) -> None:
    made = list(variants.write_variants(specs, ARCH, family, (recipe,), tmp_path))
    points = specs.archs[ARCH].kernels[family].kinds[GemmKind.FPROP].points
    assert [each.points[GemmKind.FPROP] for each in made] == [point.name for point in points]
    namespaces = set()
    for variant in made:
        for kind in GemmKind:
            (header,) = (variant.folder / "csrc" / "dispatch").glob(f"{family}_{kind.value}*.h")
            named = set(
                re.findall(r"(?:cooperative|pingpong)_\d+x\d+x\d+_\dx1", header.read_text())
            )
            assert named == {variant.points[kind]}
            assert "if (" not in header.read_text().partition("GemmSizes")[2].partition("mean")[2]
        text = (variant.folder / "_library.py").read_text()
        namespaces |= set(re.findall(r'NAMESPACE = "(\w+)"', text))
        assert (variant.folder / f"grouped_linear__{recipe}.py").is_file()
        sources = read_sources(variant.folder / "csrc" / "sources.cmake")
        # A point comes as one unit per kind, for both element types.
        named_units = [name for name in sources.kernel_sources if f"/{family}_" in name]
        assert len(named_units) == len(GemmKind)
    assert len(namespaces) == len(made)


# The fit

A, B, C = (
    "pingpong_128x128x64_2x1",
    "pingpong_128x192x64_2x1",
    "cooperative_128x256x64_2x1",
)
Truth = Callable[[Mapping[SizeVariable, int]], str]


def samples_of(truth: Truth, kind: GemmKind, noise: float = 0.0, loss: float = 0.1) -> list[Sample]:
    """The point that is best by `truth` on every case; the others take longer by `loss`."""
    numbers = random.Random(3)
    found = []
    for case in CASES:
        best = truth(case.sizes(kind))
        times = {
            point: (1.0 if point == best else 1 + loss) * numbers.uniform(1 - noise, 1 + noise)
            for point in (A, B, C)
        }
        found.append(Sample(kind, "bf16", case, times))
    return found


KNOWN = (
    [rule(A)],
    [rule(C, k={"ge": 6144}), rule(A)],
    [rule(C, k={"ge": 6144}), rule(B, mean_group_tokens={"ge": 384}), rule(A)],
    [rule(A, mean_group_tokens={"lt": 96}), rule(C, groups={"lt": 12}), rule(B)],
    [rule(A, rows={"lt": 3000}), rule(C, columns={"ge": 3000}), rule(B)],
)


@pytest.mark.parametrize("kind", [GemmKind.FPROP, GemmKind.DGRAD])
@pytest.mark.parametrize("rules", KNOWN)
def test_known_rules_are_found(rules: list[RuleSpec], kind: GemmKind) -> None:
    samples = samples_of(lambda sizes: fit.choose(rules, sizes), kind)
    observed = fit.Observations.of(samples)
    found = fit.fit(observed)
    assert observed.regret(found) == 0
    assert len(found) == len(rules)


@pytest.mark.parametrize("rules", KNOWN)
def test_known_rules_are_found_in_noise(rules: list[RuleSpec]) -> None:
    def truth(sizes: Mapping[SizeVariable, int]) -> str:
        return fit.choose(rules, sizes)

    samples = samples_of(truth, GemmKind.FPROP, noise=0.02)
    found = fit.fit(fit.Observations.of(samples))
    assert len(found) <= len(rules) + 1
    # Judged by what is true, not by the noise.
    exact = fit.Observations.of(samples_of(truth, GemmKind.FPROP))
    assert exact.regret(found) < 0.003


def test_pure_noise_earns_no_rule() -> None:
    samples = samples_of(lambda sizes: A, GemmKind.FPROP, noise=0.01, loss=0.0)
    assert len(fit.fit(fit.Observations.of(samples))) == 1


def test_few_rules_are_the_best_of_that_few() -> None:
    """Against all lists of one threshold, one by one."""
    numbers = random.Random(7)
    samples = [
        Sample(GemmKind.FPROP, "bf16", case, {p: numbers.uniform(1, 2) for p in (A, B, C)})
        for case in numbers.sample(CASES, 40)
    ]
    observed = fit.Observations.of(samples)
    found = fit.fit(observed, most_rules=2)
    best = min(
        observed.regret(
            [RuleSpec(use, Predicate((Condition(variable, comparison, value),))), rule(p)]
        )
        for variable in fit.VARIABLES
        for value in {sizes[variable] for sizes in observed.sizes}
        for comparison in (Comparison.GE, Comparison.LT)
        for use in (A, B, C)
        for p in (A, B, C)
    )
    assert observed.regret(found) == pytest.approx(best)


def test_wgrad_is_told_by_its_mean_alone() -> None:
    """Its K is the mean group size: two names of one number would be arbitrary."""
    observed = fit.Observations.of(samples_of(lambda sizes: A, GemmKind.WGRAD))
    assert SizeVariable.MEAN_GROUP_TOKENS in observed.variables
    assert SizeVariable.K not in observed.variables
    forward = fit.Observations.of(samples_of(lambda sizes: A, GemmKind.FPROP))
    assert SizeVariable.ROWS in forward.variables and SizeVariable.TOKENS not in forward.variables


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(256, 512, 384), (16, 32, 24), (4096, 7168, 6144), (1, 2, 2), (768, 1024, 896), (7, 8, 8)],
)
def test_thresholds_are_round(low: int, high: int, expected: int) -> None:
    assert fit.between(low, high) == expected


def test_thresholds_are_between() -> None:
    numbers = random.Random(5)
    for _ in range(2000):
        low = numbers.randrange(0, 100000)
        high = low + numbers.randrange(1, 100000)
        assert low < fit.between(low, high) <= high


def test_regrets_are_counted() -> None:
    cases = (Case(1, 100, 8, 8), Case(1, 200, 8, 8), Case(1, 400, 8, 8))
    times = ({A: 1.0, B: 1.1}, {A: 2.0, B: 3.0}, {A: 6.0, B: 4.0})
    samples = [Sample(GemmKind.FPROP, "bf16", c, t) for c, t in zip(cases, times, strict=True)]
    before = (rule(A),)
    choice = fit.chosen(samples, before)
    assert choice.loss_before.weighted == pytest.approx(0.5 / 3)
    assert choice.loss_before.worst == pytest.approx(0.5)
    assert choice.after == (rule(B, mean_group_tokens={"ge": 256}), rule(A))
    assert choice.loss_after == fit.Loss(0, None, 0, 0)
    assert choice.samples == 3


TIMES = {
    A: WaveTime(launch=5000, wave=300, k=5600),
    B: WaveTime(launch=6000, wave=100, k=8200),
    C: WaveTime(launch=4500, wave=1300, k=10700),
}


def wave_samples(kind: GemmKind, noise: float = 0.0) -> list[Sample]:
    """Times of one group by waves; of several, A is the fastest."""
    numbers = random.Random(5)
    found = []
    for case in CASES:
        sizes = case.sizes(kind)
        times = {
            point: time.of(parse_point(point).work, sizes) * numbers.uniform(1 - noise, 1 + noise)
            for point, time in TIMES.items()
        }
        if case.groups > 1:
            times = {point: min(times.values()) * (1 + (point != A)) for point in times}
        found.append(Sample(kind, "bf16", case, {p: each / 1e6 for p, each in times.items()}))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(GemmKind))
def test_estimates_are_found(kind: GemmKind) -> None:
    choice = fit.chosen(wave_samples(kind), (rule(A),))
    estimates, *others = choice.after
    assert estimates == RuleSpec(when=waves.WHEN, least=TIMES)
    assert others and not any(each.least for each in others)
    assert choice.loss_after.worst < choice.loss_before.worst
    # Found again, and kept.
    assert fit.chosen(wave_samples(kind), choice.after).after == choice.after


def test_estimates_are_found_in_noise() -> None:
    kind = GemmKind.FPROP
    noisy = fit.chosen(wave_samples(kind, noise=0.02), (rule(A),)).after
    decided = [each for each in wave_samples(kind) if fit.decides(noisy[0], each)]
    assert fit.Observations.of(decided).regret(noisy) < 0.002


@pytest.mark.slow
def test_estimates_that_gain_nothing_go() -> None:
    """What was fitted to another GPU, say."""
    samples = samples_of(lambda sizes: A, GemmKind.FPROP)
    wrong = RuleSpec(when=waves.WHEN, least={**TIMES, C: WaveTime(launch=0, wave=0, k=0)})
    assert fit.chosen(samples, (wrong, rule(A))).after == (rule(A),)
    assert fit.chosen(samples, (rule(A),)).after == (rule(A),)


def test_no_number_of_an_estimate_is_negative() -> None:
    """A wave that costs nothing but its K: least squares alone would go below."""
    samples = wave_samples(GemmKind.FPROP, noise=0.1)
    rule = waves.estimated(samples)
    assert rule
    for time in rule.least.values():
        assert min(time.launch, time.wave, time.k) >= 0


@pytest.mark.slow
def test_old_rules_stay_where_new_ones_gain_nothing() -> None:
    rules = (rule(B, mean_group_tokens={"ge": 370}), rule(A))
    samples = samples_of(lambda sizes: fit.choose(rules, sizes), GemmKind.FPROP)
    found = fit.chosen(samples, rules)
    assert found.after == rules and found.loss_after.weighted == found.loss_before.weighted == 0
    assert fit.fit(fit.Observations.of(samples)) != rules


# Weights

OF_MODEL = Case(32, 65536, 4096, 7168)


def test_what_models_may_run_is_near_them() -> None:
    for groups, mean, near in (
        *((32, 2048, True), (8, 2048, True), (32, 1024, True), (16, 4096, True)),
        *((4, 2048, False), (64, 2048, False), (32, 512, False), (32, 8192, False)),
    ):
        assert Case(groups, groups * mean, 4096, 7168).is_near(OF_MODEL) is near
    assert not Case(32, 65536, 7168, 4096).is_near(OF_MODEL)


def test_models_have_two_thirds_of_the_weight() -> None:
    models = (OF_MODEL, Case(8, 32768, 28672, 4096))
    found = weighted(CASES, models)
    of_models = sum(w for w, near in zip(found.each, found.of_models, strict=True) if near)
    assert sum(found.each) == pytest.approx(len(CASES))
    assert of_models == pytest.approx(len(CASES) * OF_MODELS)
    for model in models:  # each GEMM alike, however many cases it has
        own = sum(w for w, case in zip(found.each, CASES, strict=True) if case.is_near(model))
        assert own == pytest.approx(len(CASES) * OF_MODELS / 2)
    assert set(weighted(CASES, ()).each) == {1.0}
    assert weighted([OF_MODEL], models).each == (1.0,)


def deep_samples(loss: float) -> list[Sample]:
    """C is best by a tenth near the model, and loses `loss` on everything else."""
    times = {True: {A: 1.1, C: 1.0}, False: {A: 1.0, C: 1 + loss}}
    return [
        Sample(GemmKind.FPROP, "bf16", case, times[case.is_near(OF_MODEL)])
        for case in CASES
        if case.k == 7168
    ]


@pytest.mark.slow
def test_models_earn_a_rule_that_equal_cases_do_not() -> None:
    shallow = [
        Sample(GemmKind.FPROP, "bf16", case, {A: 1.0, C: 1.02}) for case in CASES if case.k != 7168
    ]
    samples, before = deep_samples(0) + shallow, (rule(A),)
    assert fit.chosen(samples, before).after == before
    choice = fit.chosen(samples, before, [OF_MODEL])
    assert len([each for each in choice.after if each.use]) == 2 and choice.loss_after.models == 0
    assert choice.loss_before.models == pytest.approx(0.1) and choice.loss_before.others == 0


def test_what_models_gain_may_not_cost_the_others_more_than_a_rule() -> None:
    before = (rule(A),)
    observed = fit.Observations.of(deep_samples(0.0003), [OF_MODEL])
    assert fit.fit(observed, most_rules=1) == (rule(C),)
    cheap = fit.chosen(deep_samples(0.0003), before, [OF_MODEL], most_rules=1)
    dear = fit.chosen(deep_samples(0.05), before, [OF_MODEL], most_rules=1)
    assert cheap.after == (rule(C),)
    assert dear.after == before and dear.loss_after == dear.loss_before


def test_the_recorded_rule_for_deep_gemms_of_fast_sums_is_back(specs: SpecSet) -> None:
    """mixtral_down and dsv3_up take their largest tile, which equal weights had dropped."""
    kind = specs.archs[ARCH].kernels["gemm_fp8_fast_sm90"].kinds[GemmKind.FPROP]
    for case in (Case(8, 32768, 4096, 14336), OF_MODEL):
        assert fit.choose(kind.select, case.sizes(GemmKind.FPROP)) == "cooperative_128x256x128_2x1"


# The spec


def spec_text(arch: str = ARCH) -> str:
    return (paths.builtin_specs() / "archs" / f"{arch}.yaml").read_bytes().decode()


def select_lines(text: str, family: str, kinds: Sequence[str]) -> tuple[list[str], list[str]]:
    """Lines of some kinds' rules, and the others, found without a YAML reader."""
    inside, outside = [], []
    current_family = kind = ""
    selecting = False
    for line in text.splitlines(keepends=True):
        if match := re.match(r"  (\w+):", line):
            current_family, selecting = match[1], False
        elif match := re.match(r"      (\w+):", line):
            kind, selecting = match[1], False
        elif re.match(r"        \w+:", line):
            selecting = line.strip() == "select:"
            outside.append(line)
            continue
        chosen = selecting and current_family == family and kind in kinds
        (inside if chosen and line.startswith("          ") else outside).append(line)
    return inside, outside


def checked(text: str, folder: Path, arch: str = ARCH) -> SpecSet:
    """The specs with another text of the arch, read and checked."""
    copy = Path(shutil.copytree(paths.builtin_specs(), folder / "specs"))
    (copy / "archs" / f"{arch}.yaml").write_bytes(text.encode())
    return load([copy])


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_rules_change(specs: SpecSet, tmp_path: Path, family: str) -> None:
    before = specs.archs[ARCH].kernels[family].kinds
    rules = {}
    for kind in (GemmKind.FPROP, GemmKind.WGRAD):
        first, *others = (point.name for point in before[kind].points)
        special = (rule(name, k={"ge": 77}, rows={"lt": 9, "ge": 3}) for name in others)
        rules[kind] = [*special, rule(first)]
    text = spec_text()
    new = rewrite.with_rules(text, family, rules)
    inside, outside = select_lines(new, family, ("fprop", "wgrad"))
    assert outside == select_lines(text, family, ("fprop", "wgrad"))[1]
    assert len(inside) == sum(map(len, rules.values()))
    kinds = checked(new, tmp_path).archs[ARCH].kernels[family].kinds
    assert all(kinds[kind].select == tuple(wanted) for kind, wanted in rules.items())
    assert kinds[GemmKind.DGRAD] == before[GemmKind.DGRAD]


def test_the_same_rules_are_the_same_bytes(specs: SpecSet) -> None:
    text = spec_text()
    for family in FAMILIES:
        kinds = specs.archs[ARCH].kernels[family].kinds
        same = {kind: spec.select for kind, spec in kinds.items()}
        assert rewrite.with_rules(text, family, same) == text


def test_a_point_without_a_rule_goes(specs: SpecSet, tmp_path: Path) -> None:
    text = spec_text()
    before = specs.archs[ARCH].kernels[FAMILY].kinds[GemmKind.DGRAD]
    points = [point.name for point in before.points]
    assert len(points) > 1
    new = rewrite.with_rules(text, FAMILY, {GemmKind.DGRAD: [rule(points[-1])]})
    kind = checked(new, tmp_path).archs[ARCH].kernels[FAMILY].kinds[GemmKind.DGRAD]
    assert [point.name for point in kind.points] == [points[-1]]
    gone = set(text.splitlines()) - set(new.splitlines())
    fewer = len(points) - 1 + sum(len(rewrite.printed(each).splitlines()) for each in before.select)
    fewer -= 1
    assert len(text.splitlines()) - len(new.splitlines()) == fewer
    assert not any("#" in line for line in gone)


def test_a_point_with_a_rule_comes_back(specs: SpecSet, tmp_path: Path) -> None:
    """A record has it; the spec has dropped it. Line by line the text is what it was."""
    text = spec_text()
    before = specs.archs[ARCH].kernels[FAMILY].kinds[GemmKind.DGRAD]
    names = [point.name for point in before.points]
    gone = rewrite.with_rules(text, FAMILY, {GemmKind.DGRAD: [rule(names[0])]})
    back = rewrite.with_rules(gone, FAMILY, {GemmKind.DGRAD: before.select})
    kind = checked(back, tmp_path).archs[ARCH].kernels[FAMILY].kinds[GemmKind.DGRAD]
    assert kind == before and back == text
    for point in before.points:
        assert WgmmaConfig.parse(point.name) == point
    with pytest.raises(ValueError, match="point 'largest': expected one like cooperative_"):
        rewrite.with_rules(text, FAMILY, {GemmKind.DGRAD: [rule("largest")]})


def test_a_record_offers_points_that_the_spec_has_dropped(specs: SpecSet) -> None:
    before = specs.archs[ARCH].kernels[FAMILY].kinds[GemmKind.DGRAD]
    dropped = "cooperative_192x128x64_2x1"
    times = {**{point.name: 1.2 for point in before.points}, dropped: 1.0}
    samples = tuple(Sample(GemmKind.DGRAD, "bf16", case, times) for case in CASES)
    tuned = tune.tune(specs, ARCH, FAMILY, Measured(samples, 0))
    assert tuned.choices[GemmKind.DGRAD].after == (rule(dropped),)
    assert f"  {dropped}: it is listed again" in tune.report(tuned)


@pytest.mark.slow
def test_rules_end_with_a_point_that_every_gpu_has_the_memory_for(
    specs: SpecSet, tmp_path: Path
) -> None:
    """Though another one was the fastest wherever it was measured."""
    names = ("mma_128x256x32_2x4_4_1", "mma_128x128x32_2x2_4_2")
    times = dict(zip(names, (1.0, 1.2), strict=True))
    samples = tuple(Sample(GemmKind.FPROP, "bf16", case, times) for case in CASES)
    tuned = tune.tune(specs, "sm_80", "gemm_mma", Measured(samples, 0))
    *rules, last = tuned.choices[GemmKind.FPROP].after
    assert {each.use for each in rules} == {names[0]} and last == rule(names[1])
    new = tune.rewritten(spec_text("sm_80"), [tuned])
    kinds = checked(new, tmp_path, "sm_80").archs["sm_80"].kernels["gemm_mma"].kinds
    assert kinds[GemmKind.FPROP].select == (*rules, last)


MADE_UP = """\
kernels: # of all
  other: {kinds: {fprop: {points: [], select: []}}}
  f:
    kinds:
      fprop:
        points:
          # the first
          - schedule: pingpong
            tile: [1, 2, 3]
            cluster: [1, 1]
          - {schedule: cooperative, tile: [1, 2, 3], cluster: [1, 1]}
        select:
          # why

          - when: {k: {ge: 3}}
            use: pingpong_1x2x3_1x1 # old
          - use: cooperative_1x2x3_1x1
          # afterwards
      # and then
      dgrad: {}
"""


def test_other_layouts_and_line_ends() -> None:
    rules = [rule("cooperative_1x2x3_1x1", rows={"lt": 4}), rule("pingpong_1x2x3_1x1")]
    new = rewrite.with_rules(MADE_UP, "f", {GemmKind.FPROP: rules})
    assert new == MADE_UP.replace(
        """\
          - when: {k: {ge: 3}}
            use: pingpong_1x2x3_1x1 # old
          - use: cooperative_1x2x3_1x1
""",
        """\
          - {when: {rows: {lt: 4}}, use: cooperative_1x2x3_1x1}
          - {use: pingpong_1x2x3_1x1}
""",
    )
    windows = rewrite.with_rules(MADE_UP.replace("\n", "\r\n"), "f", {GemmKind.FPROP: rules})
    assert windows == new.replace("\n", "\r\n")
    fewer = rewrite.with_rules(MADE_UP, "f", {GemmKind.FPROP: rules[:1]})
    assert "schedule: pingpong" not in fewer and "# the first" in fewer and "cluster" in fewer
    with pytest.raises(ValueError, match="line 2: put each item on a line of its own"):
        rewrite.with_rules(MADE_UP, "other", {GemmKind.FPROP: rules})


def test_bad_rules_leave_the_spec_alone(tmp_path: Path) -> None:
    root = tmp_path / "specs"
    shutil.copytree(paths.builtin_specs(), root)
    path = root / "archs" / f"{ARCH}.yaml"
    text = path.read_bytes().decode()
    with pytest.raises(SpecError, match="unknown point"):
        tune.write(path, text.replace("use: pingpong_128x128x64_2x1", "use: nothing", 1), root)
    assert path.read_bytes().decode() == text
    good = text.replace("{ge: 384}", "{ge: 400}", 1)
    tune.write(path, good, root)
    assert path.read_bytes().decode() == good
    assert "+          - {when: {mean_group_tokens: {ge: 400}}" not in tune.difference(path, good)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_fitted_rules_are_a_valid_spec(specs: SpecSet, tmp_path: Path, family: str) -> None:
    """From times in which the tile that is right depends on sizes the present rules ignore."""
    numbers = random.Random(11)
    found = []
    for kind, spec in specs.archs[ARCH].kernels[family].kinds.items():
        names = [point.name for point in spec.points]
        for case in CASES:
            best = names[(case.groups >= 16) + (case.n >= 4096 and len(names) > 2)]
            times = {n: (1 if n == best else 1.3) * numbers.uniform(0.99, 1.01) for n in names}
            found.append(Sample(kind, "any", case, times))
    tuned = tune.tune(specs, ARCH, family, Measured(tuple(found), 0))
    new = tune.rewritten(spec_text(), [tuned])
    kinds = checked(new, tmp_path).archs[ARCH].kernels[family].kinds
    for kind, choice in tuned.choices.items():
        assert kinds[kind].select == choice.after
        assert choice.loss_after.weighted < choice.loss_before.weighted / 2
        assert len(choice.after) <= fit.MOST_RULES
    lines = tune.report(tuned)
    assert len([line for line in lines if line.startswith(family)]) == len(kinds)


def test_measurements_of_other_points_are_refused(specs: SpecSet) -> None:
    sample = Sample(GemmKind.FPROP, "bf16", CASES[0], {"pingpong_64x64x64_1x1": 1.0})
    with pytest.raises(UsageError, match="128x256x64_2x1 was not measured on every case"):
        tune.tune(specs, ARCH, FAMILY, Measured((sample,), 0))


def test_kinds_that_were_not_measured_stay(specs: SpecSet) -> None:
    before = specs.archs[ARCH].kernels[FAMILY].kinds[GemmKind.FPROP]
    names = [point.name for point in before.points]
    samples = tuple(
        Sample(GemmKind.FPROP, "bf16", case, {n: 1.0 + i for i, n in enumerate(names)})
        for case in CASES
    )
    tuned = tune.tune(specs, ARCH, FAMILY, Measured(samples, 0))
    assert tuned.choices.keys() == {GemmKind.FPROP}
    assert dataclasses.asdict(tuned.choices[GemmKind.FPROP])["after"] == (
        dataclasses.asdict(rule(names[0])),
    )
    lines = tune.report(tuned)
    assert f"  {names[1]}: no case is worth a rule, so it goes" in lines
    assert tune.difference(
        paths.builtin_specs() / "archs" / f"{ARCH}.yaml", tune.rewritten(spec_text(), [tuned])
    ).count("\n-          - ") == len(names) - 1 + len(before.select)
