"""Context of a cell's Python module."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...ir import dtypes
from ...ir.buffers import Attribute
from ...ir.dtypes import DType
from ...ir.names import mark
from ...ir.naming import QUANTIZE_INPUT
from ...ir.plan import ModulePlan
from ...ir.program import Argument
from ...ir.segments import OF_PARTS, TENSOR_GROUP, Group
from ...ir.shapes import Expr, Sym, substitute, symbols, to_python
from ...ir.step import AttributeRef
from ...ir.words import Init
from ...steps import definition
from ..text.escape import docstring
from .autograd import AutogradText, autograd_text
from .choice import ChoiceText
from .directions import DirectionText, direction_texts, groups_of
from .flops import flops_texts
from .main_grads import MainGradText, main_grad_call, main_grad_texts
from .quantized_tensors import (
    QuantizedInputText,
    QuantizedOutputText,
    quantized_input_text,
    quantized_output_text,
)
from .refresh import RefreshText, refresh_text
from .states import (
    RecordText,
    StateText,
    called_states,
    declarations,
    record_texts,
    state_texts,
)
from .wgrad import WgradText, wgrad_text
from .words import (
    AttributeText,
    ProgramText,
    TensorText,
    WidenedText,
    attribute_text,
    given_inputs,
    given_tensors,
    pieces,
    program_text,
    return_annotation,
    tensor_text,
    uses_math,
)


@dataclass(frozen=True, slots=True)
class ParameterText:
    """A parameter of the class.

    Attributes:
        path: in the state dict.
        holder: submodule it hangs on; empty for the module itself.
        name: within its holder.
        argument: of the function.
        shape: tuple source.
        fixed_dtype: its type for people, where that is not the constructor's.
        optional: only with ``bias=True``.
        init: source of the in-place fill, without the tensor.
        quantized: the class has its copies alone.
        groups: Python source of how many parameters stand in its place; empty where it is one.
        own_shape: tuple source of the shape of each of them.
    """

    path: str
    holder: str
    name: str
    argument: str
    shape: str
    fixed_dtype: str
    optional: bool
    init: str
    quantized: bool
    groups: str
    own_shape: str

    @property
    def dtype(self) -> str:
        """Source of its type."""
        return f"torch.{self.fixed_dtype}" if self.fixed_dtype else "dtype"


@dataclass(frozen=True, slots=True)
class HolderText:
    """A submodule that has parameters and state.

    Attributes:
        name: of the attribute.
        class_name: of its class.
        bases: of that.
        tensors: declarations of what it has, ``weight: nn.Parameter``.
    """

    name: str
    class_name: str
    bases: str
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KeywordText:
    """A size keyword of the constructor, the dimension it gives, and whether a rank has a part."""

    name: str
    symbol: str
    of_rank: bool = False


@dataclass(frozen=True, slots=True)
class GroupText:
    """A process group of the module, and whether each of its ranks has a part of the weights."""

    name: str
    summary: str
    has_parts: bool


@dataclass(frozen=True, slots=True)
class DrawnText:
    """An input that the module draws where it is not given, and how many numbers that are."""

    name: str
    count: str


@dataclass(frozen=True, slots=True)
class CellContext:
    """Everything ``<cell>.py`` states.

    Attributes:
        autograd: the class by which autograd calls the ops.
        inputs: what the module is called with.
        called_with: parameters of its forward.
        widened: those of its inputs that a call may have in a narrower type.
        drawn: those of its inputs that it draws where they are not given.
        bounded: scalars that have a range.
        untouched: the input that it returns as it is outside training; empty where there is none.
        arguments: what the function is called with.
        given_tensors: tests that inputs are tensors.
        given_inputs: the inputs by name.
        states: tensors kept between calls.
        called_states: those of them that the function takes.
        transient: paths of those that no state dict has.
        records: statistics of each copy.
        record_tensors: those of the states that they lie in.
        quantized_input: the function that makes copies of the first input, where calls may have
            these in its place.
        quantized_output: how copies are given in the place of the output.
        refresh: the function that quantises the weights, where they are kept so.
        wgrad: the function that gives gradients of weights later, where they are delayed.
        keyword_only: whether the function has keywords besides its tensors.
        process_groups: that collectives are over.
        called_groups: those of them that the function takes.
        main_grads: gradients that go to buffers of the caller's.
        first: the argument that gives device and dtype.
        first_is_own_type: whether that dtype is one of the module's own.
        without_memory: names of arguments that stand for quantised copies.
        own_type: others of the module's own type, which autocast decides where it is on; not the
            first input where calls may have its copies.
        programs: every op.
        directions: functions of those directions that are more than one op.
        differentiable: arguments that can have a gradient.
        about_outputs: what the function returns, for people.
        returned: names of it.
        returns: return type of the function.
        take_outputs: ``y =`` or ``y, *_ =``, where the op also returns what it saves.
        base: class that the module's class derives from.
        tensors: declarations of parameters and state that the class has itself.
        holders: submodules.
        parts: names of those whose tensors a call reads.
        called_parts: sources of these.
        uses_callables: whether the module's file names ``Callable``: of wgrad, or of main_grad.
        uses_parts: whether the module's file names ``_parts``.
        joins_groups: whether parameters of groups stand in the place of one.
        uses_nn: whether it names ``nn``.
        lookups: what a call looks up first, since it needs it more than once.
        call_arguments: how the module calls the function.
        keeps_tensors: whether it has parameters or states.
        has_constructor: whether it has these, or keywords.
        gives_or_takes_copies: whether it gives its output, or takes its first input, quantised.
        uses_placeholders: whether a tensor without memory stands for another one.
        representation: body of the f-string of ``extra_repr``, cut into pieces.
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
    function_name: str
    autograd: AutogradText
    inputs: tuple[TensorText, ...]
    called_with: tuple[str, ...]
    widened: tuple[WidenedText, ...]
    drawn: tuple[DrawnText, ...]
    untouched: str
    arguments: tuple[TensorText, ...]
    given_tensors: tuple[str, ...]
    given_inputs: tuple[str, ...]
    attributes: tuple[AttributeText, ...]
    bounded: tuple[AttributeText, ...]
    states: tuple[StateText, ...]
    called_states: tuple[StateText, ...]
    transient: tuple[str, ...]
    records: tuple[RecordText, ...]
    record_tensors: tuple[str, ...]
    quantized_input: QuantizedInputText | None
    quantized_output: QuantizedOutputText | None
    refresh: RefreshText | None
    wgrad: WgradText | None
    keyword_only: bool
    process_groups: tuple[GroupText, ...]
    called_groups: tuple[Group, ...]
    main_grads: tuple[MainGradText, ...]
    differentiable: tuple[TensorText, ...]
    first: str
    first_is_own_type: bool
    own_type: tuple[TensorText, ...]
    without_memory: tuple[str, ...]
    programs: tuple[ProgramText, ...]
    directions: tuple[DirectionText, ...]
    forward: ProgramText
    backward: ProgramText
    about_outputs: tuple[str, ...]
    returned: str
    returns: str
    take_outputs: str
    parameters: tuple[ParameterText, ...]
    base: str
    tensors: tuple[str, ...]
    holders: tuple[HolderText, ...]
    parts: tuple[str, ...]
    called_parts: tuple[str, ...]
    uses_callables: bool
    uses_parts: bool
    joins_groups: bool
    uses_nn: bool
    keywords: tuple[KeywordText, ...]
    lookups: tuple[str, ...]
    call_arguments: tuple[str, ...]
    representation: tuple[str, ...]
    has_bias: bool
    keeps_tensors: bool
    has_constructor: bool
    uses_placeholders: bool
    gives_or_takes_copies: bool
    uses_math: bool
    description: tuple[str, ...]
    choice: ChoiceText | None = None


