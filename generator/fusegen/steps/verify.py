"""What holds of every program of every plan; a pass that breaks it is named at once.

A program is looked at with what is there before it and what has to be there after it.  Rules are
checked after every pass, so that a mistake shows where it is made and not in a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ..ir.buffers import Buffer, JoinedTensor
from ..ir.dtypes import DType, bits
from ..ir.kernel import GemmKind
from ..ir.program import Program
from ..ir.segments import Collective
from ..ir.shapes import Const, Expr, Shape, Sym, mul, product, symbols
from ..ir.step import HALVES, Access, Chunks, PointwiseOperand, Step
from . import (
    copies_memory,
    decodes,
    definition,
    is_gemm,
    is_printed,
    made_copies,
    read_copies,
    reads_decoded,
)
from .copies import Formats
from .sizes import Sizes, bind, said


class VerifyError(Exception):
    """A draft or plan breaks a rule: a mistake of the pass that made it, not of a spec."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A rule that a program breaks.

    Attributes:
        program: its name.
        step: the step, by its position and kind; empty where it is about the program.
        buffer: the buffer.
        message: what is wrong with it.
    """

    program: str
    step: str
    buffer: str
    message: str

    def __str__(self) -> str:
        place = f"{self.program}, {self.step}" if self.step else self.program
        return f"{place}: {self.buffer} {self.message}"


@dataclass(frozen=True, slots=True)
class View:
    """A program as the rules see it.

    Flags are those that ask for gradients; no flag stands for all calls.

    Attributes:
        name: of the program.
        steps: in order.
        given: buffers that are there before it, and the flags under which they are.
        results: buffers that have to be there after it, and the flags under which they have to.
        owned: buffers of the module or the caller that steps may change.
        flags: all that a condition may name.
        when: flags of which one is set in every call; empty where it is called without, too.
        unasked: whether calls without any flag exist.
        conditions: whether steps have their conditions already.
        needed: whether every step has to be of use.
    """

    name: str
    steps: tuple[Step, ...]
    given: Mapping[str, tuple[str, ...]]
    results: Mapping[str, tuple[str, ...]]
    owned: frozenset[str]
    flags: tuple[str, ...] = ()
    when: tuple[str, ...] = ()
    unasked: bool = True
    conditions: bool = True
    needed: bool = True

    def fault(self, step: Step | None, buffer: str, message: str) -> Fault:
        """A fault of one of the steps, or of the program."""
        return Fault(self.name, self._words(step) if step else "", buffer, message)

    def _words(self, step: Step) -> str:
        position = next(i for i, each in enumerate(self.steps, 1) if each is step)
        words = (f"step {position}", step.primitive, step.kind, step.item)
        return " ".join(word for word in words if word)

    def calls(self, when: tuple[str, ...]) -> frozenset[str]:
        """The calls of a condition: a name for each flag, and one for calls without any."""
        if not self.flags or not self.conditions:
            return frozenset(("",))
        return frozenset(when or self.when or (*self.flags, *([""] if self.unasked else [])))


Buffers = Mapping[str, Buffer]


def faults(view: View, buffers: Buffers, formats: Formats | None = None) -> Iterator[Fault]:
    """Every rule that a program breaks; where buffers are missing, nothing else is looked at.

    Args:
        view: of the program.
        buffers: by name.
        formats: of its copies; None where nothing is quantised yet.
    """
    missing = [*_missing(view, buffers)]
    yield from missing
    for rule in () if missing else _RULES:
        yield from rule(view, buffers)
    if formats and not missing:
        yield from _stored(view, buffers, formats)


def _missing(view: View, buffers: Buffers) -> Iterator[Fault]:
    """Every buffer that is named exists."""
    for step in view.steps:
        for name in dict.fromkeys(_names(step)):
            if name not in buffers:
                yield view.fault(step, name, "is no buffer of the module")
    for name in (*view.given, *view.results):
        if name not in buffers:
            yield view.fault(None, name, "is no buffer of the module")


def _names(step: Step) -> Iterator[str]:
    yield from (*step.reads, *step.writes, *step.mutates)
    yield from (result.buffer for result in step.output_when)
    for copy in step.copies:
        yield from (copy.original, *copy.buffers, *([copy.groups] if copy.groups else []))
    for operand in _symbols(step):
        yield operand.buffer


def _symbols(step: Step) -> tuple[PointwiseOperand, ...]:
    return (*step.pointwise.operands, *step.pointwise.results) if step.pointwise else ()


def _order(view: View, _: Buffers) -> Iterator[Fault]:
    """What is read was written before, under every flag that it is read under."""
    there = {name: view.calls(when) for name, when in view.given.items()}
    for step in view.steps:
        for name in step.reads:
            asked = view.calls(step.asking(name))
            if name not in there:
                yield view.fault(step, name, "is read, but no step before it writes it")
            elif not asked <= there[name]:
                yield view.fault(step, name, f"is read {_if(asked)}, but there {_if(there[name])}")
        for name in step.writes:
            there[name] = view.calls(step.wanted(name) or step.when)
    for name, when in view.results.items():
        if name not in there:
            yield view.fault(None, name, "is a result, but no step writes it")
        elif not view.calls(when) <= there[name]:
            wanted = _if(view.calls(when))
            yield view.fault(None, name, f"is a result {wanted}, but there {_if(there[name])}")


def _if(calls: frozenset[str]) -> str:
    named = sorted(call for call in calls if call)
    return f"if {' or '.join(named)}" if named and "" not in calls else "always"


def _conditions(view: View, _: Buffers) -> Iterator[Fault]:
    """Conditions name flags of the program, and are about what the step writes."""
    for step in view.steps if view.conditions and view.flags else ():
        for flag in (*step.when, *(flag for r in step.output_when for flag in r.when)):
            if flag not in view.flags:
                yield view.fault(step, flag, "is no flag of the program")
        for result in step.output_when:
            if result.buffer not in step.writes:
                yield view.fault(step, result.buffer, "has a condition, but is not written")


def _writers(view: View, _: Buffers) -> Iterator[Fault]:
    """A buffer has one writer; what is there before is changed by none but its owner."""
    written: set[str] = set()
    for step in view.steps:
        for name in step.writes:
            if name in written:
                yield view.fault(step, name, "is written, but a step before it writes it, too")
            if name in view.given and name not in step.mutates:
                yield view.fault(step, name, "is written, but is there before the program")
            written.add(name)
        for name in step.mutates:
            if name not in view.owned:
                yield view.fault(step, name, "is changed in place, but is neither a state nor lent")


def _use(view: View, _: Buffers) -> Iterator[Fault]:
    """Every step gives something that is read or leaves the program."""
    if not view.needed:
        return
    live = {*view.results, *view.owned}
    for step in reversed(view.steps):
        if live.isdisjoint((*step.writes, *step.mutates)):
            names = ", ".join((*step.writes, *step.mutates))
            yield view.fault(step, names, "is written, but nothing needs it")
        live.update(step.reads)


def _slots(view: View, _: Buffers) -> Iterator[Fault]:
    """Each slot has one operand, and each that the signature asks for has one."""
    for step in view.steps:
        kind = definition(step.primitive)
        for operands in (step.inputs, step.outputs):
            filled = [operand.slot for operand in operands]
            for slot in dict.fromkeys(slot for slot in filled if filled.count(slot) > 1):
                yield view.fault(step, slot, "is a slot with two operands")
        for slot in () if kind.of_passes else kind.required(step.kind):
            if step.input(slot) is None:
                yield view.fault(step, slot, "is a slot without an operand")


def _shapes(view: View, buffers: Buffers) -> Iterator[Fault]:
    """Operands and results have the shapes and types of the signature."""
    for step in view.steps:
        rules = definition(step.primitive).shapes.get(step.kind, {})
        sizes: Sizes = {}
        for slot, name in ((each.slot, each.buffer) for each in (*step.inputs, *step.outputs)):
            if slot not in rules:
                continue
            shape, dtype = _logical(step, name, buffers), buffers[name].dtype
            if not bind(rules[slot], shape.fixed(), sizes):
                yield view.fault(
                    step, name, f"is {shape}, but {slot} is {said(rules[slot], sizes)}"
                )
            expected = _types(step, slot, name)
            if dtype not in expected:
                words = " or ".join(each.value for each in expected)
                yield view.fault(step, name, f"is {dtype.value}, but {slot} is {words}")


def _elements(view: View, buffers: Buffers) -> Iterator[Fault]:
    """What gives the bytes of a tensor gives as many elements."""
    for step in filter(copies_memory, view.steps):
        read, written = buffers[step.reads[0]], buffers[step.out]
        if not written.shape.holds_as_many_as(read.shape):
            words = f"is {written.shape}, but of the elements of {read.name}, {read.shape}"
            yield view.fault(step, written.name, words)


def _logical(step: Step, name: str, buffers: Buffers) -> Shape:
    """The shape of an operand; of a quantised copy, that of what it is a copy of."""
    originals = {copy.data: copy.original for copy in step.copies}
    return buffers[originals.get(name, name)].shape


def _stored(view: View, buffers: Buffers, formats: Formats) -> Iterator[Fault]:
    """Results that follow from operands and the formats of copies are stored as their kind says.

    Codes and scales of 8 bits may be held as bytes.
    """
    for step in view.steps:
        infer = definition(step.primitive).infer
        expected = infer(step, buffers, formats) if infer else {}
        for slot, name in ((each.slot, each.buffer) for each in step.outputs):
            if slot not in expected:
                continue
            shape, dtype = buffers[name].shape.fixed(), buffers[name].dtype
            if shape != expected[slot].shape.fixed():
                yield view.fault(step, name, f"is {shape}, but {slot} is {expected[slot].shape}")
            wanted = expected[slot].dtype or dtype
            if dtype is not wanted and not (dtype is DType.UINT8 and bits(wanted) <= 8):
                yield view.fault(step, name, f"is {dtype.value}, but {slot} is {wanted.value}")


_SUMS = ("out", "accumulate")
_CODES = tuple(dtype for dtype in DType if bits(dtype) <= 8)


def _types(step: Step, slot: str, name: str) -> tuple[DType, ...]:
    """Types that a slot takes: its own, codes of a copy, or the module's."""
    kind = definition(step.primitive)
    if slot in kind.dtypes:
        return kind.types(slot)
    if any(name == copy.data for copy in step.copies):
        return _CODES
    if reads_decoded(step) and slot in ("a", "b"):
        return (DType.BFLOAT16,)
    summed = is_gemm(step) and GemmKind(step.kind) is GemmKind.WGRAD
    return (DType.IO, DType.FLOAT32) if summed and slot in _SUMS else kind.types(slot)


