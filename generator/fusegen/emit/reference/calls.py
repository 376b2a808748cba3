"""What references do for each step: calls of the functions that state its numerics."""

from __future__ import annotations

from dataclasses import dataclass

from ...ir import dtypes
from ...ir.dtypes import DType
from ...ir.plan import ModulePlan
from ...ir.program import Program
from ...ir.quantization import Orientation, Role
from ...ir.shapes import Shape, product, to_code
from ...ir.step import Copy, Operand, Step
from ...steps import (
    copies_memory,
    decodes,
    definition,
    is_gemm,
    is_printed,
    moves_state,
    observes,
    quantizes,
    rounds,
    row_sum,
)
from ...steps.pointwise import ROW_GROUPS
from ...steps.quantize import SUMMED, left_by
from ...steps.update_scale import role_of
from ..python.conditions import Conditions
from ..python.words import scalar, shape_source, step_comment
from .pointwise import buffers, function_name, scalars_of


@dataclass(frozen=True, slots=True)
class StepText:
    """A step of the reference.

    Attributes:
        comment: what it does, for people.
        condition: Python source under which it runs; empty is always.
        targets: names assigned.
        call: source of the value.
    """

    comment: str
    condition: str
    targets: tuple[str, ...]
    call: str

    @property
    def lines(self) -> tuple[str, ...]:
        """Its source."""
        assignment = f"{', '.join(self.targets)} = {self.call}"
        if self.condition:
            return (f"# {self.comment}", f"if {self.condition}:", f"    {assignment}")
        return (f"# {self.comment}", assignment)


def texts_of(
    plan: ModulePlan, program: Program, step: Step, index: int, conditions: Conditions
) -> tuple[StepText, ...]:
    """Everything that the reference does for a step."""
    texts = (
        step_text(plan, program, step, index, conditions),
        _amax_text(plan, program, step, index, conditions),
        _sum_text(step, index, conditions),
        _update_text(plan, program, step, index, conditions),
    )
    return tuple(filter(None, texts))


def writer_of(program: Program, buffer: str) -> Step | None:
    return next((step for step in program.steps if buffer in step.writes), None)


def part_of(program: Program, buffer: str) -> str:
    """A buffer after the last step; part of a copy that the program made by its field."""
    writer = writer_of(program, buffer)
    for copy in writer.copies if writer and quantizes(writer) else ():
        for name, part in zip(copy.buffers, ("data", "scale", "amax"), strict=False):
            if name == buffer:
                return f"{_copy_name(copy)}.{part}"
    return buffer


def stored(plan: ModulePlan, buffer: str, source: str) -> str:
    """A value as its buffer has it: perhaps as bytes, or in another order."""
    copy = next((c for s in plan.steps for c in s.copies if c.scale == buffer), None)
    if copy and plan.token_major(copy):
        return f"quantized.token_major({source}, {copy.groups}, align=LAYOUT.align)"
    as_bytes = plan.buffer(buffer).dtype is DType.UINT8
    return f"{source}.view(torch.uint8)" if as_bytes else source


def _loaded(plan: ModulePlan, buffer: str, dtype: DType) -> str:
    """A buffer as the value that it stands for; inverse of ``stored``."""
    as_bytes = plan.buffer(buffer).dtype is DType.UINT8
    return f"{buffer}.view(torch.{dtypes.info(dtype).torch})" if as_bytes else buffer


def step_text(
    plan: ModulePlan, program: Program, step: Step, index: int, conditions: Conditions
) -> StepText | None:
    """A step's call; none where a copy is decoded for a GEMM, which reads it as it is."""
    comment, when = step_comment(step, index), conditions.text(step.when)
    if copies_memory(step):
        return StepText(comment, when, step.writes, _copied(plan, program, step))
    if quantizes(step):
        return StepText(comment, when, *_quantize_call(plan, step, conditions))
    if moves_state(step):
        return StepText(comment, when, step.updates, _delayed_update(plan, step))
    if observes(step):
        return StepText(comment, when, (step.out,), _statistics_call(plan, step))
    if decodes(step) and plan.buffer(step.out).dtype is not DType.IO:
        return None
    if decodes(step):
        return StepText(comment, when, step.writes, _dequantize_call(plan, program, step))
    if step.copies:
        return StepText(comment, when, step.writes, _gemm_of_copies(plan, program, step))
    if step.pointwise and is_printed(step):
        values = [*buffers(step.pointwise.operands), *scalars_of(step)]
        call = f"{function_name(step)}({', '.join(values)})"
    else:
        words = _slots(tuple(o for o in step.inputs if o.slot not in ("accumulate", ROW_GROUPS)))
        words += [f"{name}={scalar(value)}" for name, value in step.attributes]
        dtype = _own_type(plan, program) if rounds(step) else _type_of_sums(plan, program, step)
        words += [f"dtype={dtype}"] if dtype else []
        call = _accumulated(step, f"{_function(step)}({', '.join(words)})")
    groups = None if step.leaves else step.input(ROW_GROUPS)
    call = f"steps.within({call}, {groups})" if groups else call
    return StepText(comment, when, _targets(step), call)


