"""Weights are quantised when asked for, not in every forward: their copies outlive the call.

The weights themselves stay parameters next to them, or live outside of the module.

Codes and 8-bit scales are stored as bytes.  A compiled graph cannot change tensors of some of their
types in place (inductor refuses E8M0, and FP8 where Triton lacks it), and collectives cannot carry
them, which DDP asks of every buffer.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.buffers import Buffer, State, StateFill
from ..ir.dtypes import DType, bits
from ..ir.step import Copy, Step
from ..steps import quantizes
from .draft import Draft, NotPossible


def keep_quantized(draft: Draft, *, alone: bool = False) -> Draft:
    """Move the steps that quantise parameters into ``refresh``, which changes the copies in place.

    What reads the copies stays where it is; the copies become state of the module.

    Args:
        draft: the module.
        alone: the module has copies, and no weight in high precision.

    Raises:
        NotPossible: copies are alone and a step reads the weight itself.
    """
    paths = {parameter.buffer: parameter.path for parameter in draft.parameters}
    moved = tuple(step for step in draft.forward if quantizes(step) and step.reads[0] in paths)
    copies = [copy for step in moved for copy in step.copies]
    caches = tuple(
        State(buffer, _path(paths[copy.original], copy, buffer), StateFill.COPY)
        for copy in copies
        for buffer in copy.buffers
    )
    stored = {cache.buffer: _bytes(draft.buffers[cache.buffer]) for cache in caches}
    if alone:
        draft = _without_memory(draft, moved)
    # First among states: the backward takes them right after what was saved.
    return replace(
        draft.with_buffers(stored),
        forward=tuple(step for step in draft.forward if step not in moved),
        refresh=tuple(_in_place(step) for step in moved),
        states=(*caches, *draft.states),
    )


def _without_memory(draft: Draft, moved: tuple[Step, ...]) -> Draft:
    """The draft with parameters that are quantised alone.

    Raises:
        NotPossible: another step than those that quantise them reads one.
    """
    weights = {step.reads[0] for step in moved}
    for program, steps in (("forward", draft.forward), ("backward", draft.backward)):
        for name in (name for step in steps if step not in moved for name in step.reads):
            if name in weights:
                raise NotPossible(
                    f"the {program} reads {name} in high precision, and quantized_weights keeps"
                    " the recipe's format alone; take cached_weights"
                )
    parameters = tuple(
        replace(parameter, quantized=parameter.buffer in weights) for parameter in draft.parameters
    )
    return replace(draft, parameters=parameters)


def _in_place(step: Step) -> Step:
    copied = (buffer for copy in step.copies for buffer in copy.buffers)
    return replace(step, mutates=(*step.mutates, *copied))


def _bytes(buffer: Buffer) -> Buffer:
    return replace(buffer, dtype=DType.UINT8) if bits(buffer.dtype) <= 8 else buffer


def _path(weight: str, copy: Copy, buffer: str) -> str:
    """``fc1.weight`` and ``fc1_weight_rowwise`` give ``fc1.weight_rowwise``."""
    return weight + buffer.removeprefix(copy.original)