def _copies(view: View, _: Buffers) -> Iterator[Fault]:
    """A step writes all of the copies that it makes, or reads all of those that it is given.

    What decodes a copy may leave scales and amaxes to the GEMM that reads what it decoded, and may
    be of another op than that GEMM.
    """
    decoding = {name: step for step in view.steps if decodes(step) for name in step.writes}
    for step in view.steps:
        made = made_copies(step)
        touched = {*step.reads}
        if reads_decoded(step):
            touched.update(*(decoding[name].reads for name in step.reads if name in decoding))
            operands = zip(read_copies(step), map(step.input, "ab"), strict=True)
            touched.update(*(copy.buffers for copy, name in operands if name in view.given))
        for copy in step.copies:
            left = {copy.scale, copy.amax} if decodes(step) else set()
            for name in copy.buffers:
                if name not in (step.writes if copy in made else touched) and name not in left:
                    missing = "writes" if copy in made else "reads"
                    yield view.fault(step, name, f"is of a copy, but the step {missing} it nowhere")


def _math(view: View, buffers: Buffers) -> Iterator[Fault]:
    """An expression reads operands of its step and computes its results, in their sizes."""
    for step in view.steps:
        math = step.pointwise
        if math is None or not is_printed(step):
            continue
        for operand in math.operands:
            if operand.buffer not in step.reads:
                yield view.fault(step, operand.buffer, "is in the expression, but no operand")
        if {result.buffer for result in math.results} != {*step.writes}:
            yield view.fault(step, ", ".join(step.writes), "are not what the expression computes")
        for each in _symbols(step):
            buffer = buffers[each.buffer]
            if each.dtype is not buffer.dtype:
                words = f"is {buffer.dtype.value}, but {each.dtype.value} in the expression"
                yield view.fault(step, buffer.name, words)
            if not _accessed(each.access, buffer.shape, math.rows, math.columns):
                words = f"is {buffer.shape}, but read or written by {each.access.value}"
                places = f"{math.rows} rows of {math.columns} columns"
                yield view.fault(step, buffer.name, f"{words} for {places}")


