"""Context of a cell's Python module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..model import dtypes
from ..model.dtypes import DType
from ..model.plan import (
    Argument,
    ModulePlan,
    Reduction,
    Result,
    State,
    StateFill,
    Step,
)
from ..model.primitives import Primitive
from ..model.shapes import Expr, Sym, substitute, to_code, to_python
from ..model.specs import Init, Orientation
from ..naming import gradient, main_grad, need
from .python import (
    AttributeText,
    ProgramText,
    TensorText,
    attribute_text,
    condition,
    pieces,
    program_text,
    tensor_text,
    uses_math,
)


@dataclass(frozen=True, slots=True)
class SavedText:
    """A tensor kept for the backward: name and source of what ``save_for_backward`` takes."""

    name: str
    source: str


@dataclass(frozen=True, slots=True)
class ParameterText:
    """A parameter of the class.

    Attributes:
        path: in the state dict.
        holder: submodule it hangs on; empty for the module itself.
        name: within its holder.
        argument: of the function.
        shape: tuple source.
        optional: only with ``bias=True``.
        init: source of the in-place fill, without the tensor.
        quantized: the class has its copies alone.
    """

    path: str
    holder: str
    name: str
    argument: str
    shape: str
    optional: bool
    init: str
    quantized: bool


@dataclass(frozen=True, slots=True)
class StateText:
    """A buffer of the class that an op changes in place.

    Attributes:
        path, holder, name: as of a parameter.
        argument: of the function.
        about: shape and type, for a docstring.
        changed_by: what changes it, for people.
        extents: its sizes, for people.
        shape: tuple source.
        dtype: attribute of torch.
        init: source of the in-place fill, without the tensor; empty where a refresh fills it.
        transient: whether no state dict needs it.
    """

    path: str
    holder: str
    name: str
    argument: str
    about: str
    changed_by: str
    extents: str
    shape: str
    dtype: str
    init: str
    transient: bool

    @property
    def copy(self) -> bool:
        """Whether it is part of a copy of a weight."""
        return not self.init


@dataclass(frozen=True, slots=True)
class HeldText:
    """A weight that the class has as quantised copies alone; every field is Python source.

    Attributes:
        argument: of the function that refreshes.
        path: of what stands in its place.
        rowwise: paths of the buffers of its rowwise copy.
        copies: paths of all its buffers, by argument.
        state: paths and first values of what else its quantisation changes, by argument.
        records: paths of the statistics of its copies, by argument.
    """

    argument: str
    path: str
    rowwise: str
    copies: str
    state: str
    records: str


@dataclass(frozen=True, slots=True)
class RefreshText:
    """The function that quantises the weights into their copies.

    Attributes:
        program: its op.
        weights: what it quantises.
        states: what it changes.
        caches: those of them that are copies of weights.
        op_arguments: what the op is called with.
        call_arguments: how the class calls it.
        held: the weights, where the class has these copies alone.
    """

    program: ProgramText
    weights: tuple[TensorText, ...]
    states: tuple[StateText, ...]
    caches: tuple[str, ...]
    op_arguments: tuple[str, ...]
    call_arguments: tuple[str, ...]
    held: tuple[HeldText, ...]


@dataclass(frozen=True, slots=True)
class RecordText:
    """Statistics of a copy: the copy's name, and the buffer's path in the class."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class KeywordText:
    """A size keyword of the constructor, and the dimension it gives."""

    name: str
    symbol: str


@dataclass(frozen=True, slots=True)
class ReductionText:
    """State that moves on by an amax of all ranks: names, and sources for the backward.

    Attributes:
        amax: source of what the op found; None where it did not quantise.
        history, scale: source of the state.
        role: constant of the reference.
        grouped: whether a group whose amax is 0 keeps its history; Python source.
    """

    amax: str
    history: str
    scale: str
    role: str
    grouped: str


@dataclass(frozen=True, slots=True)
class MainGradText:
    """A parameter whose gradient goes to a buffer of the caller's.

    Attributes:
        argument: of the function.
        path: source of the parameter in the class.
        name: of the buffer's argument.
        dummy: of the argument that asks for zeros as the parameter's gradient.
        flag: that asks for the gradient.
        about: of the buffer, for a docstring.
    """

    argument: str
    path: str
    name: str
    dummy: str
    flag: str
    about: str


