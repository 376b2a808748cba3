"""Which specs exist, and whether they are right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ..extensions import installed
from ..families.registry import FAMILIES
from ..options import OPTIONS
from ..publish.folders import BUILTIN, Folders, load_specs, validate_specs
from ..spec.arch import ArchSpec
from ..spec.fusion import FusionSpec
from ..spec.kinds import AnySpec, SpecKind
from ..spec.load import SpecSet
from ..spec.module import ModuleSpec
from ..spec.offers import options_of, recipe_facts
from ..spec.recipe import RecipeSpec
from ..spec.target import TargetSpec
from ..spec.usage import known
from ..steps import STEPS


@dataclass(frozen=True, slots=True)
class Entry:
    """A spec as `list` shows it.

    Attributes:
        kind: folder of its kind, such as `ops`.
        name: what commands call it.
        summary: one line.
        file: where it stands.
        details: what else a choice may depend on, by name; JSON values.
    """

    kind: str
    name: str
    summary: str
    file: str
    details: Mapping[str, object]

    def to_json(self) -> dict[str, object]:
        """Name, summary, file and details in one object."""
        head: dict[str, object] = {"name": self.name, "summary": self.summary, "file": self.file}
        return head | dict(self.details)


def list_specs(kind: str | None = None, folders: Folders = BUILTIN) -> tuple[Entry, ...]:
    """The specs of one kind, named by its folder, or of all kinds; not those that are wrong.

    Raises:
        SpecError: a folder is not there.
        UsageError: there is no such kind.
    """
    if kind is not None:
        known("kind", kind, [each.folder for each in SpecKind])
    return _entries(load_specs(folders), kind)


def validate(folders: Folders = BUILTIN) -> tuple[Entry, ...]:
    """The specs of all kinds, none of which is wrong.

    Raises:
        SpecError: with every problem of every file.
    """
    return _entries(validate_specs(folders), None)


def _entries(specs: SpecSet, kind: str | None) -> tuple[Entry, ...]:
    return tuple(
        Entry(
            each.folder,
            name,
            _summary(spec, specs),
            specs.source(each, name).file,
            _details(spec, specs),
        )
        for each in SpecKind
        if kind in (None, each.folder)
        for name, spec in specs.of(each).items()
    )


def _summary(spec: AnySpec, specs: SpecSet) -> str:
    if isinstance(spec, ModuleSpec):
        return spec.summary or specs.ops[spec.op or ""].summary
    return spec.summary


def _details(spec: AnySpec, specs: SpecSet) -> dict[str, object]:
    match spec:
        case ModuleSpec():
            options = {each.name: list(each.words) for each in options_of(spec, specs.ops)}
            return {"class": spec.class_, "ops": list(spec.ops), "options": options}
        case RecipeSpec():
            return {"source": spec.source, "roles": [role.value for role in spec.roles]}
        case ArchSpec():
            capability = list(spec.capability) if spec.capability else None
            return {"capability": capability, "toolkit": spec.toolkit}
        case TargetSpec():
            return {
                "archs": list(spec.archs),
                "modules": list(spec.modules),
                "recipes": list(spec.recipes),
                "options": list(spec.options),
                "every_option": spec.every_option,
            }
        case FusionSpec():
            return {"pass": spec.pass_.value}
    return {}


@dataclass(frozen=True, slots=True)
class OptionEntry:
    """An option as `list options` shows it.

    Attributes:
        name: what specs call it.
        summary: what it decides.
        default: the choice that no cell is named after.
        choices: summaries of all choices by word, the default first.
        modules: those that have it.
        recipes: those under which it has something to choose.
    """

    name: str
    summary: str
    default: str
    choices: Mapping[str, str]
    modules: tuple[str, ...]
    recipes: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """All fields."""
        return asdict(self)


def list_options(folders: Folders = BUILTIN) -> tuple[OptionEntry, ...]:
    """The options of modules, in the order in which cells are named after them.

    Raises:
        SpecError: a folder is not there.
    """
    specs = load_specs(folders)
    offered = {name: options_of(module, specs.ops) for name, module in specs.modules.items()}
    recipes = {name: recipe_facts(recipe) for name, recipe in specs.recipes.items()}
    return tuple(
        OptionEntry(
            option.name,
            option.summary,
            option.default,
            {choice.word: choice.summary for choice in option.choices},
            tuple(name for name, options in offered.items() if option in options),
            tuple(name for name, facts in recipes.items() if option.applies_under(facts) is None),
        )
        for option in OPTIONS
    )


@dataclass(frozen=True, slots=True)
class ExtensionEntry:
    """An installed extension as `list extensions` shows it.

    Attributes:
        name: of its entry point.
        package: that it came with.
        version: of that.
        digest: of its content, as locks record it.
        steps: kinds that it adds.
        families: of kernels that it adds.
    """

    name: str
    package: str
    version: str
    digest: str
    steps: tuple[str, ...]
    families: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """All fields."""
        return asdict(self)


def list_extensions() -> tuple[ExtensionEntry, ...]:
    """The extensions of this environment, by name.

    Raises:
        ExtensionError: one cannot be used.
    """
    return tuple(
        ExtensionEntry(
            each.name,
            each.package,
            each.version,
            each.digest,
            tuple(kind.name for kind in STEPS if kind in each.extension.steps),
            tuple(family.name for family in FAMILIES if family in each.extension.families),
        )
        for each in installed()
    )
