"""Quantise: put a GEMM's operands into the recipe's formats.

Each GEMM reads copies of its operands whose blocks run along the contraction: fprop and dgrad read
rowwise copies of tokens, wgrad columnwise ones, and dgrad reads weights columnwise.  Where a
tensor's columnwise copy would be its rowwise one, that is read in its place.  All copies of a
tensor are made in one step, from high precision, where its first GEMM needs one; those that the
backward reads of a tensor which it makes again, in the backward, by the scales that the forward
used.  So are those of a weight, unless forwards are to hold them: autograd keeps the weight itself,
which costs nothing and raises where somebody changes it in between.

A backward of another precision reads operands of the module's own type: the tensors themselves, or
what the forward's copies of them stand for, which then are all that is saved.

An explicit ``quantize`` step gives back what the rowwise copy stands for, in the module's own type.
Where a module gives its output quantised, the last step of its forward makes copies of that as of
an operand.  A role that the recipe does not name stays in that type: an explicit step of such a
role, as of every gradient, is the identity, and disappears by renaming its result to its operand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..ir.buffers import Buffer, State, StateFill
from ..ir.dtypes import DType
from ..ir.kernel import GemmKind
from ..ir.naming import gradient
from ..ir.quantization import OPERANDS, AmaxSource, Orientation, Role, Rounding
from ..ir.shapes import Const, Shape
from ..ir.step import Copy, Operand, Step
from ..options.backward_precision import BackwardPrecision
from ..spec.arch import ArchSpec
from ..spec.recipe import RecipeSpec
from ..steps import decodes, is_gemm, quantizes
from ..steps.copies import Original, copy_slots, serves_both
from ..steps.dequantize import DEQUANTIZE
from ..steps.pointwise import ROW_GROUPS
from ..steps.snapshot import SNAPSHOT
from .copies import make_copy, quantize_step, scratch
from .decode import decode_operands, whole_copy, why_emulated
from .draft import Draft, NotPossible
from .kernels import with_sizes
from .names import with_names


def quantize(
    draft: Draft,
    recipe: RecipeSpec,
    arch: ArchSpec,
    *,
    backward: BackwardPrecision = BackwardPrecision.QUANTIZED,
    fresh: bool = True,
    gives_copies: bool = False,
) -> Draft:
    """Insert quantisation where the recipe asks for it.

    Args:
        draft: the module.
        recipe: formats of its operands.
        arch: how copies are laid out, and whether kernels make them.
        backward: what GEMMs of the backward read.
        fresh: the backward makes the copies of weights that it reads.
        gives_copies: the module gives copies of its output, as an input of a GEMM would have them,
            and not the output.

    Raises:
        NotPossible: a GEMM would have one quantised operand only, or an output that is to be copies
            alone is read by the backward.
    """
    draft = _drop_identities(_round_trips(draft, recipe))
    if not recipe.roles:
        return draft
    remade = _weights(draft, recipe) if fresh else frozenset[str]()
    given = draft.outputs if gives_copies else ()
    return _Copies(recipe, arch, backward, remade, given).insert(draft)


def unquantized(draft: Draft) -> tuple[tuple[Step, ...], tuple[str, ...]]:
    """The forward of a recipe without roles, what a recipe's error is measured against.

    Returns:
        its steps, and the buffers that hold the outputs.
    """
    exact = _drop_identities(draft)
    return exact.forward, exact.outputs


def _round_trips(draft: Draft, recipe: RecipeSpec) -> Draft:
    """Explicit steps of roles that the recipe names become the way back from their copy."""

    def expanded(step: Step) -> Step:
        named = draft.buffers[step.reads[0]].role in recipe.roles
        if not (_is_identity(step) and named):
            return step
        return replace(step, primitive=DEQUANTIZE.name)

    return replace(draft, forward=tuple(expanded(step) for step in draft.forward))


class _Tensor(NamedTuple):
    """What copies are made of: a tensor in a role.

    ``again``: the backward makes it, or its copies, again.
    """

    name: str
    role: Role
    again: bool


@dataclass(slots=True)
class _Copies:
    """Copies made so far, in the order in which GEMMs ask for them.

    ``used`` are the forward's first steps, which keep scales as it finds them: behind another step
    they would stand between those that quantise, of which several may become one.  ``given`` are
    outputs of which the module gives copies.
    """

    recipe: RecipeSpec
    arch: ArchSpec
    backward: BackwardPrecision
    remade: frozenset[str]
    given: tuple[str, ...] = ()
    made: dict[_Tensor, dict[Orientation, Copy]] = field(default_factory=dict)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    states: dict[str, State] = field(default_factory=dict)
    kept: dict[_Tensor, tuple[Operand, ...]] = field(default_factory=dict)
    used: list[Step] = field(default_factory=list)
    emulated: str = ""

    def insert(self, draft: Draft) -> Draft:
        """Give every GEMM its copies and put a step that makes them before the first of them."""
        none = frozenset[str]()
        again = self.remade | (_written(draft.forward) & _written(draft.backward))
        first = [each for step in draft.forward for each in self._with_copies(draft, step, none)]
        second = [each for step in draft.backward for each in self._with_copies(draft, step, again)]
        done: set[_Tensor] = set()
        forward = tuple(self._with_steps(draft, first, none, done, _read(second, again)))
        forward += tuple(self._giving(draft, name) for name in self.given)
        backward = tuple(self._with_steps(draft, second, again, done, {}))
        return replace(
            draft.with_buffers(self.buffers),
            forward=(*self.used, *forward),
            backward=backward,
            states=tuple(self.states.values()),
            output_copies=self._given_copies(),
            emulated=self.emulated,
        )

    def _giving(self, draft: Draft, name: str) -> Step:
        """The step that makes the copies of an output.

        Raises:
            NotPossible: it is an input, or the backward reads it.
        """
        writer = next((step for step in draft.forward if name in step.writes), None)
        if writer is None or name in draft.inputs:
            raise NotPossible(f"{name!r} is an input, and not computed")
        if any(name in step.reads for step in draft.backward):
            raise NotPossible(f"the backward reads {name!r}, of which there would be copies alone")
        key = _Tensor(name, Role.INPUT, again=False)
        groups = writer.input("groups") or writer.input(ROW_GROUPS)
        both = serves_both(self.recipe.roles[Role.INPUT], self.arch.layout)
        for orientation in (Orientation.ROWWISE,) if both else Orientation:
            self._copy(draft, key, orientation, groups)
        return self._step(draft, key, "")

    def _given_copies(self) -> tuple[str, ...]:
        made = (self.made[_Tensor(name, Role.INPUT, again=False)] for name in self.given)
        return tuple(
            name
            for copies in made
            for o in Orientation
            if o in copies
            for name in copies[o].buffers
        )

    def _with_copies(self, draft: Draft, step: Step, again: frozenset[str]) -> tuple[Step, ...]:
        """The step, where it is a GEMM of copies, or after those that its operands are."""
        if decodes(step):
            tensor = draft.buffers[step.reads[0]]
            if tensor.role not in self.recipe.roles or tensor.role is None:
                raise NotPossible(f"recipe {self.recipe.name!r} has no copy of {tensor.name}")
            key = _Tensor(tensor.name, tensor.role, tensor.name in again)
            return (self._whole(draft, key, step, step.out),)
        if not is_gemm(step):
            return (step,)
        step = with_sizes(draft, step)
        if _has_no_roles(draft, step):
            return (step,)
        precision = self.backward
        if GemmKind(step.kind) is GemmKind.FPROP or precision is BackwardPrecision.QUANTIZED:
            return (self._of_copies(draft, step, again),)
        if precision is BackwardPrecision.DEQUANTIZED:
            return self._of_values(draft, step, again)
        return (step,)

    def _whole(self, draft: Draft, key: _Tensor, step: Step, out: str) -> Step:
        """What a tensor's rowwise copy stands for, for a step."""
        copy = self._copy(draft, key, Orientation.ROWWISE, step.input("groups"))
        return replace(whole_copy(draft.buffers[key.name], copy, out), item=step.item)

    def _of_values(self, draft: Draft, step: Step, again: frozenset[str]) -> tuple[Step, ...]:
        """A GEMM of the backward that reads what the forward's copies stand for, after them."""
        before = []
        inputs = []
        for operand in step.inputs:
            role, _ = OPERANDS.get((GemmKind(step.kind), operand.slot), (None, None))
            if role not in (Role.INPUT, Role.WEIGHT) or role not in self.recipe.roles:
                inputs.append(operand)
                continue
            tensor = draft.buffers[operand.buffer]
            key = _Tensor(tensor.name, role, tensor.name in again)
            value = replace(tensor, name=_value(tensor.name), role=None, optional=False)
            if value.name not in self.buffers:  # else a GEMM before it has asked for it
                self.buffers[value.name] = value
                before.append(self._whole(draft, key, step, value.name))
            inputs.append(Operand(operand.slot, value.name))
        return (*before, replace(step, inputs=tuple(inputs)))

    def _of_copies(self, draft: Draft, step: Step, again: frozenset[str]) -> Step:
        copies = []
        inputs = []
        for operand in step.inputs:
            role, orientation = OPERANDS.get((GemmKind(step.kind), operand.slot), (None, None))
            if role is None or orientation is None or role not in self.recipe.roles:
                inputs.append(operand)
                continue
            key = _Tensor(operand.buffer, role, operand.buffer in again)
            if serves_both(self.recipe.roles[role], self.arch.layout):
                orientation = Orientation.ROWWISE
            copy = self._copy(draft, key, orientation, step.input("groups"))
            copies.append(copy)
            inputs += copy_slots(operand.slot, copy)
        if len(copies) == 1:
            raise NotPossible(
                f"recipe {self.recipe.name!r} quantises one operand of {step.kind} only"
            )
        return replace(step, inputs=tuple(inputs), copies=tuple(copies))

    def _copy(
        self, draft: Draft, key: _Tensor, orientation: Orientation, groups: str | None
    ) -> Copy:
        known = self.made.setdefault(key, {})
        if orientation not in known:
            copy, buffers = make_copy(
                draft.buffers[key.name],
                key.role,
                orientation,
                self.recipe.roles[key.role],
                self.arch.layout,
                draft.buffers[groups] if groups else None,
            )
            known[orientation] = copy
            self.buffers |= {buffer.name: buffer for buffer in buffers}
        return known[orientation]

    def _with_steps(
        self,
        draft: Draft,
        program: list[Step],
        again: frozenset[str],
        done: set[_Tensor],
        later: dict[_Tensor, str],
    ) -> Iterable[Step]:
        """The steps, and before the first that reads a tensor's copies the one that makes them.

        Args:
            draft: the module.
            program: its steps.
            again: tensors that the backward makes again.
            done: tensors whose copies are made; grows.
            later: tensors whose copies a later program reads, and the op that does.  Those that
                this one writes and reads no copies of are quantised behind their step.
        """
        there: set[str] = set()
        own = {(copy.original, copy.role) for step in program for copy in step.copies}
        for step in program:
            for copy in step.copies:
                key = _Tensor(copy.original, copy.role, copy.original in again)
                if key not in done:
                    done.add(key)
                    yield self._step(draft, key, step.item)
                    self.used += self._snapshots(key, step.item)
            for each in self._emulated(draft, step):
                if not (decodes(each) and there.issuperset(each.writes)):  # another GEMM's
                    there.update(each.writes)
                    yield each
            for key, item in later.items():
                if key.name in step.writes and (key.name, key.role) not in own:
                    done.add(key)
                    yield self._step(draft, key, item)

    def _emulated(self, draft: Draft, step: Step) -> Iterable[Step]:
        """The step; where only decoded operands can be multiplied, after the steps that decode."""
        known = {**draft.buffers, **self.buffers}
        reason = why_emulated(step, self.arch, self.recipe, known)
        if not reason:
            yield step
            return
        self.emulated = self.emulated or reason
        steps, buffers = decode_operands(step, known, self.arch.layout, self.recipe)
        self.buffers |= {buffer.name: buffer for buffer in buffers}
        yield from steps

    def _step(self, draft: Draft, key: _Tensor, item: str) -> Step:
        copies = tuple(self.made[key][o] for o in Orientation if o in self.made[key])
        tensor = Original.of_copy(copies[0], draft.buffers)
        earlier = self.kept.get(key._replace(again=False)) if key.again else None
        states = self._states(copies[0], item) if earlier is None else self._used(key, earlier)
        self.kept[key] = states
        needed = scratch(tensor, copies, self.recipe.roles[key.role])
        kept = {operand.slot for operand in states}
        if not self.arch.has_kernels or "scale" in kept:
            needed = ()
        self.buffers |= {buffer.name: buffer for _, buffer in needed}
        step = quantize_step(tensor, copies, states, needed)
        moves = any(operand.slot == "amax_history" for operand in states)
        changed = (o.buffer for o in states if o.slot == "rng_state" or moves)
        return replace(step, item=item, mutates=tuple(changed))

    def _used(self, key: _Tensor, states: tuple[Operand, ...]) -> tuple[Operand, ...]:
        """What the forward's step had of the state that it has moved on since.

        Raises:
            NotPossible: it drew random numbers.
        """
        if any(operand.slot == "rng_state" for operand in states):
            raise NotPossible(
                f"recipe {self.recipe.name!r} rounds {key.name!r} stochastically: made again, it"
                " would be rounded otherwise"
            )
        return tuple(Operand(o.slot, _as_used(o.buffer)) for o in states if o.slot == "scale")

    def _snapshots(self, key: _Tensor, item: str) -> Iterable[Step]:
        """Scales of a forward's step as they are before it, if the backward quantises by them."""
        if key.again or key._replace(again=True) not in self.made:
            return
        for operand in self.kept[key]:
            if operand.slot == "scale":
                name = _as_used(operand.buffer)
                self.buffers[name] = replace(self.buffers[operand.buffer], name=name)
                yield Step(
                    SNAPSHOT.name,
                    None,
                    item,
                    inputs=(Operand("a", operand.buffer),),
                    outputs=(Operand("out", name),),
                )

    def _states(self, copy: Copy, item: str) -> tuple[Operand, ...]:
        """What the role's rules keep between calls: amax history and scale, or random numbers."""
        spec = self.recipe.roles[copy.role]
        word = "output" if copy.original in self.given else copy.role.value
        kept: list[tuple[str, str, Buffer, StateFill]] = []
        if spec.scale.source is AmaxSource.HISTORY:
            shape = self.buffers[copy.scale].shape
            history = Shape(None, (Const(spec.scale.history), *shape.dims))
            for slot, fill, dims in (
                ("amax_history", StateFill.ZEROS, history),
                ("scale", StateFill.ONES, shape),
            ):
                name = f"{word}_{slot}"
                argument = f"{item}_{name}" if item else name
                path = f"{item}.{name}" if item else name
                kept.append((slot, path, Buffer(argument, DType.FLOAT32, dims), fill))
        if spec.rounding is Rounding.STOCHASTIC:
            buffer = Buffer("rng_state", DType.INT64, Shape(None, (Const(2),)))
            kept.append(("rng_state", buffer.name, buffer, StateFill.SEED))
        for _, path, buffer, fill in kept:
            self.buffers[buffer.name] = buffer
            self.states[buffer.name] = State(buffer.name, path, fill)
        return tuple(Operand(slot, buffer.name) for slot, _, buffer, _ in kept)


