"""Tensors of which a chunk of the rows is there at a time: a loop around the steps that touch them.

An op says so of what is too large to be kept (``chunk``); its own rules make the tensor again in
the backward.  Two passes do the rest.  Sums over all rows are added up in fp32 over the chunks, and
rounded once behind them, or go straight to a caller's fp32 buffer.  At the end the steps that touch
such a tensor become one step, which keeps them as its parts.

This is no rule of the rewrite engine, although it merges steps.  What a rule replaces may as well
stay; whether a tensor of gigabytes is stored may not depend on where a pattern matches, so that a
step which needs all rows is refused here, with its reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ..ir.buffers import Buffer
from ..ir.dtypes import DType
from ..ir.kernel_set import KernelSet
from ..ir.program import Program
from ..ir.shapes import Expr, Sym
from ..ir.step import Chunks, Operand, Step
from ..spec.arch import ArchSpec
from ..spec.recipe import RecipeSpec
from ..steps import definition, is_gemm, quantizes
from ..steps.chunked import chunk_of, chunked
from ..steps.narrow import NARROW
from ..steps.sizes import name_of
from .draft import Draft, NotPossible
from .kernels import kernel_set
from .math import attach_formula

Buffers = Mapping[str, Buffer]


# ---- sums over all rows


def sum_chunks(draft: Draft) -> Draft:
    """Let GEMMs that add up chunks do so in fp32, each behind which a step rounds the sum.

    A caller's buffer in fp32 is what they add to themselves.

    Raises:
        NotPossible: a step cannot run for a chunk of the rows, or would round every chunk's sum.
    """
    for step in sorted((*draft.forward, *draft.backward), key=quantizes, reverse=True):
        tensor = _in_chunks(step, draft.buffers)
        if tensor and (reason := _why_whole(step, tensor, draft.buffers)):
            raise NotPossible(reason)
    sums = {
        name: Buffer(f"{name}_sum", DType.FLOAT32, draft.buffers[name].shape)
        for step in (*draft.forward, *draft.backward)
        for name in step.writes
        if _is_narrow_sum(step, draft.buffers)
    }
    draft = draft.with_buffers({each.name: each for each in sums.values()})

    def summed(step: Step) -> Iterator[Step]:
        total = sums.get(step.out) if step.outputs else None
        if total is None:
            yield step
            return
        yield replace(step, outputs=(Operand("out", total.name),), mutates=())
        inputs = (Operand("a", total.name),)
        narrow = Step(NARROW.name, None, step.item, inputs, step.outputs, mutates=step.mutates)
        yield attach_formula(draft.buffers, narrow)[0]

    return replace(
        draft,
        forward=tuple(each for step in draft.forward for each in summed(step)),
        backward=tuple(each for step in draft.backward for each in summed(step)),
    )


def _is_narrow_sum(step: Step, buffers: Buffers) -> bool:
    """Whether a step adds up chunks and gives their sum in the module's own type."""
    tensor = _in_chunks(step, buffers)
    return (
        tensor is not None and _adds_up(step, tensor, buffers) and not _is_wide(step.out, buffers)
    )


def _in_chunks(step: Step, buffers: Buffers) -> Buffer | None:
    """A tensor that a step touches and of which a chunk is there at a time."""
    names = (*step.reads, *step.writes)
    return next((buffers[name] for name in names if buffers[name].chunk), None)


def _rows(tensor: Buffer) -> Expr:
    return tensor.shape.flat[0]


def _adds_up(step: Step, tensor: Buffer, buffers: Buffers) -> bool:
    """Whether a step's result has no rows any more."""
    return _rows(buffers[step.out]) != _rows(tensor)


def _is_wide(name: str, buffers: Buffers) -> bool:
    return buffers[name].dtype is DType.FLOAT32


def _why_whole(step: Step, tensor: Buffer, buffers: Buffers) -> str:
    """Why a step needs all rows of a tensor; empty where it runs for a chunk of them."""
    there = f"{tensor.name}, of which {tensor.chunk} rows are there at a time"
    remedy = f"an op that keeps it whole says no 'chunk' of {tensor.name.removeprefix('d')!r}"
    place = f"op {step.item!r}: " if step.item else ""
    unquantized = "take a recipe that quantises nothing, such as bf16, for this module"
    if quantizes(step):
        cut = "its scales would depend on where rows are cut"
        return f"{place}the recipe quantises {there}: {cut}; {unquantized}; {remedy}"
    if step.copies:
        cut = "no kernel reads a part of their rows"
        return f"{place}quantised copies are multiplied for {there}: {cut}; {unquantized}; {remedy}"
    if is_gemm(step) and _adds_up(step, tensor, buffers):
        if step.input("accumulate") and not _is_wide(step.out, buffers):
            return (
                f"{place}{step.out} would be rounded to 16 bits once for each chunk of"
                f" {tensor.name}; let it be added to in fp32"
            )
        return ""
    if is_gemm(step) or _by_rows(step, tensor, buffers):
        return ""
    return f"{place}{step.primitive} cannot run for a part of {there}; {remedy}"


