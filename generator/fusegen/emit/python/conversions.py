"""Context of a module that only quantises: its functions, its straight-through class, its tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ...ir import dtypes
from ...ir.names import plain
from ...ir.plan import Conversion, Form, ModulePlan
from ...ir.quantization import AmaxSource, QuantizationSpec, Rounding
from ..text.escape import docstring
from .choice import ChoiceText
from .states import RecordText, StateText, declarations, record_texts, state_texts
from .words import ProgramText, program_text

_FORMS = {Form.DENSE: "", Form.STACK: "stack", Form.GROUPED: "in groups"}


@dataclass(frozen=True, slots=True)
class ConversionText:
    """An op of ``quantize``.

    Attributes:
        role, form: what it is for.
        program: its name.
        fields: of ``Quantized``, in the order of its results; ``amax`` is of both orientations.
    """

    role: str
    form: str
    program: str
    fields: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class QuantizeContext:
    """Everything ``quantize__<recipe>.py`` and its tests state.

    Attributes:
        first: what the straight-through class is called with.
        shape: of that.
        programs: of every op, the straight-through forward first.
        conversions: the ops of ``quantize``.
        roles: that the recipe names.
        formats: what each role and form is stored in, line by line.
        kept_scales, stochastic: roles that take a scale, or random numbers, from the caller.
        states: of the straight-through class.
        tensors: declarations of these.
        records: statistics of each copy.
        record_tensors: those of the states that they lie in.
        keeps_state: whether it has others, which state dicts have, too.
        forward_arguments: what its op is called with.
        forward_flags: the flag that lets its state move on, where it has state.
        apply_parameters: of its autograd function.
        wanted: positions in it of the flag and of x, as the twin for transforms states them.
        no_gradients: what that returns after the gradient of x.
        tolerance: of a tensor against what its copies stand for.
        description: what ``describe()`` returns, line by line.
        choice: the bundles that calls may go to, in a fat bundle.
    """

    cell: str
    summary: str
    recipe: str
    arch: str
    status: str
    reason: str
    class_name: str
    first: str
    shape: str
    programs: tuple[ProgramText, ...]
    conversions: tuple[ConversionText, ...]
    roles: tuple[str, ...]
    formats: tuple[str, ...]
    kept_scales: tuple[str, ...]
    stochastic: tuple[str, ...]
    states: tuple[StateText, ...]
    tensors: tuple[str, ...]
    records: tuple[RecordText, ...]
    record_tensors: tuple[str, ...]
    keeps_state: bool
    forward_arguments: tuple[str, ...]
    forward_flags: tuple[str, ...]
    apply_parameters: tuple[str, ...]
    wanted: str
    no_gradients: str
    tolerance: float
    description: tuple[str, ...]
    choice: ChoiceText | None = None


def quantize_context(plan: ModulePlan, description: tuple[str, ...]) -> QuantizeContext:
    """What ``quantize__<recipe>.py`` and its tests state.

    Args:
        plan: of the cell.
        description: what ``describe()`` returns, line by line.
    """
    forward = program_text(plan, plan.forward)
    flags = plan.forward.flags
    arguments = tuple(argument.name for argument in forward.arguments)
    states = state_texts(plan)
    return QuantizeContext(
        cell=plan.cell,
        summary=docstring(plan.summary),
        recipe=plan.recipe,
        arch=plan.arch,
        status=plan.status.value,
        reason=plan.reason,
        class_name=plan.class_name,
        first=plan.inputs[0],
        shape=str(plan.buffer(plan.inputs[0]).shape),
        programs=tuple(program_text(view, program) for view, program in plan.ops),
        conversions=tuple(_conversion_text(each) for each in plan.conversions),
        roles=tuple(role.value for role, _ in plan.quantizations),
        formats=tuple(_format_lines(plan)),
        kept_scales=tuple(_roles(plan, lambda s: s.scale.source is AmaxSource.HISTORY)),
        stochastic=tuple(_roles(plan, lambda s: s.rounding is Rounding.STOCHASTIC)),
        states=states,
        tensors=tuple(line for _, line in declarations(states)),
        records=tuple(record_texts(plan)),
        record_tensors=plan.record_tensors,
        keeps_state=len(plan.states) > len(plan.records),
        forward_arguments=(*arguments, *flags),
        forward_flags=flags,
        apply_parameters=(
            *(f"{argument.name}: {argument.annotation}" for argument in forward.arguments),
            *(f"{flag}: bool" for flag in flags),
        ),
        wanted=f"(({len(arguments)}, 0),)" if flags else "()",
        no_gradients="".join(", None" for _ in (*arguments[1:], *flags)),
        tolerance=plan.tolerance.end_to_end,
        description=tuple(map(docstring, description)),
    )


def _roles(plan: ModulePlan, holds: Callable[[QuantizationSpec], bool]) -> Iterator[str]:
    return (role.value for role, spec in plan.quantizations if holds(spec))


def _conversion_text(conversion: Conversion) -> ConversionText:
    names = ("data", "scale_inv", "amax")
    fields = [
        f"{copy.orientation.value}_{name}"
        for copy in conversion.copies
        for name, _ in zip(names, copy.buffers, strict=False)
    ]
    return ConversionText(
        role=conversion.role.value,
        form=conversion.form.value,
        program=conversion.program.name,
        fields=(*fields, *(["amax"] if conversion.amax else [])),
    )


def _format_lines(plan: ModulePlan) -> Iterator[str]:
    """``input in groups, rowwise: float8_e4m3fn [T, K], scale_inv float32 [T]``, copy by copy."""
    for conversion in plan.conversions:
        buffers = {buffer.name: buffer for buffer in conversion.buffers}
        words = " ".join(filter(None, (conversion.role.value, _FORMS[conversion.form])))
        for copy in conversion.copies:
            data, scale = (
                f"{dtypes.info(part.dtype).torch} {plain(str(part.shape))}"
                for part in (buffers[copy.data], buffers[copy.scale])
            )
            yield f"{words}, {copy.orientation.value}: {data}, scale_inv {scale}"