@dataclass(frozen=True, slots=True)
class WgradText:
    """The function that computes delayed gradients of weights, and what a backward keeps for it.

    Attributes:
        program: its op.
        weights: whose gradients.
        paths: of these in the class.
        main_grads: buffers that these go to, if any.
        unpack: targets of all that the forward left.
        kept: sources in the backward of the op's operands.
        asked: sources in the backward of the flags.
        operands: names of what was kept.
        needs: target of the flags.
        op_arguments: what the op is called with.
        gradients: pairs of a weight and its gradient, or of a weight and its flag.
        slots: constructors of the room for each operand.
        call_arguments: how the class calls it.
    """

    program: ProgramText
    weights: tuple[TensorText, ...]
    paths: tuple[str, ...]
    main_grads: tuple[MainGradText, ...]
    unpack: str
    kept: tuple[str, ...]
    asked: tuple[str, ...]
    operands: tuple[str, ...]
    needs: str
    op_arguments: tuple[str, ...]
    gradients: tuple[str, ...]
    slots: tuple[str, ...]
    call_arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CellContext:
    """Everything ``<cell>.py`` states.

    Attributes:
        inputs: what the module is called with.
        arguments: what the function is called with.
        states: tensors kept between calls.
        called_states: those of them that the function takes.
        transient: paths of those that no state dict has.
        records: those of them that are statistics.
        refresh: the function that quantises the weights, where they are kept so.
        wgrad: the function that gives gradients of weights later, where they are delayed.
        keyword_only: whether the function has keywords besides its tensors.
        carried: state of the backward; it is neither saved nor returned.
        held: copies of weights that the backward reads; they may not change before it.
        forward_reductions, backward_reductions: state that moves on after an op.
        main_grads: gradients that go to buffers of the caller's.
        take_forward: ``y, *_, x_amax =``: what the function takes of a call with gradients.
        first: the argument that gives device and dtype.
        without_memory: names of arguments that stand for quantised copies.
        own_type: others of the module's own type, which autocast decides where it is on.
        programs: every op.
        differentiable: arguments that can have a gradient.
        take_output: ``y =`` or ``y, *_ =``, where the op also returns what it saves.
        op_arguments: what the forward op is called with.
        apply_arguments: of ``apply``: those, then what only the backward changes.
        parameters_of_apply: the parameters of ``forward`` for them.
        unpack_inputs: targets of ``setup_context``'s inputs; ``_`` for what it does not read.
        kept_results: results of the forward op besides the output.
        saved_results: those of them that are kept for the backward.
        saved: everything kept for the backward.
        saving_needs: flags that decide what is kept, with the argument's position.
        left: source of all that the forward left.
        backward_saved: arguments of the backward op that the forward left.
        backward_rest: its arguments after these.
        gradients: what backward returns, one per argument of ``forward``.
        no_gradients: what it returns where nothing flows back.
        call_arguments: how the module calls the function.
        representation: body of the f-string of ``extra_repr``, cut into pieces.
        trailing_rows: what becomes of rows past the last group.
        description: what ``describe()`` returns, line by line.
    """

    cell: str
    summary: str
    recipe: str
    arch: str
    status: str
    reason: str
    class_name: str
    function_name: str
    autograd_name: str
    inputs: tuple[TensorText, ...]
    arguments: tuple[TensorText, ...]
    attributes: tuple[AttributeText, ...]
    states: tuple[StateText, ...]
    called_states: tuple[StateText, ...]
    transient: tuple[str, ...]
    records: tuple[RecordText, ...]
    refresh: RefreshText | None
    wgrad: WgradText | None
    keyword_only: bool
    carried: tuple[str, ...]
    held: tuple[str, ...]
    forward_reductions: tuple[ReductionText, ...]
    backward_reductions: tuple[ReductionText, ...]
    take_forward: str
    main_grads: tuple[MainGradText, ...]
    parameters_of_apply: tuple[str, ...]
    differentiable: tuple[TensorText, ...]
    first: str
    own_type: tuple[TensorText, ...]
    without_memory: tuple[str, ...]
    programs: tuple[ProgramText, ...]
    forward: ProgramText
    backward: ProgramText
    output: TensorText
    take_output: str
    op_arguments: tuple[str, ...]
    apply_arguments: tuple[str, ...]
    unpack_inputs: str
    saved_results: tuple[str, ...]
    kept_results: tuple[str, ...]
    saved: tuple[SavedText, ...]
    forward_flags: tuple[str, ...]
    saving_needs: tuple[tuple[str, int], ...]
    left: str
    backward_saved: tuple[str, ...]
    backward_rest: tuple[str, ...]
    gradients: tuple[str, ...]
    no_gradients: str
    parameters: tuple[ParameterText, ...]
    holders: tuple[str, ...]
    keywords: tuple[KeywordText, ...]
    call_arguments: tuple[str, ...]
    representation: tuple[str, ...]
    trailing_rows: str
    has_bias: bool
    uses_math: bool
    description: tuple[str, ...]


