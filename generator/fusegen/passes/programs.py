"""Programs: arguments, results, dimension bindings, argument checks and workspace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from ..ir.buffers import Buffer
from ..ir.dtypes import DType
from ..ir.naming import QUANTIZE_INPUT, UPDATE_STATE, gradient, need
from ..ir.program import Argument, Binding, Check, CheckKind, Program, own_type_argument
from ..ir.quantization import Orientation, Role
from ..ir.shapes import (
    Binary,
    Const,
    Expr,
    Operator,
    Sym,
    evaluate,
    parse_expr,
    substitute,
    symbols,
)
from ..ir.step import INTERLEAVE, LIKE, Copy, Operand, Result, Step
from ..steps import decodes, definition, is_gemm, quantizes, takes
from .draft import Draft, NotPossible
from .liveness import flags_of, forward_conditions, joined_results, ordered

Dims = Mapping[str, str]
"""Symbols of the module -> keywords, for messages."""


def bind_lengths(draft: Draft, saved: tuple[Result, ...], delayed: tuple[Step, ...] = ()) -> Draft:
    """Let steps of the backward that read copies read a weight that binds their length's symbol.

    A copy's rows are padded, so that it does not bind the symbol of their length; the columns of
    another argument may, if it is there whenever the step runs.  A weight costs nothing to keep,
    and one that is kept in the recipe's format alone has a shape all the same.

    Args:
        draft: before kernels are chosen.
        saved: what the forward leaves.
        delayed: steps of the backward that will have a program of their own: it knows what they
            read, and no state.
    """
    flags = flags_of(draft)
    incoming = dict.fromkeys(draft.incoming, ())
    left = {each.buffer: () for each in draft.states} | {each.buffer: each.when for each in saved}
    made = {name for step in delayed for name in step.writes}
    kept = {n: when for n, when in _asked_by(delayed, flags).items() if n not in made}

    def bound(step: Step) -> set[str]:
        asking = {*(step.when or flags)}
        beside = kept if step in delayed else left
        known = [n for n, when in (incoming | beside).items() if not when or asking <= {*when}]
        arguments = tuple(Argument(name, False) for name in sorted(known))
        return {binding.symbol for binding in bind_dimensions(draft.buffers, arguments)}

    def with_binding(step: Step) -> Step:
        if not (step.copies and takes(step, LIKE)):
            return step
        unbound = draft.buffers[step.out].shape.symbols() - bound(step)
        if not unbound:
            return step
        weight = _weight_beside(draft, step)
        return replace(step, inputs=(*step.inputs, Operand(LIKE, weight)))

    return replace(draft, backward=tuple(with_binding(step) for step in draft.backward))


def _weight_beside(draft: Draft, step: Step) -> str:
    """The weight that a copy is of, or by which a GEMM multiplies or gives the copy's original."""
    read = {copy.original for copy in step.copies}
    forward = (copy for each in draft.forward if is_gemm(each) for copy in _beside(each, read))
    return next(c.original for c in (*step.copies, *forward) if c.role is Role.WEIGHT)


def _beside(gemm: Step, originals: set[str]) -> tuple[Copy, ...]:
    """The copies of a GEMM that reads or gives one of these tensors."""
    own = {*gemm.writes, *(copy.original for copy in gemm.copies)}
    return gemm.copies if own & originals else ()


def programs_of(draft: Draft, dims: Dims) -> tuple[Program, ...]:
    """Every program of the draft's steps.

    Raises:
        NotPossible: no argument of an op tells a dimension that its steps need.
    """
    programs = [
        forward_program(draft, draft.saved, dims),
        backward_program(draft, draft.saved, dims),
    ]
    if draft.quantize_input:
        programs.append(quantize_input_program(draft, dims))
    if draft.refresh:
        programs.append(refresh_program(draft, dims))
    if draft.wgrad:
        programs.append(wgrad_program(draft, draft.saved, dims))
    return tuple(programs)


