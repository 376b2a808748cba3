"""Context of a cell's C++ launcher: one function per op."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ..model import dtypes
from ..model.dtypes import DType
from ..model.plan import (
    Argument,
    Binding,
    Buffer,
    Check,
    CheckKind,
    Copy,
    ModulePlan,
    Program,
    Result,
    Step,
)
from ..model.primitives import PADDED_SIZES, PARTIALS, ROW_PARTIALS, SUMMED, Primitive
from ..model.shapes import product, to_cpp
from ..model.specs import (
    ArchSpec,
    AttributeType,
    Extent,
    Orientation,
    QuantizationSpec,
    ScaleRounding,
    ScaleRule,
)
from .explain import size_in_bytes
from .python import op_name, range_name, step_comment

_CPP_TYPE = {
    AttributeType.FLOAT: "double",
    AttributeType.INT: "int64_t",
    AttributeType.BOOL: "bool",
    AttributeType.STRING: "std::string",
}
Reading = Callable[[str | None], str]
"""A buffer's name to the source of its address; null where there is none."""


@dataclass(frozen=True, slots=True)
class LaunchStep:
    """A step of a launcher.

    Attributes:
        comment: what it does, for people.
        opening: of the block around its lines; empty where they need none.
        lines: of the launch, after that of its range where it has one.
    """

    comment: str
    opening: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LaunchProgram:
    """One op of a launcher; every field but ``name`` and ``op`` is C++ source, line by line.

    Attributes:
        name: of the program.
        op: registered name.
        parameters: of the function.
        returns: return type.
        first: argument that gives device and dtype.
        type_checks: checks that need no sizes.
        dims: dimensions.
        size_checks: checks of sizes.
        uses_sms: whether a launch asks how many multiprocessors there are.
        delays: whether states of delayed scaling move on.
        operands: contiguous, aligned arguments.
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
    type_checks: tuple[str, ...]
    dims: tuple[str, ...]
    size_checks: tuple[str, ...]
    uses_sms: bool
    delays: bool
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
    ranges: bool
    headers: tuple[str, ...]
    has_workspace: bool
    programs: tuple[LaunchProgram, ...]


def any_of(when: tuple[str, ...]) -> str:
    """C++ source of a condition over flags."""
    return " || ".join(when)


def launcher_context(plan: ModulePlan, arch: ArchSpec, namespace: str) -> LauncherContext:
    """What ``csrc/<cell>.cpp`` states."""
    assert arch.capability is not None
    programs = tuple(_launch_program(view, program) for view, program in plan.ops)
    return LauncherContext(
        cell=plan.cell,
        summary=plan.summary,
        namespace=namespace,
        arch=arch.name,
        major=arch.capability[0],
        minor=arch.capability[1],
        exact="true" if arch.name.endswith("a") else "false",
        ranges=plan.ranges,
        headers=tuple(sorted(kernels.name for kernels in plan.kernel_sets)),
        has_workspace=any(program.workspace for program in programs),
        programs=programs,
    )


def _launch_program(plan: ModulePlan, program: Program) -> LaunchProgram:
    first = program.arguments[0].buffer
    size_checks = tuple(_check_line(plan, c) for c in program.checks if c.expr is not None)
    results = tuple(line for r in program.results for line in _allocation(plan, program, r))
    workspace = tuple(_workspace(plan, program))
    steps = tuple(_launch_step(plan, program, s, i) for i, s in enumerate(program.steps, 1))
    text = "\n".join((*size_checks, *results, *workspace, *(x for s in steps for x in s.lines)))
    words = set(re.findall(r"\w+", text))
    loaded = {name for step in program.steps for name in step.loads}
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
        uses_sms="sms" in words,
        delays=any(_keeps_history(step) for step in program.unmerged.steps),
        operands=tuple(
            f"const auto {name}_dense = dense({name});"
            for name, argument in given.items()
            if name in loaded and not argument.mutated
        ),
        results=results,
        workspace=workspace,
        steps=steps,
        returned=_returned(plan, program),
    )


def _parameters(plan: ModulePlan, program: Program) -> tuple[str, ...]:
    tensors = (
        f"{'std::optional<Tensor>' if a.optional else 'Tensor'} {a.buffer}"
        for a in program.arguments
    )
    flags = (f"[[maybe_unused]] bool {flag}" for flag in program.flags)
    attributes = plan.attributes_of(program)
    scalars = (f"[[maybe_unused]] {_CPP_TYPE[a.type]} {a.name}" for a in attributes)
    return (*tensors, *flags, *scalars)


def _return_type(program: Program) -> str:
    optional = program.returns_none
    types = ["std::optional<Tensor>" if r.when and optional else "Tensor" for r in program.results]
    if len(types) == 1:
        return types[0]
    return f"std::tuple<{', '.join(types)}>" if types else "void"


def _returned(plan: ModulePlan, program: Program) -> str:
    """Results by the names they are allocated under."""
    values = [_allocated(program, result) for result in program.results]
    return values[0] if len(values) == 1 else f"{{{', '.join(values)}}}" if values else ""


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


def _asked(program: Program, result: Result) -> tuple[str, ...]:
    """Flags under which a result is allocated; some of them are computed anyway."""
    writer = next((step for step in program.steps if result.buffer in step.writes), None)
    return writer.wanted(result.buffer) or writer.when if writer else ()


def _passing(program: Program) -> tuple[Result, ...]:
    """Results that steps write whether or not the caller wants them."""
    return tuple(r for r in program.results if r.when and _asked(program, r) != r.when)


def _allocated(program: Program, result: Result) -> str:
    return f"{result.buffer}_kept" if result in _passing(program) else result.buffer


def _allocation(plan: ModulePlan, program: Program, result: Result) -> list[str]:
    """Results that the caller wants; one that only steps want lies in the workspace."""
    first = plan.buffer(program.arguments[0].buffer)
    name, source = _allocated(program, result), _empty(plan.buffer(result.buffer), first)
    asked = any_of(result.when or _asked(program, result))
    if not asked:
        return [f"const Tensor {name} = {source};"]
    if not program.returns_none:
        nothing = _nothing(plan, result.buffer, first)
        return [f"const Tensor {name} = {asked} ? {source} : {nothing};"]
    return [f"std::optional<Tensor> {name};", f"if ({asked}) {name} = {source};"]


def _nothing(plan: ModulePlan, name: str, first: Buffer) -> str:
    """An empty tensor in place of one that nobody asked for."""
    return f"empty({{0}}, {_scalar_type(plan.buffer(name).dtype)}, {first.name})"


def _workspace(plan: ModulePlan, program: Program) -> list[str]:
    """One allocation for everything that lives inside the call."""
    passing = {result.buffer: result for result in _passing(program)}
    names = (*program.workspace, *passing)
    if not names:
        return []
    writers = {name: step for step in program.steps for name in step.writes}
    lives, addresses = [], []
    for index, name in enumerate(names):
        size = f"padded({to_cpp(size_in_bytes(plan.buffer(name)))})"
        asked = any_of(writers[name].wanted(name) or writers[name].when)
        value, address = f"{asked} ? {size} : kUnwanted" if asked else size, f"workspace[{index}]"
        if name in passing:
            kept = any_of(passing[name].when)
            rest = f"({value})" if asked else value
            value = f"{kept} ? kUnwanted : {rest}"
            address = f"{kept} ? writable({name}_kept) : {address}"
        first, last = program.lifetime(name)
        lives.append(f"    {{{value}, {first}, {last}}},  // {name}")
        addresses.append(f"void* const {name} = {address};")
    opening = f"const std::array<Lifetime, {len(names)}> lives{{{{"
    making = f"const Workspace workspace(lives, {program.arguments[0].buffer});"
    return [opening, *lives, "}};", making, *addresses]


def _launch_step(plan: ModulePlan, program: Program, step: Step, index: int) -> LaunchStep:
    given = {argument.buffer for argument in program.arguments if not argument.mutated}

    def reading(name: str | None) -> str:
        if name is None:
            return "nullptr"
        return f"pointer({name}_dense)" if name in given else f"pointer({name})"

    if step.parts:
        lines = _merged_launch(plan, program, step, reading)
    elif step.pointwise:
        fields = _pointwise_fields(step, reading)
        words = [f"/*{name}=*/{value}" for name, value in fields.items()]
        lines = _call(step, "PointwiseArguments", words)
    elif step.primitive is Primitive.QUANTIZE:
        lines = _quantize_launch(plan, program, step, reading)
    elif step.primitive is Primitive.STATISTICS:
        lines = _statistics_launch(plan, step, reading)
    elif step.primitive is Primitive.SNAPSHOT:
        lines = _snapshot_launch(plan, step, reading)
    elif step.primitive is Primitive.DEQUANTIZE:
        lines = _dequantize_launch(plan, step, reading)
    elif step.primitive is Primitive.DEQUANTIZE_GROUPS:
        lines = _dequantize_groups_launch(plan, step, reading)
    else:
        lines = _sized_launch(plan, step, reading)
    opening = f"if ({any_of(step.when)}) {{" if step.when else ""
    if plan.ranges:
        opening = opening or "{"
        lines = [f'const Range range("{range_name(plan, program, step, index)}");', *lines]
    return LaunchStep(step_comment(step, index), opening, tuple(lines))


def _sized_launch(plan: ModulePlan, step: Step, reading: Reading) -> list[str]:
    """A launch whose arguments are operands by slot and four sizes."""
    sizes = {name: to_cpp(expr) for name, expr in step.sizes}
    groups = step.input("groups")
    splits = f"integers({reading(groups)})" if groups else "nullptr"
    out = f"/*out=*/writable({step.out})"
    extents = [f"/*tokens=*/{sizes['tokens']}", f"/*groups=*/{sizes['groups']}"]
    if step.primitive is Primitive.GROUP_ROW_DOT:
        return _row_dot_launch(step, reading, [out, f"/*split_sizes=*/{splits}", *extents])
    if not step.kind:
        words = [f"/*a=*/{reading(step.input('a'))}", out, f"/*split_sizes=*/{splits}", *extents]
        words += [f"/*n=*/{sizes['n']}", "sms", *_row_scales(step, "scales", reading)]
        return _call(step, "GroupSumArguments", words)
    words = [
        f"/*a=*/{reading(step.input('a'))}",
        f"/*b=*/{reading(step.input('b'))}",
        f"/*bias=*/{reading(step.input('add'))}",
        out,
        f"/*split_sizes=*/{splits}",
        *extents,
        f"/*n=*/{sizes['n']}",
        f"/*k=*/{sizes['k']}",
        "sms",
        *_row_scales(step, "add_scales", reading),
    ]
    if not step.copies:
        return _call(step, "GemmArguments", words)
    if step.decoded:
        amaxes = [
            f"/*amax_{slot}=*/{_floats(reading(step.input(f'{slot}_amax')))}" for slot in "ab"
        ]
        return _call(step, "DecodedGemmArguments", [f"{{{', '.join(words)}}}", *amaxes])
    a, b = step.copies
    return _call(
        step,
        "Fp8GemmArguments",
        [
            f"{{{', '.join(words)}}}",
            f"/*pitch_a=*/{_pitch(plan, a)}",
            f"/*pitch_b=*/{_pitch(plan, b)}",
            f"/*scale_a=*/floats({reading(a.scale)})",
            f"/*scale_b=*/floats({reading(b.scale)})",
        ],
    )


def _row_scales(step: Step, slot: str, reading: Reading) -> list[str]:
    """The field of a struct that has scales of rows, where a step reads some."""
    scales = step.input(slot)
    return [f"/*row_scales=*/floats({reading(scales)})"] if scales else []


def _row_dot_launch(step: Step, reading: Reading, places: list[str]) -> list[str]:
    """Sums along rows: what they are added to may be absent, and the vectors of the groups, too."""
    add = step.input("add")
    words = [
        f"/*a=*/{reading(step.input('a'))}",
        f"/*b=*/{reading(step.input('b'))}",
        f"/*add=*/{_floats(reading(add))}",
        *places,
        f"/*n=*/{to_cpp(dict(step.sizes)['n'])}",
    ]
    return _call(step, "GroupRowDotArguments", words)


def _snapshot_launch(plan: ModulePlan, step: Step, reading: Reading) -> list[str]:
    """A copy of memory, in the order of the stream."""
    size = to_cpp(size_in_bytes(plan.buffer(step.out)))
    words = f"writable({step.out}), {reading(step.reads[0])}, {size}"
    return [f"check(kCell, copy_memory({words}, stream));"]


def _pitch(plan: ModulePlan, copy: Copy) -> str:
    """Bytes from one row of codes to the next."""
    buffer = plan.buffer(copy.data)
    per_byte = 8 // dtypes.bits(buffer.dtype)
    assert per_byte in (1, 2), buffer
    return to_cpp(buffer.shape.dims[-1])


def _quantize_launch(plan: ModulePlan, program: Program, step: Step, reading: Reading) -> list[str]:
    """A quantise step: its struct is filled field by field, since most fields do not apply."""
    fields = {"quantize.input": reading(step.input("a"))}
    fields |= _quantize_fields(plan, program, step, reading)
    return _filled(step, "QuantizeStepArguments", fields)


def _merged_launch(plan: ModulePlan, program: Program, step: Step, reading: Reading) -> list[str]:
    """What the parts say, without the tensor between them."""
    first, second = step.parts
    tensor = second.input("a")
    expression = _pointwise_fields(first, reading, without=tensor)
    fields = {f"expression.{name}": value for name, value in expression.items()}
    for operand in step.outputs:
        if operand.slot == ROW_PARTIALS:
            fields["row_partials"] = f"floats({_written(operand.buffer, '')})"
    if second.when != first.when:
        fields["quantizes"] = any_of(second.when)
    quantized = _quantize_fields(plan, program, second, reading)
    fields |= {f"step.{name}": value for name, value in quantized.items()}
    return _filled(step, "PointwiseQuantizeArguments", fields)


def _quantize_fields(
    plan: ModulePlan, program: Program, step: Step, reading: Reading
) -> dict[str, str]:
    """Fields of a quantise step, all but its input; empty ones keep their defaults."""
    spec = dict(plan.quantizations)[step.copies[0].role]
    rounds_down = spec.scale.round is ScaleRounding.POW2_DOWN
    groups = step.input("groups")
    fields = {
        "quantize.split_sizes": f"integers({reading(groups)})" if groups else "nullptr",
        **{f"quantize.{name}": to_cpp(size) for name, size in step.sizes},
        "quantize.row_align": str(plan.layout.token_alignment),
        f"quantize.{_rounded_down(spec)}": "true" if rounds_down else "",
        "quantize.epsilon": f"{spec.scale.epsilon}f" if spec.scale.epsilon else "",
    }
    for copy in step.copies:
        when = any_of(step.wanted(copy.data))
        place = f"quantize.{copy.orientation.value}"
        fields[f"{place}.data"] = _written(copy.data, when)
        fields[f"{place}.scale"] = _written(copy.scale, when)
        fields[f"{place}.pitch"] = _pitch(plan, copy)
        if copy.amax:
            amax = f"{copy.orientation.value}_amax"
            fields[amax] = f"floats({_written(copy.amax, when)})"
        if pitch := _token_pitch(plan, copy):
            fields["quantize.token_pitch"] = pitch
    for operand in step.outputs:
        if operand.slot in ("amax", "row_amax", "column_amax"):
            written = _written(operand.buffer, any_of(step.wanted(operand.buffer)))
            fields[operand.slot] = f"floats({written})"
        if operand.slot == SUMMED:
            fields["sums"] = _written(operand.buffer, any_of(step.wanted(operand.buffer)))
        if operand.slot == "partial_amax":
            fields["partial_amax"] = f"floats({operand.buffer})"
        if operand.slot == "row_sums":
            fields["quantize.row_sums"] = f"floats({operand.buffer})"
    return fields | _state_fields(plan, program, step, reading)


def _token_pitch(plan: ModulePlan, copy: Copy) -> str:
    """Scales from one block of columns to the next, where those of tokens are neighbours."""
    scales = plan.buffer(copy.scale).shape.dims
    return to_cpp(scales[-1]) if plan.token_major(copy) else ""


def _statistics_launch(plan: ModulePlan, step: Step, reading: Reading) -> list[str]:
    (copy,) = step.copies
    partials = next(o.buffer for o in step.outputs if o.slot == PARTIALS)
    fields = {
        "input": reading(step.input("a")),
        "split_sizes": f"integers({reading(copy.groups)})" if copy.groups else "",
        **{name: to_cpp(size) for name, size in step.sizes},
        "data": reading(copy.data),
        "scale": reading(copy.scale),
        "amax": f"floats({reading(copy.amax)})" if copy.amax else "",
        "pitch": _pitch(plan, copy),
        "row_align": str(plan.layout.token_alignment),
        "token_pitch": _token_pitch(plan, copy),
        "partials": f"writable({partials})",
        "blocks": to_cpp(plan.buffer(partials).shape.dims[0]),
        "output": f"floats(writable({step.out}))",
    }
    return _filled(step, "StatisticsArguments", fields)


def _rounded_down(spec: QuantizationSpec) -> str:
    """Which field says that a scale is rounded down to a power of two."""
    return "round_down" if spec.scale.rule is ScaleRule.MX else "power_of_two"


def _filled(step: Step, kind: str, fields: dict[str, str], io: str = "io") -> list[str]:
    """A launch whose struct is filled field by field; empty fields keep their defaults."""
    return [
        "{",
        f"  {kind} arguments{{}};",
        *(f"  arguments.{name} = {value};" for name, value in fields.items() if value),
        f"  check(kCell, {step.kernels}({io}, arguments, stream));",
        "}",
    ]


def _floats(address: str) -> str:
    return address if address == "nullptr" else f"floats({address})"


def _dequantize_launch(plan: ModulePlan, step: Step, reading: Reading) -> list[str]:
    copy = step.copies[0]
    spec = dict(plan.quantizations)[copy.role]
    square = spec.block[0] if Extent.ALL not in spec.block else 1
    amax = step.input("a_amax")
    fields = {
        "data": reading(copy.data),
        "scale": reading(copy.scale),
        "output": f"writable({step.out})",
        **{name: to_cpp(size) for name, size in step.sizes},
        "pitch": _pitch(plan, copy),
        **_scale_strides(plan, copy),
        "lines_per_scale": str(square),
        "amax": f"floats({reading(amax)})" if amax else "",
        **_line_groups(plan, step, reading),
    }
    io = _scalar_type(plan.buffer(step.out).dtype)
    return _filled(step, "DequantizeArguments", fields, io)


def _line_groups(plan: ModulePlan, step: Step, reading: Reading) -> dict[str, str]:
    """Fields of rows in groups, where scales depend on the group or lie where it begins."""
    groups, copy = step.input("groups"), step.copies[0]
    own_scale = dict(plan.quantizations)[copy.role].scaling == "tensor"
    own_place = plan.token_major(copy)
    if groups is None or not (own_scale or own_place or step.input("a_amax")):
        return {}
    return {
        "split_sizes": f"integers({reading(groups)})",
        "groups": to_cpp(plan.buffer(groups).shape.dims[0]),
        "scale_group": "1" if own_scale else "",
        "row_align": str(plan.layout.token_alignment) if own_place else "",
    }


def _scale_strides(plan: ModulePlan, copy: Copy) -> dict[str, str]:
    """From the scale of one matrix, line and block of a copy to the next."""
    spec = dict(plan.quantizations)[copy.role]
    dims = plan.buffer(copy.scale).shape.dims
    stack = len(plan.buffer(copy.data).shape.dims) == 3
    inner = dims[1:] if stack else dims
    token_major = plan.token_major(copy)
    if spec.scaling == "tensor":
        line, block = "", ""
    elif len(inner) == 1:
        line, block = "1", ""
    elif copy.orientation is Orientation.ROWWISE and not token_major:
        line, block = to_cpp(inner[1]), "1"
    else:
        line, block = "1", to_cpp(inner[1])
    matrix = to_cpp(product(inner)) if stack else ""
    return {"scale_matrix": matrix, "scale_line": line, "scale_block": block}


def _dequantize_groups_launch(plan: ModulePlan, step: Step, reading: Reading) -> list[str]:
    copy = step.copies[0]
    sizes = next((o.buffer for o in step.outputs if o.slot == PADDED_SIZES), None)
    fields = {
        "data": reading(copy.data),
        "scale": reading(copy.scale),
        "output": f"writable({step.out})",
        "split_sizes": f"integers({reading(step.input('groups'))})",
        "padded_sizes": f"integers(writable({sizes}))" if sizes else "",
        **{name: to_cpp(size) for name, size in step.sizes},
        "pitch": _pitch(plan, copy),
        "row_align": str(plan.layout.token_alignment),
    }
    return _filled(
        step, "DequantizeGroupsArguments", fields, _scalar_type(plan.buffer(step.out).dtype)
    )


def _written(buffer: str, when: str) -> str:
    return f"{when} ? writable({buffer}) : nullptr" if when else f"writable({buffer})"


def _state_fields(
    plan: ModulePlan, program: Program, step: Step, reading: Reading
) -> dict[str, str]:
    """Fields of what outlives the step; a forward without grad leaves it alone."""
    history, scale = step.input("amax_history"), step.input("scale")
    rng, update = step.input("rng_state"), any_of(program.updated_when(step)) or "true"
    fields = {"rng_state": f"integers(writable({rng}))", "update": update} if rng else {}
    if scale is None:
        return fields
    if history is None:
        return fields | {"quantize.scale": f"floats({reading(scale)})"}
    spec = dict(plan.quantizations)[step.copies[0].role]
    return fields | {
        "state.history": f"floats(writable({history}))",
        "state.scale": f"floats(writable({scale}))",
        "state.slots": str(spec.scale.history),
        "state.groups": to_cpp(plan.buffer(scale).shape.dims[0]),
        "state.max": f"{dtypes.largest(spec.format)}f",
        "state.margin": str(spec.scale.margin) if spec.scale.margin else "",
        "state.grouped": "true" if plan.per_group(scale) else "",
        "due": "&due",
        "moves_states": _moves_states(program, step),
        "update": update,
    }


def _keeps_history(step: Step) -> bool:
    """Whether its scale follows from amaxes of steps before it."""
    return step.input("amax_history") is not None


def _moves_states(program: Program, step: Step) -> str:
    """Whether no later step of the call does: empty where one always does."""
    steps = program.unmerged.steps
    later = [each for each in steps[steps.index(step) + 1 :] if _keeps_history(each)]
    if any(not each.when for each in later):
        return ""
    flags = dict.fromkeys(flag for each in later for flag in each.when)
    return f"!({any_of(tuple(flags))})" if flags else "true"


def _pointwise_fields(step: Step, reading: Reading, without: str | None = None) -> dict[str, str]:
    """Operands, results but for one that is not written, scalars and sizes of an expression."""
    assert step.pointwise is not None
    math = step.pointwise
    prefix = f"{step.item}_" if step.item else ""
    scalars = [f"static_cast<float>({prefix}{name})" for name in math.attributes]
    results = ["nullptr" if r.buffer == without else f"writable({r.buffer})" for r in math.results]
    return {
        "operands": f"{{{', '.join(reading(o.buffer) for o in math.operands)}}}",
        "results": f"{{{', '.join(results)}}}",
        "scalars": f"{{{', '.join(scalars)}}}",
        "rows": to_cpp(math.rows),
        "columns": to_cpp(math.columns),
    }


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
