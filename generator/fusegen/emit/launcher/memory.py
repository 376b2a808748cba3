"""Memory of a launcher: results, and what lives inside one call, in their memory or a workspace."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter

from ...ir.buffers import Buffer, JoinedTensor, size_in_bytes
from ...ir.plan import ModulePlan
from ...ir.program import Program
from ...ir.shapes import Const, to_cpp
from ...ir.step import Result, Step
from ...steps import copies_memory
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
    shared = shared_memory(plan, program)
    names = (*(name for name in own if name not in shared), *passing)
    same = [_same(plan, program, name, shared[name]) for name in _nearest_first(shared)]
    if not names:
        return [*rows, *same]
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
        first, last = _lifetime(program, name, shared)
        lives.append(f"    {{{value}, {first}, {last}}},  // {name}")
        addresses.append(f"void* const {name} = {address};")
    opening = f"const std::array<Lifetime, {len(names)}> lives{{{{"
    regions = _regions(plan, program, names, shared)
    given = ["lives", program.arguments[0].buffer, *(["regions"] if regions else [])]
    making = f"const Workspace workspace({', '.join(given)});"
    return [opening, *lives, "}};", *regions, making, *addresses, *rows, *same]


def shared_memory(plan: ModulePlan, program: Program) -> dict[str, str]:
    """Buffers without memory of their own -> those whose memory is theirs, before or after a step.

    What a step has in other dimensions lies where its operand does, if only the call reads it;
    otherwise an operand that only the call reads lies where the result does.  What changes in
    place, or was somebody's before the call and is a result of it, is copied.
    """
    writers = {name: step for step in program.steps for name in step.writes}
    results = {result.buffer for result in program.results}
    inside = {*program.workspace} - {*plan.given_in(program)}
    changed = {part for t in program.mutated for part in (t, *_parts(plan, t))}
    shared: dict[str, str] = {}
    for step in filter(copies_memory, program.steps):
        operand, result = step.reads[0], step.out
        if operand in changed:
            continue
        if result in inside:
            shared[result] = operand
        elif operand in inside - shared.keys() and result in results:
            writer = writers[operand]
            if (writer.wanted(operand) or writer.when) == step.when:
                shared[operand] = result
    return shared


def lies_there(plan: ModulePlan, program: Program, step: Step) -> bool:
    """Whether a step that copies memory has nothing to do, since both lie in one place."""
    shared, operand = shared_memory(plan, program), step.reads[0]
    return shared.get(step.out) == operand or shared.get(operand) == step.out


def _parts(plan: ModulePlan, name: str) -> tuple[str, ...]:
    tensor = plan.joined_tensor(name)
    return tensor.parts if tensor else ()


def _nearest_first(shared: Mapping[str, str]) -> list[str]:
    """Buffers in an order in which each comes after the one that it lies in."""

    def distance(name: str) -> int:
        return 1 + distance(shared[name]) if name in shared else 0

    return sorted(shared, key=distance)


def _same(plan: ModulePlan, program: Program, name: str, other: str) -> str:
    """The address of a buffer that lies in the memory of another one."""
    if any(name in step.writes for step in program.steps if not copies_memory(step)):
        return f"void* const {name} = writable({other});"
    given = {argument.buffer for argument in program.arguments}
    return f"const void* const {name} = pointer({other}{'_dense' if other in given else ''});"


def _lifetime(program: Program, name: str, shared: Mapping[str, str]) -> tuple[int, int]:
    """The first and the last step that touch the memory of a buffer."""
    lives = [program.lifetime(name)]
    lives += [_lifetime(program, other, shared) for other in shared if shared[other] == name]
    return min(first for first, _ in lives), max(last for _, last in lives)


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


def _regions(
    plan: ModulePlan, program: Program, names: tuple[str, ...], shared: Mapping[str, str]
) -> list[str]:
    """Results whose memory buffers can have until a step touches the result.

    Those that are written early come first, because fewer buffers can lie there.
    """
    large = (name for name in names if _is_large(plan, name))
    done = min((_lifetime(program, n, shared)[1] for n in large), default=len(program.steps))
    starts = {
        allocated(program, result): _lifetime(program, result.buffer, shared)[0]
        for result in program.results
        if _is_large(plan, result.buffer) and plan.joined_tensor(result.buffer) is None
    }
    regions = sorted(starts.items(), key=itemgetter(1))
    lines = [f"    region({name}, /*before=*/{first})," for name, first in regions if done < first]
    return ["const std::array regions{", *lines, "};"] if lines else []


def _is_large(plan: ModulePlan, name: str) -> bool:
    """Whether it grows with two sizes: a number for each row or group is too little."""
    return len(plan.buffer(name).shape.symbols()) > 1
