"""Context of a cell's file of sharding rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ...ir.buffers import Buffer
from ...ir.plan import ModulePlan, Sharding
from ...ir.program import Program
from ...ir.shapes import split
from ...passes.sharding import undivided
from .words import op_name, pieces, twin_schema

_WHOLE, _PARTIAL = "WHOLE", "PARTIAL"


@dataclass(frozen=True, slots=True)
class WayText:
    """One way to split an op; tuples are Python source.

    Attributes:
        about: the dimension, for people.
        arguments, results: how each tensor lies.
        sizes: where the dimension is read, and what it is a multiple of on every rank.
        gradients: whether it holds where flags are set.
        elementwise: whether any dimension may be split so.
    """

    about: str
    arguments: str
    results: str
    sizes: str
    gradients: bool
    elementwise: bool


@dataclass(frozen=True, slots=True)
class ShardedOpText:
    """An op, its twin's schema and the ways to split it; tuples are Python source.

    ``refusal`` says why it takes no DTensors; it is empty where it does.
    """

    name: str
    schema: tuple[str, ...]
    tensors: str
    flags: int
    mutated: int
    saved: str
    asked: str
    ways: tuple[WayText, ...]
    refusal: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ShardingContext:
    """Everything ``sharding/<cell>.py`` states.

    Attributes:
        cell: whose ops they are.
        summary: the dimensions that may be split, for people.
        imports: names that the file uses.
        ops: every op.
    """

    cell: str
    summary: tuple[str, ...]
    imports: tuple[str, ...]
    ops: tuple[ShardedOpText, ...]


def sharding_context(plan: ModulePlan) -> ShardingContext:
    """What ``sharding/<cell>.py`` states."""
    ops = tuple(_op_text(view, program) for view, program in plan.ops)
    source = " ".join(w.arguments + w.results for op in ops for w in op.ways)
    used = {"Op": True, "PARTIAL": _PARTIAL in source, "WHOLE": _WHOLE in source}
    used["Way"] = any(op.ways for op in ops)
    return ShardingContext(
        cell=plan.cell,
        summary=tuple(_summary(plan)),
        imports=tuple(sorted(name for name, needed in used.items() if needed)),
        ops=ops,
    )


def _summary(plan: ModulePlan) -> Iterator[str]:
    views = dict.fromkeys(way for view, _ in plan.ops for way in view.shardings)
    if not views and (kinds := undivided(plan)):
        yield f"None: {', '.join(kinds)} cannot be split along any dimension."
        return
    if not views and plan.output_copies:
        yield "None: what stands in the place of an output that is quantised is no shard of it."
        return
    if not views:
        yield "None: scales span whole tensors, or state is kept between calls."
        return
    names = dict.fromkeys(way.symbol for way in views)
    yield f"Dimensions: {', '.join(names)}; no block with a scale of its own is cut."


def _op_text(plan: ModulePlan, program: Program) -> ShardedOpText:
    made = {result.buffer for result in plan.forward.results} - {*plan.outputs}
    saved = program.name == plan.backward.name
    names = tuple(argument.buffer for argument in program.arguments)
    return ShardedOpText(
        name=op_name(plan, program),
        schema=pieces(twin_schema(plan, program)),
        tensors=_tuple(f'"{name}"' for name in names),
        flags=len(program.flags),
        mutated=len(program.mutated),
        saved=_tuple(i for i, name in enumerate(names) if saved and name in made),
        asked=_tuple(
            sum(1 << program.flags.index(flag) for flag in result.when)
            for result in program.results
        ),
        ways=tuple(
            _way_text(plan, program, way)
            for way in plan.shardings
            if way.gradients or program.name != plan.backward.name
        ),
        refusal=pieces(_refusal(plan), " ", 80) if plan.process_groups else (),
    )


def _refusal(plan: ModulePlan) -> str:
    groups = " and ".join(group.name for group in plan.process_groups)
    return (
        f"its calls communicate over a process group of their own, {groups}, between their ops; "
        "take the module without the option that asks for it"
    )


def _way_text(plan: ModulePlan, program: Program, way: Sharding) -> WayText:
    buffers = [plan.buffer(argument.buffer) for argument in program.arguments]
    results = [plan.buffer(result.buffer) for result in program.results]
    forms = {buffer.shape for buffer in (*buffers, *results)}
    more = "" if way.gradients else ", where no gradient is asked for"
    unit = f", in multiples of {way.unit}" if way.unit > 1 else ""
    return WayText(
        about=f"{way.symbol}{unit}{more}",
        arguments=_tuple(_lies(buffer, way) for buffer in buffers),
        results=_tuple(_lies(buffer, way) for buffer in results),
        sizes=_tuple(_sizes(buffers, way)),
        gradients=way.gradients,
        elementwise=all(form.leading and not form.dims for form in forms) and len(forms) == 1,
    )


def _lies(buffer: Buffer, way: Sharding) -> str:
    axis = way.axis(buffer.name)
    if axis is None:
        return _PARTIAL if buffer.name in way.partial else _WHOLE
    return str(_dimension(buffer, axis))


def _dimension(buffer: Buffer, axis: int) -> int:
    """The dimension that an axis begins with, counted from the end behind leading ones."""
    return axis - len(buffer.shape.flat) if buffer.shape.leading and axis else axis


def _sizes(buffers: list[Buffer], way: Sharding) -> Iterator[str]:
    """Where the size of the split dimension can be read off an argument."""
    for index, buffer in enumerate(buffers):
        axis = way.axis(buffer.name)
        if axis is None:
            continue
        parts = split(buffer.shape.flat[axis], way.symbol)
        if parts is None or parts.unit > 1 or not parts.proportional:
            continue
        start = _dimension(buffer, axis)
        stop: int | None = start + 1
        if buffer.shape.leading and axis == 0:
            stop = -len(buffer.shape.dims) or None
        elif start == -1:
            stop = None
        yield f"({index}, {start}, {stop}, {way.unit * parts.slope})"


def _tuple(items: Iterable[object]) -> str:
    texts = [str(item) for item in items]
    return f"({texts[0]},)" if len(texts) == 1 else f"({', '.join(texts)})"
