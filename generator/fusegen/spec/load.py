"""Read spec files into dataclasses: every problem of a file in one run, each with its place."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from .arch import ArchSpec
from .diagnostics import KeyPath, Loc, Problem, SpecError, did_you_mean
from .editions import CURRENT, Document, edition_of, is_older, newer_problem, upgraded
from .fields import PATTERNS
from .files import read
from .fusion import FusionSpec
from .kinds import SCHEMA_FOLDER, AnySpec, SpecKind
from .module import ModuleSpec
from .op import OpSpec
from .recipe import RecipeSpec
from .target import TargetSpec

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_YAML = (".yaml", ".yml")
_SIZE_LIMIT = 1 << 20
_DEPTH_LIMIT = 32
_INTEGERS = 2**63
_SHOWN = 60

SpecKey = tuple[SpecKind, str]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Source:
    """A spec file: how it is named to people, and where each of its keys stands.

    ``texts`` holds the place of the first character of every value that stands as written;
    ``edition`` is that of the file, whose spec is of the current one.
    """

    file: str
    places: Mapping[KeyPath, Loc]
    texts: Mapping[KeyPath, Loc] = field(default_factory=dict)
    edition: int = CURRENT

    def loc(self, *path: str | int) -> Loc:
        """The place of a key, or of the nearest enclosing key that is written."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, Loc(self.file, 1, 1))

    def problem(self, message: str, *path: str | int) -> Problem:
        """A problem at a key."""
        return Problem(self.loc(*path), message)

    def problem_within(self, message: str, column: int, *path: str | int) -> Problem:
        """A problem at a column, counted from 1, of a value; at its key where it has escapes."""
        start = self.texts.get(path)
        if start is None:
            return self.problem(f"column {column}: {message}", *path)
        return Problem(Loc(start.file, start.line, start.column + column - 1), message)


@dataclass(frozen=True)
class SpecSet:
    """All specs by name, in sorted order, with the source of each.

    ``sources`` is keyed by (kind, name) and serves error messages only.  ``broken`` are the specs
    that were left out, each with what is wrong with it or with what it names.
    ``older`` are files of an older edition, as messages name them, by the folder that has them.
    """

    ops: Mapping[str, OpSpec] = field(default_factory=dict)
    fusions: Mapping[str, FusionSpec] = field(default_factory=dict)
    modules: Mapping[str, ModuleSpec] = field(default_factory=dict)
    recipes: Mapping[str, RecipeSpec] = field(default_factory=dict)
    archs: Mapping[str, ArchSpec] = field(default_factory=dict)
    targets: Mapping[str, TargetSpec] = field(default_factory=dict)
    sources: Mapping[SpecKey, Source] = field(default_factory=dict)
    broken: Mapping[SpecKey, tuple[Problem, ...]] = field(default_factory=dict)
    older: Mapping[Path, tuple[str, ...]] = field(default_factory=dict)

    def of(self, kind: SpecKind) -> Mapping[str, AnySpec]:
        """Specs of one kind."""
        specs: Mapping[str, AnySpec] = getattr(self, kind.folder)
        return specs

    def source(self, kind: SpecKind, name: str) -> Source:
        """Where a spec was read from."""
        return self.sources[kind, name]

    def require(self, kind: SpecKind, name: str) -> None:
        """Do nothing, unless a spec was left out.

        Raises:
            SpecError: with what is wrong with it.
        """
        if (kind, name) in self.broken:
            raise SpecError(self.broken[kind, name])


