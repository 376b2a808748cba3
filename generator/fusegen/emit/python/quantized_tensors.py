"""Texts of a module whose first input may come as copies, or whose output is given so."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from ...ir import dtypes
from ...ir.dtypes import DType
from ...ir.names import plain
from ...ir.naming import UPDATE_STATE, need
from ...ir.plan import ModulePlan
from ...ir.quantization import Orientation, Role
from ...ir.segments import Group
from ...ir.shapes import symbols
from ...ir.step import Copy
from .conditions import any_of
from .directions import groups_of
from .states import StateText
from .words import (
    ProgramText,
    TensorText,
    WidenedText,
    bind_lines,
    given_inputs,
    given_tensors,
    program_text,
    shape_source,
    tensor_text,
)

_FIELDS = ("data", "scale_inv", "amax")
"""What ``QuantizedTensor`` calls the buffers of a copy, behind its orientation."""

_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class CopyText:
    """A buffer of a copy.

    Attributes:
        name: of the buffer.
        field: of ``QuantizedTensor``.
        source: of it in what is given.
        columnwise: whether it is of the columnwise copy.
        given_back: source of what ``quantize_input`` gives, which was perhaps not asked for it.
    """

    name: str
    field: str
    source: str
    columnwise: bool
    given_back: str


@dataclass(frozen=True, slots=True)
class QuantizedInputText:
    """The function that makes the copies, and how the module's takes them.

    Attributes:
        program: its op.
        format: of the copies, for people and to tell them apart.
        tensors: what it quantises, and what else it reads.
        given_tensors: conditions that these are tensors.
        given_inputs: what is said of one that is none.
        states: what it changes.
        copies: what it gives.
        columnwise: condition under which a call needs the columnwise copy, in brackets where it is
            not one word; empty where it has none.
        keyword_only: whether the function has keywords besides its tensors.
        widened: what the module takes in narrower types, too.
        wanted: what a call of the module's function calls the op with.
        asked: what ``quantize_input`` does.
        asks: the op's flag that asks for the columnwise copy; empty where it has none.
        updates: its flag that lets states move on; empty where it has none.
        process_groups: that its function takes.
        one_scale: what is the same on all ranks, and has to be in copies that come.
        groups: sizes of the groups of rows; empty where there are none.
    """

    program: ProgramText
    format: str
    tensors: tuple[TensorText, ...]
    given_tensors: tuple[str, ...]
    given_inputs: tuple[str, ...]
    states: tuple[StateText, ...]
    copies: tuple[CopyText, ...]
    columnwise: str
    keyword_only: bool
    widened: tuple[WidenedText, ...]
    wanted: tuple[str, ...]
    asked: tuple[str, ...]
    asks: str
    updates: str
    process_groups: tuple[Group, ...]
    one_scale: tuple[str, ...]
    groups: str


@dataclass(frozen=True, slots=True)
class QuantizedOutputText:
    """How a module gives copies in the place of its output.

    Attributes:
        output: name of that.
        format: of the copies, for people and to tell them apart.
        copies: what the forward's op gives.
        parameters: of the function that makes what stands in the output's place.
        arguments: what it is called with.
        dims: lines that read sizes.
        shape: tuple source of the output's.
        first: the argument whose device and type it has.
        groups: sizes of the groups of rows; empty where there are none.
    """

    output: str
    format: str
    copies: tuple[CopyText, ...]
    parameters: tuple[str, ...]
    arguments: tuple[str, ...]
    dims: tuple[str, ...]
    shape: str
    first: str
    groups: str


def quantized_output_text(plan: ModulePlan) -> QuantizedOutputText | None:
    if not plan.output_copies:
        return None
    (output,) = plan.outputs
    forward = plan.forward
    copies = plan.copies_in(plan.output_copies)
    shape = plan.buffer(output).shape
    used = {name for dim in shape.dims for name in symbols(dim)}
    first = plan.own_type_argument(forward)
    dims = bind_lines(forward, used)
    source = shape_source(shape, plan.buffer(forward.arguments[0].buffer))
    words = {*_WORD.findall(" ".join((*dims, source))), first}
    read = tuple(tensor_text(plan, a) for a in forward.arguments if a.buffer in words)
    return QuantizedOutputText(
        output=output,
        format=_format(plan, copies),
        copies=tuple(text for copy in copies for text in _copy_texts(plan, copy)),
        parameters=tuple(f"{each.name}: {each.annotation}" for each in read),
        arguments=tuple(each.name for each in read),
        dims=dims,
        shape=source,
        first=first,
        groups=copies[0].groups or "",
    )


def quantized_input_text(
    plan: ModulePlan, states: tuple[StateText, ...], widened: tuple[WidenedText, ...]
) -> QuantizedInputText | None:
    program = plan.quantize_input
    if program is None:
        return None
    printed = program_text(plan, program)
    copies = plan.copies_in(plan.input_copies)
    asks = next((f for f in program.flags if plain(f) == Orientation.COLUMNWISE.value), "")
    absent = asks if asks and not program.returns_none else ""
    texts = tuple(text for copy in copies for text in _copy_texts(plan, copy, absent))
    columnwise = tuple(text.name for text in texts if text.columnwise)
    needed = {flag for r in plan.saved if r.buffer in columnwise for flag in r.when}
    every = tuple(need(leaf) for leaf in plan.differentiated)
    condition = any_of(tuple(flag for flag in every if flag in needed) or every)
    spelled = {plain(flag): flag for flag in program.flags}
    wanted = {Orientation.COLUMNWISE.value: condition, UPDATE_STATE: any_of(every)}
    groups = groups_of(plan.direction(program.name))
    names = tuple(group.name for group in groups)
    first, *others = (argument.buffer for argument in program.arguments)
    tensors = (f"{first}.detach()", *others)
    unchanged = tuple(each.name for each in printed.unchanged)
    changed = {*program.mutated}
    return QuantizedInputText(
        program=printed,
        format=_format(plan, copies),
        tensors=printed.unchanged,
        given_tensors=given_tensors(plan, unchanged),
        given_inputs=given_inputs(plan, unchanged),
        states=tuple(state for state in states if state.argument in changed),
        copies=texts,
        columnwise=(f"({condition})" if " " in condition else condition) if columnwise else "",
        keyword_only=bool(changed or program.flags or groups),
        widened=tuple(each for each in widened if each.name in others),
        wanted=(*tensors, *(wanted[flag] for flag in spelled), *names),
        asked=(*tensors, *program.flags, *names),
        asks=asks,
        updates=spelled.get(UPDATE_STATE, ""),
        process_groups=groups,
        one_scale=tuple(copy.scale for copy in copies[:1] if groups),
        groups=copies[0].groups or "",
    )


def _copy_texts(plan: ModulePlan, copy: Copy, asks: str = "") -> tuple[CopyText, ...]:
    """Buffers of a copy; ``asks`` is the flag without which columnwise ones are empty tensors."""
    found = []
    columnwise = copy.orientation is Orientation.COLUMNWISE
    for name, part in zip(copy.buffers, _FIELDS, strict=False):
        field = f"{copy.orientation.value}_{part}"
        dtype = plan.buffer(name).dtype
        source = f"given.{field}"
        if part == "scale_inv" and dtype in (DType.E8M0, DType.UINT8):
            source = f"_quantized_tensors.typed({source}, torch.{dtypes.info(dtype).torch})"
        asked = f" if {asks} else None" if asks and columnwise else ""
        found.append(CopyText(name, field, source, columnwise, f"{name}{asked}"))
    return tuple(found)


def _format(plan: ModulePlan, copies: tuple[Copy, ...]) -> str:
    """Recipe and form in words, and a digest of what they mean: recipes of one name may differ."""
    spec = dict(plan.quantizations)[Role.INPUT]
    grouped = copies[0].groups is not None
    stated = repr((spec, plan.layout, grouped)).encode()
    form = "rows in groups" if grouped else "rows"
    return f"{plan.recipe} input, {form}, {hashlib.sha256(stated).hexdigest()[:12]}"