def _parameter_texts(plan: ModulePlan) -> tuple[ParameterText, ...]:
    words = {dim.symbol: Sym(dim.keyword) for dim in plan.dims}
    texts = []
    for parameter in plan.parameters:
        buffer = plan.buffer(parameter.buffer)
        holder, _, name = parameter.path.rpartition(".")
        fixed = "" if buffer.dtype is DType.IO else dtypes.info(buffer.dtype).torch
        dims = [to_python(dim) for dim in buffer.shape.substitute(words).dims]
        bound = f"1 / math.sqrt({_fan_in(plan, parameter.fan_in)})"
        fill = {
            Init.ZEROS: "zero_()",
            Init.ONES: "fill_(1.0)",
            Init.KAIMING_UNIFORM: f"uniform_(-{bound}, {bound})",
        }[parameter.init]
        texts.append(
            ParameterText(
                path=parameter.path,
                holder=holder,
                name=name,
                argument=parameter.buffer,
                shape=", ".join(dims),
                fixed_dtype=fixed,
                optional=buffer.optional,
                init=fill,
                quantized=parameter.quantized,
                groups=dims[0] if parameter.per_group else "",
                own_shape=", ".join(dims[1:]),
            )
        )
    return tuple(texts)


def _declared(
    parameters: tuple[ParameterText, ...], states: tuple[StateText, ...]
) -> dict[str, tuple[str, ...]]:
    """What each holder has, declared for type checkers: `nn.Module` knows of attributes no type."""
    found: dict[str, list[str]] = {}
    for parameter in parameters:
        lines = found.setdefault(parameter.holder, [])
        if parameter.groups:  # attributes of names that only the constructor knows
            continue
        kind = "nn.Parameter | None" if parameter.optional else "nn.Parameter"
        lines.append(f"{parameter.name}: {kind}")
    for holder, line in declarations(states):
        found.setdefault(holder, []).append(line)
    return {holder: tuple(lines) for holder, lines in found.items()}


