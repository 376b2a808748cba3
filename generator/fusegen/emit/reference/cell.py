"""Context of a cell's reference."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import count

from ...ir import dtypes
from ...ir.buffers import JoinedTensor
from ...ir.plan import ModulePlan
from ...ir.program import Check, CheckKind, Program
from ...ir.quantization import Extent
from ...ir.shapes import to_code
from ...ir.step import Result
from ...options import scopes_of
from ...steps import definition, is_printed
from ..python.conditions import Conditions, named_conditions
from ..python.states import state_sources
from ..python.words import (
    ProgramText,
    absent_source,
    bind_lines,
    pieces,
    program_text,
    return_annotation,
    scope_name,
    uses_math,
)
from ..text.escape import docstring
from .calls import StepText, operand_of, part_of, step_text, stored, texts_of, writer_of
from .pointwise import PointwiseText, pointwise_text


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
class CheckedProgram:
    """An op of the reference with its argument checks.

    Attributes:
        text: signature.
        type_checks: calls that need no sizes.
        check_dims: sizes that the other checks compare with.
        size_checks: those calls.
        parameters: its tensors with their types; checkers take those of flags for tensors.
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
    parameters: tuple[str, ...]
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
    """The forward without quantisation: parameters, sizes, steps, results and their annotation."""

    parameters: tuple[str, ...]
    dims: tuple[str, ...]
    steps: tuple[StepText, ...]
    returned: str
    returns: str


@dataclass(frozen=True, slots=True)
class DecodedText:
    """What copies of an output stand for: parameters, the copy put together, and its groups."""

    parameters: tuple[str, ...]
    first: str
    operand: str
    groups: str


@dataclass(frozen=True, slots=True)
class ReferenceContext:
    """Everything ``reference/<cell>.py`` states.

    Attributes:
        constants: how each role is quantised; empty where nothing is.
        modules: that functions of steps stand in, besides those that the template names.
        programs: every op's.
        exact: the forward without quantisation, where it differs.
        decoded: what the copies stand for that the module gives in the place of its output.
        scopes: modules of what each step runs in.
    """

    cell: str
    summary: str
    recipe: str
    constants: tuple[str, ...]
    pointwise: tuple[PointwiseText, ...]
    programs: tuple[CheckedProgram, ...]
    exact: ExactText | None
    decoded: DecodedText | None
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
    texts = (pointwise_text(plan, step) for step in plan.steps if is_printed(step))
    pointwise = tuple(dict.fromkeys(texts))  # a step that both directions run is one function
    programs = tuple(_checked(view, each, merged[each.function]) for view, each in plan.ops)
    lines = [line for text in pointwise for line in text.body]
    lines += [line for program in programs for line in program.type_checks]
    exact = _exact_text(plan) if plan.exact_apart else None
    calls = [step.call for program in programs for step in program.steps]
    calls += [step.call for step in (exact.steps if exact else ())]
    calls += [load.source for text in pointwise for load in text.loads]
    dims = [line for program in programs for line in (*program.check_dims, *program.dims)]
    dims += exact.dims if exact else ()
    return ReferenceContext(
        cell=plan.cell,
        summary=docstring(plan.summary),
        recipe=plan.recipe,
        constants=tuple(_constants(plan)),
        pointwise=pointwise,
        programs=programs,
        exact=exact,
        decoded=_decoded_text(plan),
        uses_math=uses_math(dims) or bool(plan.output_copies),
        uses_torch=any("torch." in line for line in lines),
        uses_steps=any("steps." in call for call in calls)
        or any(p.absent or "steps." in "".join((*p.parameters, *p.states)) for p in programs),
        scopes=tuple(scope.python for scope in scopes_of(plan.options)),
        uses_statistics=bool(plan.records),
        modules=_modules(plan),
    )


def _decoded_text(plan: ModulePlan) -> DecodedText | None:
    if not plan.output_copies:
        return None
    rowwise, *_ = plan.copies_in(plan.output_copies)
    (output,) = plan.outputs
    names = (output, *rowwise.buffers, *([rowwise.groups] if rowwise.groups else []))
    sizes = (f"math.prod({output}.shape[:-1])", f"{output}.shape[-1]")
    return DecodedText(
        parameters=tuple(f"{name}: Tensor" for name in names),
        first=output,
        operand=operand_of(plan, rowwise, sizes),
        groups=f", group_sizes={rowwise.groups}" if rowwise.groups else "",
    )


