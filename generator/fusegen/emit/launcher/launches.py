"""Launches of a launcher: the arguments of each step's kernel, filled in from the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ...ir import dtypes
from ...ir.buffers import Buffer, size_in_bytes
from ...ir.plan import ModulePlan
from ...ir.program import Program
from ...ir.quantization import (
    Extent,
    Orientation,
    QuantizationSpec,
    Role,
    ScaleRounding,
    ScaleRule,
)
from ...ir.shapes import Expr, Shape, Sym, mul, product, substitute, to_cpp
from ...ir.step import Chunks, Copy, Step
from ...ir.words import AttributeType
from ...options import scopes_of
from ...steps import copies_memory, definition
from ...steps.gemm_pointwise import AUX, OTHER
from ...steps.gemm_pointwise import launch as product_launch
from ...steps.launch import Field, Launch, Origin
from ...steps.pointwise import ROW_GROUPS
from ...steps.quantize import SUMMED
from ...steps.update_scale import role_of
from ..python.conditions import Conditions
from ..python.words import scalar, scope_name, step_comment
from .memory import lies_there
from .words import Reading, call, filled, scalar_type, writable


@dataclass(frozen=True, slots=True)
class LaunchStep:
    """A step of a launcher.

    Attributes:
        comment: what it does, for people.
        opening: of the block around its lines; empty where they need none.
        lines: of the launch, after those of the scopes that it runs in.
    """

    comment: str
    opening: str
    lines: tuple[str, ...]


def launch_step(
    plan: ModulePlan, program: Program, step: Step, index: int, conditions: Conditions
) -> LaunchStep:
    """A step as C++ that launches it, its conditions as these spell them."""
    given = {argument.buffer for argument in program.arguments if not argument.mutated}
    addresses = {part for each in plan.joined_of(program) for part in each.parts}

    def reading(name: str | None) -> str:
        if name is None:
            return "nullptr"
        if name in addresses:
            return name
        return f"pointer({name}_dense)" if name in given else f"pointer({name})"

    if copies_memory(step) and lies_there(plan, program, step):
        return LaunchStep(f"{step_comment(step, index)}, the same memory", "", ())
    place = _Place(plan, program, step, reading, conditions)
    lines = _loop(place, step.chunks) if step.chunks else _launch(place)
    lines = [*_wait(place), *lines]
    opening = f"if ({conditions.text(step.when)}) {{" if step.when else ""
    if scopes := scopes_of(plan.options):
        opening = opening or "{"
        name = scope_name(plan, program, step, index)
        lines = [*(f'const {s.cpp_class} {s.cpp}("{name}");' for s in scopes), *lines]
    return LaunchStep(step_comment(step, index), opening, tuple(lines))


def _wait(place: _Place) -> Iterator[str]:
    """A wait for rows that may come after the call, before a step that needs all at once."""
    rows, step = place.program.arriving, place.step
    if not rows or rows not in step.loads:
        return
    stated = definition(step.primitive).launch
    if stated is None or all(field.origin is not Origin.ARRIVING for field in stated(step).fields):
        yield f"check(kCell, {rows}_rows.wait(stream));"


def _writing(name: str | None) -> str:
    """The address of a result."""
    return f"writable({name})"


@dataclass(frozen=True, slots=True)
class _Place:
    """A step that is launched, and what its fields are printed from.

    Attributes:
        reading: the source of an operand's address.
        writing: that of a result's.
        extents: what stands for names of sizes.
    """

    plan: ModulePlan
    program: Program
    step: Step
    reading: Reading
    conditions: Conditions
    writing: Reading = _writing
    extents: Mapping[str, Expr] = field(default_factory=dict)

    def size(self, expr: Expr) -> str:
        """A size, of a chunk where the step runs for one."""
        return to_cpp(substitute(expr, self.extents))

    def operand(self, slot: str) -> str:
        """Address of the operand in a slot; null where there is none."""
        return self.reading(self.step.input(slot))

    def result(self, slot: str) -> str | None:
        """The buffer of the result in a slot."""
        return next((o.buffer for o in self.step.outputs if o.slot == slot), None)

    def copy(self, slot: str) -> Copy:
        """The copy whose codes are in a slot: of a, of b, or the only one."""
        return self.step.copies[slot == "b"]


def _launch(place: _Place) -> list[str]:
    step = place.step
    stated = definition(step.primitive).launch
    if stated is None:
        return _snapshot_launch(place.plan, step, place.reading)
    launch = stated(step)
    if not launch.assigned:
        return call(step, launch.arguments, _words(place, launch))
    typed = launch.typed_by and place.plan.buffer(place.result(launch.typed_by) or "").dtype
    io = scalar_type(typed) if typed else "io"
    return filled(step, launch.arguments, _fields(place, launch), io)


def _loop(place: _Place, chunks: Chunks) -> list[str]:
    """The launches of parts for one chunk behind the other.

    What they share is addressed as it is; of what has rows, those of the chunk.
    """
    plan, memory = place.plan, dict(chunks.memory)
    rows = Sym(chunks.symbol)

    def addressed(name: str | None, address: str) -> str:
        shape = plan.buffer(name).shape.flat if name and name not in memory else ()
        if not name or shape[:1] != (rows,):
            return address
        row = Buffer(name, plan.buffer(name).dtype, Shape(None, shape[1:]))
        return f"behind({address}, {to_cpp(mul(Sym(_FIRST), size_in_bytes(row)))})"

    inside = replace(
        place,
        reading=lambda name: addressed(name, place.reading(memory.get(name or "", name))),
        writing=lambda name: addressed(name, place.writing(memory.get(name or "", name))),
        extents={chunks.symbol: Sym(_ROWS)},
    )
    # Sums of no rows at all are zeros, which the first chunk writes.
    some = f"{_FIRST} == 0 || " if chunks.adding else ""
    lines = [
        f"for (int64_t {_FIRST} = 0; {some}{_FIRST} < {rows}; {_FIRST} += {chunks.rows}) {{",
        f"  const int64_t {_ROWS} = min({rows} - {_FIRST}, {chunks.rows});",
    ]
    for number, part in enumerate(place.step.parts, 1):
        lines += [f"  {line}" for line in _part(replace(inside, step=part), chunks, number)]
    return [*lines, "}"]


def _part(place: _Place, chunks: Chunks, number: int) -> list[str]:
    """The launch of a part; one that adds up is of another kernel from the second chunk on."""
    part, later = place.step, chunks.later(place.step)
    stated = definition(part.primitive).launch
    assert stated and not any(f.origin in _SEVERAL for f in stated(part).fields), part
    if later.kernels != part.kernels:
        chosen = f"({_FIRST} == 0 ? {part.kernels} : {later.kernels})"
        place = replace(place, step=replace(part, kernels=chosen))
    lines = _launch(place)
    if part.when:
        lines = [f"if ({place.conditions.text(part.when)}) {{", *(f"  {x}" for x in lines), "}"]
    return [f"// {step_comment(part, number)}", *lines]


def _words(place: _Place, launch: Launch) -> list[str]:
    """Values of a struct in order, each behind its name."""
    begun = [f"{{{', '.join(_words(place, launch.base))}}}"] if launch.base else []
    fields = [*_fields(place, launch).items()]
    while fields and not fields[-1][1]:
        fields.pop()
    return begun + [_word(name, value or "nullptr") for name, value in fields]


def _word(name: str, value: str) -> str:
    return value if value == _SMS else f"/*{name}=*/{value}"


def _fields(place: _Place, launch: Launch) -> dict[str, str]:
    """Values by field; empty ones keep their defaults."""
    values: dict[str, str] = {}
    for each in launch.fields:
        several = _SEVERAL.get(each.origin)
        values |= several(place, each) if several else {each.name: _value(place, each)}
    return values


def _value(place: _Place, field: Field) -> str:
    """The value of one field."""
    plan, step = place.plan, place.step
    match field.origin:
        case Origin.OPERAND | Origin.FLOAT_OPERAND | Origin.INTEGER_OPERAND:
            if field.optional and step.input(field.of) is None:
                return ""
            return _typed(field.origin, place.operand(field.of))
        case Origin.RESULT | Origin.FLOAT_RESULT | Origin.INTEGER_RESULT:
            name = place.result(field.of)
            return _typed(field.origin, place.writing(name)) if name else ""
        case Origin.LENGTH:
            name = place.result(field.of)
            return place.size(plan.buffer(name).shape.dims[0]) if name else ""
        case Origin.ROWS:
            name = step.input(field.of) or ""
            given = {each.buffer: "*" * each.optional for each in place.program.arguments}
            if name in given:
                return f"extent({given[name]}{name}, -2)"
            return place.size(plan.buffer(name).shape.flat[0])
        case Origin.CLEARS:
            return "false" if step.leaves else "true"
        case Origin.SIZE:
            return place.size(dict(step.sizes)[field.of])
        case Origin.ATTRIBUTE:
            return _attribute(step, field.of)
        case Origin.KIND:
            return f"{field.of}::{step.kind}"
        case Origin.WORD:
            return f"{field.of}::{dict(step.attributes)[field.name]}"
        case Origin.PITCH:
            return _pitch(plan, place.copy(field.of))
        case Origin.TOKEN_PITCH:
            return _token_pitch(plan, place.copy(field.of))
        case Origin.ALIGNMENT:
            return str(plan.layout.token_alignment)
        case Origin.MULTIPROCESSORS:
            return _SMS
        case Origin.ARRIVING:
            rows = place.program.arriving
            return f"&{rows}_rows" if rows and rows in step.reads else ""
    raise ValueError(f"{field.origin.value} is of several fields")


def _attribute(step: Step, name: str) -> str:
    """The value of a scalar of a step; empty where its kind has none of the name."""
    value = dict(step.attributes).get(name)
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    types = {each.name: each.type for each in definition(step.primitive).attributes}
    narrowed = types[name] is AttributeType.FLOAT
    return f"static_cast<float>({scalar(value)})" if narrowed else scalar(value)


def _typed(origin: Origin, address: str) -> str:
    """An address as a pointer to the type that its origin names."""
    word = _POINTERS.get(origin)
    return f"{word}({address})" if word and address != "nullptr" else address


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


def _parts_fields(place: _Place, field: Field) -> dict[str, str]:
    """What the parts say, without the tensor between them; the first one's below a field."""
    first, second = place.step.parts
    tensor = second.input("a")
    if first.pointwise:
        own = _pointwise_fields(first, place.reading, without=tensor)
    else:
        stated = definition(first.primitive).launch
        assert stated is not None, first
        left = tuple(each for each in first.outputs if each.buffer != tensor)
        own = _fields(replace(place, step=replace(first, outputs=left)), stated(first))
    fields = {f"{field.name}.{name}": value for name, value in own.items()}
    if buffer := place.result(field.of):
        fields[field.of] = f"floats({writable(buffer, '')})"
    if second.when != first.when:
        fields["quantizes"] = place.conditions.text(second.when)
    quantized = _quantize_fields(replace(place, step=second))
    return fields | {f"step.{name}": value for name, value in quantized.items()}