def _saved_text(plan: ModulePlan, result: Result) -> SavedText:
    given = {argument.buffer for argument in plan.forward.arguments}
    test = condition(result.when)
    source = result.buffer
    if test and (result.buffer in given or not plan.forward.returns_none):
        source = f"{result.buffer} if {test} else None"
    return SavedText(result.buffer, source)


def _parameter_texts(plan: ModulePlan) -> tuple[ParameterText, ...]:
    words = {dim.symbol: Sym(dim.keyword) for dim in plan.dims}
    texts = []
    for parameter in plan.parameters:
        buffer = plan.buffer(parameter.buffer)
        holder, _, name = parameter.path.rpartition(".")
        dims = [to_python(dim) for dim in buffer.shape.substitute(words).dims]
        bound = f"1 / math.sqrt({_on_self(plan, parameter.fan_in)})"
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
                optional=buffer.optional,
                init=fill,
                quantized=parameter.quantized,
            )
        )
    return tuple(texts)


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
    gradients = plan.gradients
    arguments = tuple(tensor_text(plan, a, gradients) for a in plan.forward.arguments)
    by_name = {argument.name: argument for argument in arguments}
    given = tuple(by_name[name] for name in plan.arguments)
    scalars = tuple(attribute.name for attribute in plan.attributes)
    reductions = plan.reductions_of(plan.forward), plan.reductions_of(plan.backward)
    own = {state.buffer for state in plan.states}
    read = tuple(a.buffer for a in plan.backward.arguments if a.buffer in own)
    histories = tuple(reduction.history for reduction in reductions[1])
    backward_states = (*histories, *read)
    held = tuple(name for name in read if name in plan.caches)
    carried = tuple(name for name in backward_states if name not in by_name)
    groups = ("amax_group",) if reductions[1] else ()
    queue = ("wgrad_queue",) if plan.wgrad else ()
    main_grads = () if plan.wgrad else _main_grad_texts(plan)
    dummies = tuple(each.dummy for each in main_grads)
    op_arguments = (*by_name, *plan.forward.flags, *scalars)
    buffers = tuple(each.name for each in main_grads)
    apply_arguments = (*op_arguments, *carried, *groups, *queue, *buffers, *dummies)
    needs = tuple((a.flag, index) for index, a in enumerate(arguments) if a.flag)
    conditional = {f for r in plan.saved if r.buffer in by_name for f in r.when}
    programs = tuple(program_text(plan, program) for program in plan.programs)
    parameters = _parameter_texts(plan)
    states = state_texts(plan)
    called = called_states(plan)
    shared = {reduction.amax for reduction in plan.reductions}
    kept_results = tuple(r.buffer for r in plan.forward.results[len(plan.outputs) :])
    saved_results = tuple(name for name in kept_results if name not in shared)
    holders = [*(p.holder for p in parameters), *(state.holder for state in states)]
    keywords = tuple(KeywordText(d.keyword, d.symbol) for d in plan.dims if d.constructor)
    has_bias = any(argument.optional for argument in arguments)
    flags = plan.forward.flags if not plan.forward.returns_none else ()
    carried_over = {
        *(flag for result in plan.saved for flag in result.when if flag in flags),
        *(result.buffer for result in plan.saved),
        *scalars,
        *backward_states,
        *groups,
        *queue,
        *buffers,
        *dummies,
    }
    held_alone = tuple(parameter.buffer for parameter in plan.quantized)
    left = f'_library.unchanged("{plan.cell}", ctx)' if held else "ctx.saved_tensors"
    left_names = (*(result.buffer for result in plan.saved), *held)
    return CellContext(
        cell=plan.cell,
        summary=plan.summary,
        recipe=plan.recipe,
        arch=plan.arch,
        status=plan.status.value,
        reason=plan.reason,
        class_name=plan.class_name,
        function_name=plan.module,
        autograd_name=f"_{plan.class_name}",
        inputs=tuple(by_name[name] for name in plan.inputs),
        arguments=given,
        attributes=tuple(attribute_text(a) for a in plan.attributes),
        states=states,
        called_states=tuple(state for state in states if state.argument in called),
        transient=tuple(state.path for state in states if state.transient),
        records=tuple(_record_text(plan, name) for name in plan.records),
        refresh=_refresh_text(plan, states),
        wgrad=_wgrad_text(plan, left_names, dict(needs)),
        keyword_only=bool(called or plan.attributes or main_grads or queue),
        carried=(
            *(name for name in backward_states if name not in held),
            *groups,
            *queue,
            *buffers,
            *dummies,
        ),
        held=held,
        main_grads=main_grads,
        forward_reductions=tuple(_reduction_text(plan, each, each.amax) for each in reductions[0]),
        backward_reductions=tuple(
            _reduction_text(plan, each, _amax_source(plan, each.amax, dict(needs)), "ctx.")
            for each in reductions[1]
        ),
        take_forward=", ".join(
            ("y", *(["*_"] if kept_results else []), *(each.amax for each in reductions[0]))
        )
        + " =",
        parameters_of_apply=(
            *(f"{a.name}: {a.annotation}" for a in arguments),
            *(f"{flag}: bool" for flag in plan.forward.flags),
            *(f"{a.name}: {attribute_text(a).annotation}" for a in plan.attributes),
            *(f"{name}: Tensor" for name in carried),
            *(f"{name}: ProcessGroup | None" for name in groups),
            *(f"{name}: WgradQueue" for name in queue),
            *(f"{name}: Tensor | None" for name in buffers),
            *(f"{name}: bool" for name in dummies),
        ),
        differentiable=tuple(a for a in arguments if a.flag),
        first=plan.inputs[0],
        own_type=tuple(
            by_name[name]
            for name in plan.arguments
            if plan.buffer(name).dtype is DType.IO and name not in held_alone
        ),
        without_memory=held_alone,
        programs=programs,
        forward=programs[0],
        backward=programs[1],
        output=tensor_text(plan, Argument(plan.outputs[0], False), gradients),
        take_output="y, *_ =" if kept_results else "y =",
        op_arguments=op_arguments,
        apply_arguments=apply_arguments,
        unpack_inputs=", ".join(name if name in carried_over else "_" for name in apply_arguments)
        + ("," if len(apply_arguments) == 1 else ""),
        saved_results=saved_results,
        kept_results=kept_results,
        saved=tuple(_saved_text(plan, result) for result in plan.saved),
        forward_flags=plan.forward.flags,
        saving_needs=tuple(p for p in needs if p[0] in conditional and p[0] not in flags),
        left=left,
        backward_saved=tuple(
            name for name in left_names if name in {a.buffer for a in plan.backward.arguments}
        )
        if plan.wgrad
        else (f"*{left}",),
        backward_rest=(
            *(f"ctx.{name}" for name in (*read, *buffers) if name not in held),
            *(f"needs[{dict(needs)[flag]}]" for flag in plan.backward.flags),
            *(f"ctx.{name}" for name in scalars),
        ),
        gradients=(
            *(_gradient_source(plan, a, dict(needs)) for a in arguments),
            *("None" for _ in apply_arguments[len(arguments) :]),
        ),
        no_gradients=", ".join(["None"] * len(apply_arguments)),
        parameters=parameters,
        holders=tuple(dict.fromkeys(holder for holder in holders if holder)),
        keywords=keywords,
        call_arguments=_call_arguments(plan),
        representation=_representation(plan, keywords, has_bias),
        trailing_rows=(
            "  Rows past sum(split_sizes) are zero." if "split_sizes" in plan.inputs else ""
        ),
        has_bias=has_bias,
        uses_math=uses_math(
            (*(line for p in programs for line in p.fake_dims), *(p.init for p in parameters))
        ),
        description=description,
    )


