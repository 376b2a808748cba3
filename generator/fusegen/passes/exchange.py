"""Tensors that enter and leave a direction pass through collectives: what its ops have is theirs.

Inside a program such a tensor has a name of its own, ``x_all`` where ranks gather x: it is an
argument or a result of the ops, while the module's caller has x.  What the forward gathers is not
saved: the backward gathers it again, of what each rank has.  Copies of the first input that the
forward takes for the backward alone are gathered there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..ir.naming import QUANTIZE_INPUT
from ..ir.program import Program
from ..ir.segments import Collective, Exchange
from ..steps.collectives import collective
from .draft import Draft
from .names import program_with_names

_PART = "part"
"""Of the name of what ops give for a sum over ranks."""


def exchange(draft: Draft) -> Draft:
    """Give programs what collectives give, and collectives what programs give."""
    names = {each.buffer: _inside(draft, each) for each in draft.exchanges}
    programs = tuple(_renamed(draft, program, names) for program in draft.programs)
    found = [each for program in draft.programs for each in _collectives(draft, program, names)]
    new = {own: replace(draft.buffers[name], name=own) for name, own in names.items()}
    for each in found:
        outer = each.operands[0] if each.operands[0] in draft.buffers else each.results[0]
        new[each.future] = replace(draft.buffers[outer], name=each.future)
    draft = draft.with_buffers(new)
    return replace(draft, programs=programs, collectives=(*draft.collectives, *found))


def _inside(draft: Draft, each: Exchange) -> str:
    """What ops call it."""
    suffix = collective(each.kind).suffix if each.entering else _PART
    return _unused(draft, f"{each.buffer}_{suffix}")


def _unused(draft: Draft, name: str) -> str:
    """A name that no buffer has."""
    while name in draft.buffers:
        name += "_"
    return name


def _of(draft: Draft, program: Program) -> Iterator[Exchange]:
    """What a program's tensors pass through: what enters in the order of its arguments first."""
    if program.name == QUANTIZE_INPUT:  # what a rank has: its copies are gathered
        return
    exchanges = {each.buffer: each for each in draft.exchanges}
    unread = {*draft.input_copies}.difference(*(step.reads for step in program.steps))
    for argument in program.arguments:
        each = exchanges.get(argument.buffer)
        if each and each.entering and argument.buffer not in unread:
            yield each
    for result in program.results:
        each = exchanges.get(result.buffer)
        if each and not each.entering:
            yield each


def _renamed(draft: Draft, program: Program, names: dict[str, str]) -> Program:
    own = {each.buffer: names[each.buffer] for each in _of(draft, program)}
    return program_with_names(program, lambda name: own.get(name, name))


def _collectives(draft: Draft, program: Program, names: dict[str, str]) -> Iterator[Collective]:
    for each in _of(draft, program):
        inside = names[each.buffer]
        sent, given = (each.buffer, inside) if each.entering else (inside, each.buffer)
        yield Collective(
            each.kind,
            program.name,
            (sent,),
            (given,),
            _unused(draft, f"{program.name}_{inside}_pending"),
            each.group,
            each.attributes,
            each.sizes,
            outside=True,
        )