def _class_of(holder: str) -> str:
    """``_NormPart`` of ``norm``, another one for every name."""
    words = re.sub("(^|_)([a-z])", lambda match: match[2].upper(), holder)
    return f"_{words}Part"


def _fan_in(plan: ModulePlan, size: Expr) -> str:
    """Inputs per output, those of all ranks."""
    text = _on_self(plan, size)
    if not symbols(size) & {*plan.split}:
        return text
    return f"{text} * _asked.count(self.{TENSOR_GROUP.name})"


def _on_self(plan: ModulePlan, size: Expr) -> str:
    """A size in terms of the module's attributes."""
    words = {dim.symbol: Sym(f"self.{dim.keyword}") for dim in plan.dims}
    return to_python(substitute(size, words))


def cell_context(plan: ModulePlan, description: tuple[str, ...]) -> CellContext:
    """What ``<cell>.py`` states.

    Args:
        plan: of the cell.
        description: what ``describe()`` returns, line by line.
    """
    by_name = {a.buffer: tensor_text(plan, a) for a in plan.forward.arguments}
    main_grads = () if plan.wgrad else main_grad_texts(plan)
    flops = flops_texts(plan)
    programs = tuple(
        replace(program_text(plan, program), flops=flops.get(program.function))
        for each in plan.directions
        for program in each.programs
        if program.steps
    )
    parameters, states = _parameter_texts(plan), state_texts(plan)
    called, parts = called_states(plan), _called_parts(plan)
    called_groups = groups_of(plan.direction("forward"), plan.direction("backward"))
    lookups, call_arguments = _call(plan, main_grads, parts)
    autograd = autograd_text(plan, tuple(by_name.values()))
    base = _base(plan, states)
    grouped = {parameter.holder for parameter in parameters if parameter.groups}
    tensors = _declared(parameters, states)
    holders = tuple(
        HolderText(h, _class_of(h), _with_groups("_parts.Part", joins=h in grouped), own)
        for h, own in tensors.items()
        if h
    )
    keywords = tuple(
        KeywordText(d.keyword, d.symbol, d.symbol in plan.split) for d in plan.dims if d.constructor
    )
    has_bias = any(plan.buffer(parameter.buffer).optional for parameter in plan.parameters)
    representation = _representation(plan, keywords, has_bias)
    without_memory = tuple(parameter.buffer for parameter in plan.quantized)
    copied = plan.inputs[:1] if plan.input_copies else ()
    rest = ("*_",) if autograd.saves_results else ()
    outputs = tuple(tensor_text(plan, Argument(n, False)) for n in plan.outputs)
    return CellContext(
        cell=plan.cell,
        summary=docstring(plan.summary),
        recipe=plan.recipe,
        arch=plan.arch,
        status=plan.status.value,
        reason=plan.reason,
        class_name=plan.class_name,
        function_name=plan.module,
        autograd=autograd,
        inputs=tuple(by_name[name] for name in plan.inputs),
        called_with=tuple(_called_with(plan, name) for name in plan.inputs),
        widened=widened_texts(plan),
        drawn=tuple(DrawnText(name, to_python(_elements(plan, name))) for name in plan.drawn),
        untouched=_untouched(plan),
        arguments=tuple(_or_copies(plan, by_name[name]) for name in plan.called_with),
        given_tensors=given_tensors(plan, plan.inputs),
        given_inputs=given_inputs(plan, plan.inputs),
        attributes=tuple(attribute_text(a) for a in plan.attributes),
        bounded=tuple(attribute_text(a) for a in plan.attributes if a.range),
        states=states,
        called_states=tuple(state for state in states if state.argument in called),
        transient=tuple(state.path for state in states if state.transient),
        records=tuple(record_texts(plan)),
        record_tensors=plan.record_tensors,
        quantized_input=quantized_input_text(plan, states, widened_texts(plan)),
        quantized_output=quantized_output_text(plan),
        refresh=refresh_text(plan, states),
        wgrad=wgrad_text(plan),
        keyword_only=bool(called or plan.attributes or main_grads or plan.wgrad or called_groups),
        main_grads=main_grads,
        process_groups=tuple(
            GroupText(each.name, each.summary, each in OF_PARTS) for each in plan.process_groups
        ),
        called_groups=called_groups,
        take_outputs=", ".join((*plan.results, *rest)) + " =",
        differentiable=tuple(a for a in by_name.values() if a.flag),
        first=plan.inputs[0],
        first_is_own_type=plan.buffer(plan.inputs[0]).dtype is DType.IO,
        own_type=tuple(
            by_name[name]
            for name in plan.called_with
            if plan.buffer(name).dtype is DType.IO and name not in (*without_memory, *copied)
        ),
        without_memory=without_memory,
        programs=programs,
        directions=direction_texts(plan),
        forward=program_text(plan, plan.forward),
        backward=program_text(plan, plan.backward),
        about_outputs=_about_outputs(plan, outputs),
        returned=", ".join(dict.fromkeys((*plan.outputs, *plan.results))),
        returns="QuantizedTensor"
        if plan.output_copies
        else return_annotation(each.annotation for each in outputs),
        parameters=parameters,
        base=base,
        tensors=tensors.get("", ()),
        holders=holders,
        parts=tuple(parts.values()),
        called_parts=tuple(f'self._modules["{holder}"]' for holder in parts),
        uses_callables=bool(plan.wgrad or main_grads),
        uses_parts=bool(holders or any(state.parts for state in states) or "_parts." in base),
        joins_groups=bool(grouped),
        uses_nn=bool(parts) or "nn." in base or not all(p.groups for p in parameters),
        keywords=keywords,
        lookups=lookups,
        call_arguments=call_arguments,
        representation=representation,
        has_bias=has_bias,
        keeps_tensors=bool(parameters or states),
        has_constructor=bool(parameters or states or representation),
        gives_or_takes_copies=bool(plan.input_copies or plan.output_copies),
        uses_placeholders=bool(plan.input_copies or plan.output_copies or plan.quantized),
        uses_math=uses_math(
            (
                *(line for p in programs for line in p.fake_dims),
                *(line for each in flops.values() for line in each.lines),
                *(p.init for p in parameters),
            )
        ),
        description=tuple(map(docstring, description)),
    )


