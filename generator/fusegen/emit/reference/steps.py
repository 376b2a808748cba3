"""Context of a cell's reference."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count

from ...ir import dtypes
from ...ir.dtypes import DType
from ...ir.plan import (
    FIRSTS,
    HALVES,
    INTERLEAVE,
    Access,
    Check,
    CheckKind,
    Copy,
    ModulePlan,
    Operand,
    Pointwise,
    Program,
    Result,
    Step,
)
from ...ir.quantization import Extent, Orientation, Role
from ...ir.shapes import Shape, product, symbols, to_code
from ...options import scopes_of
from ...steps import (
    SHIPPED,
    copies_memory,
    decodes,
    definition,
    is_derived,
    is_printed,
    moves_state,
    observes,
    quantizes,
    row_sum,
)
from ...steps.pointwise import ROW_GROUPS
from ...steps.quantize import SUMMED
from ...steps.update_scale import role_of
from ..python.conditions import Conditions, named_conditions
from ..python.states import state_sources
from ..python.words import (
    ProgramText,
    absent_source,
    bind_lines,
    program_text,
    return_annotation,
    scalar,
    scope_name,
    step_comment,
    uses_math,
)
from ..text.escape import docstring


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


@dataclass(frozen=True, slots=True)
class ScopedText:
    """A step of the plan, and what the reference does for it.

    Attributes:
        condition: Python source under which the step runs; empty is always.
        steps: what the reference does.
        scopes: Python source of the context managers that it does it in; the outermost first.
    """

    condition: str
    steps: tuple[StepText, ...]
    scopes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LoadText:
    """Assignment of a pointwise operand: ``gate, up = steps.halves(h)``."""

    target: str
    source: str


@dataclass(frozen=True, slots=True)
class PointwiseText:
    """A pointwise step of the reference as a function of its own.

    Attributes:
        name: of the function.
        formula: for its docstring.
        differentiated: whether it computes the formula's gradients.
        arguments: buffers and scalars read.
        loads: fp32 views of the operands.
        body: printed program.
        returns: source of the results, rounded to their buffers' types.
        annotation: of the return value.
    """

    name: str
    formula: str
    differentiated: bool
    arguments: tuple[str, ...]
    scalars: tuple[str, ...]
    loads: tuple[LoadText, ...]
    body: tuple[str, ...]
    returns: str
    annotation: str


@dataclass(frozen=True, slots=True)
class CheckedProgram:
    """An op of the reference with its argument checks.

    Attributes:
        text: signature.
        type_checks: calls that need no sizes.
        check_dims: sizes that the other checks compare with.
        size_checks: those calls.
        absent: results that stay None where no flag asks for them.
        dims: sizes that the steps need.
        conditions: ``need_da = ...`` lines that they need.
        states: lines that take buffers out of arguments that they are rows of.
        steps: in order.
        scoped: the same by steps of the plan, where each runs in a scope.
        returned: source of the return value.
        returns: its annotation.
    """

    text: ProgramText
    type_checks: tuple[str, ...]
    check_dims: tuple[str, ...]
    size_checks: tuple[str, ...]
    absent: tuple[str, ...]
    dims: tuple[str, ...]
    conditions: tuple[str, ...]
    states: tuple[str, ...]
    steps: tuple[StepText, ...]
    scoped: tuple[ScopedText, ...]
    returned: str
    returns: str


@dataclass(frozen=True, slots=True)
class ExactText:
    """The forward without quantisation: its parameters, steps, results and their annotation."""

    parameters: tuple[str, ...]
    steps: tuple[StepText, ...]
    returned: str
    returns: str


@dataclass(frozen=True, slots=True)
class ReferenceContext:
    """Everything ``reference/<cell>.py`` states.

    Attributes:
        constants: how each role is quantised; empty where nothing is.
        modules: that functions of steps stand in, besides those of fusegen.
        programs: every op's.
        exact: the forward without quantisation, where it differs.
        scopes: modules of what each step runs in.
    """

    cell: str
    summary: str
    recipe: str
    constants: tuple[str, ...]
    pointwise: tuple[PointwiseText, ...]
    programs: tuple[CheckedProgram, ...]
    exact: ExactText | None
    uses_math: bool
    uses_torch: bool
    uses_steps: bool
    scopes: tuple[str, ...]
    uses_statistics: bool
    modules: tuple[str, ...]


def reference_context(plan: ModulePlan) -> ReferenceContext:
    """What ``reference/<cell>.py`` states: steps one by one, whatever kernels merge."""
    merged = {program.function: program for _, program in plan.ops}
    plan = plan.unmerged
    texts = (_pointwise_text(plan, step) for step in plan.steps if is_printed(step))
    pointwise = tuple(dict.fromkeys(texts))  # a step that both directions run is one function
    programs = tuple(_checked(view, each, merged[each.function]) for view, each in plan.ops)
    lines = [line for text in pointwise for line in text.body]
    lines += [line for program in programs for line in program.type_checks]
    exact = _exact_text(plan) if plan.quantizations else None
    calls = [step.call for program in programs for step in program.steps]
    calls += [step.call for step in (exact.steps if exact else ())]
    calls += [load.source for text in pointwise for load in text.loads]
    dims = [line for program in programs for line in (*program.check_dims, *program.dims)]
    return ReferenceContext(
        cell=plan.cell,
        summary=docstring(plan.summary),
        recipe=plan.recipe,
        constants=tuple(_constants(plan)),
        pointwise=pointwise,
        programs=programs,
        exact=exact,
        uses_math=uses_math(dims),
        uses_torch=any("torch." in line for line in lines),
        uses_steps=any("steps." in call for call in calls),
        scopes=tuple(scope.python for scope in scopes_of(plan.options)),
        uses_statistics=bool(plan.records),
        modules=_modules(plan),
    )


_OWN_MODULES = frozenset(
    kind.reference.function.partition(".")[0] for kind in SHIPPED if kind.reference
)


def _modules(plan: ModulePlan) -> tuple[str, ...]:
    """Modules of the reference that extensions bring."""
    kinds = (definition(step.primitive) for step in (*plan.steps, *plan.exact))
    words = {kind.reference.function.partition(".")[0] for kind in kinds if kind.reference}
    return tuple(sorted(words - _OWN_MODULES))


def _exact_text(plan: ModulePlan) -> ExactText:
    printed = program_text(plan, plan.forward)
    given = (each for each in printed.arguments if each.name not in plan.kept)
    tensors = (f"{each.name}: {each.annotation}" for each in given)
    scalars = (f"{each.name}: {each.annotation}" for each in printed.attributes)
    spelled = Conditions()
    steps = (
        _step_text(plan, plan.forward, step, i, spelled) for i, step in enumerate(plan.exact, 1)
    )
    return ExactText(
        parameters=(*tensors, *scalars),
        steps=tuple(filter(None, steps)),
        returned=", ".join(plan.exact_outputs),
        returns=return_annotation("Tensor" for _ in plan.exact_outputs),
    )


def _constants(plan: ModulePlan) -> Iterator[str]:
    """``INPUT = quantized.Quantization(...)`` for every role, and the layout of the copies."""
    for role, spec in plan.quantizations:
        fields: dict[str, object] = {
            "format": spec.format.value,
            "block": tuple(None if extent is Extent.ALL else extent for extent in spec.block),
            "scale_dtype": spec.scale.dtype.value,
            "rule": spec.scale.rule.value,
            "round": spec.scale.round.value,
            "source": spec.scale.source.value,
            "epsilon": spec.scale.epsilon,
            "margin": spec.scale.margin,
            "history": spec.scale.history,
            "tensor_scale": spec.tensor_scale is not None,
            "rounding": spec.rounding.value,
            "hadamard": spec.hadamard.orientation.value if spec.hadamard else None,
        }
        values = ", ".join(f"{name}={_literal(value)}" for name, value in fields.items())
        yield f"{role.value.upper()} = quantized.Quantization({values})"
    if plan.quantizations:
        layout = plan.layout
        yield (
            f"LAYOUT = quantized.Layout(transposed={layout.transposed},"
            f" align={layout.token_alignment}, pitch={layout.pitch})"
        )


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _checked(plan: ModulePlan, program: Program, merged: Program) -> CheckedProgram:
    sized = [check for check in program.checks if check.expr is not None]
    used = {name for check in sized if check.expr for name in symbols(check.expr)}
    conditions = named_conditions(program, lambda names: _asking(plan, program, merged, names))
    scoped = tuple(_scoped(plan, program, merged, conditions))
    steps = tuple(text for each in scoped for text in each.steps)
    words = {word for step in steps for word in re.findall(r"\w+", step.call)}
    returned = _returned_values(plan, program, conditions)
    absent = {argument.buffer for argument in program.arguments if argument.optional}
    needed = words | {*re.findall(r"\w+", returned)}
    return CheckedProgram(
        text=program_text(plan, program),
        type_checks=tuple(_check_line(plan, c) for c in program.checks if c.expr is None),
        check_dims=bind_lines(program, used),
        size_checks=tuple(_check_line(plan, check) for check in sized),
        absent=tuple(
            r.buffer
            for r in program.results
            if r.when
            and _part(program, r.buffer) == r.buffer
            and (program.name == "backward" or _runs_for(program, r))
        ),
        dims=bind_lines(program, words),
        conditions=conditions.lines,
        states=tuple(
            f"{name} = None if {tensor.buffer} is None else {source}"
            if tensor.buffer in absent
            else f"{name} = {source}"
            for tensor in plan.joined_of(program)
            for name, source in state_sources(plan, tensor)
            if name in needed
        ),
        steps=steps,
        scoped=scoped if scopes_of(plan.options) else (),
        returned=returned,
        returns=_reference_returns(program),
    )


def _asking(
    plan: ModulePlan, program: Program, merged: Program, conditions: Conditions
) -> Iterator[str]:
    """Source in which conditions stand, as these spell them."""
    for each in _scoped(plan, program, merged, conditions):
        if each.scopes:
            yield each.condition
        for step in each.steps:
            yield from (step.condition, step.call)
    yield _returned_values(plan, program, conditions)


def _scoped(
    plan: ModulePlan, program: Program, merged: Program, conditions: Conditions
) -> Iterator[ScopedText]:
    """Each step of the plan that the reference does something for, part by part."""
    indices = count(1)
    for i, step in enumerate(merged.steps, 1):
        parts = step.parts or (step,)
        done = tuple(t for p in parts for t in _texts(plan, program, p, next(indices), conditions))
        if done:
            condition, name = conditions.text(step.when), scope_name(plan, merged, step, i)
            told = f'"{name}", runs={condition}' if condition else f'"{name}"'
            scopes = (f"{scope.python}.step({told})" for scope in scopes_of(plan.options))
            yield ScopedText(condition, done, tuple(scopes))


def _texts(
    plan: ModulePlan, program: Program, step: Step, index: int, conditions: Conditions
) -> tuple[StepText, ...]:
    """Everything that the reference does for a step."""
    texts = (
        _step_text(plan, program, step, index, conditions),
        _amax_text(plan, program, step, index, conditions),
        _sum_text(step, index, conditions),
        _update_text(plan, program, step, index, conditions),
    )
    return tuple(filter(None, texts))


def _returned_values(plan: ModulePlan, program: Program, conditions: Conditions) -> str:
    values = [_returned(plan, program, result, conditions) for result in program.results]
    values += [_new_value(plan, program, name) for name in program.mutated]
    alone = len(values) == 1 and program.mutated
    return f"{values[0]}," if alone else ", ".join(values)


def _new_value(plan: ModulePlan, program: Program, name: str) -> str:
    """What an argument that is changed in place holds after the op."""
    tensor = plan.joined_tensor(name)
    if tensor:
        return f"quantized.join_states({', '.join(tensor.parts)})"
    return _stored(plan, name, _part(program, name))


def _reference_returns(program: Program) -> str:
    """A reference is functional: what an op changes in place, its reference returns."""
    optional = program.returns_none
    types = [
        "Tensor | None" if result.when and optional else "Tensor" for result in program.results
    ]
    types += ["Tensor" for _ in program.mutated]
    if len(types) == 1 and program.mutated:  # new values of arguments are always a tuple
        return "tuple[Tensor]"
    return return_annotation(types)


def _writer(program: Program, buffer: str) -> Step | None:
    return next((step for step in program.steps if buffer in step.writes), None)


def _runs_for(program: Program, result: Result) -> bool:
    """Whether the step that gives a result runs exactly where the result is asked for."""
    writer = _writer(program, result.buffer)
    return writer is not None and writer.when == result.when


def _part(program: Program, buffer: str) -> str:
    """A buffer after the last step; part of a copy that the program made by its field."""
    writer = _writer(program, buffer)
    for copy in writer.copies if writer and quantizes(writer) else ():
        for name, part in zip(copy.buffers, ("data", "scale", "amax"), strict=False):
            if name == buffer:
                return f"{_copy_name(copy)}.{part}"
    return buffer


def _stored(plan: ModulePlan, buffer: str, source: str) -> str:
    """A value as its buffer has it: perhaps as bytes, or in another order."""
    copy = next((c for s in plan.steps for c in s.copies if c.scale == buffer), None)
    if copy and plan.token_major(copy):
        return f"quantized.token_major({source}, {copy.groups}, align=LAYOUT.align)"
    as_bytes = plan.buffer(buffer).dtype is DType.UINT8
    return f"{source}.view(torch.uint8)" if as_bytes else source


def _loaded(plan: ModulePlan, buffer: str, dtype: DType) -> str:
    """A buffer as the value that it stands for; inverse of ``_stored``."""
    as_bytes = plan.buffer(buffer).dtype is DType.UINT8
    return f"{buffer}.view(torch.{dtypes.info(dtype).torch})" if as_bytes else buffer


def _returned(plan: ModulePlan, program: Program, result: Result, conditions: Conditions) -> str:
    """A result, or None where its step ran for the sake of others."""
    tensor = plan.joined_tensor(result.buffer)
    if tensor:
        rows = ", ".join(_row(program, name, conditions) for name in tensor.parts)
        absent = absent_source(plan, program, result)
        return f"quantized.join_amaxes({rows}) if {conditions.text(result.when)} else {absent}"
    part = _part(program, result.buffer)
    source = _stored(plan, result.buffer, part)
    own_name = part == result.buffer  # None where no step gives it; a copy has no name then
    always_there = own_name and _runs_for(program, result) and program.returns_none
    if not result.when or always_there:
        return source
    absent = absent_source(plan, program, result)
    return f"{source} if {conditions.text(result.when)} else {absent}"


def _row(program: Program, name: str, conditions: Conditions) -> str:
    """A part of a result, or None where no step wrote it."""
    writer, source = _writer(program, name), _part(program, name)
    when = conditions.text(writer.wanted(name) or writer.when) if writer else ""
    return f"{source} if {when} else None" if when else source


def _check_line(plan: ModulePlan, check: Check) -> str:
    """One call into ``reference/_checks.py``."""
    name = f'"{check.tensor}", {check.tensor}'
    match check.kind:
        case CheckKind.IO_DTYPE:
            return f"checks.io_dtype(CELL, {name})"
        case CheckKind.SAME_DTYPE:
            return f'checks.same_dtype(CELL, {name}, "{check.reference}", {check.reference})'
        case CheckKind.DTYPE:
            return f"checks.dtype(CELL, {name}, torch.{dtypes.info(check.dtype).torch})"
        case CheckKind.DEVICE:
            return f'checks.device(CELL, {name}, "{check.reference}", {check.reference})'
        case CheckKind.RANK:
            exact = "" if check.exact else ", exact=False"
            return f'checks.rank(CELL, {name}, {check.number}, "{check.label}"{exact})'
        case CheckKind.SIZE:
            assert check.expr is not None
            size = to_code(check.expr)
            if check.axis == 0:
                return f'checks.leading(CELL, {name}, {check.number}, {size}, "{check.label}")'
            return f'checks.size(CELL, {name}, {check.axis}, {size}, "{check.label}")'
        case CheckKind.MULTIPLE:
            assert check.expr is not None
            size = to_code(check.expr)
            return f'checks.multiple(CELL, "{check.label}", {size}, {check.number}, "{plan.arch}")'
        case CheckKind.CONTIGUOUS:
            return f"checks.contiguous(CELL, {name})"


def _step_text(
    plan: ModulePlan, program: Program, step: Step, index: int, conditions: Conditions
) -> StepText | None:
    """A step's call; none where a copy is decoded for a product, which reads it as it is."""
    comment, when = step_comment(step, index), conditions.text(step.when)
    if copies_memory(step):
        return StepText(comment, when, step.writes, f"{step.reads[0]}.clone()")
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
        return StepText(comment, when, step.writes, _product_of_copies(plan, program, step))
    if step.pointwise and is_printed(step):
        values = [*_buffers(step.pointwise.operands), *_scalars(step)]
        call = f"{_function_name(step)}({', '.join(values)})"
    else:
        words = _slots(tuple(o for o in step.inputs if o.slot not in ("accumulate", ROW_GROUPS)))
        words += [f"{name}={scalar(value)}" for name, value in step.attributes]
        wide = _is_wide(plan, program, step)
        words += ["dtype=torch.float32"] if wide else []
        call = _accumulated(step, f"{_function(step)}({', '.join(words)})")
    groups = step.input(ROW_GROUPS)
    call = f"steps.within({call}, {groups})" if groups else call
    return StepText(comment, when, step.writes, call)


