"""The rules of ``steps.verify`` for drafts: which of them hold follows from what passes gave."""

from __future__ import annotations

from collections.abc import Iterator

from ..ir.naming import QUANTIZE_INPUT, need
from ..ir.step import Step
from ..steps.copies import Formats
from ..steps.verify import Fault, VerifyError, View, faults, views
from ..steps.verify_directions import direction_faults
from .contract import Pass
from .draft import Draft, Property
from .liveness import flags_of

When = dict[str, tuple[str, ...]]
"""Buffers, and the flags under which each is there."""


def verify_pass(done: Pass, before: Draft, after: Draft) -> None:
    """Check the draft after a pass; to be given to ``run_passes``.

    Raises:
        VerifyError: with the pass and every fault.
    """
    found = [*draft_faults(after, before)] if after != before else []
    if found:
        lines = "\n".join(f"  {fault}" for fault in found)
        raise VerifyError(f"after pass {done.name!r} the draft is broken\n{lines}")


def draft_faults(draft: Draft, before: Draft | None = None) -> Iterator[Fault]:
    """Every rule that a draft breaks, of those that its properties ask for.

    Args:
        draft: to be looked at.
        before: one that breaks none: what stands in it, too, and says the same there, is left out.
    """
    roles, formats = dict(draft.quantizations), _formats(draft)
    settled = before if before and _says_the_same(before, draft) else None
    known = [*_programs(settled)] if settled else []
    for view in _programs(draft):
        if view not in known:
            yield from faults(view, draft.buffers, formats)
    if not settled or settled.gradients != draft.gradients:
        yield from _gradients(draft)
    for direction in draft.directions:
        if not settled or direction not in settled.directions:
            yield from direction_faults(direction, draft.buffers)
    for conversion in draft.conversions:
        if before and conversion in before.conversions and roles == dict(before.quantizations):
            continue
        buffers = {buffer.name: buffer for buffer in conversion.buffers}
        for view in views((conversion.program,)):
            yield from faults(view, buffers, Formats(roles, conversion.layout))


def _gradients(draft: Draft) -> Iterator[Fault]:
    """Whatever gives a leaf its gradient, it is of the leaf's type and shape."""
    lent = dict(draft.main_grads).values()
    for leaf, name in draft.gradients:
        one, other = draft.buffers.get(leaf), draft.buffers.get(name)
        if one is None or other is None or name in lent:
            continue
        if (other.dtype, other.shape) != (one.dtype, one.shape):
            words = f"is {other.dtype.value} {other.shape}, but the gradient of {leaf}, "
            yield Fault("backward", "", name, f"{words}{one.dtype.value} {one.shape}")


def _says_the_same(before: Draft, draft: Draft) -> bool:
    """Whether names and formats of a draft mean what they meant, whatever is new."""
    return before.buffers.items() <= draft.buffers.items() and _formats(before) == _formats(draft)


def _formats(draft: Draft) -> Formats | None:
    """Of the copies in a draft; None where nothing is quantised yet."""
    if Property.QUANTIZED not in draft.holds:
        return None
    return Formats(dict(draft.quantizations), draft.layout)


def _programs(draft: Draft) -> Iterator[View]:
    """Every program of a draft."""
    programs = tuple(program for each in draft.directions for program in each.programs)
    if programs or draft.programs:
        return views(programs or draft.programs, draft.joined, draft.collectives)
    return _views(draft)


def _views(draft: Draft) -> Iterator[View]:
    """Programs whose arguments and results are not written down yet."""
    if Property.EXPANDED in draft.holds:
        yield _forward(draft)
    if Property.DIFFERENTIATED in draft.holds:
        yield _backward(draft)
    if draft.quantize_input:
        yield _quantize_input(draft)
    if draft.refresh:
        yield _refresh(draft)
    if draft.wgrad:
        yield _wgrad(draft)


def _forward(draft: Draft) -> View:
    settled = Property.SAVED in draft.holds
    results: When = dict.fromkeys(draft.results, ())
    results |= {result.buffer: result.when for result in draft.saved}
    results |= _sent(draft, draft.forward)
    return View(
        name="forward",
        steps=draft.forward,
        given=_always((*draft.arguments, *_states(draft), *draft.received("forward"))),
        results=results,
        owned=frozenset(_states(draft)),
        needed=settled,
    )


def _backward(draft: Draft) -> View:
    flagged = Property.FLAGGED in draft.holds
    later = draft.received("wgrad") | {name for step in draft.wgrad for name in step.writes}
    results = {name: when for name, when in draft.computed.items() if name not in later}
    made = {name for step in draft.backward for name in step.writes}
    results |= {name: step.when for step in draft.wgrad for name in step.reads if name in made}
    results |= _sent(draft, draft.backward)
    return View(
        name="backward",
        steps=draft.backward,
        given=_before_backward(draft) | _always((*draft.received("backward"),)),
        results=results,
        owned=_owned(draft),
        flags=flags_of(draft),
        unasked=False,
        conditions=flagged,
        needed=flagged,
    )


def _quantize_input(draft: Draft) -> View:
    made = {name for step in draft.quantize_input for name in step.writes}
    given = (name for name in draft.arguments if name not in made)
    return View(
        name=QUANTIZE_INPUT,
        steps=draft.quantize_input,
        given=_always((*given, *_states(draft), *draft.received(QUANTIZE_INPUT))),
        results=_always(draft.input_copies) | _sent(draft, draft.quantize_input),
        owned=frozenset(_states(draft)),
    )


def _refresh(draft: Draft) -> View:
    return View(
        name="refresh",
        steps=draft.refresh,
        given=_always((*draft.arguments, *_states(draft))),
        results={},
        owned=frozenset(_states(draft)),
    )


def _wgrad(draft: Draft) -> View:
    received = draft.received("wgrad")
    written = received | {name for step in draft.wgrad for name in step.writes}
    left = {name: step.wanted(name) or step.when for step in draft.backward for name in step.writes}
    return View(
        name="wgrad",
        steps=draft.wgrad,
        given=_before_backward(draft) | left | _always((*received,)),
        results={name: (need(leaf),) for leaf, name in draft.gradients if name in written}
        | _sent(draft, draft.wgrad),
        owned=_owned(draft),
        flags=flags_of(draft),
        unasked=False,
    )


def _before_backward(draft: Draft) -> When:
    """What a backward can read: gradients of the outputs, what the module has, what is saved."""
    known = (*draft.incoming, *_states(draft), *dict(draft.main_grads).values())
    if Property.SAVED in draft.holds:
        return {result.buffer: result.when for result in draft.saved} | _always(known)
    repeated = {name for step in draft.backward for name in step.writes}
    made = {name for step in draft.forward for name in step.writes} - repeated
    return _always((*draft.arguments, *made, *known))


def _states(draft: Draft) -> tuple[str, ...]:
    return tuple(state.buffer for state in draft.states)


def _owned(draft: Draft) -> frozenset[str]:
    return frozenset((*_states(draft), *dict(draft.main_grads).values()))


def _sent(draft: Draft, steps: tuple[Step, ...]) -> When:
    """What collectives read of these steps."""
    operands = {name for each in draft.collectives for name in each.operands}
    return {name: step.when for step in steps for name in step.writes if name in operands}


def _always(names: tuple[str, ...]) -> When:
    return dict.fromkeys(names, ())
