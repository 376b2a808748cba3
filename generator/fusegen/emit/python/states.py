"""Texts of what a class keeps between calls: state of recipes, copies of weights, statistics."""

from __future__ import annotations

from dataclasses import dataclass

from ...ir import dtypes
from ...ir.plan import ModulePlan, State, StateFill
from ...ir.shapes import Sym, to_code, to_python


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
class RecordText:
    """Statistics of a copy: the copy's name, and the buffer's path in the class."""

    name: str
    path: str


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


def called_states(plan: ModulePlan) -> tuple[str, ...]:
    """State that the function takes, for its forward or its backward."""
    taken = {a.buffer for p in (plan.forward, plan.backward) for a in p.arguments}
    return tuple(state.buffer for state in plan.states if state.buffer in taken)


def record_text(plan: ModulePlan, name: str) -> RecordText:
    copy = next(step.copies[0] for step in plan.steps if name in step.mutates)
    return RecordText(copy.data, plan.state(name).path)


def _transient(plan: ModulePlan, state: State) -> bool:
    """Whether no state dict needs it; one without the weights needs their copies."""
    return state.fill is StateFill.RECORD or (state.fill is StateFill.COPY and not plan.quantized)


def _changed_by(plan: ModulePlan, state: State) -> str:
    if plan.refresh and state.buffer in plan.refresh.mutated:
        return "`refresh_weights`"
    return "calls" if state.fill is StateFill.RECORD else "training steps"