def _function(step: Step) -> str:
    """The function of the reference that does a step."""
    return definition(step.primitive).function(step.kind, of_copies=bool(step.copies))


def _is_wide(plan: ModulePlan, program: Program, step: Step) -> bool:
    """Whether a product goes to a buffer of the caller's in fp32."""
    return step.out in program.mutated and plan.buffer(step.out).dtype is DType.FLOAT32


def _accumulated(step: Step, call: str) -> str:
    """A product, added to the caller's buffer where the step does so."""
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
    amax = next((o.buffer for o in step.outputs if o.slot == "amax" and o.buffer in results), None)
    if amax is None:
        return None
    when = conditions.text(step.wanted(amax) or step.when)
    return StepText(f"{index}. {amax}", when, (amax,), _group_amax(plan, step))


def _sum_text(step: Step, index: int, conditions: Conditions) -> StepText | None:
    """The sum over rows that a step leaves besides its copies."""
    out = next((o.buffer for o in step.outputs if o.slot == SUMMED), None)
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
    first = plan.buffer(program.arguments[0].buffer)
    words = _read_copies(plan, program, step)
    words += [f"group_sizes={o.buffer}" for o in step.inputs if o.slot == "groups"]
    call = f"{_function(step)}({', '.join(words)}).to({first.name}.dtype)"
    leading = plan.buffer(step.out).shape.leading
    return f"steps.with_leading({call}, {first.name})" if leading else call