def forward_program(draft: Draft, saved: tuple[Result, ...], dims: Dims) -> Program:
    """The forward op: results, then what it saves for the backward under flags."""
    read = {name for step in draft.forward for name in step.reads}
    unread = {*draft.input_copies} - read  # for a backward, which not every call asks for
    arguments = tuple(
        Argument(name, draft.buffers[name].optional or name in unread) for name in draft.arguments
    )
    arguments += _states(draft, draft.forward)
    sent = frozenset(
        name for each in draft.collectives if each.direction == "forward" for name in each.operands
    )
    given = {argument.buffer for argument in arguments} | {*draft.results}
    kept = tuple(result for result in saved if result.buffer not in given)
    outputs = tuple(Result(name) for name in draft.results)
    asked = {flag for result in kept for flag in result.when or flags_of(draft)}
    if any(step.updates for step in draft.forward):  # a call without grad changes none
        asked = {*flags_of(draft)}
    flags = tuple(flag for flag in flags_of(draft) if flag in asked)
    kept = tuple(Result(result.buffer, result.when or flags) for result in kept)
    steps = forward_conditions(draft.forward, kept, sent)
    left = (Result(r.buffer, r.when or flags) for r in joined_results(draft, kept))
    return program("forward", draft, steps, arguments, flags, (*outputs, *left), dims)


def backward_program(draft: Draft, saved: tuple[Result, ...], dims: Dims) -> Program:
    """The backward op: gradients of the outputs and what was saved to gradients of the leaves.

    It is called for one that it computes at least; what comes in is no result of it.  Where
    gradients of weights are delayed, further results are what only the backward makes of what these
    read.
    """
    incoming = tuple(Argument(name, False) for name in draft.incoming)
    computed = draft.computed
    flags = _union(computed.values(), flags_of(draft))
    flags = flags if len(flags) > 1 else ()
    read = {draft.tensor_with(name) for step in draft.backward for name in step.reads}
    made = {name for step in draft.backward for name in step.writes}
    delayed = draft.received("wgrad") | {name for step in draft.wgrad for name in step.writes}
    left = {each.buffer: _within(each.when, flags) for each in joined_results(draft, saved)}
    kept = tuple(
        Argument(name, bool(when) or draft.buffers[name].optional, when)
        for name, when in left.items()
        if name in read
    )
    own = {name for _, name in draft.main_grads} | {*delayed}
    results = tuple(
        Result(name, _within(when, flags)) for name, when in computed.items() if name not in own
    )
    asked = _asked_by(draft.wgrad, flags)
    results += tuple(Result(name, asked[name]) for name in asked if name in made)
    main_grads = tuple(
        Argument(name, optional=True, when=(need(leaf),), mutated=True)
        for leaf, name in draft.main_grads
        if name not in delayed
    )
    arguments = (*incoming, *kept, *_states(draft, draft.backward), *main_grads)
    steps = tuple(_asked_within(step, flags) for step in draft.backward)
    return program("backward", draft, steps, arguments, flags, results, dims)


