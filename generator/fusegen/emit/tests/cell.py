"""Context of a cell's generated tests."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, count
from string import digits

from ...ir import dtypes
from ...ir.buffers import Buffer, Parameter, State, StateFill
from ...ir.dtypes import DType
from ...ir.plan import ModulePlan
from ...ir.program import CheckKind, Program
from ...ir.shapes import Expr, Sym, evaluate, product, to_code, to_python
from ...ir.step import PointwiseOperand, Step
from ...steps import cancels, decodes, definition, is_gemm, observes, sums_rows
from ..python.cell import widened_texts
from ..python.flops import step_flops
from ..python.main_grads import adds
from ..python.states import called_states
from ..python.words import WidenedText, op_name, pieces

_ROWS, _GROUPS = 96, 4
_LEADING = 3
_COUNTS = (3, 5, 7)
_WIDTHS = (64, 40, 24, 72, 56)
_ERRORS_OF_EXPERTS = 5
# Of normal values with a relative error e, 0.32 e change their sign. Where a gradient jumps there,
# the square of its error is twice that, as half of it is 0; times the margin of tolerances, 2.6.
_ERRORS_OF_FLIPS = 1.7
# A rounding to 3 bits of mantissa is one; twice, for of few tokens a row's sum may nearly cancel.
_ERRORS_OF_COPIES = 2.0
# Half of what is subtracted is left: beside it errors are twice what they were.
_ERRORS_OF_DIFFERENCES = 4.0
_VALUES = ("a", "b", "grad", "add", "scales", "add_scales")


@dataclass(frozen=True, slots=True)
class Refusal:
    """A bad argument and what the module says of it.

    Attributes:
        name: of the case.
        tensor: argument replaced.
        change: source of a function that makes the bad argument of the right one.
        message: after the names of the cell and the argument.
    """

    name: str
    tensor: str
    change: str
    message: str

    @property
    def message_pieces(self) -> tuple[str, ...]:
        """The message as string literals that fit a line."""
        return pieces(self.message, " ")


@dataclass(frozen=True, slots=True)
class TestContext:
    """Everything ``tests/test_<cell>.py`` states; most fields are Python source.

    Where a module has several outputs, most tests see them side by side in one tensor.

    Attributes:
        call: what they call.
        layer: the class of the modules that they make.
        several: how many outputs there are; 0 for a single one.
        counts: the input that tells how many rows groups have, where ops leave those that none has
            as they are; empty elsewhere.
        integers: how many of them are before those of integers; 0 where there are none.
        numbers: whether one of them is a single number, which is there without any tokens.
        flops: of the matrix multiplications of a training step.
        widened: inputs that the module takes in narrower types, too.
        first_is_own_type: whether the first input is of one of the module's own types.
        outputs_call: what gives them one by one.
        direct_call: what a function that calls the module's is called, where there is one.
        returns: its return annotation.
        quantize_arguments: what copies of the first input are made of; empty where calls take
            none.
        quantized_tensors: those of them that are inputs.
        quantizes_columnwise: whether a columnwise copy is made only where it is asked for.
        decode_groups: name of the groups of its output's rows; empty where there are none.
        gives_copies: whether the module gives copies of its output, of which most tests see what
            they stand for.
        per_group: paths of parameters that each group has one of; empty where there are none.
        per_group_arguments: what the function calls them all.
    """

    __test__ = False

    cell: str
    call: str
    layer: str
    several: int
    counts: str
    integers: int
    numbers: bool
    flops: int
    widened: tuple[WidenedText, ...]
    first_is_own_type: bool
    outputs_call: str
    direct_call: str
    returns: str
    function_name: str
    class_name: str
    first: str
    output: str
    token_axis: str
    group_axis: str
    groups: str
    sizes: str
    wanted: str
    tolerances: str
    size_lines: tuple[str, ...]
    input_lines: tuple[str, ...]
    grouped: bool
    splits_parameter: str
    splits_argument: str
    exact_call: str
    exact_name: str
    exact_keywords: str
    row_inputs: str
    row_gradients: str
    group_gradients: str
    ops: str
    many_archs: bool
    constructor: str
    meta_constructor: str
    cpu_constructor: str
    input_names: str
    left_out: str
    refusals: tuple[Refusal, ...]
    states: str
    forward_states: str
    backward_states: str
    reduces: bool
    caches: str
    reads_caches_again: bool
    quantized: str
    quantize_arguments: str
    quantized_tensors: str
    quantizes_columnwise: bool
    decode_groups: str
    gives_copies: bool
    per_group: str
    per_group_arguments: str
    copied_parameters: str
    refresh_op: str
    refresh_arguments: str
    refresh_flags: str
    refresh_alone: str
    kept_states: str
    main_grads: str
    main_grad_paths: str
    keeps_main_grads: bool
    immediate_main_grads: bool
    adds: bool
    main_grad_dtype: str
    gradient_dtype: str
    two_batches: float
    delays: bool
    delayed: str
    delayed_arguments: str
    tokens: int
    slots: str
    wgrad_op: str
    wgrad_flags: str
    wgrad_buffers: str
    keeps_records: bool
    same_records: str


_FEWEST_PARTS = 3
"""How often a size holds the one that it is a multiple of; the next such size once more."""


def sizes_of(plan: ModulePlan) -> dict[str, int]:
    """Small sizes, all different, multiples of 8 that are no multiples of a tile.

    What a step needs more of is rounded up, and what is to hold another size is made of several.
    """
    widths = chain(_WIDTHS, count(104, 16))
    known = dict(zip(_counted(plan), _COUNTS, strict=False))
    known |= {str(plan.token_axis): _ROWS, str(plan.group_axis): _GROUPS}
    multiples = (check for check in plan.forward.checks if check.kind is CheckKind.MULTIPLE)
    units = {str(check.expr): check.number for check in multiples if not check.divisor}

    def size(symbol: str) -> int:
        unit = units.get(symbol, 1)
        return known.get(symbol) or -(-next(widths) // unit) * unit

    sizes = {dim.symbol: size(dim.symbol) for dim in plan.dims}
    for parts, check in enumerate((c for c in plan.forward.checks if c.divisor), _FEWEST_PARTS):
        if str(check.expr) in sizes and check.divisor:
            sizes[str(check.expr)] = parts * evaluate(check.divisor, sizes)
    return sizes


def _counted(plan: ModulePlan) -> tuple[str, ...]:
    """Sizes that integers have and no row of 16 bits is long: of choices, of experts."""
    own = [plan.buffer(name) for name in plan.called_with]
    rows = {str(each.shape.flat[-1]) for each in own if each.dtype is DType.IO}
    numbers = (each for each in own if each.dtype in (DType.INT32, DType.INT64))
    found = dict.fromkeys(s for each in numbers for s in map(str, each.shape.dims))
    symbols = [dim.symbol for dim in plan.dims]
    return tuple(symbol for symbol in symbols if symbol in found and symbol not in rows)


def test_context(plan: ModulePlan, *, many_archs: bool) -> TestContext:
    """What ``tests/test_<cell>.py`` states, in a bundle of one architecture or of several."""
    sizes = sizes_of(plan)
    wanted = _wanted(plan)
    several = len(plan.outputs) if len(plan.outputs) > 1 else 0
    grouped = plan.groups is not None
    tokens = _ROWS * (_LEADING if plan.buffer(plan.inputs[0]).shape.leading else 1)
    called = called_states(plan)
    moving = [name for name in called if name not in (*plan.caches, *plan.record_tensors)]
    per_group = [p for p in plan.parameters if p.per_group]
    left_out = [*plan.drawn, *plan.optional_inputs]
    copies = bool(plan.output_copies)
    quantize = plan.quantize_input
    refreshed = [a.buffer for a in plan.refresh.arguments] if plan.refresh else []
    return TestContext(
        cell=plan.cell,
        call="call" if plan.wgrad or several or copies else f"module.{plan.module}",
        layer="Layer" if several or copies else f"module.{plan.class_name}",
        several=several,
        counts=_counts(plan),
        integers=plan.differentiable_outputs if plan.differentiable_outputs < several else 0,
        numbers=any(not plan.buffer(name).shape.flat for name in plan.outputs),
        widened=widened_texts(plan),
        first_is_own_type=plan.buffer(plan.inputs[0]).dtype is DType.IO,
        flops=step_flops(plan, {**sizes, str(plan.token_axis): tokens}),
        direct_call="outputs" if several or copies else "call",
        returns=_returns(plan),
        outputs_call="outputs" if plan.wgrad else f"module.{plan.module}",
        function_name=plan.module,
        class_name=plan.class_name,
        first=plan.inputs[0],
        output=plan.outputs[0],
        token_axis=str(plan.token_axis),
        group_axis=str(plan.group_axis),
        groups=plan.groups or "",
        sizes=repr(sizes),
        wanted=_tuple(wanted),
        tolerances=repr(_tolerances(plan, wanted)),
        size_lines=tuple(f'{symbol} = sizes["{symbol}"]' for symbol in _symbols(plan)),
        input_lines=tuple(_input_lines(plan)),
        grouped=grouped,
        splits_parameter=", splits: list[int]" if grouped else "",
        splits_argument=", splits" if grouped else "",
        exact_call=_exact_call(plan),
        exact_name=_exact_name(plan),
        exact_keywords=", ".join(_exact_keywords(plan)),
        row_inputs=_tuple([name for name in plan.inputs if _outer(plan, name) == plan.token_axis]),
        row_gradients=_tuple([name for name in wanted if _outer(plan, name) == plan.token_axis]),
        group_gradients=_tuple([name for name in wanted if _outer(plan, name) == plan.group_axis]),
        ops=_ops(plan, many_archs),
        many_archs=many_archs,
        constructor=_constructor(plan, sizes),
        meta_constructor=_constructor(plan, sizes, '"meta"'),
        cpu_constructor=_constructor(plan, sizes, '"cpu"'),
        input_names=_tuple(list(plan.inputs)),
        left_out=_tuple(left_out) if left_out else "",
        refusals=_distinct(_refusals(plan, sizes)),
        states=_tuple([*called, *(name for _, name in plan.main_grads)]),
        main_grads=repr(dict(plan.main_grads)),
        main_grad_paths=_tuple(
            [p.path for p in plan.parameters if p.buffer in dict(plan.main_grads)]
        ),
        keeps_main_grads=bool(plan.main_grads),
        immediate_main_grads=bool(plan.main_grads) and plan.wgrad is None,
        two_batches=1e-6 if len(plan.states) == len(plan.records) else plan.tolerance.end_to_end,
        main_grad_dtype=_main_grad_dtype(plan),
        gradient_dtype=_gradient_dtype(plan),
        adds=adds(plan),
        forward_states=_tuple(_changed(plan, plan.forward)) if moving else "",
        backward_states=_tuple(_changed(plan, plan.backward)),
        reduces=bool(plan.process_groups),
        caches=_tuple(list(plan.caches)) if plan.caches else "",
        quantized=_tuple([p.path for p in plan.quantized]) if plan.quantized else "",
        quantize_arguments=_tuple([a.buffer for a in quantize.arguments]) if quantize else "",
        quantized_tensors=_tuple(
            [a.buffer for a in quantize.arguments if a.buffer in plan.inputs] if quantize else []
        ),
        decode_groups=_decode_groups(plan),
        gives_copies=bool(plan.output_copies),
        quantizes_columnwise=any(r.when for r in (quantize.results if quantize else ())),
        per_group=_tuple([p.path for p in per_group]) if per_group else "",
        per_group_arguments=_tuple([p.buffer for p in per_group]),
        reads_caches_again=any(a.buffer in plan.caches for a in plan.backward.arguments),
        copied_parameters=_copied_parameters(plan),
        refresh_op=op_name(plan, plan.refresh) if plan.refresh else "",
        refresh_arguments=_tuple(refreshed),
        refresh_flags=", ".join(["True"] * len(plan.refresh.flags)) if plan.refresh else "",
        refresh_alone=_tuple([name for name in plan.kept if name not in called]),
        kept_states=_tuple(moving) if len(moving) < len(called) else "STATES",
        delays=plan.wgrad is not None,
        delayed=_tuple(list(plan.delayed)),
        delayed_arguments=_delayed_arguments(plan),
        tokens=tokens,
        slots=f", max_in_flight=8, max_tokens={tokens}" if plan.wgrad else "",
        wgrad_op=op_name(plan, plan.wgrad) if plan.wgrad else "",
        wgrad_flags=", ".join(["True"] * len(plan.wgrad.flags)) if plan.wgrad else "",
        wgrad_buffers=_tuple(_of_the_caller(plan, plan.wgrad)) if plan.wgrad else "",
        keeps_records=bool(plan.records),
        same_records=_tuple(_same_records(plan)),
    )


def _counts(plan: ModulePlan) -> str:
    if not any(step.leaves for step in plan.steps):
        return ""
    return next(name for name in plan.inputs if plan.buffer(name).dtype is DType.INT64)


def _copied_parameters(plan: ModulePlan) -> str:
    """Source of the parameters that calls read copies of, and of biases, which are 0."""
    read = {argument.buffer for argument in plan.refresh.arguments} if plan.refresh else set()
    required = [p for p in plan.parameters if not plan.buffer(p.buffer).optional]
    if all(p.buffer in read for p in required):
        return "layer.parameters()"
    paths = _tuple([p.path for p in required if p.buffer in read])
    return f"map(layer.get_parameter, {paths})"


def _returns(plan: ModulePlan) -> str:
    if plan.output_copies:
        return "module.QuantizedTensor"
    return "tuple[Tensor, ...]" if len(plan.outputs) > 1 else "Tensor"


def _decode_groups(plan: ModulePlan) -> str:
    return next((copy.groups or "" for copy in plan.copies_in(plan.output_copies)), "")


def _ops(plan: ModulePlan, many_archs: bool) -> str:
    """Names of the ops of a training step, delayed gradients among them; for several architectures
    without numbers, which each has its own of.
    """
    directions = (each for each in plan.directions if each.name != "refresh")
    programs = (program for each in directions for program in each.programs if program.steps)
    names = (op_name(plan, program) for program in programs)
    stems = dict.fromkeys(f'"{name.rstrip(digits) if many_archs else name}"' for name in names)
    return f"{{{', '.join(stems)}}}"


def _main_grad_dtype(plan: ModulePlan) -> str:
    """Of the buffers, for a module in bfloat16."""
    narrow = any(plan.buffer(name).dtype is DType.IO for _, name in plan.main_grads)
    return "bfloat16" if narrow else "float32"


def _gradient_dtype(plan: ModulePlan) -> str:
    """Source of the type of the gradient called `name`."""
    own = "tensors[name].dtype"
    wide = _main_grad_dtype(plan) == "float32"
    return f"torch.float32 if name in MAIN_GRADS else {own}" if wide else own


def _of_the_caller(plan: ModulePlan, wgrad: Program) -> list[str]:
    """What the op takes that did not wait: weights, and the buffers it changes."""
    own = {*plan.delayed, *wgrad.mutated}
    return [argument.buffer for argument in wgrad.arguments if argument.buffer in own]


def _delayed_arguments(plan: ModulePlan) -> str:
    """What the tests call ``backward_dw`` with, of all tensors by name."""
    weights = [f'{{**tensors, **leaves}}["{leaf}"]' for leaf in plan.delayed]
    buffers = [f'{name}=given["{name}"]' for _, name in plan.main_grads]
    return ", ".join((*weights, "wgrad_queue=queue", *buffers))


def _same_records(plan: ModulePlan) -> list[str]:
    """Copies of what a call is given: no GEMM is before them, so that all devices agree."""
    given = {*plan.arguments, *plan.incoming}
    observed = [s.copies[0] for s in plan.steps if observes(s)]
    return [copy.data for copy in observed if copy.original in given]


def _changed(plan: ModulePlan, program: Program) -> list[str]:
    """State that a call of a direction moves on."""
    own = {*plan.record_tensors, *(name for _, name in plan.main_grads)}
    return [name for name in program.mutated if name not in own]


def _tuple(names: list[str]) -> str:
    return "(" + "".join(f'"{name}", ' for name in names) + ")"


def _wanted(plan: ModulePlan) -> list[str]:
    return [*plan.differentiated]


def _outer(plan: ModulePlan, name: str) -> Expr:
    return plan.buffer(name).shape.flat[0]


def _tolerances(plan: ModulePlan, wanted: list[str]) -> dict[str, float]:
    """Of the outputs, by the name of the first, and of gradients by that of the leaf."""
    outputs = max(_tolerance(plan, name) for name in plan.outputs)
    return {plan.outputs[0]: outputs} | {name: _tolerance(plan, name) for name in wanted}


def _tolerance(plan: ModulePlan, name: str) -> float:
    """A chain rounds between its steps; one alone, that reads no copies, rounds once, and an fp32
    result not at all.

    Errors are independent, so their squares add up.  `end_to_end` is that of an expert MLP, to
    whose gradients five contribute.
    """
    buffer = plan.buffer(name if name in plan.outputs else dict(plan.gradients)[name])
    steps = plan.forward.unmerged.steps
    if len(steps) > 1 or any(step.copies for step in steps):
        growth = max(1.0, error_counts(plan).get(buffer.name, 0.0) / _ERRORS_OF_EXPERTS)
        return float(f"{plan.tolerance.end_to_end * math.sqrt(growth):.3g}")
    return plan.tolerance.float32 if buffer.dtype is DType.FLOAT32 else plan.tolerance.gemm


def error_counts(plan: ModulePlan) -> dict[str, float]:
    """Independent errors that each buffer carries, as many as would have its square.

    A GEMM, a sum, an expression, or what computes each row by itself adds one, and passes on those
    of its operands: an expression by the square of each symbol's degree, a difference by more.
    Copies pass on what they are made from, and their own to an expression; that of a GEMM's
    operands is among its own.
    """
    counts: dict[str, float] = {}
    steps = [step for program in plan.programs for step in program.unmerged.steps]
    decoded = {name for step in steps if decodes(step) for name in step.writes}
    one = plan.tolerance.end_to_end / math.sqrt(_ERRORS_OF_EXPERTS)

    def passed(operand: PointwiseOperand) -> float:
        count = counts.get(operand.buffer, 0.0) + _ERRORS_OF_COPIES * (operand.buffer in decoded)
        flips = _ERRORS_OF_FLIPS / one * math.sqrt(count) if operand.jumps else 0.0
        return count * operand.degree**2 + flips

    for step in steps:
        if step.pointwise:
            found = 1.0 + sum(map(passed, step.pointwise.operands))
        else:
            values = (o.buffer for o in step.inputs if o.slot in _VALUES)
            by_rows = definition(step.primitive).independent
            own = 1.0 if is_gemm(step) or sums_rows(step) or by_rows else 0.0
            lost = _ERRORS_OF_DIFFERENCES if cancels(step) else 1.0
            found = own + lost * sum(counts.get(name, 0.0) for name in values)
        counts |= dict.fromkeys(step.writes, found)
    return counts


def _symbols(plan: ModulePlan) -> list[str]:
    used = {s for name in plan.called_with for s in plan.buffer(name).shape.symbols()}
    return [dim.symbol for dim in plan.dims if dim.symbol in used]


def _input_lines(plan: ModulePlan) -> Iterator[str]:
    parameters = {parameter.buffer: parameter for parameter in plan.parameters}
    fills = {
        StateFill.ZEROS: "torch.zeros({shape}, device=device)",
        StateFill.ONES: "torch.ones({shape}, device=device)",
        StateFill.SEED: "torch.tensor([seed, 0], device=device)",
        StateFill.RECORD: "torch.zeros({shape}, device=device)",
        StateFill.COPY: "torch.empty({shape}, device=device, dtype=torch.{dtype})",
    }

    def filled(state: State) -> str:
        buffer = plan.buffer(state.buffer)
        dims = ", ".join(to_code(dim) for dim in buffer.shape.dims)
        return fills[state.fill].format(shape=dims, dtype=dtypes.info(buffer.dtype).torch)

    for name in plan.kept:
        tensor = plan.joined_tensor(name)
        if tensor is None:
            yield f'"{name}": {filled(plan.state(name))},'
        else:
            values = ", ".join(filled(plan.state(part)) for part in tensor.parts)
            yield f'"{name}": support.state_rows({values}),'
    for _, name in plan.main_grads:
        dims = ", ".join(to_python(dim) for dim in plan.buffer(name).shape.dims)
        dtype = ", dtype=dtype" if plan.buffer(name).dtype is DType.IO else ""
        yield f'"{name}": torch.zeros({dims}, device=device{dtype}),'
    for seed, name in enumerate(plan.called_with, 1):
        buffer = plan.buffer(name)
        if name == plan.groups:
            default = f"support.split_cases({plan.group_axis}, {plan.token_axis})[0]"
            values = f"torch.tensor({default} if splits is None else splits, device=device)"
            yield f'"{name}": {values},'
            continue
        if values := _integers(plan, buffer, seed):
            yield f'"{name}": {values}.to(device),'
            continue
        yield f'"{name}": support.random_tensor({_random(buffer, parameters.get(name), seed)}),'


def _integers(plan: ModulePlan, buffer: Buffer, seed: int) -> str:
    """Source of a tensor of random bits, of indices, or of what follows from one; else empty."""
    steps = [step for program in plan.programs for step in program.unmerged.steps]
    kinds = [(step, definition(step.primitive)) for step in steps]
    of_indices = {
        name: to_python(dict(step.sizes)[size])
        for step, kind in kinds
        for slot, size in kind.indices.items()
        if (name := step.input(slot)) in plan.inputs
    }
    maps = {name: other for step, kind in kinds for name, other in _pairs(step, kind.inverse)}
    counts = {name: other for step, kind in kinds for name, other in _pairs(step, kind.counted)}
    seeds = {name: number for number, name in enumerate(plan.called_with, 1)}

    def places(name: str) -> str:
        return f"support.places({_dims(plan.buffer(name))}, {seeds[name]})"

    def indices(name: str, bound: str) -> str:
        rng = f"torch.Generator().manual_seed({seeds[name]})"
        dtype = dtypes.info(plan.buffer(name).dtype).torch
        words = "" if dtype == "int64" else f", dtype=torch.{dtype}"
        return f"torch.randint({bound}, {_dims(plan.buffer(name))}, generator={rng}{words})"

    if buffer.drawn:
        return indices(buffer.name, "2**63 - 1")
    if buffer.name in maps:
        return f"support.inverse({places(maps[buffer.name])})"
    if buffer.name in maps.values():
        return places(buffer.name)
    if other := counts.get(buffer.name):
        bound = to_python(buffer.shape.dims[0])
        return f"{indices(other, of_indices[other])}.flatten().bincount(minlength={bound})"
    return indices(buffer.name, of_indices[buffer.name]) if buffer.name in of_indices else ""


def _pairs(step: Step, slots: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Operands by slot, each with another one."""
    for slot, other in slots.items():
        name, of = step.input(slot), step.input(other)
        if name and of:
            yield name, of


