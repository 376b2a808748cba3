"""Context of a cell's C++ launcher: one function per op."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ...ir import dtypes
from ...ir.plan import ModulePlan
from ...ir.program import Argument, Binding, Check, CheckKind, Program
from ...ir.shapes import Const, Operator, to_cpp, uses
from ...ir.words import AttributeType
from ...options import scopes_of
from ...spec.arch import ArchSpec
from ..python.conditions import CPP, Conditions, named_conditions
from ..python.words import op_name
from ..text.escape import comment
from .launches import LaunchStep, keeps_history, launch_step
from .memory import allocated, allocation, elements, workspace_lines

_CPP_TYPE = {
    AttributeType.FLOAT: "double",
    AttributeType.INT: "int64_t",
    AttributeType.BOOL: "bool",
    AttributeType.STRING: "std::string",
}


@dataclass(frozen=True, slots=True)
class LaunchProgram:
    """One op of a launcher; every field but ``name`` and ``op`` is C++ source, line by line.

    Attributes:
        name: of the program.
        op: registered name.
        parameters: of the function.
        returns: return type.
        first: argument that gives the device.
        own_type: argument that gives the module's own type.
        type_checks: checks that need no sizes.
        dims: dimensions.
        size_checks: checks of sizes.
        changes: whether arguments are changed in place, which threads do in turns.
        uses_sms: whether a launch asks how many multiprocessors there are.
        uses_io: whether anything asks for the module's own type.
        delays: whether states of delayed scaling move on.
        arriving: argument whose rows may come after the call; None where there is none.
        states: addresses of buffers that lie as rows of arguments.
        operands: contiguous, aligned arguments.
        conditions: names for those that are asked more than once.
        results: allocations.
        workspace: allocations inside the call.
        steps: launches.
        returned: source of the return value; empty where there is none.
    """

    name: str
    op: str
    parameters: tuple[str, ...]
    returns: str
    first: str
    own_type: str
    type_checks: tuple[str, ...]
    dims: tuple[str, ...]
    size_checks: tuple[str, ...]
    changes: bool
    uses_sms: bool
    uses_io: bool
    delays: bool
    arriving: str | None
    states: tuple[str, ...]
    operands: tuple[str, ...]
    conditions: tuple[str, ...]
    results: tuple[str, ...]
    workspace: tuple[str, ...]
    steps: tuple[LaunchStep, ...]
    returned: str


@dataclass(frozen=True, slots=True)
class LauncherContext:
    """Everything ``csrc/<cell>.cpp`` states."""

    cell: str
    summary: str
    namespace: str
    arch: str
    major: int
    minor: int
    reach: str
    changes: bool
    headers: tuple[str, ...]
    programs: tuple[LaunchProgram, ...]


def launcher_context(plan: ModulePlan, arch: ArchSpec, namespace: str) -> LauncherContext:
    """What ``csrc/<cell>.cpp`` states."""
    assert arch.capability is not None
    programs = tuple(_launch_program(view, program) for view, program in plan.ops)
    return LauncherContext(
        cell=plan.cell,
        summary=comment(plan.summary),
        namespace=namespace,
        arch=arch.name,
        major=arch.capability[0],
        minor=arch.capability[1],
        reach=arch.reach.value,
        changes=any(program.changes for program in programs),
        headers=_headers(plan, programs),
        programs=programs,
    )


def _headers(plan: ModulePlan, programs: Sequence[LaunchProgram]) -> tuple[str, ...]:
    """What the launcher includes, sorted."""
    own = {"checks", "stable", *(scope.cpp for scope in scopes_of(plan.options))}
    own |= {"changes"} if any(program.changes for program in programs) else set()
    own |= {"chunks"} if any(step.chunks for step in plan.steps) or _takes_least(plan) else set()
    own |= {"workspace"} if any(program.workspace for program in programs) else set()
    dispatch = (f"dispatch/{kernels.name}.h" for kernels in plan.kernel_sets)
    return tuple(sorted((*dispatch, *(f"fusegen/host/{name}.h" for name in own))))


def _takes_least(plan: ModulePlan) -> bool:
    """Whether a size is the least of two, for which C++ has a function of its own."""
    return any(uses(dim, Operator.MIN) for each in plan.buffers for dim in each.shape.flat)


def _launch_program(plan: ModulePlan, program: Program) -> LaunchProgram:
    first = program.arguments[0].buffer
    size_checks = tuple(_check_line(plan, c) for c in program.checks if c.expr is not None)
    conditions = named_conditions(program, lambda names: _body(plan, program, names).lines, CPP)
    body = _body(plan, program, conditions)
    states = tuple(_state_lines(plan, program, _words(body.lines)))
    words = _words((*size_checks, *conditions.lines, *states, *body.lines))
    loaded = {name for step in program.steps for name in step.loads}
    loaded |= {each.buffer for each in plan.joined_of(program) if not loaded.isdisjoint(each.parts)}
    given = {argument.buffer: argument for argument in program.arguments}
    return LaunchProgram(
        name=program.function,
        op=op_name(plan, program),
        parameters=_parameters(plan, program, words),
        returns=_return_type(program),
        first=first,
        own_type=plan.own_type_argument(program),
        type_checks=tuple(_check_line(plan, c) for c in program.checks if c.expr is None),
        dims=tuple(_bind_line(b, given) for b in program.bindings if b.symbol in words),
        size_checks=size_checks,
        changes=bool(program.mutated),
        uses_sms="sms" in words,
        uses_io="io" in words,
        delays=any(keeps_history(step) for step in program.unmerged.steps),
        arriving=program.arriving,
        states=states,
        operands=tuple(
            f"const auto {name}_dense = dense({name});"
            for name, argument in given.items()
            if name in loaded and not argument.mutated
        ),
        conditions=conditions.lines,
        results=body.results,
        workspace=body.workspace,
        steps=body.steps,
        returned=_returned(plan, program),
    )


@dataclass(frozen=True, slots=True)
class _Body:
    """What conditions stand in: results, workspace and steps of a launcher's function."""

    results: tuple[str, ...]
    workspace: tuple[str, ...]
    steps: tuple[LaunchStep, ...]

    @property
    def lines(self) -> tuple[str, ...]:
        """All source but comments."""
        launches = (line for step in self.steps for line in (step.opening, *step.lines))
        return (*self.results, *self.workspace, *launches)


