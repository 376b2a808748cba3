"""Contexts of the C++ templates: launchers, dispatch headers, kernels, list of sources."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ..model import dtypes
from ..model.dtypes import DType
from ..model.plan import (
    Access,
    Argument,
    Binding,
    Buffer,
    Check,
    CheckKind,
    Kernel,
    KernelSet,
    ModulePlan,
    PointwiseOperand,
    Program,
    Result,
    SelectionRule,
    Step,
)
from ..model.shapes import to_cpp
from ..model.specs import ArchSpec, AttributeType
from .explain import size_in_bytes
from .python import op_name, step_comment

_CPP_TYPE = {
    AttributeType.FLOAT: "double",
    AttributeType.INT: "int64_t",
    AttributeType.BOOL: "bool",
    AttributeType.STRING: "std::string",
}
Reading = Callable[[str | None], str]
"""A buffer's name to the source of its address; null where there is none."""

_ACCESS = {
    Access.FULL: "full",
    Access.FIRST_HALF: "first_half",
    Access.SECOND_HALF: "second_half",
    Access.ROW: "row",
    Access.COLUMN: "column",
}


@dataclass(frozen=True, slots=True)
class LaunchStep:
    """A step of a launcher: comment, condition (empty is always), lines."""

    comment: str
    condition: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LaunchProgram:
    """One direction of a launcher; every field but ``name`` and ``op`` is C++ source, line by line.

    Attributes:
        name: ``forward`` or ``backward``.
        op: registered name.
        parameters: of the function.
        returns: return type.
        first: argument that gives device and dtype.
        type_checks: checks that need no sizes.
        dims: dimensions.
        size_checks: checks of sizes.
        operands: contiguous, aligned arguments.
        results: allocations.
        workspace: allocations inside the call.
        steps: launches.
        returned: source of the return value.
    """

    name: str
    op: str
    parameters: tuple[str, ...]
    returns: str
    first: str
    type_checks: tuple[str, ...]
    dims: tuple[str, ...]
    size_checks: tuple[str, ...]
    operands: tuple[str, ...]
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
    exact: str
    headers: tuple[str, ...]
    forward: LaunchProgram
    backward: LaunchProgram


@dataclass(frozen=True, slots=True)
class DispatchRule:
    """A rule of a dispatch header: condition source and the kernel per element type."""

    condition: str
    words: str
    bfloat16: str
    float16: str
    last: bool


@dataclass(frozen=True, slots=True)
class DispatchContext:
    """Everything a dispatch header states; ``template`` is named after the kernel family."""

    template: str
    namespace: str
    name: str
    kind: str
    kernels: tuple[str, ...]
    variables: tuple[str, ...]
    rules: tuple[DispatchRule, ...]


@dataclass(frozen=True, slots=True)
class KernelOperand:
    """An operand or result of a pointwise kernel: its place, symbol, access and type."""

    index: int
    symbol: str
    access: str
    wide: str


@dataclass(frozen=True, slots=True)
class KernelContext:
    """Everything a kernel unit states; ``template`` is named after the kernel family."""

    template: str
    namespace: str
    name: str
    element: str
    kind: str
    tile: str
    cluster: int
    schedule: str
    formula: str
    operands: tuple[KernelOperand, ...]
    results: tuple[KernelOperand, ...]
    scalars: tuple[str, ...]
    body: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SourcesContext:
    """Everything ``sources.cmake`` states."""

    namespace: str
    gencode: str
    fingerprint: str
    host: tuple[str, ...]
    kernels: tuple[str, ...]


def any_of(when: tuple[str, ...]) -> str:
    """C++ source of a condition over flags."""
    return " || ".join(when)


# Launchers