def wgrad_program(draft: Draft, saved: tuple[Result, ...], dims: Dims) -> Program:
    """The op that gives delayed gradients of weights, of what forward and backward left for it.

    Its first argument is the gradient of the output, which tells type, device and sizes, even where
    no step reads its elements.  Weights come last: whoever calls the op has them.  One of them
    tells the type where that gradient is fp32 and all else are codes.
    """
    written = draft.received("wgrad") | {n for step in draft.wgrad for n in step.writes}
    leaves = {name: need(leaf) for leaf, name in draft.gradients if name in written}
    own = {name for _, name in draft.main_grads}
    flags = tuple(leaves.values()) if len(leaves) > 1 else ()
    asked = _asked_by(draft.wgrad, flags, draft.tensor_with)
    first = gradient(draft.outputs[0])
    weights = {parameter.buffer for parameter in draft.parameters}
    left = (result.buffer for result in joined_results(draft, saved))
    names = sorted((*left, *asked), key=weights.__contains__)
    operands = tuple(
        Argument(name, bool(asked[name]), asked[name])
        for name in dict.fromkeys(names)
        if name in asked and name not in written and name != first
    )
    operands += _telling(draft, (Argument(first, False), *operands), saved, flags)

    def asking(flag: str) -> tuple[str, ...]:
        return (flag,) if flags else ()

    results = tuple(Result(name, asking(flag)) for name, flag in leaves.items() if name not in own)
    main_grads = tuple(
        Argument(name, optional=bool(flags), when=asking(flag), mutated=True)
        for name, flag in leaves.items()
        if name in own
    )
    steps = tuple(_asked_within(step, flags) for step in draft.wgrad)
    arguments = (Argument(first, False), *operands)
    if draft.buffers[own_type_argument(arguments, draft.buffers)].dtype is not DType.IO:
        weight = next(leaf for leaf, name in draft.gradients if name in leaves)
        arguments += (Argument(weight, False),)
    arguments += main_grads
    return program("wgrad", draft, steps, arguments, flags, results, dims)


def _telling(
    draft: Draft,
    arguments: tuple[Argument, ...],
    saved: tuple[Result, ...],
    flags: tuple[str, ...],
) -> tuple[Argument, ...]:
    """Further arguments of ``wgrad`` that tell sizes which these do not: of what the forward saves
    for the backward whenever a step asks for them.
    """
    found: tuple[Argument, ...] = ()
    for result in joined_results(draft, saved):
        bound = {b.symbol for b in bind_dimensions(draft.buffers, (*arguments, *found))}
        lacking = [step for step in draft.wgrad if symbols_used(draft, (step,), ()) - bound]
        when = _within(result.when, flags)
        more = Argument(result.buffer, bool(when), when)
        told = {b.symbol for b in bind_dimensions(draft.buffers, (more,))}
        asking = {flag for step in lacking for flag in step.when}
        if any(told & symbols_used(draft, (step,), ()) - bound for step in lacking) and (
            not when or asking <= {*when}
        ):
            found += (more,)
    return found


def _asked_by(
    steps: tuple[Step, ...], flags: tuple[str, ...], tensor: Callable[[str], str] = str
) -> dict[str, tuple[str, ...]]:
    """The tensors of what steps read, in their order, and the flags under which they do."""
    asked: dict[str, set[str]] = {}
    for step in steps:
        for name in map(tensor, step.reads):
            asked.setdefault(name, set()).update(step.when)
    return {name: _within(tuple(found), flags) for name, found in asked.items()}


def _union(conditions: Iterable[tuple[str, ...]], flags: tuple[str, ...]) -> tuple[str, ...]:
    """The flags that any of the conditions names."""
    named = {flag for when in conditions for flag in when}
    return tuple(flag for flag in flags if flag in named)


def _asked_within(step: Step, flags: tuple[str, ...]) -> Step:
    """A step of a program with fewer flags, and its results."""
    wanted = ((result.buffer, _within(result.when, flags)) for result in step.output_when)
    return replace(
        step,
        when=_within(step.when, flags),
        output_when=tuple(Result(name, when) for name, when in wanted if when),
    )


def _within(when: tuple[str, ...], flags: tuple[str, ...]) -> tuple[str, ...]:
    """A condition over fewer flags, of which one at least is set."""
    return ordered({*when} & {*flags}, flags)


def quantize_input_program(draft: Draft, dims: Dims) -> Program:
    """The op that makes the copies of the first input; a columnwise one only where asked for."""
    columnwise = {
        name
        for step in draft.quantize_input
        for copy in step.copies
        if copy.orientation is Orientation.COLUMNWISE
        for name in copy.buffers
    } & {*draft.input_copies}
    asked = (Orientation.COLUMNWISE.value,) if columnwise else ()
    results = tuple(
        Result(name, asked if name in columnwise else ()) for name in draft.input_copies
    )
    conditional = tuple(result for result in results if result.when)
    steps = forward_conditions(draft.quantize_input, conditional, frozenset())
    moves_on = (UPDATE_STATE,) if any(step.updates for step in steps) else ()
    read = {name for step in steps for name in step.reads}
    given = tuple(Argument(name, False) for name in draft.inputs if name in read)
    states = _states(draft, steps)
    flags = (*asked, *moves_on)
    arguments = (*given, *states)
    return program(QUANTIZE_INPUT, draft, steps, arguments, flags, results, dims, own=states)