def _targets(step: Step) -> tuple[str, ...]:
    """Names for all results of the function of the reference; those left out have none."""
    kind = definition(step.primitive)
    rule = kind.shapes.get(step.kind)
    if rule is None:
        return step.writes
    names = {operand.slot: operand.buffer for operand in step.outputs}
    return tuple(names.get(slot, "_") for slot in kind.results if slot in rule)


def _copied(plan: ModulePlan, program: Program, step: Step) -> str:
    """A tensor with memory of its own, in the dimensions of the result."""
    source, shape = step.reads[0], plan.buffer(step.out).shape
    if plan.buffer(source).shape == shape:
        return f"{source}.clone()"
    first = plan.buffer(program.arguments[0].buffer)
    return f"{source}.reshape{shape_source(shape, first)}.clone()"


def _with_leading(plan: ModulePlan, program: Program, step: Step, call: str) -> str:
    """Rows of a result with the leading dimensions of the program's first argument."""
    if not plan.buffer(step.out).shape.leading:
        return call
    first = plan.buffer(program.arguments[0].buffer)
    others = ", 0" * (len(first.shape.dims) - 1)
    like = f"{first.name}[...{others}]" if others else first.name
    return f"steps.with_leading({call}, {like})"


def _function(step: Step) -> str:
    """The function of the reference that does a step."""
    return definition(step.primitive).function(step.kind, of_copies=bool(step.copies))


def _type_of_sums(plan: ModulePlan, program: Program, step: Step) -> str:
    """The type of a GEMM's result where that is fp32: a caller's buffer, or a sum to be rounded."""
    if not is_gemm(step) or plan.buffer(step.out).dtype is not DType.FLOAT32:
        return ""
    if step.out in program.mutated:
        return "torch.float32"
    return f"torch.promote_types({_own_type(plan, program)}, torch.float32)"


def _own_type(plan: ModulePlan, program: Program) -> str:
    """The module's own type, as a program's arguments tell it."""
    return f"{plan.own_type_argument(program)}.dtype"


def _accumulated(step: Step, call: str) -> str:
    """A GEMM, added to the caller's buffer where the step does so."""
    buffer = step.input("accumulate")
    return f"{buffer} + {call}" if buffer else call


def _copy_name(copy: Copy) -> str:
    return f"{copy.data}_copy"


def _quantize_call(
    plan: ModulePlan, step: Step, conditions: Conditions
) -> tuple[tuple[str, ...], str]:
    """Targets, one per orientation, and the call that makes the copies."""
    made = {copy.orientation: copy for copy in step.copies}
    targets, wanted = [], []
    for orientation in Orientation:
        copy = made.get(orientation)
        targets.append(_copy_name(copy) if copy else "_")
        asked = conditions.text(step.wanted(copy.data)) or "True" if copy else "False"
        wanted.append(f"{orientation.value}={asked}")
    groups = step.input("groups")
    words = [_rows(plan, step), step.copies[0].role.value.upper(), *wanted]
    words += [f"group_sizes={groups}"] if groups else []
    words += [f"{o.slot}={o.buffer}" for o in step.inputs if o.slot in ("scale", "rng_state")]
    return tuple(targets), f"{_function(step)}({', '.join(words)}, layout=LAYOUT)"


def _statistics_call(plan: ModulePlan, step: Step) -> str:
    (copy,) = step.copies
    words = [_rows(plan, step), _copy_name(copy)]
    words += [f"group_sizes={copy.groups}"] if copy.groups else []
    return f"{_function(step)}({', '.join(words)})"


def _amax_text(
    plan: ModulePlan, program: Program, step: Step, index: int, conditions: Conditions
) -> StepText | None:
    """The amax that a scale of the whole tensor or group followed from, where the op returns it."""
    results = {result.buffer for result in program.results}
    amax = next((name for name in left_by(step, "amax") if name in results), None)
    if amax is None:
        return None
    when = conditions.text(step.wanted(amax) or step.when)
    return StepText(f"{index}. {amax}", when, (amax,), _group_amax(plan, step))


def _sum_text(step: Step, index: int, conditions: Conditions) -> StepText | None:
    """The sum over rows that a step leaves besides its copies."""
    out = next(iter(left_by(step, SUMMED)), None)
    if out is None:
        return None
    groups = step.input("groups")
    words = [step.reads[0], *([groups] if groups else [])]
    call = f"{row_sum(in_groups=bool(groups)).function()}({', '.join(words)})"
    return StepText(f"{index}. {out}", conditions.text(step.wanted(out)), (out,), call)