def launcher_context(plan: ModulePlan, arch: ArchSpec, namespace: str) -> LauncherContext:
    """What ``csrc/<cell>.cpp`` states."""
    assert arch.capability is not None
    return LauncherContext(
        cell=plan.cell,
        summary=plan.summary,
        namespace=namespace,
        arch=arch.name,
        major=arch.capability[0],
        minor=arch.capability[1],
        exact="true" if arch.name.endswith("a") else "false",
        headers=tuple(sorted(kernels.name for kernels in plan.kernel_sets)),
        forward=_launch_program(plan, plan.forward),
        backward=_launch_program(plan, plan.backward),
    )


def _launch_program(plan: ModulePlan, program: Program) -> LaunchProgram:
    first = program.arguments[0].buffer
    size_checks = tuple(_check_line(plan, c) for c in program.checks if c.expr is not None)
    results = tuple(line for r in program.results for line in _allocation(plan, program, r))
    workspace = tuple(_workspace(plan, program))
    steps = tuple(_launch_step(plan, program, s, i) for i, s in enumerate(program.steps, 1))
    text = "\n".join((*size_checks, *results, *workspace, *(x for s in steps for x in s.lines)))
    words = set(re.findall(r"\w+", text))
    read = {name for step in program.steps for name in step.reads}
    given = {argument.buffer: argument for argument in program.arguments}
    return LaunchProgram(
        name=program.name,
        op=op_name(plan, program),
        parameters=_parameters(plan, program),
        returns=_return_type(program),
        first=first,
        type_checks=tuple(_check_line(plan, c) for c in program.checks if c.expr is None),
        dims=tuple(_bind_line(b, given) for b in program.bindings if b.symbol in words),
        size_checks=size_checks,
        operands=tuple(f"const auto {n}_dense = dense({n});" for n in given if n in read),
        results=results,
        workspace=workspace,
        steps=steps,
        returned=_returned(program),
    )


def _parameters(plan: ModulePlan, program: Program) -> tuple[str, ...]:
    tensors = (
        f"{'std::optional<Tensor>' if a.optional else 'Tensor'} {a.buffer}"
        for a in program.arguments
    )
    flags = (f"[[maybe_unused]] bool {flag}" for flag in program.flags)
    scalars = (f"[[maybe_unused]] {_CPP_TYPE[a.type]} {a.name}" for a in plan.attributes)
    return (*tensors, *flags, *scalars)


def _return_type(program: Program) -> str:
    types = ["std::optional<Tensor>" if r.when else "Tensor" for r in program.results]
    return types[0] if len(types) == 1 else f"std::tuple<{', '.join(types)}>"


def _returned(program: Program) -> str:
    """The forward keeps what it computed anyway; the backward allocated only what was asked for."""
    values = [
        f"{any_of(r.when)} ? std::optional<Tensor>({r.buffer}) : std::nullopt"
        if r.when and program.name == "forward"
        else r.buffer
        for r in program.results
    ]
    return values[0] if len(values) == 1 else f"{{{', '.join(values)}}}"


def _check_line(plan: ModulePlan, check: Check) -> str:
    name = f'"{check.tensor}", given({check.tensor})'
    size = to_cpp(check.expr) if check.expr is not None else ""
    match check.kind:
        case CheckKind.IO_DTYPE:
            return f"check_io_dtype(kCell, {name});"
        case CheckKind.SAME_DTYPE:
            return f'check_same_dtype(kCell, {name}, "{check.reference}", {check.reference});'
        case CheckKind.DTYPE:
            dtype = dtypes.info(check.dtype).scalar_type
            return f"check_dtype(kCell, {name}, ScalarType::{dtype});"
        case CheckKind.DEVICE:
            return f'check_device(kCell, {name}, "{check.reference}", {check.reference});'
        case CheckKind.RANK:
            exact = "true" if check.exact else "false"
            return f'check_rank(kCell, {name}, {check.number}, {exact}, "{check.label}");'
        case CheckKind.SIZE if check.axis == 0:
            return f'check_leading(kCell, {name}, {check.number}, {size}, "{check.label}");'
        case CheckKind.SIZE:
            return f'check_size(kCell, {name}, {check.axis}, {size}, "{check.label}");'
        case CheckKind.MULTIPLE:
            return f'check_multiple(kCell, "{check.label}", {size}, {check.number}, "{plan.arch}");'