def _dims(buffer: Buffer) -> str:
    """Source of a shape, with leading dimensions where a tensor may have several."""
    dims = [str(_LEADING)] if buffer.shape.leading else []
    dims += [to_python(dim) for dim in buffer.shape.flat]
    return f"({dims[0]},)" if len(dims) == 1 else f"({', '.join(dims)})"


def _random(buffer: Buffer, parameter: Parameter | None, seed: int) -> str:
    dtype = "dtype" if buffer.dtype is DType.IO else f"torch.{dtypes.info(buffer.dtype).torch}"
    weight = parameter is not None and not buffer.optional
    scale = f", scale={_root(parameter.fan_in)}" if weight and parameter else ""
    return f"{_dims(buffer)}, dtype, device, {seed}{scale}".replace("dtype", dtype, 1)


def _root(size: Expr) -> str:
    """Source of 1 over the square root of a size."""
    text = to_python(size)
    return f"{text if isinstance(size, Sym) else f'({text})'} ** -0.5"


def _exact_name(plan: ModulePlan) -> str:
    """The function of the reference without quantisation."""
    return "exact" if plan.exact_apart else "forward"


def _exact_keywords(plan: ModulePlan) -> list[str]:
    """What the reference takes besides tensors: flags where it saves something, and scalars."""
    flags = () if plan.exact_apart else plan.forward.flags
    keywords = [*(f"{flag}=True" for flag in flags)]
    return keywords + [f"{a.name}={a.default!r}" for a in plan.attributes]