class _Reader:
    """Turns a YAML node tree into plain data and a map of places; refuses duplicate keys."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.places: dict[KeyPath, Loc] = {}
        self.texts: dict[KeyPath, Loc] = {}
        self.problems: list[Problem] = []
        self._constructor = yaml.SafeLoader("")

    def loc(self, node: yaml.Node) -> Loc:
        return Loc(self.file, node.start_mark.line + 1, node.start_mark.column + 1)

    def read(self, node: yaml.Node, path: KeyPath = ()) -> Any:
        self.places.setdefault(path, self.loc(node))
        if isinstance(node, yaml.MappingNode):
            return dict(self._pairs(node, path))
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, (*path, i)) for i, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        quotes = int(node.style in ("'", '"'))
        length = node.end_mark.index - node.start_mark.index - 2 * quotes
        if length == len(node.value):
            start = self.loc(node)
            self.texts[path] = Loc(start.file, start.line, start.column + quotes)
        try:
            value = self._constructor.construct_object(node)
        except ValueError as error:
            reason = f"{_short(node.value)} is no value; put it in quotes"
            raise yaml.MarkedYAMLError(problem=reason, problem_mark=node.start_mark) from error
        if isinstance(value, int) and not -_INTEGERS <= value < _INTEGERS:
            reason = f"{_short(node.value)} has more than 64 bits; write a smaller number"
            self.problems.append(Problem(self.loc(node), reason))
            return 0
        return value

    def _pairs(self, node: yaml.MappingNode, path: KeyPath) -> Iterator[tuple[str, Any]]:
        seen: set[str] = set()
        for key_node, value_node in node.value:
            key = key_node.value
            if not isinstance(key, str):
                self.problems.append(
                    Problem(self.loc(key_node), "a key is a plain word, not a list or a mapping")
                )
                continue
            if key in seen:
                first = self.places[(*path, key)]
                self.problems.append(
                    Problem(
                        self.loc(key_node),
                        f"key {key!r} is written twice, first at line {first.line}; remove one",
                    )
                )
                continue
            seen.add(key)
            self.places[(*path, key)] = self.loc(key_node)
            yield key, self.read(value_node, (*path, key))


def parse_yaml(text: str, file: str) -> tuple[dict[str, Any] | None, Source, list[Problem]]:
    """The document of a file's text, None where it is none; places; what is wrong with it."""
    try:
        refused = _refuse(text, file)
        if refused:
            return None, Source(file, {}), [refused]
        node = yaml.compose(text, Loader=_LOADER)
        if not isinstance(node, yaml.MappingNode):
            raise ValueError(f"expected keys and values such as 'edition: {CURRENT}'")
        reader = _Reader(file)
        content = reader.read(node)
    except yaml.MarkedYAMLError as error:
        place = _place(file, error.problem_mark)
        return None, Source(file, {}), [Problem(place, f"not YAML: {_yaml_reason(error)}")]
    except (yaml.YAMLError, ValueError) as error:
        return None, Source(file, {}), [_no_spec(file, error)]
    return content, Source(file, reader.places, reader.texts), reader.problems


def _no_spec(file: str, error: Exception) -> Problem:
    """A file that cannot be read, or whose text is no mapping."""
    return Problem(Loc(file, 1, 1), f"not a spec: {getattr(error, 'strerror', None) or error}")


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is too large, or not UTF-8.
    """
    data = read(path, _SIZE_LIMIT + 1)
    if len(data) > _SIZE_LIMIT:
        raise ValueError(f"the file is larger than {_SIZE_LIMIT} bytes; split it")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8; save the file as UTF-8") from None


def _refuse(text: str, file: str, loader: Any = _LOADER) -> Problem | None:
    """What YAML offers and a spec does not need: aliases, tags and deep nesting.

    Read from the event stream, before anything is built: aliases of aliases grow without bound,
    tags name code to run, and composing thousands of levels overflows the C stack.  Of too deep
    ones libyaml itself may say so, before the event that is too deep; the parser in Python has it.
    """
    try:
        return _refused(text, file, loader)
    except yaml.MarkedYAMLError as error:
        if loader is yaml.SafeLoader or "nesting depth" not in str(error.problem):
            raise
    return _refuse(text, file, yaml.SafeLoader)


def _refused(text: str, file: str, loader: Any) -> Problem | None:
    depth = 0
    for event in yaml.parse(text, Loader=loader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        reason, tag = "", getattr(event, "tag", None)
        if getattr(event, "anchor", None):
            reason = "anchors and aliases are refused; write the value out"
        elif tag:
            reason = f"tag {tag!r} is refused; write plain words, numbers, lists and keys"
        elif depth > _DEPTH_LIMIT:
            reason = f"nested deeper than {_DEPTH_LIMIT} levels"
        if reason:
            return Problem(_place(file, event.start_mark), reason)
    return None


def _place(file: str, mark: Any) -> Loc:
    return Loc(file, mark.line + 1, mark.column + 1) if mark else Loc(file, 1, 1)


def _yaml_reason(error: yaml.MarkedYAMLError) -> str:
    """What the YAML parser found, with the remedy for what people do most."""
    if "cannot start any token" in str(error.problem):
        return f"{error.problem}; indent with spaces, quote text that starts with @ or a backtick"
    return str(error.problem)


_EXPECTED = {
    "string": "text",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "mapping": "keys and values",
    "dict": "keys and values",
    "dataclass": "keys and values",
    "tuple": "a list",
    "none": "nothing",
}
"""pydantic's names of types, in the words of people who write YAML."""