def _or_copies(plan: ModulePlan, argument: TensorText) -> TensorText:
    """An argument of the function, of which calls may have copies."""
    if not plan.input_copies or argument.name != plan.inputs[0]:
        return argument
    about = f"{argument.about}; or its copies, of `{QUANTIZE_INPUT}`"
    return replace(argument, annotation=f"{argument.annotation} | QuantizedTensor", about=about)


def _called_with(plan: ModulePlan, name: str) -> str:
    """An input as the class's forward takes it."""
    copies = " | QuantizedTensor" if plan.input_copies and name == plan.inputs[0] else ""
    absent = " | None = None" if name in (*plan.drawn, *plan.optional_inputs) else ""
    return f"{name}: Tensor{copies}{absent}"


def widened_texts(plan: ModulePlan) -> tuple[WidenedText, ...]:
    """Sizes of groups, numbers of classes, and what is fp32 whatever the module's own type is."""
    found = ((name, plan.buffer(name).dtype) for name in plan.inputs if name not in plan.drawn)
    return tuple(
        WidenedText(name, dtypes.info(dtype).torch)
        for name, dtype in found
        if dtype in (DType.INT64, DType.FLOAT32)
    )


def _about_outputs(plan: ModulePlan, outputs: tuple[TensorText, ...]) -> tuple[str, ...]:
    """Shape and type of each output, and what becomes of rows past the last group."""
    trailing = f"Rows past sum({plan.groups}) are zero." if plan.groups else ""
    if len(outputs) == 1:
        return ("  ".join(filter(None, (f"{outputs[0].about}.", trailing))),)
    return tuple(filter(None, (*(f"{each.name}: {each.about}." for each in outputs), trailing)))