_NAMED_OTHERWISE = frozenset(("quantized", "statistics", "steps"))
"""Modules that more than functions of steps stand in: the template has their imports."""


def _modules(plan: ModulePlan) -> tuple[str, ...]:
    """Modules of the reference, such as those of extensions, that the plan's steps call."""
    kinds = (definition(step.primitive) for step in (*plan.steps, *plan.exact))
    words = {kind.reference.function.partition(".")[0] for kind in kinds if kind.reference}
    return tuple(sorted(words - _NAMED_OTHERWISE))


def _exact_text(plan: ModulePlan) -> ExactText:
    printed = program_text(plan, plan.forward)
    given = (
        each for each in printed.arguments if each.name not in (*plan.kept, *plan.input_copies)
    )
    tensors = (f"{each.name}: {each.annotation}" for each in given)
    scalars = (f"{each.name}: {each.annotation}" for each in printed.attributes)
    spelled = Conditions()
    read = {*plan.exact_outputs, *(name for step in plan.exact for name in step.reads)}
    texts = (
        step_text(plan, plan.forward, step, i, spelled) for i, step in enumerate(plan.exact, 1)
    )
    steps = tuple(_without_unread(text, read) for text in texts if text)
    return ExactText(
        parameters=(*tensors, *scalars),
        dims=bind_lines(plan.forward, _words(*(step.call for step in steps))),
        steps=steps,
        returned=", ".join(plan.exact_outputs),
        returns=return_annotation("Tensor" for _ in plan.exact_outputs),
    )


def _without_unread(text: StepText, read: Collection[str]) -> StepText:
    """The same without names for what only a backward reads, such as statistics of a norm."""
    return replace(text, targets=tuple(name if name in read else "_" for name in text.targets))


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
            f" align={layout.token_alignment}, pitch={layout.pitch}"
            f"{', atoms=True' if layout.scale_atoms else ''})"
        )


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _checked(plan: ModulePlan, program: Program, merged: Program) -> CheckedProgram:
    used = {name for check in program.checks for name in check.symbols}
    conditions = named_conditions(program, lambda names: _asking(plan, program, merged, names))
    scoped = tuple(_scoped(plan, program, merged, conditions))
    steps = tuple(text for each in scoped for text in each.steps)
    returned = _returned_values(plan, program, conditions)
    calls = (*(step.call for step in steps), returned)
    states = tuple(_states(plan, program, {*_words(*calls)}))
    words = {*_words(*calls, *states)}
    text = program_text(plan, program)
    return CheckedProgram(
        text=text,
        type_checks=tuple(_check_line(plan, c) for c in program.checks if c.expr is None),
        check_dims=bind_lines(program, used),
        size_checks=tuple(_check_line(plan, c) for c in program.checks if c.expr is not None),
        parameters=tuple(
            f"{each.name}: {'steps.IfAsked' if argument.when else each.annotation}"
            for each, argument in zip(text.arguments, program.arguments, strict=True)
        ),
        absent=_absent(program, steps),
        dims=bind_lines(program, words),
        conditions=conditions.lines,
        states=states,
        steps=steps,
        scoped=scoped if scopes_of(plan.options) else (),
        returned=returned,
        returns=_reference_returns(program),
    )


def _absent(program: Program, steps: tuple[StepText, ...]) -> tuple[str, ...]:
    """What flags decide whether a step gives: results first, then what other steps read."""
    results = [
        each.buffer
        for each in program.results
        if each.when
        and part_of(program, each.buffer) == each.buffer
        and (program.name == "backward" or _runs_for(program, each))
    ]
    there = {argument.buffer for argument in program.arguments} | {*results}
    for step in steps:
        new = [name for name in step.targets if name not in there]
        results += new if step.condition else []
        there.update(new)
    return tuple(results)


def _words(*lines: str) -> Iterator[str]:
    return (word for line in lines for word in re.findall(r"\w+", line))