def _bind_line(binding: Binding, given: dict[str, Argument]) -> str:
    """``const int64_t K = extent(x, -1);`` or the first present of several."""

    def source(tensor: str, axis: int | None, number: int) -> str:
        if axis is None:
            return f"rows({tensor}, {number})"
        size = f"extent({tensor}, {axis})"
        return f"{size} / {number}" if number > 1 else size

    text = "0"
    for tensor, axis, number in reversed(binding.sources):
        if given[tensor].optional:
            text = f"{tensor} ? {source(f'*{tensor}', axis, number)} : {text}"
        else:
            text = source(tensor, axis, number)
    return f"const int64_t {binding.symbol} = {text};"


def _scalar_type(dtype: DType) -> str:
    return "io" if dtype is DType.IO else f"ScalarType::{dtypes.info(dtype).scalar_type}"


def _empty(buffer: Buffer, first: Buffer) -> str:
    dims = ", ".join(to_cpp(dim) for dim in buffer.shape.dims)
    dtype = _scalar_type(buffer.dtype)
    if buffer.shape.leading:
        return f"empty_rows({first.name}, {len(first.shape.dims)}, {{{dims}}}, {dtype})"
    return f"empty({{{dims}}}, {dtype}, {first.name})"


def _allocation(plan: ModulePlan, program: Program, result: Result) -> list[str]:
    first = plan.buffer(program.arguments[0].buffer)
    source = _empty(plan.buffer(result.buffer), first)
    if result.when and program.name == "backward":
        return [
            f"std::optional<Tensor> {result.buffer};",
            f"if ({any_of(result.when)}) {result.buffer} = {source};",
        ]
    return [f"const Tensor {result.buffer} = {source};"]


def _workspace(plan: ModulePlan, program: Program) -> list[str]:
    """One allocation for everything that lives inside the call."""
    if not program.workspace:
        return []
    writers = {name: step for step in program.steps for name in step.writes}
    lines, offset = [], "0"
    offsets = {}
    for name in program.workspace:
        size = f"padded({to_cpp(size_in_bytes(plan.buffer(name)))})"
        test = any_of(writers[name].when)
        value = f"{test} ? {size} : 0" if test else size
        lines.append(f"const int64_t {name}_bytes = {value};")
        offsets[name] = offset
        offset = f"{name}_bytes" if offset == "0" else f"{offset} + {name}_bytes"
    first = program.arguments[0].buffer
    lines.append(f"const Tensor workspace = empty({{{offset}}}, ScalarType::Byte, {first});")
    lines += [f"void* const {n} = place(workspace, {offsets[n]});" for n in program.workspace]
    return lines


def _launch_step(plan: ModulePlan, program: Program, step: Step, index: int) -> LaunchStep:
    given = {argument.buffer for argument in program.arguments}

    def reading(name: str | None) -> str:
        if name is None:
            return "nullptr"
        return f"pointer({name}_dense)" if name in given else f"pointer({name})"

    lines = (
        _pointwise_launch(plan, step, reading) if step.pointwise else _sized_launch(step, reading)
    )
    return LaunchStep(step_comment(step, index), any_of(step.when), tuple(lines))