def _explain(error: Any, spec: type[Any]) -> tuple[str, KeyPath]:
    """A pydantic error as a sentence and the key it is about."""
    path: KeyPath = tuple(part for part in error["loc"] if part != "[key]")
    kind: str = error["type"]
    context, got = error.get("ctx", {}), _short(error["input"])
    match kind:
        case "unexpected_keyword_argument" | "extra_forbidden":
            known = _field_names(spec, path[:-1])
            return f"unknown key {path[-1]!r}{did_you_mean(str(path[-1]), known)}", path
        case "missing" if isinstance(path[-1], int):
            return f"expected at least {path[-1] + 1} entries, got {got}", path[:-1]
        case "missing":
            return f"missing key {path[-1]!r}", path[:-1]
        case "enum":
            known = re.findall(r"'([^']*)'", context["expected"])
            return f"unknown value {got}{did_you_mean(str(error['input']), known)}", path
        case "literal_error":
            return f"expected {context['expected']}, got {got}", path
        case "string_pattern_mismatch":
            return f"expected {PATTERNS[context['pattern']]}, got {got}", path
        case "string_too_long" | "too_long":
            return f"expected at most {context['max_length']} {_unit(kind)}, got {got}", path
        case "string_too_short" | "too_short":
            return f"expected at least {context['min_length']} {_unit(kind)}, got {got}", path
        case _ if "path" in context:
            return str(context["text"]), (*path, *context["path"])
    word = _EXPECTED.get(kind.partition("_")[0])
    if word and kind.endswith(("_type", "_parsing", "_parsing_size", "_from_float")):
        return f"expected {word}, got {got}", path
    reason: str = error["msg"]
    return f"{reason.replace('Input should be', 'expected a value')}, got {got}", path


def _unit(kind: str) -> str:
    return "characters" if kind.startswith("string") else "entries"


