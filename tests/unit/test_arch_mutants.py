"""Every number and word of every architecture's spec, changed one at a time: refused, or harmless.

A changed spec that is still loaded has one of four meanings, which ``verdict`` tells apart:

* *tiles*: only configurations and the rules that choose among them differ.  No result depends on
  them, and the device code's ``static_assert``s hold for each of them: it derives what the unit
  states.  Here its text is computed; ``tests/compile/test_constants.py`` compiles a sample, and
  shows that every constant that is another one is refused by its name.
* *prose*: what is only shown to people differs.
* *fewer*: the spec lists less than it did.  As no two families serve one demand, each step keeps
  its family or has none, and its cell is then refused, or emulated by kernels that are listed.
* *template*: a family names a template that there is none of, and rendering refuses it.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml
from plans import SPECS
from pydantic import ValidationError

from fusegen.build.toolchain import MIN_NVCC
from fusegen.checks.archs import check_arch
from fusegen.emit.bundle import render_bundle
from fusegen.emit.render import Renderer, RenderError
from fusegen.families.family import Config, Demand, offers
from fusegen.families.registry import CONFIGS, FAMILIES, known_family
from fusegen.families.scalings import ALL
from fusegen.families.wgmma import WgmmaConfig
from fusegen.ir.dtypes import DType
from fusegen.ir.kernel import GemmKind, Store
from fusegen.ir.kernel_set import Variant
from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan, Status
from fusegen.ir.predicate import Comparison, SizeVariable
from fusegen.ir.quantization import Accumulation
from fusegen.passes.pipeline import Plan, resolve
from fusegen.publish.paths import builtin_specs, builtin_templates
from fusegen.spec.arch import ArchSpec, FamilySpec
from fusegen.spec.diagnostics import SpecError
from fusegen.spec.kinds import SpecKind
from fusegen.spec.load import Source, adapter, parse_spec
from fusegen.spec.offered import listed_scalings
from fusegen.spec.points import point_of
from fusegen.steps import BY_NAME

from .device_code import traits

pytestmark = pytest.mark.slow


Path_ = tuple[str | int, ...]


@dataclass(frozen=True)
class Subject:
    """The spec of an architecture that is shipped."""

    name: str

    @property
    def arch(self) -> ArchSpec:
        return SPECS.archs[self.name]

    @property
    def source(self) -> Source:
        return SPECS.source(SpecKind.ARCHS, self.name)

    @property
    def data(self) -> dict[str, Any]:
        return _yaml(self.name)


@cache
def _yaml(name: str) -> dict[str, Any]:
    file = builtin_specs() / "archs" / f"{name}.yaml"
    data: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return data


SUBJECTS = tuple(Subject(name) for name in SPECS.archs)
COMPILED = tuple(each for each in SUBJECTS if each.arch.kernels)
HOPPER = Subject("sm_90a")
of_compiled = pytest.mark.parametrize("subject", COMPILED, ids=lambda each: each.name)


# Mutants


@dataclass(frozen=True)
class Mutant:
    """The spec with one change.

    Attributes:
        subject: the spec as it is shipped.
        words: what was changed.
        path: keys under which it stands.
        value: in its place.
        key: in the place of its key.
        drop: whether it is left out.
        followed: whether rules that use a changed configuration name it as it is then.
    """

    subject: Subject
    words: str
    path: Path_
    value: Any = None
    key: str | None = None
    drop: bool = False
    followed: bool = False

    @property
    def data(self) -> dict[str, Any]:
        data: dict[str, Any] = copy.deepcopy(self.subject.data)
        *parents, last = self.path
        at = _at(data, tuple(parents))
        if self.drop:
            del at[last]
        elif self.key is not None:
            entries = [(self.key if each == last else each, at[each]) for each in at]
            at.clear()
            at.update(entries)
        else:
            at[last] = self.value
        if self.followed:
            before, after = (_name(_at(each, self.path[:6])) for each in (self.subject.data, data))
            for rule in _at(data, self.path[:4])["select"]:
                if "use" in rule:
                    rule["use"] = after if rule["use"] == before else rule["use"]
                else:
                    times = [(after if p == before else p, t) for p, t in rule["least"].items()]
                    rule["least"] = dict(times)
        return data


def values(data: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """Every value but the whole, with its path."""
    entries = enumerate(data) if isinstance(data, list) else data.items()
    for key, value in entries:
        yield (*path, key), value
        if isinstance(value, dict | list):
            yield from values(value, (*path, key))


def changed(subject: Subject, path: Path_, value: Any) -> Mutant:
    return Mutant(subject, f"{'.'.join(map(str, path))} = {value}", path, value)


def dropped(subject: Subject, path: Path_) -> Mutant:
    return Mutant(subject, f"{'.'.join(map(str, path))} dropped", path, drop=True)


def renamed(subject: Subject, path: Path_, key: str) -> Mutant:
    return Mutant(subject, f"{'.'.join(map(str, path))} renamed {key}", path, key=key)


def numbers(path: Path_, value: int) -> Iterator[int]:
    """Other numbers in the place of one."""
    yield from dict.fromkeys(n for n in (value + 1, value * 2, value // 2, 0) if n != value)


def others(word: str, words: list[str]) -> list[str]:
    """All other words of a set."""
    return [each for each in words if each != word]


def words_beside(subject: Subject, path: Path_, word: str) -> list[str]:
    """Words that the field of a word can have instead."""
    names: dict[str, list[str]] = {
        "implements": [*BY_NAME],
        "formats": [each.value for each in DType],
        "scalings": ["any", *sorted({each for family in FAMILIES for each in family.scalings})],
        "accumulations": [each.value for each in Accumulation],
        "stores": [each.value for each in Store],
        **words_of_points(),
        "template": [family.name for family in FAMILIES],
        "transposed": [each.value for each in DType],
        "scale_atoms": [each.name for each in ALL if each.atom_block],
        "arch": ["sm_90", "sm_100a", "cpu"],
        "gencode": ["arch=compute_90,code=sm_90", "arch=compute_100a,code=sm_100a"],
        "toolkit": ["12.0", "13.3", "12.6"],
        "summary": ["Another GPU"],
    }
    key = next(part for part in reversed(path) if isinstance(part, str))
    if key == "use":
        _, family, _, kind = path[:4]
        points = subject.arch.kernels[str(family)].kinds[GemmKind(kind)].points
        return others(word, [point.name for point in points])
    return others(word, names[key])


def words_of_points() -> dict[str, list[str]]:
    """The words that fields of configurations can have, of those that have one of a set."""
    return {
        name: [each.value for each in kind]
        for config in CONFIGS
        for name, kind in get_type_hints(config).items()
        if isinstance(kind, type) and issubclass(kind, Enum)
    }


def keys_beside(subject: Subject, path: Path_) -> list[str]:
    """Words that a key which is a word of a set can be instead, where they are not there already.

    The name of a family with a template of its own is a label of its kernels.
    """
    if path[-2:-1] == ("when",):
        return others(str(path[-1]), [each.value for each in SizeVariable])
    if path[-3:-2] == ("when",):
        return others(str(path[-1]), [each.value for each in Comparison])
    if path[:1] == ("kernels",) and len(path) == 2:
        kernels = subject.data["kernels"]
        own = "template" not in kernels[path[1]]
        return [each.name for each in FAMILIES if own and each.name not in kernels]
    return []


def mutants(subject: Subject) -> Iterator[Mutant]:
    for path, value in values(subject.data):
        yield dropped(subject, path)
        if isinstance(value, bool):
            yield changed(subject, path, not value)
        elif isinstance(value, int):
            yield from (changed(subject, path, number) for number in numbers(path, value))
        elif isinstance(value, str):
            yield from (changed(subject, path, word) for word in words_beside(subject, path, value))
        if isinstance(path[-1], str):
            yield from (renamed(subject, path, key) for key in keys_beside(subject, path))
    yield from renamed_points(subject)


def renamed_points(subject: Subject) -> Iterator[Mutant]:
    """Changes of a configuration that the rules which use it follow: only families refuse them."""
    for path, value in values(subject.data):
        if "points" not in path or not isinstance(value, int | str):
            continue
        new = words_beside(subject, path, value) if isinstance(value, str) else numbers(path, value)
        for each in new:
            mutant = changed(subject, path, each)
            words = f"{mutant.words}, followed by its rules"
            yield replace(mutant, words=words, followed=True)


def _at(data: Any, path: Path_) -> Any:
    for part in path:
        data = data[part]
    return data


def _name(point: dict[str, Any]) -> str:
    """Of a configuration; empty where it is none, which is refused whatever its rules say."""
    try:
        return point_of(point).name
    except ValueError:
        return ""


def groups() -> dict[tuple[str, str], list[Mutant]]:
    """Mutants by architecture and what they are part of: a family, or a key of the spec."""
    found: dict[tuple[str, str], list[Mutant]] = {}
    for subject in SUBJECTS:
        for mutant in mutants(subject):
            first, *rest = mutant.path
            name = rest[0] if first == "kernels" and rest else first
            found.setdefault((subject.name, str(name)), []).append(mutant)
    return found


GROUPS = groups()


# Verdicts


class Verdict(Enum):
    REFUSED = "refused"
    TILES = "tiles"
    PROSE = "prose"
    FEWER = "fewer"
    TEMPLATE = "template"
    HARMFUL = "harmful"


def loaded(mutant: Mutant) -> ArchSpec | None:
    """The spec, judged as it is at load but not read from a file; None where it is refused.

    Each problem has the place of a key of the spec.
    """
    try:
        arch = adapter(ArchSpec).validate_python(mutant.data)
    except ValidationError as error:
        assert error.errors()
        return None
    source = mutant.subject.source
    found = list(check_arch(arch, Source(source.file, source.places)))
    if arch.name != mutant.subject.name:
        return None  # the file has another name; so says `parse_spec`
    assert all(problem.loc.file == source.file for problem in found)
    return None if found else arch


def verdict(arch: ArchSpec | None, subject: Subject) -> Verdict:
    if arch is None:
        return Verdict.REFUSED
    if any(known_family(each.template or name) is None for name, each in arch.kernels.items()):
        return Verdict.TEMPLATE
    own = subject.arch
    prose = replace(arch, summary=own.summary, toolkit=own.toolkit)
    if prose == own:
        return Verdict.PROSE
    bare, expected = without_tiles(prose), without_tiles(own)
    if bare == expected:
        return Verdict.TILES
    return Verdict.FEWER if lists_fewer(bare, expected) else Verdict.HARMFUL


def without_tiles(arch: ArchSpec) -> ArchSpec:
    """The spec without configurations and rules, which choose how and not what is computed."""

    def bare(family: FamilySpec) -> FamilySpec:
        kinds = {kind: replace(spec, points=(), select=()) for kind, spec in family.kinds.items()}
        return replace(family, kinds=kinds)

    kernels = {name: bare(family) for name, family in arch.kernels.items()}
    return replace(arch, kernels=kernels)


def lists_fewer(arch: ArchSpec, whole: ArchSpec) -> bool:
    """Whether all that a spec lists, in the same order, the whole one lists, too."""

    lists = ("implements", "formats", "accumulations", "stores")

    def part(name: str, family: FamilySpec) -> bool:
        other = whole.kernels.get(name)
        if other is None or not family.kinds.items() <= other.kinds.items():
            return False
        rest = {key: getattr(other, key) for key in (*lists, "scalings", "kinds")}
        fewer = all({*getattr(family, key)} <= {*getattr(other, key)} for key in lists)
        fewer &= {*listed_scalings(name, family)} <= {*listed_scalings(name, other)}
        return fewer and replace(family, **rest) == other

    same = replace(arch, kernels=whole.kernels) == whole
    return same and all(part(name, family) for name, family in arch.kernels.items())


# Tests


@pytest.mark.parametrize(
    "group", [pytest.param(g, id=f"{'-'.join(g)}-{len(m)}") for g, m in GROUPS.items()]
)
def test_mutants_are_refused_or_harmless(group: tuple[str, str]) -> None:
    """The number behind a group's name is that of its mutants."""
    harmful = []
    for mutant, found in judged(group):
        if found is Verdict.HARMFUL:
            harmful.append(mutant.words)
        elif found is Verdict.TILES and "points" in mutant.path:
            arch = loaded(mutant)
            assert arch is not None
            assert not broken_asserts(arch, mutant.path), mutant.words
    assert not harmful


