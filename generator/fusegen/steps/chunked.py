"""Steps that run in a loop over chunks of the rows, so that what they hand on is never there whole.

A plan is a straight line; the loop is one step of it, whose parts are the steps of a chunk.  They
stay what they were, over all rows, which is how plain PyTorch runs them; a launcher prints the loop
around their launches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from ..ir.buffers import Buffer
from ..ir.shapes import Expr, Shape, Sym, collected, least
from ..ir.step import Chunks, Operand, Result, Step
from .copies import Formats, Results, Stored
from .definition import StepDef, Trait
from .parts import numbered

MEMORY = "chunk"
"""Slot of the memory of a chunk, before the number of the tensor that it is a chunk of."""


def chunk_of(tensor: Buffer, chunks: Chunks) -> Shape:
    """What is there of a tensor at a time: no more rows than it has."""
    return Shape(None, (least(Sym(chunks.symbol), chunks.rows), *tensor.shape.flat[1:]))


def chunked(parts: Sequence[Step], chunks: Chunks) -> Step:
    """One step for several, which hand chunks of tensors on to each other."""
    within = {name for name, _ in chunks.memory}
    written = {name for part in parts for name in part.writes if name not in part.mutates}
    asked = {name: part.wanted(name) or part.when for part in parts for name in part.writes}
    items = dict.fromkeys(part.item for part in parts)
    when = _common(parts)
    outputs = [o for n, part in enumerate(parts, 1) for o in numbered(part.outputs, n)]
    kept = [operand for operand in outputs if operand.buffer not in within]
    memory = dict.fromkeys(buffer for _, buffer in chunks.memory)
    return Step(
        primitive=CHUNKED.name,
        kind=None,
        item=next(iter(items)) if len(items) == 1 else "",
        inputs=tuple(
            operand
            for n, part in enumerate(parts, 1)
            for operand in numbered(part.inputs, n)
            if operand.buffer not in written
        ),
        outputs=(*kept, *(Operand(f"{MEMORY}_{n}", name) for n, name in enumerate(memory, 1))),
        when=when,
        output_when=tuple(
            Result(each.buffer, asked[each.buffer])
            for each in kept
            if asked[each.buffer] not in ((), when)
        ),
        mutates=tuple(dict.fromkeys(name for part in parts for name in part.mutates)),
        flops=_flops(parts),
        parts=tuple(parts),
        chunks=chunks,
    )


def _common(parts: Sequence[Step]) -> tuple[str, ...]:
    """Flags of which one is set whenever any of the parts runs; empty where one always does."""
    if not all(part.when for part in parts):
        return ()
    return tuple(dict.fromkeys(chain.from_iterable(part.when for part in parts)))


def _flops(parts: Sequence[Step]) -> Expr:
    return collected(part.flops for part in parts if part.flops is not None)


def _infer(step: Step, buffers: Mapping[str, Buffer], formats: Formats) -> Results:
    """Chunks of tensors; other results are those of the parts."""
    return dict(_stored(step, buffers))


def _stored(step: Step, buffers: Mapping[str, Buffer]) -> Iterator[tuple[str, Stored]]:
    chunks = step.chunks
    assert chunks is not None, step
    tensors = {buffer: buffers[name] for name, buffer in chunks.memory}
    for operand in step.outputs:
        if operand.buffer in tensors:
            tensor = tensors[operand.buffer]
            yield operand.slot, Stored(tensor.dtype, chunk_of(tensor, chunks))


CHUNKED = StepDef("chunked", results=(), infer=_infer, traits=frozenset((Trait.LOOPS,)))
