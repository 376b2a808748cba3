"""New rules in the text of an architecture's spec; every other line stays as it is, to the byte."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import yaml

from ..families.family import Config
from ..ir.kernel import GemmKind
from ..spec.arch import RuleSpec
from ..spec.points import as_spec, parse_point, point_of

_MEASURED = "measured"  # key of `KindSpec`
Choices = Mapping[GemmKind, Sequence[RuleSpec]]


def with_rules(text: str, family: str, choices: Choices) -> str:
    """The text with other rules for some kinds of a family.

    A point that no rule uses any more loses its line too: a spec may not list it. One that the list
    lacks gets a line at its end.

    Args:
        text: of a valid spec.
        family: whose kinds they are.
        choices: rules by kind.

    Raises:
        ValueError: a list does not have its items on lines of their own.
    """
    lines = text.splitlines(keepends=True)
    kinds = _value(_value(_value(_root(text), "kernels"), family), "kinds")
    edits: list[tuple[int, int, list[str]]] = []
    for kind, rules in choices.items():
        spec = _value(kinds, kind.value)
        edits.append(_select(_value(spec, "select"), rules, lines))
        edits += _points(
            _value(spec, "points"), {point for rule in rules for point in rule.points}, lines
        )
    for start, end, new in sorted(edits, key=lambda edit: edit[0], reverse=True):
        lines[start:end] = new
    return "".join(lines)


def marked(text: str, family: str, kinds: Iterable[GemmKind], *, measured: bool) -> str:
    """The text that says of kinds of a family whether their rules were measured.

    Nothing is said of those that were.
    """
    lines = text.splitlines(keepends=True)
    specs = _value(_value(_value(_root(text), "kernels"), family), "kinds")
    edits: list[tuple[int, int, list[str]]] = []
    for kind in kinds:
        keys = {key.value: key for key, _ in _pairs(_value(specs, kind.value))}
        said, points = keys.get(_MEASURED), keys["points"].start_mark
        if said is not None:
            edits.append((said.start_mark.line, said.start_mark.line + 1, []))
        if not measured:
            end = "\r\n" if lines[points.line].endswith("\r\n") else "\n"
            new = f"{' ' * points.column}{_MEASURED}: false{end}"
            edits.append((points.line, points.line, [new]))
    for start, stop, new_lines in sorted(edits, key=lambda edit: edit[:2], reverse=True):
        lines[start:stop] = new_lines
    return "".join(lines)


def _pairs(node: yaml.Node) -> list[tuple[yaml.Node, yaml.Node]]:
    assert isinstance(node, yaml.MappingNode)
    pairs: list[tuple[yaml.Node, yaml.Node]] = node.value
    return pairs


def _root(text: str) -> yaml.Node:
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    assert root is not None
    return root


def _value(node: yaml.Node, key: str) -> yaml.Node:
    assert isinstance(node, yaml.MappingNode)
    found: yaml.Node = next(value for name, value in node.value if name.value == key)
    return found


def _items(node: yaml.Node) -> list[yaml.Node]:
    assert isinstance(node, yaml.SequenceNode)
    items: list[yaml.Node] = node.value
    return items


def _lines_of(node: yaml.Node) -> list[tuple[yaml.Node, int, int]]:
    """Items of a list, each with its first line and the one behind its last."""
    if isinstance(node, yaml.CollectionNode) and node.flow_style:
        raise ValueError(f"line {node.start_mark.line + 1}: put each item on a line of its own")
    return [(item, item.start_mark.line, _last_line(item) + 1) for item in _items(node)]


def _last_line(node: yaml.Node) -> int:
    """The line a node ends on; of a block collection PyYAML marks the next token instead."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style:
        last = node.value[-1]
        return _last_line(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.line)


def _select(
    node: yaml.Node, rules: Sequence[RuleSpec], lines: Sequence[str]
) -> tuple[int, int, list[str]]:
    """The lines of a list of rules, and the new ones in their place."""
    items = _lines_of(node)
    start = items[0][1]
    return start, items[-1][2], _as_items(node, map(printed, rules), lines)


def _as_items(node: yaml.Node, texts: Iterable[str], lines: Sequence[str]) -> list[str]:
    """Lines of a list, indented and ended as those it has."""
    start, indent = node.start_mark.line, " " * node.start_mark.column
    end = "\r\n" if lines[start].endswith("\r\n") else "\n"
    items = (text.replace("\n", f"{end}{indent}  ") for text in texts)
    return [f"{indent}- {text}{end}" for text in items]


def _points(
    node: yaml.Node, used: set[str], lines: Sequence[str]
) -> Iterator[tuple[int, int, list[str]]]:
    """Lines of points without a rule go; points that are not listed come after the last one."""
    items = _lines_of(node)
    for item, start, end in items:
        if _point_name(item) not in used:
            yield start, end, []
    missing = sorted(used - {_point_name(item) for item, _, _ in items})
    if missing:
        behind = items[-1][2]
        points = (_printed_point(parse_point(name)) for name in missing)
        yield behind, behind, _as_items(node, points, lines)


def _point_name(node: yaml.Node) -> str:
    return point_of(yaml.SafeLoader("").construct_object(node, deep=True)).name


def _printed_point(point: Config) -> str:
    """A point as a spec spells it, on one line."""
    return f"{{{', '.join(f'{key}: {value}' for key, value in as_spec(point).items())}}}"


def printed(rule: RuleSpec) -> str:
    """A rule as a spec spells it: on one line, or on one for each of its estimates."""
    by_variable: dict[str, list[str]] = {}
    for each in rule.when.conditions:
        words = f"{each.comparison.value}: {each.value}"
        by_variable.setdefault(each.variable.value, []).append(words)
    when = ", ".join(f"{name}: {{{', '.join(words)}}}" for name, words in by_variable.items())
    if rule.use is None:
        times = (
            f"\n  {point}: {{launch: {time.launch}, wave: {time.wave}, k: {time.k}}}"
            for point, time in rule.least.items()
        )
        return f"when: {{{when}}}\nleast:{''.join(times)}"
    return f"{{when: {{{when}}}, use: {rule.use}}}" if when else f"{{use: {rule.use}}}"