def _product_fields(place: _Place, field: Field) -> dict[str, str]:
    """What a GEMM with expressions of its result is launched with, and what quantises the last."""
    *product, quantized = place.step.parts
    stated = product_launch(replace(place.step, parts=tuple(product)))
    own = f"{stated.arguments}{{{', '.join(_words(place, stated))}}}"
    fields = _quantize_fields(replace(place, step=quantized))
    return {field.name: own} | {f"step.{name}": value for name, value in fields.items()}


def _each_part_fields(place: _Place) -> dict[str, str]:
    """What each part is launched with alone, by its place among them, and how many there are."""
    fields: dict[str, str] = {}
    for number, part in enumerate(place.step.parts):
        stated = definition(part.primitive).launch
        assert stated is not None, part
        own = _fields(replace(place, step=part), stated(part))
        fields |= {f"steps[{number}].{name}": value for name, value in own.items()}
    return fields | {"count": str(len(place.step.parts))}


def _quantize_fields(at: _Place) -> dict[str, str]:
    """Fields of a quantise step, all but its input; empty ones keep their defaults."""
    plan, step, reading = at.plan, at.step, at.reading
    spec = dict(plan.quantizations)[step.copies[0].role]
    rounds_down = spec.scale.round is ScaleRounding.POW2_DOWN
    groups = step.input("groups")
    fields = {
        "quantize.group_sizes": f"integers({reading(groups)})" if groups else "nullptr",
        **{f"quantize.{name}": to_cpp(size) for name, size in step.sizes},
        "quantize.row_align": str(plan.layout.token_alignment),
        f"quantize.{_rounded_down(spec)}": "true" if rounds_down else "",
        "quantize.epsilon": f"{spec.scale.epsilon}f" if spec.scale.epsilon else "",
    }
    for copy in step.copies:
        when = at.conditions.text(step.wanted(copy.data))
        place = f"quantize.{copy.orientation.value}"
        fields[f"{place}.data"] = writable(copy.data, when)
        fields[f"{place}.scale"] = writable(copy.scale, when)
        fields[f"{place}.pitch"] = "0" if copy.untransposed else _pitch(plan, copy)
        if copy.amax:
            amax = f"{copy.orientation.value}_amax"
            fields[amax] = f"floats({writable(copy.amax, when)})"
        if pitch := _token_pitch(plan, copy):
            fields["quantize.token_pitch"] = pitch
    for operand in step.outputs:
        written = writable(operand.buffer, at.conditions.text(step.wanted(operand.buffer)))
        if operand.slot in ("amax", "row_amax", "column_amax"):
            fields[operand.slot] = f"floats({written})"
        if operand.slot == SUMMED:
            fields["sums"] = written
        if operand.slot == "partial_amax":
            fields["partial_amax"] = f"floats({operand.buffer})"
        if operand.slot == "row_sums":
            fields["quantize.row_sums"] = f"floats({operand.buffer})"
    return fields | _state_fields(at)


