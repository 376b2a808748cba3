"""Memory of a launcher: results, and what lives inside one call, in their memory or a workspace."""

from __future__ import annotations

from operator import itemgetter

from ...ir.buffers import Buffer, JoinedTensor, size_in_bytes
from ...ir.plan import ModulePlan
from ...ir.program import Program
from ...ir.shapes import Const, to_cpp
from ...ir.step import Result
from ..python.conditions import Conditions
from .words import scalar_type


def _empty(buffer: Buffer, first: Buffer) -> str:
    dims = ", ".join(to_cpp(dim) for dim in buffer.shape.dims)
    dtype = scalar_type(buffer.dtype)
    if buffer.shape.leading:
        return f"empty_rows({first.name}, {len(first.shape.dims)}, {{{dims}}}, {dtype})"
    return f"empty({{{dims}}}, {dtype}, {first.name})"


def _asked(program: Program, result: Result) -> tuple[str, ...]:
    """Flags under which a result is allocated; some of them are computed anyway."""
    writer = next((step for step in program.steps if result.buffer in step.writes), None)
    return writer.wanted(result.buffer) or writer.when if writer else result.when


def _passing(program: Program) -> tuple[Result, ...]:
    """Results that steps write whether or not the caller wants them."""
    return tuple(r for r in program.results if r.when and _asked(program, r) != r.when)


def allocated(program: Program, result: Result) -> str:
    return f"{result.buffer}_kept" if result in _passing(program) else result.buffer


def allocation(
    plan: ModulePlan, program: Program, result: Result, conditions: Conditions
) -> list[str]:
    """Results that the caller wants; one that only steps want lies in the workspace."""
    first = plan.buffer(program.arguments[0].buffer)
    name, source = allocated(program, result), _empty(plan.buffer(result.buffer), first)
    asked = conditions.text(result.when or _asked(program, result))
    if not asked:
        return [f"const Tensor {name} = {source};"]
    if not program.returns_none:
        nothing = _nothing(plan, result.buffer, first)
        return [f"const Tensor {name} = {asked} ? {source} : {nothing};"]
    return [f"std::optional<Tensor> {name};", f"if ({asked}) {name} = {source};"]


def _nothing(plan: ModulePlan, name: str, first: Buffer) -> str:
    """An empty tensor in place of one that nobody asked for."""
    return f"empty({{0}}, {scalar_type(plan.buffer(name).dtype)}, {first.name})"


def workspace_lines(plan: ModulePlan, program: Program, conditions: Conditions) -> list[str]:
    """One allocation for everything that lives inside the call and in no result's memory."""
    parts = plan.given_in(program)
    passing = {result.buffer: result for result in _passing(program)}
    passing |= {name: result for name, result in parts.items() if _passes(program, name, result)}
    rows = [
        f"void* const {name} = {_row(plan, name, result, conditions)} : nullptr;"
        for name, result in parts.items()
        if name not in passing
    ]
    own = (name for name in program.workspace if name not in parts)
    names = (*own, *passing)
    if not names:
        return rows
    writers = {name: step for step in program.steps for name in step.writes}
    lives, addresses = [], []
    for index, name in enumerate(names):
        size = f"padded({to_cpp(size_in_bytes(plan.buffer(name)))})"
        asked = conditions.text(writers[name].wanted(name) or writers[name].when)
        value, address = f"{asked} ? {size} : kUnwanted" if asked else size, f"workspace[{index}]"
        if name in passing:
            kept = conditions.text(passing[name].when)
            rest = f"({value})" if asked else value
            value = f"{kept} ? kUnwanted : {rest}"
            place = f"{kept} ? writable({name}_kept)"
            place = _row(plan, name, parts[name], conditions) if name in parts else place
            address = f"{place} : {address}"
        first, last = program.lifetime(name)
        lives.append(f"    {{{value}, {first}, {last}}},  // {name}")
        addresses.append(f"void* const {name} = {address};")
    opening = f"const std::array<Lifetime, {len(names)}> lives{{{{"
    regions = _regions(plan, program, names)
    given = ["lives", program.arguments[0].buffer, *(["regions"] if regions else [])]
    making = f"const Workspace workspace({', '.join(given)});"
    return [opening, *lives, "}};", *regions, making, *addresses, *rows]


def _passes(program: Program, name: str, result: Result) -> bool:
    """Whether a step writes a part of a result in calls that do not want the result."""
    when = _asked(program, Result(name))
    return not when or not {*when} <= {*result.when}


def _row(plan: ModulePlan, name: str, result: Result, conditions: Conditions) -> str:
    """The address of a part of a result, if that is wanted."""
    tensor = plan.joined_tensor(result.buffer)
    assert tensor is not None, result
    offset = next(begin for part, begin in plan.places(tensor) if part == name)
    start = elements(plan, tensor, f"writable({result.buffer})", "")
    place = start if offset == Const(0) else f"{start} + {to_cpp(offset)}"
    return f"{conditions.text(result.when)} ? {place}"


def elements(plan: ModulePlan, tensor: JoinedTensor, address: str, const: str) -> str:
    """A tensor's address as that of its elements, ``const`` before their type or not."""
    if plan.in_bytes(tensor):
        return f"static_cast<{const}uint8_t*>({address})"
    return f"floats({address})"


def _regions(plan: ModulePlan, program: Program, names: tuple[str, ...]) -> list[str]:
    """Results whose memory buffers can have until a step touches the result.

    Those that are written early come first, because fewer buffers can lie there.
    """
    large = (name for name in names if _is_large(plan, name))
    done = min((program.lifetime(name)[1] for name in large), default=len(program.steps))
    starts = {
        allocated(program, result): program.lifetime(result.buffer)[0]
        for result in program.results
        if _is_large(plan, result.buffer) and plan.joined_tensor(result.buffer) is None
    }
    regions = sorted(starts.items(), key=itemgetter(1))
    lines = [f"    region({name}, /*before=*/{first})," for name, first in regions if done < first]
    return ["const std::array regions{", *lines, "};"] if lines else []


def _is_large(plan: ModulePlan, name: str) -> bool:
    """Whether it grows with two sizes: a number for each row or group is too little."""
    return len(plan.buffer(name).shape.symbols()) > 1
