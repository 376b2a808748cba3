"""The reference of the spec format, as Markdown: every key, its values, its meaning."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..ir.predicate import Comparison, SizeVariable
from ..math.expression import CALLABLE
from ..steps import SHIPPED, definition
from ..steps.definition import StepDef
from .fields import CAPITAL, NAME, PATTERNS
from .kinds import SpecKind
from .meanings import described

_MANY = 12
"""Words of a closed set that a table has no place for beside each other."""


def reference(examples: Mapping[SpecKind, str]) -> Iterator[str]:
    """Lines of the page.

    Args:
        examples: text of a spec of each kind.
    """
    yield f"*name*: {PATTERNS[NAME]}. *Symbol*: {PATTERNS[CAPITAL]}."
    yield ""
    for kind in SpecKind:
        schema = described(kind)
        yield f"## {kind.folder}: `specs/{kind.folder}/<{kind.key}>.yaml`"
        yield schema["description"]
        yield ""
        yield "```yaml"
        yield from examples[kind].rstrip("\n").split("\n")
        yield "```"
        yield ""
        yield from _table(schema, schema)
        for name in _objects(schema, schema, []):
            node = schema["$defs"][name]
            yield ""
            yield f"### {kind.folder}: {_title(name)}"
            yield node["description"]
            yield ""
            yield from _table(node, schema)
        yield ""
    yield from _words()
    yield from _steps()


# ---- keys


def _table(node: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[str]:
    """Every key of an object, those that must be written first."""
    required = node.get("required", [])
    yield "| key | values | if left out | meaning |"
    yield "|---|---|---|---|"
    properties = node["properties"]
    for key in (*required, *(each for each in properties if each not in required)):
        value = properties[key]
        absent = "must be there" if key in required else _default(value)
        values, meaning = _values(value, schema), value["description"]
        yield f"| `{key}` | {escaped(values)} | {escaped(absent)} | {escaped(meaning)} |"


def _default(value: Mapping[str, Any]) -> str:
    default = value.get("default")
    if default is None or default == [] or default == {}:
        return "nothing"
    if isinstance(default, Mapping):
        return "what its keys say"
    if isinstance(default, list):
        return f"`[{', '.join(map(str, default))}]`"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _values(value: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """What may stand at a key, in words."""
    match value:
        case {"$ref": ref}:
            return _named(ref.rsplit("/", 1)[1], schema)
        case {"anyOf": branches}:
            words = (_values(each, schema) for each in branches if each.get("type") != "null")
            return " or ".join(dict.fromkeys(words))
        case {"const": const}:
            return f"`{const}`"
        case {"enum": words}:
            return _choice(words)
        case {"prefixItems": items}:
            return f"[{', '.join(_values(each, schema) for each in items)}]"
        case {"type": "array", "items": items}:
            return f"list of {_values(items, schema)}"
        case {"type": "object"}:
            return _mapping(value, schema)
        case {"type": "string", "pattern": pattern}:
            return _WORDS.get(pattern, PATTERNS[pattern])
        case {"type": "string"}:
            return "text"
        case {"type": "boolean"}:
            return "`true` or `false`"
        case {"type": "integer" | "number" as type_}:
            return _number(value, type_)
        case {"type": ["string", "integer"]}:
            return "an integer or an expression of dimensions, such as `2 * D`"
    raise ValueError(f"no words for {value}")


def _named(name: str, schema: Mapping[str, Any]) -> str:
    node = schema["$defs"][name]
    link = f"[{_title(name)}](#{_anchor(name, schema)})"
    return _choice(node["enum"]) if "enum" in node else link


def _choice(words: Sequence[object]) -> str:
    if len(words) > _MANY:
        return "kind of [step](#kinds-of-steps)"
    return ", ".join(f"`{word}`" for word in words)


def _mapping(value: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """Keys that people choose, each with a value."""
    patterns = value.get("patternProperties", {})
    inner = next(iter(patterns.values()), value.get("additionalProperties"))
    if not isinstance(inner, Mapping):
        if "step" in value.get("properties", {}):
            return "[step](#kinds-of-steps)"
        return "[conditions on sizes](#conditions-on-sizes)"
    names = value.get("propertyNames", {})
    ref = names.get("$ref", "").rsplit("/", 1)[-1]
    enum = schema["$defs"][ref]["enum"] if ref else names.get("enum")
    key = _choice(enum) if enum else _WORDS[next(iter(patterns))]
    return f"by {key}: {_values(inner, schema)}"


_WORDS = {NAME: "*name*", CAPITAL: "*Symbol*"}
"""Of patterns that many keys have, explained at the head of the page."""


def _number(value: Mapping[str, Any], type_: str) -> str:
    words = "an integer" if type_ == "integer" else "a number"
    least = value.get("minimum", value.get("exclusiveMinimum"))
    most = value.get("maximum", value.get("exclusiveMaximum"))
    if least is None or most is None:
        return words
    between = "between" if "exclusiveMinimum" in value else "from"
    joint = "and" if between == "between" else "to"
    return f"{words} {between} {least:g} {joint} {most:.6g}"


def _objects(node: Any, schema: Mapping[str, Any], found: list[str]) -> list[str]:
    """Names of the objects that a node leads to, each once, in the order of first use."""
    if isinstance(node, list):
        for each in node:
            _objects(each, schema, found)
        return found
    if not isinstance(node, Mapping):
        return found
    name = str(node.get("$ref", "")).rsplit("/", 1)[-1]
    if name and name not in found and "properties" in schema["$defs"][name]:
        found.append(name)
        _objects(schema["$defs"][name], schema, found)
    for key, each in node.items():
        if key != "$defs":
            _objects(each, schema, found)
    return found


def _title(name: str) -> str:
    """`tensor` of TensorSpec, `chain item` of ChainItem."""
    words = re.findall(r"[A-Z][a-z0-9]*", name.removesuffix("Spec"))
    return " ".join(words).lower()


def _anchor(name: str, schema: Mapping[str, Any]) -> str:
    """Of the heading of an object among those of its kind of spec, as GitHub makes it."""
    kind = next(each for each in SpecKind if schema["title"] == each.spec.__name__)
    return f"{kind.folder}-{_title(name)}".replace(" ", "-")


def escaped(text: str) -> str:
    """Text of a table, or of a page, where what looks like HTML outside of code would vanish."""
    code = text.replace("|", "\\|").split("`")
    return "`".join(part if i % 2 else part.replace("<", "&lt;") for i, part in enumerate(code))


# ---- words


def _words() -> Iterator[str]:
    yield "## Shapes and expressions"
    yield (
        "A shape is a list of dimensions: a symbol, an integer, or `+`, `-`, `*`, `//` of these;"
        " `T...` stands for any number of leading dimensions."
    )
    yield (
        "A pointwise expression has Python's operators, names of tensors, halves and attributes,"
        f" and these functions: {', '.join(f'`{name}`' for name in CALLABLE)}."
    )
    yield ""
    yield "## Conditions on sizes"
    sizes = ", ".join(f"`{each.value}`" for each in SizeVariable)
    comparisons = ", ".join(f"`{each.value}`" for each in Comparison)
    yield (
        "`{rows: {ge: 4096}, groups: {lt: 64}}` holds where all of it does. Sizes:"
        f" {sizes}. Comparisons, each with an integer: {comparisons}."
    )
    yield ""


# ---- steps


def _steps() -> Iterator[str]:
    yield "## Kinds of steps"
    yield (
        "`{step: gemm, kind: fprop, a: x, b: weight, out: y}`: tensors of the op by slot, and"
        " attributes, each a value or the name of one of the op's attributes. Kinds that only"
        " passes write stand in fusions and families alone."
    )
    yield ""
    yield "| step | kinds | operands | results | attributes | written by |"
    yield "|---|---|---|---|---|---|"
    for step in SHIPPED:
        yield _step(step)


def _step(step: StepDef) -> str:
    kinds = step.kinds or (None,)
    needed = {slot for kind in kinds for slot in step.required(kind)}
    operands = ", ".join(
        f"`{slot}`" if slot in needed else f"`{slot}` (optional)" for slot in step.slots
    )
    attributes = {each.name: each.type.value for kind in kinds for each in step.attributes_of(kind)}
    columns = (
        f"`{step.name}`",
        ", ".join(f"`{kind}`" for kind in step.kinds),
        operands,
        ", ".join(f"`{result}`" for result in definition(step.name).results),
        ", ".join(f"`{name}` ({type_})" for name, type_ in attributes.items()),
        "passes" if step.of_passes else "ops",
    )
    return f"| {' | '.join(columns)} |"