def _token_pitch(plan: ModulePlan, copy: Copy) -> str:
    """Scales from one block of columns to the next, where those of tokens are neighbours."""
    scales = plan.buffer(copy.scale).shape.dims
    return to_cpp(scales[-1]) if plan.token_major(copy) else ""


def _rounded_down(spec: QuantizationSpec) -> str:
    """Which field says that a scale is rounded down to a power of two."""
    return "round_down" if spec.scale.rule is ScaleRule.MX else "power_of_two"


def _line_groups(plan: ModulePlan, step: Step, reading: Reading) -> dict[str, str]:
    """Fields of rows in groups, where scales depend on the group or lie where it begins."""
    groups, copy = step.input("groups"), step.copies[0]
    spec = dict(plan.quantizations)[copy.role]
    own_scale = spec.scaling == "tensor"
    by_token = plan.token_major(copy) or copy.atoms
    start = plan.layout.token_alignment if by_token else _lines_per_scale(copy, spec)
    if groups is None or not (own_scale or start > 1 or step.input("a_amax")):
        return {}
    return {
        "group_sizes": f"integers({reading(groups)})",
        "groups": to_cpp(plan.buffer(groups).shape.dims[0]),
        "scale_group": "1" if own_scale else "",
        "row_align": str(start) if start > 1 else "",
    }