def _record_text(plan: ModulePlan, name: str) -> RecordText:
    copy = next(step.copies[0] for step in plan.steps if name in step.mutates)
    return RecordText(copy.data, plan.state(name).path)


def called_states(plan: ModulePlan) -> tuple[str, ...]:
    """State that the function takes, for its forward, its backward or what follows them."""
    taken = {a.buffer for p in (plan.forward, plan.backward) for a in p.arguments}
    taken |= {name for each in plan.reductions for name in (each.history, each.scale)}
    return tuple(state.buffer for state in plan.states if state.buffer in taken)


def _refresh_text(plan: ModulePlan, states: tuple[StateText, ...]) -> RefreshText | None:
    if plan.refresh is None:
        return None
    printed = program_text(plan, plan.refresh)
    paths = {parameter.buffer: f"self.{parameter.path}" for parameter in plan.parameters}
    by_name = {state.argument: state for state in states}
    changed = tuple(by_name[name] for name in plan.refresh.mutated)
    caches = tuple(state for state in changed if state.copy)
    held = {parameter.buffer for parameter in plan.quantized}
    return RefreshText(
        program=printed,
        weights=printed.unchanged,
        states=changed,
        caches=tuple(state.argument for state in caches),
        op_arguments=(*(argument.name for argument in printed.arguments), *printed.flags),
        call_arguments=(
            *(
                _given(plan, name, paths[name]) if name in held else paths[name]
                for name in (weight.name for weight in printed.unchanged)
            ),
            *(f"{state.argument}=self.{state.path}" for state in changed),
            *(f"{flag}={flag}" for flag in printed.flags),
        ),
        held=tuple(_held_texts(plan, plan.refresh.steps)) if held else (),
    )