def refresh_program(draft: Draft, dims: Dims) -> Program:
    """The op that quantises the weights a module keeps so; other state moves on if asked for."""
    read = {name for step in draft.refresh for name in step.reads}
    weights = tuple(Argument(name, False) for name in draft.arguments if name in read)
    moves_on = any(step.updates for step in draft.refresh)
    flags = (UPDATE_STATE,) if moves_on else ()
    arguments = (*weights, *_states(draft, draft.refresh))
    return program("refresh", draft, draft.refresh, arguments, flags, (), dims)


def _states(draft: Draft, steps: tuple[Step, ...]) -> tuple[Argument, ...]:
    """State that the steps read, then state that they change, in the module's order."""
    read = {draft.tensor_with(name) for step in steps for name in step.reads}
    changed = {draft.tensor_with(name) for step in steps for name in step.mutates}
    kept = dict.fromkeys(draft.tensor_with(state.buffer) for state in draft.states)
    arguments = [
        Argument(name, optional=False, mutated=name in changed)
        for name in kept
        if name in read | changed
    ]
    return tuple(sorted(arguments, key=lambda argument: argument.mutated))


def program(
    name: str,
    draft: Draft,
    steps: tuple[Step, ...],
    arguments: tuple[Argument, ...],
    flags: tuple[str, ...],
    results: tuple[Result, ...],
    dims: Dims,
    own: tuple[Argument, ...] = (),
) -> Program:
    """A program of an op: where its sizes are read, what is checked, what lives inside the call.

    Args:
        name: of its direction.
        draft: whose buffers it names.
        steps, arguments, flags, results: of the program.
        dims: keywords of its dimensions, for messages.
        own: those of the arguments that tell sizes before others do, which are checked by them.
    """
    used = symbols_used(draft, steps, results)
    bindings = bind_dimensions(draft.buffers, (*own, *arguments))
    missing = used - {binding.symbol for binding in bindings}
    if missing:
        raise NotPossible(f"no argument of the {name} tells dimension {', '.join(sorted(missing))}")
    typed = {r.buffer for r in results if draft.buffers[r.buffer].dtype is DType.IO}
    if typed and draft.buffers[own_type_argument(arguments, draft.buffers)].dtype is not DType.IO:
        raise NotPossible(f"no argument of the {name} tells the type of {', '.join(sorted(typed))}")
    checks = tuple(_checks(draft, arguments, bindings, steps, dims))
    for check in checks:
        used |= check.symbols
    return Program(
        name=name,
        arguments=arguments,
        flags=flags,
        results=results,
        steps=steps,
        bindings=tuple(binding for binding in bindings if binding.symbol in used),
        checks=checks,
    )


def symbols_used(draft: Draft, steps: Iterable[Step], results: Iterable[Result]) -> set[str]:
    """Dimensions that the launches and allocations of a program mention."""
    used: set[str] = set()
    for step in steps:
        for _, size in step.sizes:
            used |= symbols(size)
        if step.pointwise:
            used |= symbols(step.pointwise.rows) | symbols(step.pointwise.columns)
        for name in (*step.writes, *(copy.original for copy in step.copies)):
            used |= draft.buffers[name].shape.symbols()
    for result in results:
        used |= draft.buffers[result.buffer].shape.symbols()
    return used