def _lines_per_scale(copy: Copy, spec: QuantizationSpec) -> int:
    """Lines of a copy that share scales: of one that lies as the tensor does, those of a block."""
    rows = spec.block[1]
    return rows if copy.untransposed and not isinstance(rows, Extent) else spec.square


def _scale_strides(at: _Place, slot: str) -> dict[str, str]:
    """From the scale of one matrix, line and block of a copy to the next; lines that share one.

    Nothing of a copy whose scales the step does not read.
    """
    if at.step.input(f"{slot}_scale") is None:
        return {}
    plan, copy = at.plan, at.copy(slot)
    spec = dict(plan.quantizations)[copy.role]
    dims = plan.buffer(copy.scale).shape.dims
    stack = len(plan.buffer(copy.data).shape.dims) == 3
    inner = dims[1:] if stack else dims
    token_major = plan.token_major(copy)
    if spec.scaling == "tensor":
        line, block = "", ""
    elif len(inner) == 1:
        line, block = "1", ""
    elif copy.untransposed or (copy.orientation is Orientation.ROWWISE and not token_major):
        line, block = to_cpp(inner[1]), "1"
    else:
        line, block = "1", to_cpp(inner[1])
    matrix = to_cpp(product(inner)) if stack else ""
    if copy.atoms:
        return {"scale_matrix": matrix, "scale_line": to_cpp(inner[1])}
    return {
        "scale_matrix": matrix,
        "scale_line": line,
        "scale_block": block,
        "lines_per_scale": str(_lines_per_scale(copy, spec)),
    }


def _state_fields(at: _Place) -> dict[str, str]:
    """Fields of what outlives the step; a forward without grad leaves it alone."""
    step = at.step
    history, scale, rng = (step.input(slot) for slot in ("amax_history", "scale", "rng_state"))
    update = at.conditions.text(at.program.updated_when(step)) or "true"
    fields = {"rng_state": f"integers(writable({rng}))", "update": update} if rng else {}
    if scale is None:
        return fields
    if history is None:
        return fields | {"quantize.scale": f"floats({at.reading(scale)})"}
    return fields | _delayed_fields(at, step.copies[0].role)


