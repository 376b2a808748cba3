"""Texts of what a class keeps between calls: state of recipes, copies of weights, statistics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ...ir import dtypes
from ...ir.buffers import JoinedTensor, StateFill
from ...ir.plan import ModulePlan
from ...ir.shapes import Expr, Sym, to_code, to_python
from ...steps import observes


@dataclass(frozen=True, slots=True)
class PartText:
    """A state that lies in a tensor of several; the class has a view of it.

    Attributes:
        path: in the state dict.
        holder: submodule that has the view; empty for the module itself.
        name: within its holder.
        rows: index into the tensor, Python source.
        extents: its sizes, for people.
        init: source of the in-place fill, without the tensor.
    """

    path: str
    holder: str
    name: str
    rows: str
    extents: str
    init: str


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
        copy: whether it is part of a copy of a weight.
        transient: whether no state dict needs it; one without the weights needs their copies.
        parts: the states that lie in it, which state dicts have in its place.
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
    copy: bool
    transient: bool
    parts: tuple[PartText, ...]

    @property
    def fills(self) -> tuple[str, ...]:
        """Sources that fill it, or each state in it, as before the first step."""
        filled = self.parts or (self,)
        return tuple(f"{each.path}.{each.init}" for each in filled if each.init)


@dataclass(frozen=True, slots=True)
class RecordText:
    """Statistics of a copy.

    Attributes:
        name: of the copy.
        source: of its numbers, on the class.
    """

    name: str
    source: str


_FILLS = {
    StateFill.ZEROS: "zero_()",
    StateFill.ONES: "fill_(1.0)",
    StateFill.SEED: "copy_(torch.stack((torch.randint(2**62, ()), torch.tensor(0))))",
    StateFill.COPY: "",
    StateFill.RECORD: "zero_()",
}


def state_texts(plan: ModulePlan) -> tuple[StateText, ...]:
    """Every buffer of the class that ops change."""
    return tuple(_state_text(plan, name) for name in plan.kept)


def declarations(states: Iterable[StateText]) -> Iterator[tuple[str, str]]:
    """Of every state, and of the parts of each: its holder, and how a class declares it."""
    for state in states:
        yield state.holder, f"{state.name}: Tensor"
        yield from ((part.holder, f"{part.name}: Tensor") for part in state.parts)


def _state_text(plan: ModulePlan, name: str) -> StateText:
    tensor = plan.joined_tensor(name)
    recorded = name in plan.record_tensors
    state = plan.state(name) if tensor is None else None
    path = state.path if state else name
    holder, _, attribute = path.rpartition(".")
    buffer = plan.buffer(name)
    dims = _named_dims(plan, name)
    dtype = dtypes.info(buffer.dtype).torch
    copy = state is not None and state.fill is StateFill.COPY
    return StateText(
        path=path,
        holder=holder,
        name=attribute,
        argument=name,
        about=f"{buffer.shape} {dtype}, changed in place"
        + (" by `refresh_weights`" if copy else ""),
        changed_by=_changed_by(plan, name),
        extents=", ".join(to_python(dim) for dim in dims),
        shape=", ".join(to_code(dim) for dim in dims),
        dtype=dtype,
        init=_FILLS[StateFill.RECORD] if recorded else _FILLS[state.fill] if state else "",
        copy=copy,
        transient=recorded or (copy and not plan.quantized),
        parts=tuple(_part_texts(plan, tensor)) if tensor and not recorded else (),
    )


def _named_dims(plan: ModulePlan, name: str) -> tuple[Expr, ...]:
    """Sizes of a buffer, in keywords of the constructor."""
    words = {dim.symbol: Sym(dim.keyword) for dim in plan.dims}
    return plan.buffer(name).shape.substitute(words).dims


def _part_texts(plan: ModulePlan, tensor: JoinedTensor) -> Iterator[PartText]:
    for name, first, count in plan.rows(tensor):
        state = plan.state(name)
        holder, _, attribute = state.path.rpartition(".")
        yield PartText(
            path=state.path,
            holder=holder,
            name=attribute,
            rows=str(first) if count is None else f"slice({first}, {first + count})",
            extents=", ".join(to_python(dim) for dim in _named_dims(plan, name)),
            init=_FILLS[state.fill],
        )


def state_sources(
    plan: ModulePlan, tensor: JoinedTensor, prefix: str = ""
) -> Iterator[tuple[str, str]]:
    """Parts, and Python source of each out of its tensor, whose name has a prefix."""
    if plan.in_bytes(tensor):
        for name, begin in plan.places(tensor):
            buffer = plan.buffer(name)
            dtype = f"torch.{dtypes.info(buffer.dtype).torch}"
            sizes = (to_code(each) for each in (begin, *buffer.shape.dims))
            start, *dims = sizes
            given = ", ".join((f"{prefix}{tensor.buffer}", start, dtype, *dims))
            yield name, f"quantized.bytes_at({given})"
        return
    for name, first, count in plan.rows(tensor):
        rows = str(first) if count is None else f"{first}:{first + count}"
        yield name, f"{prefix}{tensor.buffer}[{rows}]"


def called_states(plan: ModulePlan) -> tuple[str, ...]:
    """Tensors of state that the function takes, for any of the ops that it calls."""
    programs = (plan.forward, plan.backward, plan.quantize_input)
    taken = {a.buffer for program in programs if program for a in program.arguments}
    return tuple(name for name in plan.kept if name in taken)


def record_texts(plan: ModulePlan) -> Iterator[RecordText]:
    """Statistics of every copy: each is a row of the tensor of its op."""
    copies = {step.out: step.copies[0].data for step in plan.steps if observes(step)}
    for name in plan.record_tensors:
        tensor = plan.joined_tensor(name)
        assert tensor is not None, name
        for part, source in state_sources(plan, tensor, "self."):
            yield RecordText(copies[part], source)


def _changed_by(plan: ModulePlan, name: str) -> str:
    if plan.refresh and name in plan.refresh.mutated:
        return "`refresh_weights`"
    return "calls" if name in plan.record_tensors else "training steps"