def _base(plan: ModulePlan, states: tuple[StateText, ...]) -> str:
    if plan.quantized:
        return "_quantized_weights.QuantizedWeights"
    own = any(not state.holder for state in states)
    joins = any(parameter.per_group for parameter in plan.parameters)
    return _with_groups("_parts.KeepsBuffers" if own else "nn.Module", joins=joins)


def _with_groups(base: str, *, joins: bool) -> str:
    """The bases of a class; what joins groups does so around what else its base does."""
    return f"_per_group.PerGroup, {base}" if joins else base


def _called_parts(plan: ModulePlan) -> dict[str, str]:
    """Submodules whose tensors a call reads, and what it calls them: never what an input is."""
    called = called_states(plan)
    paths = [parameter.path for parameter in plan.parameters]
    paths += [state.path for state in plan.states if state.buffer in called]  # none in a tensor
    holders = dict.fromkeys(path.rpartition(".")[0] for path in paths)
    return {h: h if mark(h) in plan.inputs else mark(h) for h in holders if h}


def _call(
    plan: ModulePlan, main_grads: tuple[MainGradText, ...], parts: Mapping[str, str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What a module looks up before it calls the function, and the call's arguments."""

    def reached(path: str, kind: str = "parameter") -> str:
        holder, _, name = path.rpartition(".")
        look = "_per_group.joined" if path in joined else f"_library.{kind}"
        return f'{look}({parts.get(holder, "self")}, "{name}")'

    paths = {parameter.buffer: parameter.path for parameter in plan.parameters}
    joined = [parameter.path for parameter in plan.parameters if parameter.per_group]
    holders = dict.fromkeys(parts.get(path.rpartition(".")[0], "self") for path in joined)
    held = {parameter.buffer for parameter in plan.quantized}
    copied = _copied(plan)
    found = dict.fromkeys((*(m.argument for m in main_grads), *copied))
    lookups = [f"{name} = {reached(paths[name])}" for name in found]
    if copied:
        pairs = ", ".join(f'("{paths[name]}", {name})' for name in copied)
        lookups.append(f'_library.check_copied("{plan.cell}", self._copied, {pairs})')
    called = called_states(plan)
    paths_of_states = {state.buffer: state.path for state in plan.states}
    states = (f"{name}={reached(paths_of_states.get(name, name), 'buffer')}" for name in called)
    trains = bool(_untouched(plan))  # in evaluation there is no call
    scalars = [f"{each.name}={_scalar_of(each, trains=trains)}" for each in plan.attributes]
    groups = groups_of(plan.direction("forward"), plan.direction("backward"))
    scalars += [f"{group.name}=self.{group.name}" for group in groups]
    scalars += ["wgrad_queue=self.wgrad_queue"] if plan.wgrad else []
    for m in main_grads:
        buffer = main_grad_call(plan, "_library", m.argument, m.path, m.argument)
        scalars.append(f"{m.name}={buffer}")
        scalars.append(f"{m.dummy}=_library.wants_dummy_grad({m.argument})")
        if m.overwrite:
            scalars.append(f"{m.overwrite}=_library.overwrites_main_grad({m.argument})")

    def tensor(name: str) -> str:
        if name == plan.groups and joined:
            return f'_per_group.checked("{plan.cell}", {name}, {", ".join(holders)})'
        if name not in paths:
            return name
        source = name if name in found else reached(paths[name])
        if name in held:
            source = f'_quantized_weights.stand_in("{plan.cell}", "{paths[name]}", {source})'
        if name in plan.delayed:
            source = f'_delayed.own("{plan.cell}", "{paths[name]}", {source})'
        return source

    return tuple(lookups), (*map(tensor, plan.called_with), *states, *scalars)


def _scalar_of(attribute: Attribute, *, trains: bool) -> str:
    """What a module calls its function with: in evaluation perhaps another value than its own.

    Args:
        attribute: of the module.
        trains: whether the call is one of training.
    """
    own = f"self.{attribute.name}"
    if trains or attribute.in_eval is None:
        return own
    return f"{own} if self.training else {attribute.in_eval!r}"


def _elements(plan: ModulePlan, name: str) -> Expr:
    return plan.buffer(name).shape.elements


def _untouched(plan: ModulePlan) -> str:
    """The input that the forward in evaluation gives back bit for bit; empty where it does not."""
    if len(plan.forward.steps) != 1:
        return ""
    (step,) = plan.forward.steps
    neutral = definition(step.primitive).neutral
    in_eval = {attribute.name: attribute.in_eval for attribute in plan.attributes}
    told = {
        name: in_eval[value.name] if isinstance(value, AttributeRef) else value
        for name, value in step.attributes
    }
    if not neutral or any(told[name] != value for name, value in neutral.items()):
        return ""
    return step.reads[0]


def _copied(plan: ModulePlan) -> tuple[str, ...]:
    """Weights that stand next to their copies."""
    if plan.refresh is None or plan.quantized:
        return ()
    return tuple(a.buffer for a in plan.refresh.arguments if not a.mutated)


def _representation(
    plan: ModulePlan, keywords: tuple[KeywordText, ...], has_bias: bool
) -> tuple[str, ...]:
    parts = [f"{k.name}={{self.{k.name}}}" for k in keywords]
    parts += [f"{attribute.name}={{self.{attribute.name}}}" for attribute in plan.attributes]
    if has_bias:
        bias = next(p for p in plan.parameters if plan.buffer(p.buffer).optional)
        path = f"{bias.path}0" if bias.per_group else bias.path
        parts.append(f"bias={{self.{path} is not None}}")
    return pieces(", ".join(parts), width=80) if parts else ()