COMPARED = {
    "stages": "kStages",
    "store_buffers": "kBuffers",
    "shared_bytes": "kUsedBytes",
    "threads": "kThreads",
    "math_warpgroups": "kMathGroups",
    "loader_registers": "kLoaderRegisters",
    "math_registers": "kMathRegisters",
    "accumulators": "kAccumulators",
}
"""Constants that units state, and what device code calls them."""


def broken_asserts(arch: ArchSpec, path: Path_) -> list[str]:
    """Conditions of the device code that a changed configuration does not meet.

    That what its unit states is what the device code derives is one of them.  Of the types of
    configurations, those of ``config_sm90.cuh`` are computed here; a unit of any other one is
    held to its own by ``tests/compile/test_constants.py``.
    """
    family, kind = arch.kernels[str(path[1])], GemmKind(path[3])
    template = family.template or str(path[1])
    found: list[str] = []
    points = [each for each in family.kinds[kind].points if isinstance(each, WgmmaConfig)]
    for point in points:
        for adds, block in product((False, True), {family.scales("block_1x128")}):
            rows, columns, _ = point.tile
            extra = 4 * (rows + (columns if kind is GemmKind.WGRAD else 0)) if block else 0
            fp8 = template == "gemm_fp8_sm90"
            control = 1024 if fp8 and kind is not GemmKind.WGRAD else 2048
            names = traits(point, 1 if fp8 else 2, adds, extra, control, arch.limits)
            found += [n for n, holds in names.items() if n.startswith("assert ") and not holds]
            stated = constants_of(arch, template, point, kind, adds, block)
            found += [n for n, own in COMPARED.items() if stated[n] != names[own]]
    return found