def _product_of_copies(plan: ModulePlan, program: Program, step: Step) -> str:
    first = plan.buffer(program.arguments[0].buffer)
    words = _read_copies(plan, program, step)
    words += [step.copies[0].groups] if step.copies[0].groups else []
    wide = _is_wide(plan, program, step)
    words.append("dtype=torch.float32" if wide else f"dtype={first.name}.dtype")
    words += [f"{o.slot}={o.buffer}" for o in step.inputs if o.slot in ("add", "add_scales")]
    call = _accumulated(step, f"{_function(step)}({', '.join(words)})")
    leading = plan.buffer(step.out).shape.leading
    return f"steps.with_leading({call}, {first.name})" if leading else call


def _saved_copy(plan: ModulePlan, copy: Copy) -> str:
    flat = plan.buffer(copy.source).shape.fixed()
    if copy.role is not Role.WEIGHT:
        flat = Shape(None, (product(flat.dims[:-1]), flat.dims[-1]))
    shape = ", ".join(to_code(dim) for dim in flat.dims)
    columnwise = copy.orientation is Orientation.COLUMNWISE
    spec = dict(plan.quantizations)[copy.role]
    data, scale = (
        _loaded(plan, buffer, dtype)
        for buffer, dtype in ((copy.data, spec.format), (copy.scale, spec.scale.dtype))
    )
    if plan.token_major(copy):
        tokens = to_code(flat.dims[0])
        scale = f"quantized.row_major({scale}, {tokens}, {copy.groups}, align=LAYOUT.align)"
    words = [data, scale, copy.role.value.upper(), f"({shape})"]
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