def _accessed(access: Access, shape: Shape, rows: Expr, columns: Expr) -> bool:
    if access is Access.ROW:
        return shape.elements == rows
    if access is Access.COLUMN:
        return shape.elements == columns
    width = mul(Const(2), columns) if access in HALVES else columns
    return product(shape.flat[:-1]) == rows and shape.flat[-1] == width


def _chunks(view: View, buffers: Buffers) -> Iterator[Fault]:
    """What is there in chunks stays between parts; a sum of chunks is whole behind the loop."""
    for step in view.steps:
        chunks = step.chunks
        if chunks is None:
            continue
        outside = [each for each in view.steps if each is not step]
        for name, _ in chunks.memory:
            for other in outside:
                if name in (*other.reads, *other.writes):
                    yield view.fault(other, name, "is read or written, but there in chunks alone")
            if name in view.results:
                yield view.fault(None, name, "is a result, but there in chunks alone")
        yield from _shared_chunks(view, step, chunks)
        yield from _rows_of_chunks(view, step, chunks, buffers)


def _shared_chunks(view: View, step: Step, chunks: Chunks) -> Iterator[Fault]:
    """Tensors whose chunks share memory: only the part that writes the second reads the first."""
    memory = dict(chunks.memory)
    for index, part in enumerate(step.parts):
        places = definition(part.primitive).in_place
        for result in part.outputs:
            sharing = {n for n in memory if memory[n] == memory.get(result.buffer)}
            sharing -= {result.buffer}
            there = {n for n in sharing if any(n in p.writes for p in step.parts[:index])}
            if there - {part.input(places.get(result.slot, ""))}:
                yield view.fault(step, result.buffer, "is written over what it is not made of")
            for name in there:
                if any(name in later.reads for later in step.parts[index + 1 :]):
                    yield view.fault(step, name, "is read after its memory is another's")