def _body(plan: ModulePlan, program: Program, conditions: Conditions) -> _Body:
    return _Body(
        results=tuple(
            line
            for result in program.results
            for line in allocation(plan, program, result, conditions)
        ),
        workspace=tuple(workspace_lines(plan, program, conditions)),
        steps=tuple(
            launch_step(plan, program, step, number, conditions)
            for number, step in enumerate(program.steps, 1)
        ),
    )


def _words(lines: Iterable[str]) -> frozenset[str]:
    return frozenset(word for line in lines for word in re.findall(r"\w+", line))


def _state_lines(plan: ModulePlan, program: Program, used: frozenset[str]) -> Iterator[str]:
    """Addresses of what launches name as parts of an argument, each in its tensor."""
    for tensor in plan.joined_of(program):
        const = "" if tensor.buffer in program.mutated else "const "
        optional = any(a.optional for a in program.arguments if a.buffer == tensor.buffer)
        whole = f"pointer({tensor.buffer}_dense)" if const else f"writable({tensor.buffer})"
        kind = f"{const}{'uint8_t' if plan.in_bytes(tensor) else 'float'}*"
        for name, begin in plan.places(tensor):
            if name in used:
                offset = "" if begin == Const(0) else f" + {to_cpp(begin)}"
                place = f"{elements(plan, tensor, whole, const)}{offset}"
                place = f"{tensor.buffer} ? {place} : nullptr" if optional else place
                yield f"{kind} const {name} = {place};"


