"""Sharding: the ways in which ranks may run a module's ops, each on its shards.

A way begins with one axis of one argument and follows it through all steps by the symbols of the
dimensions: an axis is split together with every axis of the same step that its symbols occur in.
It is valid if every step gives on shards what it gives on the whole:

- a GEMM whose contraction is split leaves a partial sum on every rank, and so does a sum;
- a copy is quantised alike only if its scale is split with its data, each block on one rank; a
  scale that does not grow with the dimension spans all of it;
- groups of rows start where all groups before them end, so neither rows in groups nor the groups
  can be split;
- a pointwise step that reads halves of a row needs the whole row;
- other steps are split along the dimensions of which their kind says so.

Partial sums leave the ops, where they are added; no step reads one, but for the bias that a GEMM
adds: it is divided among the ranks beforehand.  Modules that keep state between calls are not
split: scales of the past are of whole tensors, and random numbers are drawn by position.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import lcm

from ..ir.buffers import Buffer
from ..ir.naming import gradient
from ..ir.plan import ModulePlan, Sharding
from ..ir.program import Program
from ..ir.quantization import QuantizationSpec, Role
from ..ir.shapes import split, symbols
from ..ir.step import HALVES, Access, Step
from ..steps import decodes, definition, is_gemm, quantizes, rounds, sums_rows
from ..steps.pointwise import ROW_GROUPS
from ..steps.quantize import SUMMED, left_by
from ..steps.sizes import name_of

Axis = tuple[str, int]


def module_shardings(plan: ModulePlan) -> tuple[Sharding, ...]:
    """Every way to split the ops of a training step alike, and those of a forward alone.

    There is none where an output is given quantised: what stands in its place is no shard.
    """
    if plan.states or plan.main_grads or plan.wgrad or plan.process_groups or plan.output_copies:
        return ()
    ends = tuple((name, gradient(name)) for name in plan.outputs)
    buffers = {buffer.name: buffer for buffer in plan.buffers}
    roles = dict(plan.quantizations)
    before = (plan.quantize_input,) if plan.quantize_input else ()
    whole = _Ops(buffers, (plan.forward, plan.backward, *before), ends, roles, gradients=True)
    ways = {way.axes: way for way in whole.shardings()}
    if plan.forward.flags:
        alone = _Ops(buffers, (plan.forward, *before), (), roles, gradients=False)
        known = {_of(way, plan.forward) for way in ways.values()}
        ways |= {w.axes: w for w in alone.shardings() if _of(w, plan.forward) not in known}
    return tuple(ways.values())


def undivided(plan: ModulePlan) -> tuple[str, ...]:
    """Kinds of steps of a plan that say of no dimension that ranks may have shards of it."""
    names = dict.fromkeys(step.primitive for program in plan.programs for step in program.steps)
    kinds = [definition(name) for name in names]
    return tuple(
        kind.name
        for kind in kinds
        if not (kind.independent or kind.traits or kind.in_groups or kind.of_passes)
    )


def op_shardings(
    buffers: Mapping[str, Buffer], program: Program, roles: Mapping[Role, QuantizationSpec]
) -> tuple[Sharding, ...]:
    """Every way to split one op by itself."""
    if program.mutated:
        return ()
    return tuple(_Ops(buffers, (program,), (), roles, gradients=True).shardings())


def _of(way: Sharding, program: Program) -> frozenset[Axis]:
    given = {argument.buffer for argument in program.arguments}
    return frozenset(axis for axis in way.axes if axis[0] in given)


@dataclass(frozen=True, slots=True)
class _Ops:
    """Ops that are split alike.

    Attributes:
        buffers: by name.
        programs: of the ops, the forward first.
        ends: (output, its gradient), which lie on the ranks in the same way.
        roles: how each is quantised.
        gradients: whether the ops are asked for everything; else for what no flag asks for.
    """

    buffers: Mapping[str, Buffer]
    programs: tuple[Program, ...]
    ends: tuple[tuple[str, str], ...]
    roles: Mapping[Role, QuantizationSpec]
    gradients: bool

    def shardings(self) -> Iterator[Sharding]:
        """Each way once, in the order of the arguments."""
        seen: set[Axis] = set()
        steps = [{a: self._symbols(a) for a in self._axes(step)} for step in self._steps()]
        for argument in self.programs[0].arguments:
            for index in range(len(self.buffers[argument.buffer].shape.flat)):
                if (argument.buffer, index) in seen:
                    continue
                axes = self._followed((argument.buffer, index), steps)
                seen |= axes
                way = self._judged((argument.buffer, index), axes)
                if way is not None:
                    yield way

    def _steps(self) -> Iterator[Step]:
        return (step for program in self.programs for step in program.steps)

    def _writes(self, step: Step) -> tuple[str, ...]:
        """Results that are asked for, without the scratch of kernels."""
        names = step.writes if self.gradients else [n for n in step.writes if not step.wanted(n)]
        kind = definition(step.primitive)
        if kind.scratch:
            results = {each.buffer for each in step.outputs if each.slot in kind.results}
            return tuple(name for name in names if name in results)
        if not quantizes(step):
            return tuple(names)
        copied = {name for copy in step.copies for name in copy.buffers}
        summed = {*left_by(step, SUMMED)}
        results = {result.buffer for program in self.programs for result in program.results}
        return tuple(name for name in names if name in copied | summed | results)

    def _symbols(self, axis: Axis) -> frozenset[str]:
        return symbols(self.buffers[axis[0]].shape.flat[axis[1]])

    def _axes(self, step: Step) -> list[Axis]:
        names = dict.fromkeys((*step.reads, *self._writes(step)))
        return [(name, i) for name in names for i in range(len(self.buffers[name].shape.flat))]

    def _followed(self, first: Axis, steps: list[dict[Axis, frozenset[str]]]) -> set[Axis]:
        """All axes that are split where the first one is; ``steps`` has the symbols of theirs."""
        axes = {first}
        count = 0
        while count != len(axes):
            count = len(axes)
            for own in steps:
                names = {name for axis in own.keys() & axes for name in own[axis]}
                axes |= {axis for axis, found in own.items() if found & names}
            for one, other in (*self.ends, *(end[::-1] for end in self.ends)):
                axes |= {(other, index) for name, index in axes if name == one}
        return axes

    def _judged(self, first: Axis, axes: set[Axis]) -> Sharding | None:
        """The way that splits these axes, if it is valid."""
        parts = dict(axes)
        names = self._symbols(first)
        if len(parts) != len(axes) or len(names) != 1:
            return None
        (symbol,) = names
        touched = [s for s in self._steps() if parts.keys() & {*s.reads, *self._writes(s)}]
        if not all(self._valid(step, parts) for step in touched):
            return None
        partial = {name for step in touched for name in self._partial_sums(step, parts)}
        unit = self._unit(parts, symbol)
        if unit is None or not all(_may_read(step, partial) for step in self._steps()):
            return None
        return Sharding(symbol, tuple(sorted(axes)), tuple(sorted(partial)), unit, self.gradients)

    def _valid(self, step: Step, parts: Mapping[str, int]) -> bool:
        """Whether shards give a part, or a partial sum, of what the step gives on the whole."""
        if _groups(step) and self._ragged(step) & self._split_symbols(step, parts):
            return False
        if is_gemm(step) or sums_rows(step) or rounds(step):
            return True
        if step.pointwise:
            return self._valid_pointwise(step, parts)
        if quantizes(step):
            return {*self._writes(step)} - {*self._partial_sums(step, parts)} <= parts.keys()
        if decodes(step):
            return step.out in parts
        return self._independent(step, parts)

    def _independent(self, step: Step, parts: Mapping[str, int]) -> bool:
        """Whether the kind of a step says that shards of its results need shards alone.

        Sums along the dimension that is split are partial ones.
        """
        kind = definition(step.primitive)
        rule = kind.shapes.get(step.kind, {})
        split_names = {
            name_of(rule[each.slot], self.buffers[each.buffer].shape, parts[each.buffer])
            for each in (*step.inputs, *step.outputs)
            if each.buffer in parts and each.slot in rule
        }
        sums = {each.buffer for each in step.outputs if each.slot in kind.sums}
        whole = {*self._writes(step)} - parts.keys() - sums
        return bool(split_names) and split_names <= {*kind.independent} and not whole

    def _partial_sums(self, step: Step, parts: Mapping[str, int]) -> tuple[str, ...]:
        """Results that are split into partial sums, and operands that then have to be."""
        if quantizes(step):
            written = [*left_by(step, SUMMED)]
        else:
            written = [name for name in self._writes(step) if not decodes(step)]
        found = tuple(name for name in written if name not in parts)
        bias = step.input("add") if is_gemm(step) and found else None
        return (*found, bias) if bias else found

    def _split_symbols(self, step: Step, parts: Mapping[str, int]) -> frozenset[str]:
        split_axes = (axis for axis in self._axes(step) if parts.get(axis[0]) == axis[1])
        return frozenset().union(*(self._symbols(axis) for axis in split_axes))

    def _ragged(self, step: Step) -> frozenset[str]:
        """Symbols of the rows in groups, and of the groups."""
        groups = self.buffers[_groups(step) or ""].shape
        return groups.symbols() | self._symbols((self.programs[0].arguments[0].buffer, 0))

    def _valid_pointwise(self, step: Step, parts: Mapping[str, int]) -> bool:
        math = step.pointwise
        assert math is not None
        columns = {name for name, axis in parts.items() if self._is_last((name, axis))}
        halved = any(
            each.access in HALVES and each.buffer in columns
            for each in (*math.operands, *math.results)
        )
        sums = {each.buffer for each in math.results if each.access is Access.ROW}
        return not halved and {*self._partial_sums(step, parts)} <= sums

    def _unit(self, parts: Mapping[str, int], symbol: str) -> int | None:
        """What a shard is a multiple of; None where shards would not make up the whole."""
        ends = {*self._ends()}
        copies = {name for step in self._steps() for c in step.copies for name in c.buffers}
        units = [1]
        for buffer in parts.keys() & (ends | copies):
            way = split(self.buffers[buffer].shape.flat[parts[buffer]], symbol)
            if way is None or (buffer in ends and not way.proportional):
                return None
            units.append(way.unit)
        innermost = {axis for axis in parts.items() if axis[1] and self._is_last(axis)}
        for step in self._steps():
            units += [step.alignment] if innermost & {*self._axes(step)} else []
            units += [
                self._transform(copy.role) for copy in step.copies if {*copy.buffers} & parts.keys()
            ]
        return lcm(*units)

    def _ends(self) -> Iterator[str]:
        """Arguments and results of the ops."""
        for program in self.programs:
            yield from (argument.buffer for argument in program.arguments)
            asked = (r for r in program.results if self.gradients or not r.when)
            yield from (result.buffer for result in asked)

    def _is_last(self, axis: Axis) -> bool:
        return axis[1] == len(self.buffers[axis[0]].shape.flat) - 1

    def _transform(self, role: Role) -> int:
        spec = self.roles[role]
        return spec.hadamard.size if spec.hadamard else 1


def _groups(step: Step) -> str | None:
    return step.input("groups") or step.input(ROW_GROUPS)


def _may_read(step: Step, partial: set[str]) -> bool:
    """Whether a step reads no partial sum, but for the share of a bias in a GEMM of them.

    What rounds a partial sum gives one.
    """
    if rounds(step):
        return True
    adds = step.input("add") if is_gemm(step) and step.out in partial else None
    return all(name == adds for name in step.reads if name in partial)