def _given(plan: ModulePlan, weight: str, path: str) -> str:
    """A weight that the class is given, since it has none."""
    return f'_quantized_weights.given("{plan.cell}", "{weight}", {weight}, {path})'


def _held_texts(plan: ModulePlan, steps: tuple[Step, ...]) -> Iterator[HeldText]:
    for step in steps:
        if step.primitive is Primitive.QUANTIZE:
            yield _held_text(plan, step, steps)


def _held_text(plan: ModulePlan, step: Step, steps: tuple[Step, ...]) -> HeldText:
    """The weight that a step of the refresh quantises."""
    weight = step.reads[0]
    path = next(parameter.path for parameter in plan.quantized if parameter.buffer == weight)
    rowwise = next(copy for copy in step.copies if copy.orientation is Orientation.ROWWISE)
    copies = [name for copy in step.copies for name in copy.buffers]
    first = {StateFill.ZEROS: 0.0, StateFill.ONES: 1.0}
    kept = {name: plan.state(name) for name in step.mutates if name not in copies}
    return HeldText(
        argument=repr(weight),
        path=repr(path),
        rowwise=repr(tuple(plan.state(name).path for name in rowwise.buffers)),
        copies=repr({name: plan.state(name).path for name in copies}),
        state=repr({name: (state.path, first.get(state.fill)) for name, state in kept.items()}),
        records=repr(
            {
                name: plan.state(name).path
                for each in steps
                for name in each.mutates
                if name in plan.records and each.copies[0].source == weight
            }
        ),
    )