def _states(plan: ModulePlan, program: Program, used: set[str]) -> Iterator[str]:
    """What source names of an argument's parts, each out of its tensor."""
    absent = {argument.buffer for argument in program.arguments if argument.optional}
    for tensor in plan.joined_of(program):
        for name, source in state_sources(plan, tensor):
            if name in used:
                missing = f"steps.ABSENT if {tensor.buffer} is None else "
                yield f"{name} = {missing if tensor.buffer in absent else ''}{source}"


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
        done = tuple(
            t for p in parts for t in texts_of(plan, program, p, next(indices), conditions)
        )
        if done:
            condition, name = conditions.text(step.when), scope_name(plan, merged, step, i)
            told = " ".join(f'"{piece}"' for piece in pieces(name, " "))
            told += f", runs={condition}" if condition else ""
            scopes = (f"{scope.python}.step({told})" for scope in scopes_of(plan.options))
            yield ScopedText(condition, done, tuple(scopes))


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
    return stored(plan, name, part_of(program, name))


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


def _runs_for(program: Program, result: Result) -> bool:
    """Whether the step that gives a result runs exactly where the result is asked for."""
    writer = writer_of(program, result.buffer)
    return writer is not None and writer.when == result.when


def _returned(plan: ModulePlan, program: Program, result: Result, conditions: Conditions) -> str:
    """A result, or None where its step ran for the sake of others."""
    tensor = plan.joined_tensor(result.buffer)
    if tensor:
        absent = absent_source(plan, program, result)
        joined = _joined(plan, program, tensor, conditions)
        return f"{joined} if {conditions.text(result.when)} else {absent}"
    part = part_of(program, result.buffer)
    source = stored(plan, result.buffer, part)
    own_name = part == result.buffer  # None where no step gives it; a copy has no name then
    always_there = own_name and _runs_for(program, result) and program.returns_none
    if not result.when or always_there:
        return source
    absent = absent_source(plan, program, result)
    return f"{source} if {conditions.text(result.when)} else {absent}"


def _joined(
    plan: ModulePlan, program: Program, tensor: JoinedTensor, conditions: Conditions
) -> str:
    """Parts of a result in their tensor."""
    if not plan.in_bytes(tensor):
        rows = ", ".join(_row(plan, program, name, conditions) for name in tensor.parts)
        return f"quantized.join_amaxes({rows})"
    places = (
        f"({to_code(begin)}, {_row(plan, program, name, conditions)})"
        for name, begin in plan.places(tensor)
    )
    (count,) = plan.buffer(tensor.buffer).shape.dims
    return f"quantized.join_bytes({to_code(count)}, {', '.join(places)})"


def _row(plan: ModulePlan, program: Program, name: str, conditions: Conditions) -> str:
    """A part of a result, or None where no step wrote it."""
    writer, source = writer_of(program, name), stored(plan, name, part_of(program, name))
    when = conditions.text(writer.wanted(name) or writer.when) if writer else ""
    return f"{source} if {when} else None" if when else source


def _check_line(plan: ModulePlan, check: Check) -> str:
    """One call into ``reference/_checks.py``."""
    tensor, reference = check.names
    name = f'"{tensor}", {check.tensor}'
    match check.kind:
        case CheckKind.IO_DTYPE:
            return f"checks.io_dtype(CELL, {name})"
        case CheckKind.SAME_DTYPE:
            return f'checks.same_dtype(CELL, {name}, "{reference}", {check.reference})'
        case CheckKind.DTYPE:
            return f"checks.dtype(CELL, {name}, torch.{dtypes.info(check.dtype).torch})"
        case CheckKind.DEVICE:
            return f'checks.device(CELL, {name}, "{reference}", {check.reference})'
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
            of = f"max({to_code(check.divisor)}, 1)" if check.divisor else check.number
            return f'checks.multiple(CELL, "{check.label}", {size}, {of}, "{plan.arch}")'
        case CheckKind.LEAST:
            assert check.expr is not None
            return f'checks.least(CELL, "{check.label}", {to_code(check.expr)}, {check.number})'
        case CheckKind.CONTIGUOUS:
            return f"checks.contiguous(CELL, {name})"