def _delayed_fields(at: _Place, role: Role) -> dict[str, str]:
    """Fields of a history and of the scale of a role that follows from it."""
    plan, step = at.plan, at.step
    history, scale = step.input("amax_history") or "", step.input("scale") or ""
    spec = dict(plan.quantizations)[role]
    return {
        "state.history": history,
        "state.scale": scale,
        "state.slots": str(spec.scale.history),
        "state.groups": to_cpp(plan.buffer(scale).shape.dims[0]),
        "state.max": f"{dtypes.largest(spec.format)}f",
        "state.margin": str(spec.scale.margin) if spec.scale.margin else "",
        "state.grouped": "true" if plan.per_group(scale) else "",
        "due": "&due",
        "moves_states": _moves_states(at),
        "update": at.conditions.text(at.program.updated_when(step)) or "true",
    }


def keeps_history(step: Step) -> bool:
    """Whether its scale follows from amaxes of steps before it."""
    return step.input("amax_history") is not None


def _moves_states(at: _Place) -> str:
    """Whether no later step of the call does: empty where one always does."""
    steps = at.program.unmerged.steps
    later = [each for each in steps[steps.index(at.step) + 1 :] if keeps_history(each)]
    if any(not each.when for each in later):
        return ""
    asked = {flag for each in later for flag in each.when}
    when = tuple(flag for flag in at.program.flags if flag in asked)
    text = at.conditions.text(when)
    return "true" if not when else f"!{text}" if text.isidentifier() else f"!({text})"


def _row_groups(plan: ModulePlan, step: Step, reading: Reading) -> dict[str, str]:
    """Fields of the groups past which results are zero."""
    groups = step.input(ROW_GROUPS)
    if groups is None:
        return {}
    return {
        "group_sizes": f"integers({reading(groups)})",
        "groups": to_cpp(plan.buffer(groups).shape.dims[0]),
        "clears": "false" if step.leaves else "",
    }


def _pointwise_fields(step: Step, reading: Reading, without: str | None = None) -> dict[str, str]:
    """Operands, results but for one that is not written, scalars and sizes of an expression."""
    assert step.pointwise is not None
    math = step.pointwise
    scalars = [f"static_cast<float>({scalar(value)})" for _, value in step.attributes]
    results = ["nullptr" if r.buffer == without else f"writable({r.buffer})" for r in math.results]
    return {
        "operands": f"{{{', '.join(reading(o.buffer) for o in math.operands)}}}",
        "results": f"{{{', '.join(results)}}}",
        "scalars": f"{{{', '.join(scalars)}}}",
        "rows": to_cpp(math.rows),
        "columns": to_cpp(math.columns),
    }


def _epilogue_fields(at: _Place) -> dict[str, str]:
    """What the expressions behind a GEMM read besides its result, and where that goes without."""
    attributes = [value for part in at.step.parts for _, value in part.attributes]
    scalars = ", ".join(f"static_cast<float>({scalar(value)})" for value in attributes)
    words = [at.operand(OTHER), f"{{{scalars}}}"]
    if aux := at.result(AUX):
        words.append(writable(aux, at.conditions.text(at.step.wanted(aux))))
    elif not scalars:
        words.pop()
    return {"epilogue": f"{{{', '.join(words)}}}"}


_FIRST, _ROWS = "first", "rows"
"""The first row of a chunk and how many it has, as launches in a loop call them."""

_SMS = "sms"
"""The number of multiprocessors, which a launcher asks the device for."""

_POINTERS = {
    Origin.FLOAT_OPERAND: "floats",
    Origin.FLOAT_RESULT: "floats",
    Origin.INTEGER_OPERAND: "integers",
    Origin.INTEGER_RESULT: "integers",
}

_SEVERAL: Mapping[Origin, Callable[[_Place, Field], dict[str, str]]] = {
    Origin.EXPRESSION: lambda at, _: _pointwise_fields(at.step, at.reading),
    Origin.EPILOGUE: lambda at, _: _epilogue_fields(at),
    Origin.ROW_GROUPS: lambda at, _: _row_groups(at.plan, at.step, at.reading),
    Origin.QUANTIZATION: lambda at, _: _quantize_fields(at),
    Origin.PARTS: _parts_fields,
    Origin.PRODUCT: _product_fields,
    Origin.EACH_PART: lambda at, _: _each_part_fields(at),
    Origin.SCALE_STRIDES: lambda at, field: _scale_strides(at, field.of),
    Origin.LINE_GROUPS: lambda at, _: _line_groups(at.plan, at.step, at.reading),
    Origin.DELAYED_STATE: lambda at, _: _delayed_fields(at, role_of(at.step)),
}
"""Origins of several fields."""