def constants_of(
    arch: ArchSpec, template: str, point: Config, kind: GemmKind, adds: bool, block: bool
) -> dict[str, int]:
    """What a unit of a configuration states."""
    known = known_family(template)
    assert known
    pair = next((each for each in known.multiplies if block == (each.tokens.columns == 128)), None)
    store = Store.ADD if adds else Store.IO
    variant = Variant(known.formats[:1], pair.of(kind) if pair else (), (), store)
    return dict(known.constants(point, kind, variant, arch.limits))


def test_all_kinds_of_verdicts_occur() -> None:
    """Proof that the judge can tell, by mutants whose verdict is known."""
    for path, value, expected in (
        (("limits", "shared_memory"), 232449, Verdict.REFUSED),
        (("layout", "token_major"), False, Verdict.REFUSED),
        (("kernels", "quantize", "row_alignment"), 16, Verdict.REFUSED),
        (("kernels", "gemm_fp8_block_sm90", "accumulations", 0), "fast", Verdict.REFUSED),
        (("kernels", "gemm_sm90", "kinds", "fprop", "select", 1, "when", "rows", "lt"), 1,
         Verdict.TILES),
        (("summary",), "Another GPU", Verdict.PROSE),
        (("kernels", "gemm_sm90", "stores", 1), "nothing", Verdict.REFUSED),
    ):  # fmt: skip
        assert verdict(loaded(changed(HOPPER, path, value)), HOPPER) is expected, path
    without = dropped(HOPPER, ("kernels", "statistics"))
    assert verdict(loaded(without), HOPPER) is Verdict.FEWER
    no_template = dropped(HOPPER, ("kernels", "gemm_fp8_fast_sm90", "template"))
    assert verdict(loaded(no_template), HOPPER) is Verdict.TEMPLATE
    pointwise = replace(HOPPER.arch.kernels["pointwise"], row_alignment=2)
    more = replace(HOPPER.arch, kernels={**HOPPER.arch.kernels, "pointwise": pointwise})
    assert verdict(more, HOPPER) is Verdict.HARMFUL