def _function_name(step: Step) -> str:
    """``_act_backward``: chain item and direction; without an item the direction alone."""
    assert step.pointwise is not None
    direction = step.pointwise.kernel.rpartition("_")[2]
    return f"_{step.item}_{direction}" if step.item else f"_math_{direction}"


def _buffers(operands: Iterable[object]) -> list[str]:
    return list(dict.fromkeys(operand.buffer for operand in operands))  # type: ignore[attr-defined]


def _scalars(step: Step) -> list[str]:
    return [scalar(value) for _, value in step.attributes]


def _pointwise_text(plan: ModulePlan, step: Step) -> PointwiseText:
    math = step.pointwise
    assert math is not None
    arguments = _argument_names(math)
    loads = []
    halves: dict[str, dict[bool, str]] = {}  # by whether it is the first
    for operand in math.operands:
        if operand.access in HALVES:
            first = operand.access in FIRSTS
            halves.setdefault(operand.buffer, {})[first] = operand.symbol
        elif operand.access is Access.ROW:
            loads.append(LoadText(operand.symbol, f"steps.per_row({arguments[operand.buffer]})"))
        else:
            loads.append(LoadText(operand.symbol, f"steps.wide({arguments[operand.buffer]})"))
    block = f", {INTERLEAVE}" if math.interleaved else ""
    for buffer, parts in halves.items():
        target = f"{parts.get(True, '_')}, {parts.get(False, '_')}"
        loads.insert(0, LoadText(target, f"steps.halves({arguments[buffer]}{block})"))
    own_type = next(o.buffer for o in math.operands if o.dtype is DType.IO)
    # Before a symbol takes the buffer's name.
    loads.insert(0, LoadText("io", f"{arguments[own_type]}.dtype"))
    results = _result_sources(math)
    return PointwiseText(
        name=_function_name(step),
        formula=docstring(math.formula),
        differentiated=is_derived(step),
        arguments=tuple(arguments.values()),
        scalars=math.attributes,
        loads=tuple(loads),
        body=math.torch,
        returns=", ".join(results.values()),
        annotation="Tensor"
        if len(results) == 1
        else f"tuple[{', '.join(['Tensor'] * len(results))}]",
    )


def _argument_names(math: Pointwise) -> dict[str, str]:
    """What a function calls each buffer: another name where an op calls something else so."""
    others = {(each.symbol, each.buffer) for each in math.operands}
    scalars = {*math.attributes, *(each.symbol for each in math.results)}
    taken = {
        buffer: scalars | {symbol for symbol, other in others if other != buffer}
        for buffer in _buffers(math.operands)
    }
    return {buffer: f"{buffer}_" if buffer in words else buffer for buffer, words in taken.items()}


def _result_sources(math: Pointwise) -> dict[str, str]:
    """Source per result buffer: rounded to its type, halves joined, rows summed."""
    sources: dict[str, str] = {}
    halves: dict[str, list[str]] = {}
    block = f", {INTERLEAVE}" if math.interleaved else ""
    for result in math.results:
        if result.access in HALVES:
            halves.setdefault(result.buffer, []).append(result.symbol)
            sources[result.buffer] = f"steps.join({', '.join(halves[result.buffer])}, io{block})"
        elif result.access is Access.ROW:
            sources[result.buffer] = f"steps.row_sum({result.symbol})"
        else:
            sources[result.buffer] = f"{result.symbol}.to(io)"
    return sources