def bind_dimensions(
    buffers: Mapping[str, Buffer], arguments: tuple[Argument, ...]
) -> tuple[Binding, ...]:
    """Where each dimension is read: plain occurrences first, then multiples such as ``2 * D``.

    An argument that is always there ends the list of candidates.  What an op fills has the size
    that others tell.
    """
    plain: dict[str, list[tuple[str, int | None, int]]] = {}
    multiple: dict[str, list[tuple[str, int | None, int]]] = {}
    certain = {argument.buffer for argument in arguments if not argument.optional}
    for argument in arguments:
        if buffers[argument.buffer].optional or argument.filled:
            continue
        shape = buffers[argument.buffer].shape
        if shape.leading:
            plain.setdefault(shape.leading, []).append((argument.buffer, None, len(shape.dims)))
        for index, dim in enumerate(shape.dims):
            axis = index - len(shape.dims)
            match dim:
                case Sym(name=symbol):
                    plain.setdefault(symbol, []).append((argument.buffer, axis, 1))
                case Binary(
                    operator=Operator.MUL, left=Const(value=factor), right=Sym(name=symbol)
                ):
                    multiple.setdefault(symbol, []).append((argument.buffer, axis, factor))
    bindings = []
    for symbol in dict.fromkeys((*plain, *multiple)):
        candidates = _until_certain(plain.get(symbol, []), certain)
        if not any(each[0] in certain for each in candidates):
            candidates += _until_certain(multiple.get(symbol, []), certain)
        bindings.append(Binding(symbol, tuple(candidates)))
    return tuple(bindings)


def _until_certain(
    candidates: list[tuple[str, int | None, int]], certain: set[str]
) -> list[tuple[str, int | None, int]]:
    """One that is always there alone, otherwise all."""
    for each in candidates:
        if each[0] in certain:
            return [each]
    return list(candidates)


def _checks(
    draft: Draft,
    arguments: tuple[Argument, ...],
    bindings: tuple[Binding, ...],
    steps: tuple[Step, ...],
    dims: Dims,
) -> Iterable[Check]:
    """Rank, dtype and device of every argument, then the sizes, then what the kernels ask for."""
    first, own_type = arguments[0].buffer, own_type_argument(arguments, draft.buffers)
    bound = {
        (tensor, axis)
        for binding in bindings
        for tensor, axis, factor in binding.candidates
        if factor == 1
    }
    for argument in arguments:
        rank = "[bytes]" if draft.in_bytes(argument.buffer) else None
        yield from _type_checks(draft.buffers[argument.buffer], argument, first, own_type, rank)
    for argument in arguments:
        buffer = draft.buffers[argument.buffer]
        shape = buffer.shape
        if shape.leading and argument.buffer != first and (buffer.name, None) not in bound:
            yield Check(
                CheckKind.SIZE,
                buffer.name,
                argument.optional,
                reference=first,
                axis=0,
                expr=Sym(shape.leading),
                number=len(shape.dims),
                label=_label(Sym(shape.leading), dims),
            )
        for index, dim in enumerate(shape.dims):
            axis = index - len(shape.dims)
            if (argument.buffer, axis) not in bound:
                yield Check(
                    CheckKind.SIZE,
                    buffer.name,
                    argument.optional,
                    axis=axis,
                    expr=dim,
                    number=len(shape.dims),
                    label=_BYTES if draft.in_bytes(argument.buffer) else _label(dim, dims),
                )
    for expr, alignment in _alignments(draft, steps).items():
        yield Check(
            CheckKind.MULTIPLE, first, expr=expr, number=alignment, label=_label(expr, dims)
        )
    for expr, divisor in _divisible(steps).items():
        yield Check(CheckKind.MULTIPLE, first, expr=expr, divisor=divisor, label=_label(expr, dims))
    for expr, number in _least(steps).items():
        yield Check(CheckKind.LEAST, first, expr=expr, number=number, label=_label(expr, dims))


_BYTES = "the bytes of its parts"
"""What a size that is a long sum of theirs is called in messages."""