@of_compiled
def test_no_two_families_serve_one_demand(subject: Subject) -> None:
    """So that a family which lists less hands nothing over to another one."""
    formats = [*DType]
    names = sorted({each for family in FAMILIES for each in family.scalings})
    scalings: list[tuple[str, ...]] = [(), *((name,) for name in names)]
    ways = [(), *((each.value,) for each in Accumulation)]
    kernels = subject.arch.kernels
    counts = Counter(each for family in kernels.values() for each in family.implements)
    several = [each for each in BY_NAME if counts[each] > 1]
    assert several
    for primitive, format, scaling, way, store in product(several, formats, scalings, ways, Store):
        demand = Demand(primitive, variant=Variant((format,), scaling, way, store))
        quantised = format not in (DType.IO, DType.BFLOAT16)
        if quantised != bool(scaling) or (primitive == "gemm" and quantised and not way):
            continue
        served = [name for name, each in kernels.items() if offers(each, demand)]
        assert len(served) < 2, (demand, served)


@cache
def judged(group: tuple[str, str]) -> tuple[tuple[Mutant, Verdict], ...]:
    """Every mutant of a group and its verdict."""
    return tuple((each, verdict(loaded(each), each.subject)) for each in GROUPS[group])


LOOKED_AT = 600
"""Mutants of a spec of which samples are taken: it has thousands."""