def _read(backward: list[Step], again: frozenset[str]) -> dict[_Tensor, str]:
    """Tensors of the forward whose copies a backward reads, and the op that does."""
    return {
        _Tensor(copy.original, copy.role, again=False): step.item
        for step in backward
        for copy in step.copies
        if copy.original not in again
    }


def _weights(draft: Draft, recipe: RecipeSpec) -> frozenset[str]:
    """Parameters whose copies can be made again; of those drawn at random there is one set."""
    spec = recipe.roles.get(Role.WEIGHT)
    if spec is None or spec.rounding is Rounding.STOCHASTIC:
        return frozenset()
    return frozenset(parameter.buffer for parameter in draft.parameters)


def _has_no_roles(draft: Draft, step: Step) -> bool:
    """Whether a step is of an op that no recipe quantises anything of, such as a router."""
    return any(each.item == step.item and not each.op.has_roles for each in draft.instances)


def _value(name: str) -> str:
    """The buffer of what a tensor's copy stands for."""
    return f"{name}_dequantized"


def _as_used(scale: str) -> str:
    """The buffer of a scale as a forward used it, before its step moved it on."""
    return f"{scale}_used"


def _written(steps: tuple[Step, ...]) -> frozenset[str]:
    return frozenset(name for step in steps for name in step.writes)


