"""The plan of a module as text, for ``explain``, ``describe()`` and READMEs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...ir.buffers import Buffer, size_in_bytes
from ...ir.kernel_set import KernelSet
from ...ir.plan import ModulePlan, Status
from ...ir.program import Direction, Program
from ...ir.segments import Start, Wait
from ...ir.shapes import (
    Binary,
    Const,
    Expr,
    Operator,
    Sym,
    add,
    ceildiv,
    mul,
    to_markdown,
)
from ...ir.step import Chunks, Result, Step
from ...steps import copies_memory, decodes
from ...steps.footprint import (
    backward_peak,
    for_each_parameter,
    for_each_token,
    held,
    typical_sizes,
)
from ..launcher.memory import lies_there, shared_memory
from ..python.conditions import any_of
from ..python.words import step_comment
from .columns import aligned
from .fold import LINE_LENGTH, fold
from .quantities import in_bytes

_NAME_WIDTH = 48  # of a first column that leaves half of the line to what follows
_UNDER_STEP = 3  # under the first word behind a number


def _formula(buffers: Iterable[Buffer]) -> str:
    """Total bytes of buffers for people, with equal terms added up."""
    merged: dict[Expr, Expr] = {}
    for buffer in buffers:
        key, size = buffer.shape.elements, size_in_bytes(buffer)
        merged[key] = _sum(merged[key], size) if key in merged else size
    return " + ".join(to_markdown(size) for size in merged.values())


def _sum(left: Expr, right: Expr) -> Expr:
    """``2 T K`` and ``4 T K`` give ``6 T K``; terms without a number in front stay apart."""
    match left, right:
        case (
            Binary(Operator.MUL, Const(value=first), rest),
            Binary(Operator.MUL, Const(value=second), other),
        ) if rest == other:
            return mul(Const(first + second), rest)
    return add(left, right)


def explain(plan: ModulePlan) -> Iterator[str]:
    """Lines, of 100 letters at most, that say what the module does, keeps, runs and costs."""
    for line in _lines(plan):
        yield from fold(line)


def _lines(plan: ModulePlan) -> Iterator[str]:
    yield f"{plan.cell} on {plan.arch}: {plan.status.value} ({plan.reason})"
    yield plan.summary
    yield "sizes: " + ", ".join(f"{dim.symbol} {dim.keyword}" for dim in plan.dims)
    if plan.is_identity:
        yield "nothing to run: the outputs are the inputs"
        return
    if plan.status is Status.EMULATED:
        yield f"emulation moves {_formula(_decoding_traffic(plan))} bytes more"
    yield ""
    yield "buffers"
    yield from _table(buffer_rows(plan))
    for direction in plan.directions:
        yield ""
        yield from _direction(plan, direction)
    yield ""
    yield from _saved(plan)
    for conversion in plan.conversions:
        yield ""
        yield f"quantize(role={conversion.role.value!r}), {conversion.form.value}"
        yield from _program(plan.of(conversion), conversion.program)
    if plan.kernel_sets:
        yield ""
        yield "kernels, first rule that holds (io is bfloat16 or float16)"
        for kernels in plan.kernel_sets:
            yield from _dispatch(kernels)


def explain_rewrites(plan: ModulePlan, left_out: Iterable[str] = ()) -> Iterator[str]:
    """Lines that say what each fusion replaced, and why it did not elsewhere.

    Args:
        plan: of the module.
        left_out: fusions that were not to apply.
    """
    rows = [*rewrite_rows(plan, left_out)]
    if rows:
        yield ""
        yield "fusions"
        yield from _table(rows)


def rewrite_rows(plan: ModulePlan, left_out: Iterable[str] = ()) -> Iterator[tuple[str, ...]]:
    """Of each fusion its name, the steps that it found, and whether it replaced them."""
    yield from ((name, "", "left out by --no-fusion") for name in left_out)
    for each in plan.rewrites:
        outcome = f"not applied: {each.reason}" if each.reason else "applied"
        yield (each.rule, each.place, outcome)


def _decoding_traffic(plan: ModulePlan) -> Iterator[Buffer]:
    """What decoding reads and writes, and what GEMMs read in place of codes."""
    for step in plan.steps:
        if decodes(step):
            yield from (plan.buffer(name) for name in (*step.reads, *step.writes))
            yield plan.buffer(step.out)


def buffer_rows(plan: ModulePlan) -> Iterator[tuple[str, ...]]:
    """Of each buffer its name, shape, type, bytes and what it is."""
    used = {name for program in plan.programs for name in _names(program)}
    for buffer in plan.buffers:
        if buffer.name in used:
            size = f"{to_markdown(size_in_bytes(buffer))} bytes"
            place = _place(plan, buffer.name)
            yield (buffer.name, str(buffer.shape), buffer.dtype.value, size, place)


def _names(program: Program) -> set[str]:
    names = {argument.buffer for argument in program.arguments}
    names |= {result.buffer for result in program.results}
    return names | {name for step in program.steps for name in (*step.reads, *step.writes)}


def _place(plan: ModulePlan, name: str) -> str:
    paths = {parameter.buffer: f"parameter {parameter.path}" for parameter in plan.parameters}
    if name in paths:
        memory = ", without memory" if name in {each.buffer for each in plan.quantized} else ""
        return paths[name] + memory + (", optional" if plan.buffer(name).optional else "")
    if name in plan.caches:
        return f"buffer {plan.state(name).path}, filled by refresh"
    if name in plan.kept and plan.joined_tensor(name) is None:
        return f"buffer {plan.state(name).path}, changed in place"
    if place := _place_in_state(plan, name):
        return place
    if name in plan.inputs:
        return "input"
    if name in plan.input_copies:
        return "copy of the input"
    if name in plan.results:
        return "output"
    if name in plan.left_for_wgrad:
        return "kept for the wgrad"
    leaves = [leaf for leaf, own in plan.gradients if own == name]
    if name in plan.incoming and plan.backward.steps:
        return f"gradient in, and of {' and '.join(leaves)}" if leaves else "gradient in"
    if name in plan.incoming or name in _given_later(plan):
        return f"gradient of {' and '.join(leaves)}" if len(leaves) > 1 else "gradient"
    if name in {argument.buffer for argument in plan.backward.arguments}:
        return "gradient in" if name not in _names(plan.forward) else "kept for the backward"
    if any(name in direction.made for direction in plan.directions):
        return "between ops"
    return _shared(plan).get(name, "workspace")


def _given_later(plan: ModulePlan) -> set[str]:
    """Results of what runs after the forward."""
    return {result.buffer for program in plan.programs[1:] for result in program.results}


def _shared(plan: ModulePlan) -> dict[str, str]:
    """Buffers that lie in the memory of others where kernels run, and whose that is."""
    programs = plan.programs if plan.kernel_sets else ()
    pairs = (pair for program in programs for pair in shared_memory(plan, program).items())
    return {name: f"memory of {other}" for name, other in pairs}


def _direction(plan: ModulePlan, direction: Direction) -> Iterator[str]:
    """Its op; where it is several segments, one behind the other."""
    for segment in direction.segments:
        match segment:
            case Program():
                yield from _program(plan, segment)
            case Start():
                words = "".join(f" {value}" for _, value in segment.attributes)
                operands = ", ".join(segment.operands)
                head = f"start {segment.kind}{words} over {segment.group.name}: {operands}"
                rows = _by_rows(segment)
                yield f"{head} -> {segment.future}{rows}{_under(segment.when)}"
            case Wait():
                results, rows = ", ".join(segment.results), _by_rows(segment)
                yield f"wait {segment.future} -> {results}{rows}{_under(segment.when)}"


def _by_rows(segment: Start | Wait) -> str:
    return f", by rows of {', '.join(segment.by_rows)} if asked" if segment.by_rows else ""


def _under(when: tuple[str, ...]) -> str:
    return f", if {any_of(when)}" if when else ""


def _place_in_state(plan: ModulePlan, name: str) -> str:
    """Of a tensor of states, or a row of a tensor of several; empty for another buffer."""
    if name in plan.record_tensors:
        return "buffer, for people"
    if name in plan.kept:
        return "state, changed in place"
    for tensor in plan.joined:
        if name in tensor.parts and plan.in_bytes(tensor):
            place = next(place for part, place in plan.places(tensor) if part == name)
            return f"byte {to_markdown(place)} of {tensor.buffer}"
        for part, first, count in () if plan.in_bytes(tensor) else plan.rows(tensor):
            if part == name:
                rows = f"row {first}" if count is None else f"rows {first} to {first + count - 1}"
                kept = tensor.buffer in {*plan.kept} - {*plan.record_tensors}
                path = f", {plan.state(name).path} in the state dict" if kept else ""
                return f"{rows} of {tensor.buffer}{path}"
    return ""


def _program(plan: ModulePlan, program: Program) -> Iterator[str]:
    arguments = ", ".join(argument.buffer for argument in program.arguments)
    results = ", ".join(result.buffer for result in program.results)
    if not program.steps:  # no op: what comes in is returned
        results = ", ".join(dict.fromkeys(name for _, name in plan.gradients))
    changed = f", changes {', '.join(program.mutated)}" if not results else ""
    called = _under(program.when)
    if program.arriving:
        called += f", begins before all rows of {program.arriving} are there if asked"
    yield f"{program.function} ({arguments}) -> {results or 'nothing'}{changed}{called}"
    yield from _table(
        r for i, s in enumerate(program.steps, 1) for r in step_rows(plan, program, s, i)
    )


def step_rows(
    plan: ModulePlan, program: Program, step: Step, index: int
) -> Iterator[tuple[str, ...]]:
    """A row for a step; behind one that runs in a loop, a row for each of its parts.

    A row has the step in words, its kernels, operations, bytes, condition and fusion.
    """
    if step.chunks is None:
        yield _step_row(plan, program, step, index)
        return
    when = f"if {any_of(step.when)}" if step.when else ""
    loop = f"{step.chunks.rows} rows of {step.chunks.symbol} at a time"
    yield (step_comment(step, index), "", _flops(step), loop, when, "")
    for number, part in enumerate(step.parts, 1):
        yield _part_row(plan, step.chunks, part, f"{index}.{step_comment(part, number)}")


def _part_row(plan: ModulePlan, chunks: Chunks, part: Step, words: str) -> tuple[str, ...]:
    """A part of a loop: every chunk reads again what has no rows, and adds to a sum of them."""
    later, rows = chunks.later(part), Sym(chunks.symbol)
    touched = [plan.buffer(name) for name in (*later.loads, *later.writes)]
    count = ceildiv(rows, chunks.rows)
    shared = [size_in_bytes(each) for each in touched if each.shape.flat[0] != rows]
    moved = [_formula(each for each in touched if each.shape.flat[0] == rows)]
    moved += [to_markdown(mul(count, size)) for size in shared]
    kernels = " then ".join(dict.fromkeys(each.kernels or "" for each in (part, later)))
    when = f"if {any_of(part.when)}" if part.when else ""
    return (words, kernels, _flops(part), f"{' + '.join(moved)} bytes", when, "")


def _flops(step: Step) -> str:
    return f"{to_markdown(step.flops)} flop" if step.flops else ""


def _step_row(plan: ModulePlan, program: Program, step: Step, index: int) -> tuple[str, ...]:
    moved = f"{_formula(plan.buffer(name) for name in (*step.loads, *step.writes))} bytes"
    if plan.kernel_sets and copies_memory(step) and lies_there(plan, program, step):
        moved = "the same memory"
    moved += ", of rows that a group has" if step.leaves else ""
    when = f"if {any_of(step.when)}" if step.when else ""
    origin = f"rule {step.rule}" if step.rule else ""
    return (step_comment(step, index), step.kernels or "", _flops(step), moved, when, origin)


def _saved(plan: ModulePlan) -> Iterator[str]:
    yield "saved for the backward, each only if a gradient that needs it is asked for"
    if not plan.saved:
        yield "  nothing"
        return
    yield from _table(saved_row(plan, result) for result in plan.saved)
    everything = _formula(plan.buffer(result.buffer) for result in plan.saved)
    yield f"  at most {everything} bytes, inputs and parameters included"
    yield f"  {_of_token(plan)}, {_of_weights(plan)}"
    for lengths in typical_sizes(plan):
        sizes = ", ".join(f"{symbol} = {length}" for symbol, length in lengths.items())
        worst = in_bytes(backward_peak(plan, lengths))
        yield f"  peak of the backward, with all gradients: {worst} at {sizes}"


def _of_token(plan: ModulePlan) -> str:
    """What is held of a token, with what the caller has anyway."""
    weights = {parameter.buffer for parameter in plan.parameters} | {*plan.caches}
    every = for_each_token(plan, (r.buffer for r in plan.saved if r.buffer not in weights))
    made = for_each_token(plan, held(plan))
    return f"{every} bytes for each token" + (f", {made} of the forward's" if made != every else "")


def _of_weights(plan: ModulePlan) -> str:
    """What is held of weights."""
    number = for_each_parameter(plan)
    return f"{number:.2g} for each parameter of a GEMM" if number else "none for parameters"


def saved_row(plan: ModulePlan, result: Result) -> tuple[str, ...]:
    """Of a saved tensor its name, bytes, and when it is saved."""
    size = to_markdown(size_in_bytes(plan.buffer(result.buffer)))
    when = f"if {any_of(result.when)}" if result.when else "always"
    return (result.buffer, f"{size} bytes", when)


def _dispatch(kernels: KernelSet) -> Iterator[str]:
    yield f"  {kernels.name}{'' if kernels.measured else ', from a model, not measured'}"
    for when, *candidates in rule_rows(kernels):
        if len(candidates) == 1:
            yield f"    {when}: {candidates[0]}"
            continue
        yield f"    {when}: least of"
        yield from (f"      {each}" for each in candidates)


def rule_rows(kernels: KernelSet) -> Iterator[tuple[str, ...]]:
    """Of each rule when it holds, and what it chooses: of several the one with the least time."""
    for rule in kernels.rules:
        if len(rule.candidates) == 1:
            yield (rule.words, rule.points[0] or "the only one")
        else:
            yield (rule.words, *(f"{each.point}: {each.words}" for each in rule.candidates))


def _table(rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Rows in columns where these fit the page; else what follows the first runs on behind it."""
    cells = list(rows)
    lines = [f"  {line}" for line in aligned(cells)]
    if max(map(len, lines), default=0) <= LINE_LENGTH:
        yield from lines
        return
    width = max(len(first) for first, *_ in cells)
    for first, *rest in cells:
        if width <= _NAME_WIDTH:
            head, indent = f"  {first.ljust(width)}  ", width + 4
        else:
            yield from fold(f"  {first}", _UNDER_STEP)
            head, indent = " " * (2 + _UNDER_STEP), 2 + _UNDER_STEP
        yield from _run_on(head, indent, [cell for cell in rest if cell])


def _run_on(head: str, indent: int, cells: list[str]) -> Iterator[str]:
    """Cells one behind the other; one that the line has no place for begins the next."""
    lines = [head]
    for index, cell in enumerate(cells):
        text = f"{cell};" if index + 1 < len(cells) else cell
        if not lines[-1].endswith(" "):
            text = f" {text}"
        if len(lines[-1] + text) > LINE_LENGTH and lines[-1] != head:
            lines.append(" " * indent)
            text = text.lstrip(" ")
        lines[-1] += text
    for line in lines:
        yield from fold(line, indent - len(line) + len(line.lstrip(" ")))