def _sized_launch(step: Step, reading: Reading) -> list[str]:
    """A launch whose arguments are operands by slot and four sizes."""
    sizes = {name: to_cpp(expr) for name, expr in step.sizes}
    groups = step.input("groups")
    splits = f"integers({reading(groups)})" if groups else "nullptr"
    operands = [f"/*a=*/{reading(step.input('a'))}"]
    extents = [f"/*tokens=*/{sizes['tokens']}", f"/*groups=*/{sizes['groups']}"]
    if step.kind:
        operands += [
            f"/*b=*/{reading(step.input('b'))}",
            f"/*bias=*/{reading(step.input('add'))}",
        ]
        extents += [f"/*n=*/{sizes['n']}", f"/*k=*/{sizes['k']}"]
        kind = "GemmArguments"
    else:
        extents.append(f"/*n=*/{sizes['n']}")
        kind = "GroupSumArguments"
    words = [
        *operands,
        f"/*out=*/writable({step.out})",
        f"/*split_sizes=*/{splits}",
        *extents,
        "sms",
    ]
    return _call(step, kind, words)


def _pointwise_launch(plan: ModulePlan, step: Step, reading: Reading) -> list[str]:
    assert step.pointwise is not None
    math = step.pointwise
    prefix = f"{step.item}_" if step.item else ""
    scalars = [f"static_cast<float>({prefix}{name})" for name in math.attributes]
    words = [
        f"/*operands=*/{{{', '.join(reading(o.buffer) for o in math.operands)}}}",
        f"/*results=*/{{{', '.join(f'writable({r.buffer})' for r in math.results)}}}",
        f"/*scalars=*/{{{', '.join(scalars)}}}",
        f"/*rows=*/{to_cpp(math.rows)}",
        f"/*columns=*/{to_cpp(math.columns)}",
        "sms",
    ]
    return _call(step, "PointwiseArguments", words)


def _call(step: Step, kind: str, words: list[str]) -> list[str]:
    """One launch: arguments by name, one a line."""
    return [
        "check(kCell,",
        f"      {step.kernels}(io,",
        f"          {kind}{{",
        *(f"              {word}," for word in words),
        "          },",
        "          stream));",
    ]


# Dispatch headers and kernels


def dispatch_context(kernels: KernelSet, namespace: str) -> DispatchContext:
    """What ``csrc/dispatch/<set>.h`` states."""
    variables = sorted(
        {c.variable.value for rule in kernels.rules for c in rule.predicate.conditions}
    )
    last = len(kernels.rules) - 1
    return DispatchContext(
        template=f"csrc/{kernels.family}.h.j2",
        namespace=namespace,
        name=kernels.name,
        kind=kernels.kind.value if kernels.kind else "",
        kernels=tuple(kernel.name for kernel in kernels.kernels),
        variables=tuple(variables),
        rules=tuple(_rule(rule, i == last) for i, rule in enumerate(kernels.rules)),
    )


def _rule(rule: SelectionRule, last: bool) -> DispatchRule:
    names = dict(rule.kernels)
    return DispatchRule(
        condition=rule.predicate.to_cpp(),
        words=str(rule.predicate),
        bfloat16=names[DType.BFLOAT16],
        float16=names[DType.FLOAT16],
        last=last,
    )


def kernel_context(kernel: Kernel, namespace: str) -> KernelContext:
    """What ``csrc/kernels/<kernel>.cu`` states."""
    point, math = kernel.point, kernel.pointwise
    return KernelContext(
        template=f"csrc/{kernel.family}.cu.j2",
        namespace=namespace,
        name=kernel.name,
        element=dtypes.info(kernel.dtype).cuda,
        kind=kernel.kind.value if kernel.kind else "",
        tile=", ".join(str(extent) for extent in point.tile) if point else "",
        cluster=point.cluster[0] * point.cluster[1] if point else 1,
        schedule=point.schedule.value if point else "",
        formula=math.formula if math else "",
        operands=_operands(math.operands) if math else (),
        results=_operands(math.results) if math else (),
        scalars=math.attributes if math else (),
        body=math.cuda if math else (),
    )


def _operands(operands: tuple[PointwiseOperand, ...]) -> tuple[KernelOperand, ...]:
    return tuple(
        KernelOperand(
            index, o.symbol, _ACCESS[o.access], "true" if o.dtype is DType.FLOAT32 else "false"
        )
        for index, o in enumerate(operands)
    )