def _type_checks(
    buffer: Buffer, argument: Argument, first: str, own_type: str, rank: str | None
) -> Iterable[Check]:
    """Device, type and rank, which has a word of its own where the shape would be a long one."""
    optional = argument.optional
    shape = buffer.shape
    if buffer.name != first:
        yield Check(CheckKind.DEVICE, buffer.name, optional, reference=first)
    if buffer.dtype is not DType.IO:
        yield Check(CheckKind.DTYPE, buffer.name, optional, dtype=buffer.dtype)
    elif buffer.name == own_type:
        yield Check(CheckKind.IO_DTYPE, buffer.name)
    else:
        yield Check(CheckKind.SAME_DTYPE, buffer.name, optional, reference=own_type)
    yield Check(
        CheckKind.RANK,
        buffer.name,
        optional,
        number=len(shape.dims),
        exact=shape.leading is None,
        label=rank or str(shape),
    )
    if argument.mutated:  # Others are copied where they are not; a copy would take the change.
        yield Check(CheckKind.CONTIGUOUS, buffer.name, optional)


def _label(expr: Expr, dims: Dims) -> str:
    """``N (out_features)``; a compound size keeps its formula."""
    if isinstance(expr, Sym) and expr.name in dims:
        return f"{expr.name} ({dims[expr.name]})"
    return str(expr)


def _of_rows(step: Step) -> frozenset[str]:
    """Results that have a number, or a byte, for elements of each row of another operand.

    How long their own rows are follows from that.
    """
    rule = definition(step.primitive).shapes.get(step.kind, {})
    leading = {slot for slot, dims in rule.items() if dims.endswith("...")}
    leading = leading if leading != {*rule} else set()
    leading |= {slot for slot, dims in rule.items() if "/" in dims}
    return frozenset(o.buffer for o in step.outputs if o.slot in leading)


def _divisible(steps: tuple[Step, ...]) -> dict[Expr, Expr]:
    """Sizes that hold others a whole number of times, each once, and those."""
    found: dict[Expr, Expr] = {}
    for step in steps:
        sizes = dict(step.sizes)
        counts = {name: Const(number) for name, number in _integers(step).items()}
        for size, formula in definition(step.primitive).divisible.items():
            divisor = substitute(parse_expr(formula), {**sizes, **counts})
            if divisor != Const(1):
                found[sizes[size]] = divisor
    return found


def _least(steps: tuple[Step, ...]) -> dict[Expr, int]:
    """Sizes that have a least one, each once."""
    found: dict[Expr, int] = {}
    for step in steps:
        sizes = dict(step.sizes)
        for size, formula in definition(step.primitive).least.items():
            number = evaluate(parse_expr(formula), _integers(step))
            found[sizes[size]] = max(number, found.get(sizes[size], 0))
    return found


def _integers(step: Step) -> dict[str, int]:
    """Attributes of a step that are numbers when a module is generated."""
    return {name: value for name, value in step.attributes if type(value) is int}


def _alignments(draft: Draft, steps: tuple[Step, ...]) -> dict[Expr, int]:
    """Lengths of rows that the steps of a program need to be multiples, each once."""
    needed: dict[Expr, int] = {}
    for step in steps:
        if step.pointwise and step.pointwise.interleaved:
            needed[step.pointwise.columns] = INTERLEAVE
    for step in steps:
        if step.alignment == 1:
            continue
        originals = [copy.original for copy in step.copies]
        operands = [operand.buffer for operand in step.inputs if operand.slot in ("a", "b")]
        results = () if quantizes(step) or decodes(step) else step.writes
        of_rows = _of_rows(step)
        for name in (*(originals or operands), *results):
            if name in of_rows:
                continue
            *outer, inner = draft.buffers[name].shape.flat
            if not outer:  # a vector has no rows: one number for each row of another operand
                continue
            needed[inner] = max(step.alignment, needed.get(inner, 1))
    plain = {expr for expr in needed if isinstance(expr, Sym)}
    return {
        expr: alignment
        for expr, alignment in needed.items()
        if expr in plain or not (symbols(expr) <= {str(each) for each in plain})
    }