def _short(value: object) -> str:
    """A value as messages show it."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _field_names(spec: type[Any], path: KeyPath) -> list[str]:
    """Keys allowed at a place of a spec, read from its JSON Schema so that they stand once."""
    schema = _schema(spec)
    node: Any = schema
    for part in path:
        node = _deref(node, schema)
        named = [*node.get("patternProperties", {}).values(), node.get("additionalProperties")]
        choices = (node.get("properties", {}).get(part), *named, node.get("items"))
        node = next((choice for choice in choices if isinstance(choice, dict)), {})
    return list(_deref(node, schema).get("properties", {}))


_SCHEMAS: dict[type[Any], Any] = {}


def _schema(spec: type[Any]) -> Any:
    """The JSON Schema of a spec class, made once."""
    if spec not in _SCHEMAS:
        _SCHEMAS[spec] = adapter(spec).json_schema()
    return _SCHEMAS[spec]


def _deref(node: Any, schema: Any) -> Any:
    while isinstance(node, dict):
        if "anyOf" in node:
            node = next((branch for branch in node["anyOf"] if "$ref" in branch), node["anyOf"][0])
        if "$ref" not in node:
            return node
        node = schema["$defs"][node["$ref"].rsplit("/", 1)[1]]
    return {}


_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {}


def adapter(spec: type[T]) -> TypeAdapter[T]:
    """The pydantic adapter of a spec class, made once."""
    if spec not in _ADAPTERS:
        _ADAPTERS[spec] = TypeAdapter(spec)
    return _ADAPTERS[spec]


def parse_spec(kind: SpecKind, path: Path, file: str) -> tuple[AnySpec, Source]:
    """Read one file.

    Args:
        kind: which kind of spec its folder holds.
        path: of the file.
        file: how error messages name it.

    Raises:
        SpecError: with every problem of the file.
    """
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise SpecError([_no_spec(file, error)]) from None
    return _parsed(kind, path.stem, file, text)


@lru_cache(maxsize=512)
def _parsed(kind: SpecKind, stem: str, file: str, text: str) -> tuple[AnySpec, Source]:
    """The spec of a file's text, which nobody changes: loading folders again parses what is new.

    Args:
        kind: see `parse_spec`.
        stem: the file's name, which is the spec's.
        file: see `parse_spec`.
        text: of the file.

    Raises:
        SpecError: with every problem of the file; it is found anew each time.
    """
    content, source, problems = parse_yaml(text, file)
    if content is None:
        raise SpecError(problems)
    if newer := newer_problem(content):
        raise SpecError([source.problem(newer, "edition")])
    document, source, contradictions = _in_current_edition(kind, content, source)
    problems += contradictions
    try:
        spec: AnySpec = adapter(kind.spec).validate_python(document)
    except ValidationError as error:
        seen: set[Loc] = set()
        for item in error.errors(include_url=False):
            message, key = _explain(item, kind.spec)
            # A key that is not written is a branch of a union: its first branch says enough.
            if key in source.places or source.loc(*key) not in seen:
                problems.append(source.problem(message, *key))
                seen.add(source.loc(*key))
        raise SpecError(problems) from None
    if spec.name != stem:
        problems.append(
            source.problem(
                f"the file is named {stem!r}, its {kind.key} {spec.name!r}; make them the same",
                kind.key,
            )
        )
    if problems:
        raise SpecError(problems)
    return spec, source


def _in_current_edition(
    kind: SpecKind, content: Document, source: Source
) -> tuple[Document, Source, list[Problem]]:
    """What a file says, and where, in the current edition; and what is wrong with it."""
    if not is_older(content):
        return content, source, []
    upgrade = upgraded(kind, content)
    problems = [source.problem(c.problem, *c.path) for c in upgrade.changes if c.problem]
    gone = {change.path for change in upgrade.changes if change.value is None}
    places = {path: loc for path, loc in source.places.items() if path not in gone}
    return (
        upgrade.document,
        replace(source, places=places, edition=edition_of(content) or CURRENT),
        problems,
    )


def read_folders(
    folders: Iterable[Path],
) -> tuple[SpecSet, dict[SpecKey, list[Problem]], list[Problem]]:
    """Every ``<folder>/<kind>/*.yaml``, unchecked against each other; ``checks.load`` checks them.

    Args:
        folders: the built-in folder first, then users' folders; a name may be stated only once.

    Returns:
        what could be read, the problems by spec, and those of files that are no specs.
    """
    specs: dict[SpecKind, dict[str, AnySpec]] = {kind: {} for kind in SpecKind}
    sources: dict[SpecKey, Source] = {}
    broken: dict[SpecKey, list[Problem]] = {}
    others: list[Problem] = []
    older: dict[Path, tuple[str, ...]] = {}
    for folder in folders:
        for kind, path in spec_files(folder, others):
            try:
                spec, source = parse_spec(kind, path, display(path, folder))
            except SpecError as error:
                broken.setdefault((kind, path.stem), []).extend(error.problems)
                continue
            if source.edition < CURRENT:
                older[folder] = (*older.get(folder, ()), source.file)
            for each, place, wrong in _with_variants(spec, source):
                problems = list(wrong)
                if each.name in specs[kind]:
                    first = sources[kind, each.name].loc(kind.key)
                    problems.append(
                        place.problem(
                            f"{kind.key} {each.name!r} is already defined at {first}; give it"
                            " another name",
                            kind.key,
                        )
                    )
                if problems:
                    broken.setdefault((kind, each.name), []).extend(problems)
                    continue
                specs[kind][each.name] = each
                sources[kind, each.name] = place
    by_folder: dict[str, Any] = {
        kind.folder: dict(sorted(specs[kind].items())) for kind in SpecKind
    }
    return SpecSet(**by_folder, sources=sources, older=older), broken, others


def _with_variants(
    spec: AnySpec, source: Source
) -> Iterator[tuple[AnySpec, Source, tuple[Problem, ...]]]:
    """A spec and, where it is a module with variants, those: each with its source and problems."""
    if not isinstance(spec, ModuleSpec) or not spec.variants:
        yield spec, source, ()
        return
    yield spec, source, ()
    for name in spec.variants:
        wrong = tuple(_variant_problems(spec, name, source))
        yield spec.variant(name), _variant_source(spec, name, source), wrong


def _variant_problems(spec: ModuleSpec, name: str, source: Source) -> Iterator[Problem]:
    """A variant changes an op of the chain, or several, or attributes of the one op."""
    items = [item.as_ for item in spec.chain if item.as_]
    changes = spec.variants[name].chain
    attributes = spec.variants[name].attributes
    if spec.op and not attributes:
        yield source.problem(
            f"{name!r} changes no attribute of the op; say which, such as attributes: {{scale:"
            " 2.0}",
            *("variants", name),
        )
    elif attributes and not spec.op:
        yield source.problem(
            f"{name!r} changes attributes of one op, and the module has a chain; name the op under"
            " 'chain'",
            *("variants", name, "attributes"),
        )
    for item in changes:
        if item not in items:
            hint = did_you_mean(item, items)
            path = ("variants", name, "chain", item)
            yield source.problem(f"no op of the chain has 'as: {item}'{hint}", *path)
    if spec.chain and not changes:
        yield source.problem(
            f"{name!r} changes no op of the chain; say which, such as act: {{op: srelu}}",
            *("variants", name, "chain"),
        )


def _variant_source(spec: ModuleSpec, name: str, source: Source) -> Source:
    """The source of a variant: what it says otherwise stands where it says so."""
    variant: KeyPath = ("variants", name)
    indices = {item.as_: index for index, item in enumerate(spec.chain)}

    def moved(path: KeyPath) -> KeyPath | None:
        """The key of a module that a key of the variant stands for."""
        match path[len(variant) :]:
            case ("chain", item, *rest) if item in indices:
                return ("chain", indices[item], *rest)
            case ("class" | "summary" | "attributes") as key, *rest:
                return (key, *rest)
            case ():
                return ("module",)
        return None

    def overlaid(places: Mapping[KeyPath, Loc]) -> dict[KeyPath, Loc]:
        own = {path: loc for path, loc in places.items() if path[: len(variant)] == variant}
        said = {key: loc for path, loc in own.items() if (key := moved(path)) is not None}
        return {**places, **said}

    return replace(source, places=overlaid(source.places), texts=overlaid(source.texts))


def spec_files(folder: Path, problems: list[Problem]) -> Iterator[tuple[SpecKind, Path]]:
    """The specs of a folder, each with its kind; what else lies there is added to the problems."""
    if not folder.is_dir():
        problems.append(no_folder(folder))
        return

    def wrong(path: Path, message: str) -> None:
        problems.append(Problem(Loc(display(path, folder), 1, 1), message))

    known = [kind.folder for kind in SpecKind]
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and entry.name not in (*known, SCHEMA_FOLDER):
            wrong(entry, f"unknown spec folder{did_you_mean(entry.name, known)}")
        if entry.name in known and not entry.is_dir():
            wrong(entry, "expected a folder of specs")
    for path in sorted((*folder.glob("[!.]*"), *folder.glob(f"{SCHEMA_FOLDER}/[!.]*"))):
        if path.suffix.lower() in _YAML and path.is_file():
            wrong(path, f"no spec is read from here; move it into a folder: {', '.join(known)}")
    for kind in SpecKind:
        for path in sorted((folder / kind.folder).glob("[!.]*")):
            if path.suffix == ".yaml":
                yield kind, path
            elif path.suffix != ".md":
                wrong(path, "not a spec: expected <name>.yaml, or .md for notes")


def no_folder(folder: Path) -> Problem:
    """The problem of a folder that is not there."""
    return Problem(Loc(str(folder), 1, 1), "there is no such spec folder")


def display(path: Path, folder: Path) -> str:
    """How messages name a spec: from the folder's name on, the same on every machine."""
    return (Path(folder.name) / path.relative_to(folder)).as_posix()
