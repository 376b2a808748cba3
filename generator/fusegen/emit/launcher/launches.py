"""Launches of a launcher: the arguments of each step's kernel, filled in from the plan."""

from __future__ import annotations

from dataclasses import dataclass

from ...ir import dtypes
from ...ir.plan import Copy, ModulePlan, Program, Step
from ...ir.primitives import PADDED_SIZES, PARTIALS, ROW_GROUPS, ROW_PARTIALS, SUMMED, Primitive
from ...ir.quantization import Extent, Orientation, QuantizationSpec, ScaleRounding, ScaleRule
from ...ir.shapes import product, to_cpp
from ..python.words import range_name, step_comment
from ..text.explain import size_in_bytes
from .words import Reading, any_of, call, filled, floats, scalar_type, writable


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


def launch_step(plan: ModulePlan, program: Program, step: Step, index: int) -> LaunchStep:
    given = {argument.buffer for argument in program.arguments if not argument.mutated}

    def reading(name: str | None) -> str:
        if name is None:
            return "nullptr"
        return f"pointer({name}_dense)" if name in given else f"pointer({name})"

    if step.parts:
        lines = _merged_launch(plan, program, step, reading)
    elif step.pointwise:
        fields = _pointwise_fields(step, reading) | _row_groups(plan, step, reading)
        words = [f"/*{name}=*/{value}" for name, value in fields.items()]
        lines = call(step, "PointwiseArguments", words)
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
        return call(step, "GroupSumArguments", words)
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
        return call(step, "GemmArguments", words)
    if step.decoded:
        amaxes = [f"/*amax_{slot}=*/{floats(reading(step.input(f'{slot}_amax')))}" for slot in "ab"]
        return call(step, "DecodedGemmArguments", [f"{{{', '.join(words)}}}", *amaxes])
    a, b = step.copies
    return call(
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
        f"/*add=*/{floats(reading(add))}",
        *places,
        f"/*n=*/{to_cpp(dict(step.sizes)['n'])}",
    ]
    return call(step, "GroupRowDotArguments", words)


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
    return filled(step, "QuantizeStepArguments", fields)


def _merged_launch(plan: ModulePlan, program: Program, step: Step, reading: Reading) -> list[str]:
    """What the parts say, without the tensor between them."""
    first, second = step.parts
    tensor = second.input("a")
    expression = _pointwise_fields(first, reading, without=tensor)
    fields = {f"expression.{name}": value for name, value in expression.items()}
    for operand in step.outputs:
        if operand.slot == ROW_PARTIALS:
            fields["row_partials"] = f"floats({writable(operand.buffer, '')})"
    if second.when != first.when:
        fields["quantizes"] = any_of(second.when)
    quantized = _quantize_fields(plan, program, second, reading)
    fields |= {f"step.{name}": value for name, value in quantized.items()}
    return filled(step, "PointwiseQuantizeArguments", fields)


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
        fields[f"{place}.data"] = writable(copy.data, when)
        fields[f"{place}.scale"] = writable(copy.scale, when)
        fields[f"{place}.pitch"] = _pitch(plan, copy)
        if copy.amax:
            amax = f"{copy.orientation.value}_amax"
            fields[amax] = f"floats({writable(copy.amax, when)})"
        if pitch := _token_pitch(plan, copy):
            fields["quantize.token_pitch"] = pitch
    for operand in step.outputs:
        if operand.slot in ("amax", "row_amax", "column_amax"):
            written = writable(operand.buffer, any_of(step.wanted(operand.buffer)))
            fields[operand.slot] = f"floats({written})"
        if operand.slot == SUMMED:
            fields["sums"] = writable(operand.buffer, any_of(step.wanted(operand.buffer)))
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
    return filled(step, "StatisticsArguments", fields)


def _rounded_down(spec: QuantizationSpec) -> str:
    """Which field says that a scale is rounded down to a power of two."""
    return "round_down" if spec.scale.rule is ScaleRule.MX else "power_of_two"


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
    io = scalar_type(plan.buffer(step.out).dtype)
    return filled(step, "DequantizeArguments", fields, io)


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
    return filled(
        step, "DequantizeGroupsArguments", fields, scalar_type(plan.buffer(step.out).dtype)
    )


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


def keeps_history(step: Step) -> bool:
    """Whether its scale follows from amaxes of steps before it."""
    return step.input("amax_history") is not None


def _moves_states(program: Program, step: Step) -> str:
    """Whether no later step of the call does: empty where one always does."""
    steps = program.unmerged.steps
    later = [each for each in steps[steps.index(step) + 1 :] if keeps_history(each)]
    if any(not each.when for each in later):
        return ""
    flags = dict.fromkeys(flag for each in later for flag in each.when)
    return f"!({any_of(tuple(flags))})" if flags else "true"


def _row_groups(plan: ModulePlan, step: Step, reading: Reading) -> dict[str, str]:
    """Fields of the groups past which results are zero."""
    groups = step.input(ROW_GROUPS)
    if groups is None:
        return {}
    return {
        "split_sizes": f"integers({reading(groups)})",
        "groups": to_cpp(plan.buffer(groups).shape.dims[0]),
    }


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