@cache
def judged_of(subject: Subject) -> tuple[tuple[Mutant, Verdict], ...]:
    """Mutants of a spec, spread over its file, and their verdicts."""
    every = [each for group in GROUPS if group[0] == subject.name for each in GROUPS[group]]
    some = every[:: -(-len(every) // LOOKED_AT)]
    return tuple((each, verdict(loaded(each), subject)) for each in some)


def sample(subject: Subject, wanted: Verdict, size: int) -> list[Mutant]:
    """Some mutants of a verdict, spread over the file; none where there is none."""
    found = [mutant for mutant, each in judged_of(subject) if each is wanted]
    return found[:: -(-len(found) // size) or 1]


@of_compiled
def test_a_sample_is_refused_at_its_place_in_the_file(subject: Subject, tmp_path: Path) -> None:
    """What was judged in memory is judged the same when it is read, with line and column."""
    places = set()
    file = tmp_path / f"{subject.name}.yaml"
    for mutant in sample(subject, Verdict.REFUSED, 30):
        file.write_text(yaml.safe_dump(mutant.data, sort_keys=False), encoding="utf-8")
        try:
            spec, source = parse_spec(SpecKind.ARCHS, file, "archs/mutant.yaml")
        except SpecError as error:
            found = list(error.problems)
        else:
            assert isinstance(spec, ArchSpec)
            found = list(check_arch(spec, source))
        assert found, mutant.words
        places |= {problem.loc for problem in found}
        assert all(problem.loc.file == "archs/mutant.yaml" for problem in found)
    assert len(places) > 10


CELLS = [
    Cell(module, recipe) for module in ("linear", "grouped_linear") for recipe in SPECS.recipes
]


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer((builtin_templates(),))


def planned(arch: ArchSpec, cells: list[Cell]) -> Plan:
    return resolve(replace(SPECS, archs={**SPECS.archs, arch.name: arch}), arch.name, cells)


def computed(arch: ArchSpec, cells: list[Cell]) -> list[ModulePlan]:
    """Plans without what says how their kernels are chosen."""
    return [replace(plan, kernel_sets=(), conversions=()) for plan in planned(arch, cells).modules]


def rendered(arch: ArchSpec, cells: list[Cell], renderer: Renderer) -> dict[str, str]:
    plan = planned(arch, cells)
    files = render_bundle(plan.modules, arch, "mutants", renderer)
    return {path: files[path].text for path in files}


@of_compiled
def test_a_sample_of_tiles_changes_nothing_but_units_and_dispatch(
    subject: Subject, renderer: Renderer
) -> None:
    """A cell's own module describes its kernels; what it runs are the plan's steps."""
    cells = [Cell("linear", "bf16"), Cell("grouped_linear", "fp8_block")]
    before = rendered(subject.arch, cells, renderer)
    computes = computed(subject.arch, cells)
    own = tuple(f"{cell}.py" for cell in cells)
    for mutant in sample(subject, Verdict.TILES, 5):
        arch = loaded(mutant)
        assert arch is not None
        assert computed(arch, cells) == computes
        after = rendered(arch, cells, renderer)
        differ = {path for path in {*before, *after} if before.get(path) != after.get(path)}
        allowed = ("csrc/dispatch/", "csrc/kernels/", "csrc/sources.cmake", "README.md", *own)
        assert all(path.startswith(allowed) for path in differ), (mutant.words, differ)


def joined_otherwise(module: ModulePlan, other: ModulePlan) -> bool:
    """Whether they differ at most in which steps one launch runs together."""
    steps, others = (
        [Counter(map(repr, program.unmerged.steps)) for program in each.programs]
        for each in (module, other)
    )
    known = {each.name: each for each in other.kernel_sets}
    kernels = all(known.get(each.name, each) == each for each in module.kernel_sets)
    like = replace(module, directions=other.directions, kernel_sets=other.kernel_sets)
    return steps == others and kernels and like == other


@of_compiled
def test_a_sample_that_lists_fewer_is_refused_by_cell(subject: Subject) -> None:
    """Each cell is planned as before, maybe by more launches, refused or newly emulated."""
    before = {each.cell: each for each in planned(subject.arch, CELLS).modules}
    for mutant in sample(subject, Verdict.FEWER, 12):
        arch = loaded(mutant)
        assert arch is not None
        plan = planned(arch, CELLS)
        assert all(each.reason for each in plan.unsupported)
        for module in plan.modules:
            newly_emulated = module.status is Status.EMULATED != before[module.cell].status
            assert newly_emulated or joined_otherwise(module, before[module.cell]), mutant.words


def test_a_template_that_is_missing_is_refused_by_its_name(renderer: Renderer) -> None:
    for mutant in sample(HOPPER, Verdict.TEMPLATE, 2):
        arch = loaded(mutant)
        assert arch is not None
        with pytest.raises(RenderError, match=r"gemm_fp8_\w+_sm90"):
            rendered(arch, [Cell("linear", "fp8_current"), Cell("linear", "fp8_block")], renderer)


def test_toolkits_are_what_builds_require() -> None:
    for name, arch in SPECS.archs.items():
        if arch.toolkit:
            assert tuple(map(int, arch.toolkit.split("."))) == MIN_NVCC[name]