def _wgrad_text(plan: ModulePlan, left: tuple[str, ...], needs: dict[str, int]) -> WgradText | None:
    if plan.wgrad is None:
        return None
    printed = program_text(plan, plan.wgrad)
    paths = {parameter.buffer: f"self.{parameter.path}" for parameter in plan.parameters}
    flags = tuple(need(leaf) for leaf in plan.delayed)
    operands = tuple(
        a for a in plan.wgrad.arguments if not a.mutated and a.buffer not in plan.delayed
    )
    main_grads = _main_grad_texts(plan)
    first = operands[0].buffer
    read = {name: step.when for step in plan.wgrad.steps for name in step.reads}

    def kept(argument: Argument) -> str:
        name = argument.buffer
        when = read.get(name, ()) if name == first else argument.when
        test = " or ".join(f"needs[{needs[flag]}]" for flag in when)
        if name == first and name not in read:
            return f"_delayed.shape_of({name})"
        absent = f"_delayed.shape_of({name})" if name == first else "None"
        return f"{name} if {test} else {absent}" if test else name

    called = tuple(
        f"{a.buffer} if {condition(a.when)} else None" if a.when else a.buffer
        for a in plan.wgrad.arguments
    )
    given = flags if main_grads else tuple(map(gradient, plan.delayed))
    gradients = dict(zip(plan.delayed, given, strict=True))
    return WgradText(
        program=printed,
        weights=tuple(
            tensor_text(plan, Argument(leaf, False), plan.gradients) for leaf in plan.delayed
        ),
        paths=tuple(paths[leaf].removeprefix("self.") for leaf in plan.delayed),
        main_grads=main_grads,
        unpack=f"({', '.join(left)},)",
        kept=tuple(kept(argument) for argument in operands),
        asked=tuple(f"needs[{needs[flag]}]" for flag in flags),
        operands=tuple(argument.buffer for argument in operands),
        needs=f"({', '.join(flags)},)" if printed.flags or main_grads else "_",
        op_arguments=(*called, *printed.flags),
        gradients=tuple(f"({leaf}, {value})" for leaf, value in gradients.items()),
        slots=tuple(_slot(plan, name.buffer, name.buffer in read) for name in operands),
        call_arguments=(
            *(paths[leaf] for leaf in plan.delayed),
            "wgrad_queue=self.wgrad_queue",
            *(
                f"{m.name}={_main_grad_call(plan, '_delayed', m.argument, m.path)}"
                for m in main_grads
            ),
        ),
    )


def _slot(plan: ModulePlan, name: str, read: bool) -> str:
    """Room for a tensor with the most tokens."""
    words = {d.symbol: Sym(d.keyword if d.constructor else "max_tokens") for d in plan.dims}
    buffer = plan.buffer(name)
    dims = [to_code(substitute(dim, words)) for dim in buffer.shape.flat]
    shape = f"({', '.join(dims)})" if len(dims) > 1 else f"({dims[0]},)"
    dtype = None if buffer.dtype is DType.IO else f"torch.{dtypes.info(buffer.dtype).torch}"
    return f"_delayed.Slot({shape}, {dtype}{'' if read else ', stored=False'})"


def _dummy(parameter: str) -> str:
    return f"{parameter}_dummy_grad"


def _main_grad_texts(plan: ModulePlan) -> tuple[MainGradText, ...]:
    return tuple(_main_grad_text(plan, leaf, name) for leaf, name in plan.main_grads)


def _main_grad_text(plan: ModulePlan, leaf: str, name: str) -> MainGradText:
    paths = {parameter.buffer: parameter.path for parameter in plan.parameters}
    buffer = plan.buffer(name)
    dtype = "bfloat16 or float16" if buffer.dtype is DType.IO else "float32"
    about = f"{buffer.shape} {dtype}"
    return MainGradText(leaf, paths[leaf], name, _dummy(leaf), need(leaf), about)


def _main_grad_call(plan: ModulePlan, helper: str, leaf: str, path: str) -> str:
    """The buffer of a module's parameter, of the type that it is to have."""
    narrow = plan.buffer(main_grad(leaf)).dtype is DType.IO
    dtype = f"self.{path}.dtype" if narrow else "torch.float32"
    return f'{helper}.main_grad("{plan.cell}", "{path}", self.{path}, {dtype})'


def _reduction_text(
    plan: ModulePlan, reduction: Reduction, amax: str, prefix: str = ""
) -> ReductionText:
    return ReductionText(
        amax,
        f"{prefix}{reduction.history}",
        f"{prefix}{reduction.scale}",
        reduction.role.value.upper(),
        str(plan.per_group(reduction.scale)),
    )


def _amax_source(plan: ModulePlan, amax: str, needs: dict[str, int]) -> str:
    """An amax as the backward op returned it; an empty stand-in becomes None again."""
    when = next(r.when for r in plan.backward.results if r.buffer == amax)
    if not when or plan.backward.returns_none:
        return amax
    return f"{amax} if {' or '.join(f'needs[{needs[flag]}]' for flag in when)} else None"