def _exact_call(plan: ModulePlan) -> str:
    """The reference as a function of tensors that returns the outputs alone, as tests see them."""
    name, keywords = f"reference.{_exact_name(plan)}", _exact_keywords(plan)
    count = len(plan.outputs)
    kept = not plan.exact_apart and len(plan.forward.results) > count
    call = f"{name}({', '.join(('**tensors', *keywords))})"
    if count > 1:
        return f"lambda **tensors: support.joined({call}{f'[:{count}]' if kept else ''})"
    if not keywords and not kept:
        return name
    return f"lambda **tensors: {call}{'[0]' if kept else ''}"


def _constructor(plan: ModulePlan, sizes: dict[str, int], device: str = "device") -> str:
    parts = [f"{dim.keyword}={sizes[dim.symbol]}" for dim in plan.dims if dim.constructor]
    if any(plan.buffer(p.buffer).optional for p in plan.parameters):
        parts.append("bias=True")
    if plan.parameters or plan.states:
        parts.append(f"device={device}")
    return ", ".join(parts)


def _refusals(plan: ModulePlan, sizes: dict[str, int]) -> Iterator[Refusal]:
    """One bad argument per check of the forward program."""
    first = plan.inputs[0]
    for check in plan.forward.checks:
        name = check.tensor
        if name in (*plan.caches, *plan.input_copies):  # nor are bad ones made of these formats
            continue
        match check.kind:
            case CheckKind.IO_DTYPE:
                text = "expected dtype bfloat16 or float16, got float32"
                yield Refusal(f"{name}_float32", name, "Tensor.float", text)
            case CheckKind.SAME_DTYPE:
                text = f"expected dtype bfloat16, as {first}, got float16"
                yield Refusal(f"{name}_of_another_dtype", name, "Tensor.half", text)
            case CheckKind.DTYPE:
                expected = dtypes.info(check.dtype).torch
                got = "int64" if check.dtype is DType.INT32 else "int32"
                change = "Tensor.long" if got == "int64" else "Tensor.int"
                text = f"expected dtype {expected}, got {got}"
                yield Refusal(f"{name}_{got}", name, change, text)
            case CheckKind.RANK if check.exact:
                dimensions = "dimension" if check.number == 1 else "dimensions"
                text = f"expected {check.number} {dimensions} {check.label}, got {check.number + 1}"
                yield Refusal(f"{name}_of_another_rank", name, "support.deeper", text)
            case CheckKind.SIZE if check.axis:
                yield _size_refusal(
                    plan, check.tensor, check.axis, check.number, check.label, sizes
                )
            case CheckKind.CONTIGUOUS:
                yield from _gap_refusal(plan, name, sizes)