def _group_amax(plan: ModulePlan, step: Step) -> str:
    words = [_rows(plan, step), step.copies[0].role.value.upper()]
    words += [f"group_sizes={step.input('groups')}"] if step.input("groups") else []
    return f"quantized.group_amax({', '.join(words)})"


def _rows(plan: ModulePlan, step: Step) -> str:
    """The tensor that a step quantises; all its leading dimensions as one."""
    source = step.reads[0]
    return f"steps.rows({source})" if plan.buffer(source).shape.leading else source


def _update_text(
    plan: ModulePlan, program: Program, step: Step, index: int, conditions: Conditions
) -> StepText | None:
    """The state after a step that keeps some; a forward without grad leaves it alone."""
    if not quantizes(step) or not step.updates:
        return None
    updated = conditions.text(program.updated_when(step))
    comment = f"{index}. state after it: {', '.join(step.updates)}"
    rng = step.input("rng_state")
    if rng:
        return StepText(comment, updated, (rng,), f"quantized.advance({rng})")
    call = _moved(plan, step.updates, _group_amax(plan, step), step.copies[0].role)
    return StepText(comment, updated, step.updates, call)


def _delayed_update(plan: ModulePlan, step: Step) -> str:
    """The call that moves a state on by an amax which is given."""
    return _moved(plan, step.updates, step.input("amax") or "", role_of(step))


def _moved(plan: ModulePlan, states: tuple[str, ...], amax: str, role: Role) -> str:
    """A history and its scale after a step."""
    words = (*states, amax, role.value.upper(), f"grouped={plan.per_group(states[-1])}")
    return f"quantized.delayed_update({', '.join(words)})"


def _read_copies(plan: ModulePlan, program: Program, step: Step) -> list[str]:
    """Copies made in this program, or put together from what was saved."""
    made = {c for s in program.steps if quantizes(s) for c in s.copies}
    return [_copy_name(c) if c in made else _saved_copy(plan, c) for c in step.copies]


def _dequantize_call(plan: ModulePlan, program: Program, step: Step) -> str:
    words = _read_copies(plan, program, step)
    words += [f"group_sizes={o.buffer}" for o in step.inputs if o.slot == "groups"]
    call = f"{_function(step)}({', '.join(words)}).to({_own_type(plan, program)})"
    return _with_leading(plan, program, step, call)


def _gemm_of_copies(plan: ModulePlan, program: Program, step: Step) -> str:
    words = _read_copies(plan, program, step)
    words += [step.copies[0].groups] if step.copies[0].groups else []
    dtype = _type_of_sums(plan, program, step) or _own_type(plan, program)
    words.append(f"dtype={dtype}")
    words += [f"{o.slot}={o.buffer}" for o in step.inputs if o.slot in ("add", "add_scales")]
    call = _accumulated(step, f"{_function(step)}({', '.join(words)})")
    return _with_leading(plan, program, step, call)


def _saved_copy(plan: ModulePlan, copy: Copy) -> str:
    flat = plan.buffer(copy.original).shape.fixed()
    if copy.role is not Role.WEIGHT:
        flat = Shape(None, (product(flat.dims[:-1]), flat.dims[-1]))
    return operand_of(plan, copy, tuple(to_code(dim) for dim in flat.dims))


def operand_of(plan: ModulePlan, copy: Copy, sizes: tuple[str, ...]) -> str:
    """A copy put together from its buffers, of a tensor whose sizes have these sources."""
    columnwise = copy.orientation is Orientation.COLUMNWISE
    spec = dict(plan.quantizations)[copy.role]
    data, scale = (
        _loaded(plan, buffer, dtype)
        for buffer, dtype in ((copy.data, spec.format), (copy.scale, spec.scale.dtype))
    )
    if plan.token_major(copy):
        scale = f"quantized.row_major({scale}, {sizes[0]}, {copy.groups}, align=LAYOUT.align)"
    words = [data, scale, copy.role.value.upper(), f"({', '.join(sizes)})"]
    words += [f"amax={copy.amax}"] if copy.amax else []
    return f"quantized.Operand({', '.join(words)}, columnwise={columnwise}, layout=LAYOUT)"


def _slots(operands: tuple[Operand, ...]) -> list[str]:
    """Positional operands; the optional ones by keyword, so that a reader sees what they are."""
    return [
        operand.buffer
        if operand.slot in ("a", "b", "groups")
        else f"{operand.slot}={operand.buffer}"
        for operand in operands
    ]