def _rows_of_chunks(view: View, step: Step, chunks: Chunks, buffers: Buffers) -> Iterator[Fault]:
    """Rows are the outermost dimension; what has none is shared, or a sum that nothing reads."""
    rows = Sym(chunks.symbol)
    for index, part in enumerate(step.parts):
        later = chunks.later(part)
        if {*later.writes} != {*part.writes} or not {*part.reads} <= {*later.reads}:
            yield view.fault(step, part.out, "is another result from the second chunk on")
        for name in dict.fromkeys((*part.reads, *part.writes)):
            if any(chunks.symbol in symbols(dim) for dim in buffers[name].shape.flat[1:]):
                yield view.fault(step, name, f"has {rows} elsewhere than in its outermost place")
        for name in part.writes:
            if buffers[name].shape.flat[0] == rows:
                continue
            if name not in later.updates:
                yield view.fault(step, name, "is written by each chunk, but not added up")
            if any(name in reader.reads for reader in step.parts[index + 1 :]):
                yield view.fault(step, name, "is read by a chunk before all have added to it")


_RULES: tuple[Callable[[View, Buffers], Iterator[Fault]], ...] = (
    _order,
    _conditions,
    _writers,
    _use,
    _slots,
    _shapes,
    _elements,
    _copies,
    _math,
    _chunks,
)


def views(
    programs: tuple[Program, ...],
    joined: tuple[JoinedTensor, ...] = (),
    collectives: tuple[Collective, ...] = (),
) -> Iterator[View]:
    """Programs with arguments and results, as kernels run them and as the reference does.

    Args:
        programs: all with steps.
        joined: arguments and results in whose place steps name what lies in them.
        collectives: that are to cut them: what these read is a result, what they give is there.
    """
    parts = {each.buffer: each.parts for each in joined}

    def named(buffer: str) -> tuple[str, ...]:
        return parts.get(buffer, (buffer,))

    for program in programs:
        own = [each for each in collectives if each.direction == program.name]
        operands = {name for each in own for name in each.operands}
        when = {name: s.wanted(name) or s.when for s in program.steps for name in s.writes}
        sent = {name: when[name] for name in operands if name in when}
        pairs = (pair for each in own for pair in zip(each.results, each.operands, strict=True))
        received = {result: when.get(operand, ()) for result, operand in pairs}
        merged = any(step.parts for step in program.steps)
        for each in (program, program.unmerged) if merged else (program,):
            yield View(
                name=program.name,
                steps=each.steps,
                given=received | {n: a.when for a in program.arguments for n in named(a.buffer)},
                results={
                    name: r.when if name == r.buffer else when[name]
                    for r in program.results
                    for name in named(r.buffer)
                }
                | sent,
                owned=frozenset(n for buffer in program.mutated for n in named(buffer)),
                flags=program.flags,
                when=program.when,
                unasked=program.name not in ("backward", "wgrad"),
            )