def _distinct(refusals: Iterable[Refusal]) -> tuple[Refusal, ...]:
    """Names told apart where a tensor has two dimensions of one size."""
    found: dict[str, Refusal] = {}
    for refusal in refusals:
        name, count = refusal.name, 1
        while name in found:
            count += 1
            name = f"{refusal.name}_{count}"
        found[name] = replace(refusal, name=name)
    return tuple(found.values())


def _gap_refusal(plan: ModulePlan, name: str, sizes: dict[str, int]) -> Iterator[Refusal]:
    """Every second element of a tensor of twice the length; one element alone has no gaps."""
    dims = plan.buffer(name).shape.dims
    if evaluate(product(dims), sizes) > 1:
        strides = [2 * evaluate(product(dims[axis + 1 :]), sizes) for axis in range(len(dims))]
        text = f"expected a contiguous tensor, got strides {strides}"
        yield Refusal(f"{name}_with_gaps", name, "support.with_gaps", text)


def _size_refusal(
    plan: ModulePlan, name: str, axis: int, rank: int, label: str, sizes: dict[str, int]
) -> Refusal:
    """A dimension that is 8 too large; one too large where the tensor itself tells the size."""
    shape = plan.buffer(name).shape
    size = evaluate(shape.dims[axis], sizes)
    bound = {(tensor, at) for b in plan.forward.bindings for tensor, at, _ in b.candidates}
    extra = 1 if (name, axis) in bound else 8
    place = rank + axis + (2 if shape.leading else 0)
    text = f"expected {label} = {size} in dimension {place}, got {size + extra}"
    words = re.sub(r"\W+", "_", str(shape.dims[axis]).replace(" * ", "").lower()).strip("_")
    return Refusal(f"{name}_of_another_{words}", name, f"support.longer({axis}, {extra})", text)