def _drop_identities(draft: Draft) -> Draft:
    """Copy propagation in both programs: an identity's result and its operand become one buffer.

    A result of the module keeps its name where a step writes the operand; otherwise the readers of
    the identity's result read its operand.

    Raises:
        NotPossible: one of several outputs is another one or an input: an op returns it once.
    """
    steps = (*draft.forward, *draft.backward)
    written = {name for step in steps if not _is_identity(step) for name in step.writes}
    ends = {*draft.outputs, *(name for _, name in draft.gradients)}
    renamed: dict[str, str] = {}

    def final(name: str) -> str:
        while name in renamed:
            name = renamed[name]
        return name

    def join(step: Step) -> None:
        operand, result = final(step.reads[0]), final(step.out)
        if result in ends and operand in written and operand not in ends:
            renamed[operand] = result
            written.add(result)
        elif operand != result:
            renamed[result] = operand

    for step in filter(_is_identity, draft.forward):
        join(step)
    for name in draft.outputs:
        if final(name) != name:  # an output that is an input: so are their gradients
            renamed[gradient(name)] = gradient(final(name))
    for step in filter(_is_identity, draft.backward):
        join(step)

    def kept(program: tuple[Step, ...]) -> tuple[Step, ...]:
        return tuple(with_names(step, final) for step in program if not _is_identity(step))

    outputs = tuple(final(name) for name in draft.outputs)
    shared = next((n for n in draft.outputs if Counter(outputs + draft.inputs)[final(n)] > 1), None)
    if shared and len(outputs) > 1:
        raise NotPossible(f"{shared!r} is what another output or an input is, and not computed")
    gradients = tuple((leaf, final(name)) for leaf, name in draft.gradients)
    return replace(
        draft,
        forward=kept(draft.forward),
        backward=kept(draft.backward),
        outputs=outputs,
        gradients=gradients,
    )


def _is_identity(step: Step) -> bool:
    return quantizes(step)