def _gradient_source(plan: ModulePlan, argument: TensorText, needs: dict[str, int]) -> str:
    """A gradient as ``backward`` returns it; an empty stand-in becomes None again."""
    if not argument.flag or argument.name in plan.delayed:
        return "None"
    if argument.name in dict(plan.main_grads):
        buffer = f"ctx.{dict(plan.main_grads)[argument.name]}"
        wanted = f"ctx.{_dummy(argument.name)} and needs[{needs[argument.flag]}]"
        return f"_library.dummy_grad(dy, {buffer}) if {wanted} else None"
    name = gradient(argument.name)
    conditional = plan.backward.flags and not plan.backward.returns_none
    return f"{name} if needs[{needs[argument.flag]}] else None" if conditional else name


def state_texts(plan: ModulePlan) -> tuple[StateText, ...]:
    fills = {
        StateFill.ZEROS: "zero_()",
        StateFill.ONES: "fill_(1.0)",
        StateFill.SEED: "copy_(torch.stack((torch.randint(2**62, ()), torch.tensor(0))))",
        StateFill.COPY: "",
        StateFill.RECORD: "zero_()",
    }
    words = {dim.symbol: Sym(dim.keyword) for dim in plan.dims}
    texts = []
    for state in plan.states:
        buffer = plan.buffer(state.buffer)
        dims = buffer.shape.substitute(words).dims
        holder, _, name = state.path.rpartition(".")
        dtype = dtypes.info(buffer.dtype).torch
        texts.append(
            StateText(
                path=state.path,
                holder=holder,
                name=name,
                argument=state.buffer,
                about=f"{buffer.shape} {dtype}, changed in place"
                + (" by `refresh_weights`" if state.fill is StateFill.COPY else ""),
                changed_by=_changed_by(plan, state),
                extents=", ".join(to_python(dim) for dim in dims),
                shape=", ".join(to_code(dim) for dim in dims),
                dtype=dtype,
                init=fills[state.fill],
                transient=_transient(plan, state),
            )
        )
    return tuple(texts)


def _transient(plan: ModulePlan, state: State) -> bool:
    """Whether no state dict needs it; one without the weights needs their copies."""
    return state.fill is StateFill.RECORD or (state.fill is StateFill.COPY and not plan.quantized)


def _changed_by(plan: ModulePlan, state: State) -> str:
    if plan.refresh and state.buffer in plan.refresh.mutated:
        return "`refresh_weights`"
    return "calls" if state.fill is StateFill.RECORD else "training steps"


def _call_arguments(plan: ModulePlan) -> tuple[str, ...]:
    paths = {parameter.buffer: f"self.{parameter.path}" for parameter in plan.parameters}
    called = called_states(plan)
    states = (f"{s.buffer}=self.{s.path}" for s in plan.states if s.buffer in called)
    scalars = [f"{attribute.name}=self.{attribute.name}" for attribute in plan.attributes]
    scalars += ["amax_group=self.amax_group"] if plan.reductions else []
    scalars += ["wgrad_queue=self.wgrad_queue"] if plan.wgrad else []
    for leaf, name in () if plan.wgrad else plan.main_grads:
        path = paths[leaf].removeprefix("self.")
        scalars.append(f"{name}={_main_grad_call(plan, '_library', leaf, path)}")
        scalars.append(f"{_dummy(leaf)}=_library.wants_dummy_grad({paths[leaf]})")
    return (*(paths.get(name, name) for name in plan.arguments), *states, *scalars)


def _representation(
    plan: ModulePlan, keywords: tuple[KeywordText, ...], has_bias: bool
) -> tuple[str, ...]:
    parts = [f"{k.name}={{self.{k.name}}}" for k in keywords]
    parts += [f"{attribute.name}={{self.{attribute.name}}}" for attribute in plan.attributes]
    if has_bias:
        path = next(p.path for p in plan.parameters if plan.buffer(p.buffer).optional)
        parts.append(f"bias={{self.{path} is not None}}")
    return pieces(", ".join(parts)) if parts else ()