def _by_rows(step: Step, tensor: Buffer, buffers: Buffers) -> bool:
    """Whether the kind of a step says that rows of its results need rows of its operands alone."""
    kind = definition(step.primitive)
    rule = kind.shapes.get(step.kind, {})
    slots = (o.slot for o in (*step.inputs, *step.outputs) if o.buffer == tensor.name)
    names = {name_of(rule[slot], tensor.shape, 0) for slot in slots if slot in rule}
    by_rows = bool(names) and names <= {*kind.independent}
    whole = any(_rows(buffers[name]) != _rows(tensor) for name in step.writes)
    return by_rows and not whole and kind.scratch is None


# ---- loops


def run_in_chunks(
    draft: Draft, arch: ArchSpec, recipe: RecipeSpec
) -> tuple[Draft, tuple[KernelSet, ...]]:
    """The draft with a loop around the steps that touch such a tensor, and kernels of its own.

    What has no kernels runs the steps over all rows at once.

    Raises:
        NotPossible: such a tensor leaves its program, or a step between needs what a loop gives.
    """
    sets: dict[str, KernelSet] = {}
    buffers: dict[str, Buffer] = {}
    programs = []
    for program in draft.programs:
        _check_inside(program, draft.buffers)
        for loop in _loops(program.steps, draft.buffers) if arch.has_kernels else ():
            made, memory, kernels = _looped(loop, draft.buffers, arch, recipe)
            buffers |= memory
            sets |= kernels
            program = replace(program, steps=_placed(program.steps, loop, made))
        programs.append(program)
    return draft.with_buffers(buffers).packed(programs), tuple(sets.values())


def _check_inside(program: Program, buffers: Buffers) -> None:
    """Refuse a tensor that comes from another program or goes to one."""
    for name in (*program.takes, *program.gives):
        if buffers[name].chunk:
            raise NotPossible(
                f"{name}, of which {buffers[name].chunk} rows are there at a time, would cross from"
                f" one op to another at the {program.name}"
            )


def _loops(steps: Sequence[Step], buffers: Buffers) -> list[tuple[Step, ...]]:
    """Steps that are connected by such tensors, each group in the order of the program."""
    loops: dict[frozenset[str], tuple[Step, ...]] = {}
    for step in steps:
        names = frozenset(n for n in (*step.reads, *step.writes) if buffers[n].chunk)
        if names:
            own = [known for known in loops if known & names]
            parts = (*(each for known in own for each in loops.pop(known)), step)
            loops[names.union(*own)] = tuple(sorted(parts, key=steps.index))
    return [*loops.values()]


def _looped(
    parts: tuple[Step, ...], buffers: Buffers, arch: ArchSpec, recipe: RecipeSpec
) -> tuple[Step, dict[str, Buffer], dict[str, KernelSet]]:
    """The step that runs parts in a loop, the memory of its chunks, and kernels of later ones."""
    names = dict.fromkeys(name for part in parts for name in (*part.reads, *part.writes))
    tensors = [buffers[name] for name in names if buffers[name].chunk]
    rows, chunk = _rows(tensors[0]), tensors[0].chunk
    assert isinstance(rows, Sym) and chunk is not None, tensors[0]
    if any((_rows(each), each.chunk) != (rows, chunk) for each in tensors):
        words = " and ".join(f"{each.chunk} of {_rows(each)} of {each.name}" for each in tensors)
        raise NotPossible(f"{words} cannot be the chunks of one loop; let them be the same")
    memory = _memory(parts, tensors)
    adding, sets = [], {}
    for part in parts:
        if not part.updates and _adds_up(part, tensors[0], buffers):
            added = replace(
                part,
                inputs=(*part.inputs, Operand("accumulate", part.out)),
                mutates=(part.out,),
            )
            chosen = kernel_set(added, buffers, arch, recipe)
            sets[chosen.name] = chosen
            adding.append(replace(added, kernels=chosen.name))
    chunks = Chunks(rows.name, chunk, tuple(memory.items()), tuple(adding))
    own = {
        name: Buffer(name, buffers[tensor].dtype, chunk_of(buffers[tensor], chunks))
        for tensor, name in memory.items()
    }
    return chunked(parts, chunks), own, sets


def _memory(parts: Sequence[Step], tensors: Sequence[Buffer]) -> dict[str, str]:
    """The buffer that has a chunk of each tensor: that of an operand which nobody reads again."""
    memory: dict[str, str] = {}
    named = {each.name for each in tensors}
    for index, part in enumerate(parts):
        places = definition(part.primitive).in_place
        for result in part.outputs:
            if result.buffer not in named:
                continue
            operand = part.input(places.get(result.slot, ""))
            later = (name for each in parts[index + 1 :] for name in each.reads)
            free = operand in memory and operand not in later
            own = memory[operand] if operand and free else f"{result.buffer}_chunk"
            memory[result.buffer] = own
    return memory


def _placed(steps: Sequence[Step], loop: Sequence[Step], made: Step) -> tuple[Step, ...]:
    """The steps with a loop in the place of its parts; what reads a part's results is behind it."""
    before: list[Step] = []
    behind: list[Step] = []
    waiting = {*made.writes}
    for step in steps:
        if step in loop:
            continue
        if waiting & {*step.reads}:
            behind.append(step)
            waiting |= {*step.writes}
        else:
            before.append(step)
    late = {name for step in behind for name in step.writes} & {*made.reads}
    if late:
        names = ", ".join(sorted(late))
        raise NotPossible(f"a loop over chunks reads {names}, which follows from what it gives")
    return (*before, made, *behind)