def _parameters(plan: ModulePlan, program: Program, used: frozenset[str]) -> tuple[str, ...]:
    """Of the function, as the op's schema has them; scalars that it does not use have no name."""

    def scalar(kind: str, name: str) -> str:
        return f"{kind} {name}" if name in used else f"{kind} /*{name}*/"

    tensors = (
        f"{'std::optional<Tensor>' if a.optional else 'Tensor'} {a.buffer}"
        for a in program.arguments
    )
    flags = (scalar("bool", flag) for flag in program.flags)
    attributes = plan.attributes_of(program)
    scalars = (scalar(_CPP_TYPE[a.type], a.name) for a in attributes)
    arrival = (f"int64_t {name}" for name in program.arrival)
    return (*tensors, *flags, *scalars, *arrival)


def _return_type(program: Program) -> str:
    optional = program.returns_none
    types = ["std::optional<Tensor>" if r.when and optional else "Tensor" for r in program.results]
    if len(types) == 1:
        return types[0]
    return f"std::tuple<{', '.join(types)}>" if types else "void"


def _returned(plan: ModulePlan, program: Program) -> str:
    """Results by the names they are allocated under."""
    values = [allocated(program, result) for result in program.results]
    return values[0] if len(values) == 1 else f"{{{', '.join(values)}}}" if values else ""


def _check_line(plan: ModulePlan, check: Check) -> str:
    tensor, reference = check.names
    name = f'"{tensor}", given({check.tensor})'
    size = to_cpp(check.expr) if check.expr is not None else ""
    match check.kind:
        case CheckKind.IO_DTYPE:
            return f"check_io_dtype(kCell, {name});"
        case CheckKind.SAME_DTYPE:
            return f'check_same_dtype(kCell, {name}, "{reference}", {check.reference});'
        case CheckKind.DTYPE:
            dtype = dtypes.info(check.dtype).scalar_type
            return f"check_dtype(kCell, {name}, ScalarType::{dtype});"
        case CheckKind.DEVICE:
            return f'check_device(kCell, {name}, "{reference}", {check.reference});'
        case CheckKind.RANK:
            exact = "true" if check.exact else "false"
            return f'check_rank(kCell, {name}, {check.number}, {exact}, "{check.label}");'
        case CheckKind.SIZE if check.axis == 0:
            return f'check_leading(kCell, {name}, {check.number}, {size}, "{check.label}");'
        case CheckKind.SIZE:
            return f'check_size(kCell, {name}, {check.axis}, {size}, "{check.label}");'
        case CheckKind.MULTIPLE:
            part = to_cpp(check.divisor) if check.divisor else ""
            of = f"{part} > 0 ? {part} : 1" if part else check.number
            return f'check_multiple(kCell, "{check.label}", {size}, {of}, "{plan.arch}");'
        case CheckKind.LEAST:
            words = f'"{check.label}", "at least {check.number}", std::to_string({size})'
            return f"if ({size} < {check.number}) refuse(kCell, {words});"
        case CheckKind.CONTIGUOUS:
            return f"check_contiguous(kCell, {name});"


def _bind_line(binding: Binding, given: dict[str, Argument]) -> str:
    """``const int64_t K = extent(x, -1);`` or the first present of several."""

    def source(tensor: str, axis: int | None, number: int) -> str:
        if axis is None:
            return f"rows({tensor}, {number})"
        size = f"extent({tensor}, {axis})"
        return f"{size} / {number}" if number > 1 else size

    text = "0"
    for tensor, axis, number in reversed(binding.candidates):
        if given[tensor].optional:
            text = f"{tensor} ? {source(f'*{tensor}', axis, number)} : {text}"
        else:
            text = source(tensor, axis, number)
    return f"const int64_t {binding.symbol} = {text};"
