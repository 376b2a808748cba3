"""Texts of the function that gives delayed gradients of weights."""

from __future__ import annotations

from dataclasses import dataclass

from ...ir import dtypes
from ...ir.dtypes import DType
from ...ir.naming import gradient, need
from ...ir.plan import ModulePlan
from ...ir.program import Argument
from ...ir.segments import Group
from ...ir.shapes import Sym, substitute, to_code
from .conditions import any_of
from .directions import groups_of
from .main_grads import MainGradText, main_grad_call, main_grad_texts
from .words import ProgramText, TensorText, program_text, tensor_text


@dataclass(frozen=True, slots=True)
class WgradText:
    """The function that computes delayed gradients of weights, and what a backward keeps for it.

    Attributes:
        program: its op.
        weights: whose gradients.
        paths: of these in the class.
        main_grads: buffers that these go to, if any.
        kept: sources in the backward of the op's operands.
        asked: sources in the backward of the flags.
        operands: names of what was kept.
        needs: target of the flags.
        groups: that its collectives are over.
        op_arguments: what the op is called with.
        gradients: pairs of a weight and its gradient, or of a weight and its flag.
        slots: constructors of the slots, one per operand.
        call_arguments: how the class calls it.
    """

    program: ProgramText
    weights: tuple[TensorText, ...]
    paths: tuple[str, ...]
    main_grads: tuple[MainGradText, ...]
    kept: tuple[str, ...]
    asked: tuple[str, ...]
    operands: tuple[str, ...]
    needs: str
    groups: tuple[Group, ...]
    op_arguments: tuple[str, ...]
    gradients: tuple[str, ...]
    slots: tuple[str, ...]
    call_arguments: tuple[str, ...]


def wgrad_text(plan: ModulePlan) -> WgradText | None:
    if plan.wgrad is None:
        return None
    printed = program_text(plan, plan.wgrad)
    paths = {parameter.buffer: f"self.{parameter.path}" for parameter in plan.parameters}
    flags = tuple(need(leaf) for leaf in plan.delayed)
    operands = tuple(
        a for a in plan.wgrad.arguments if not a.mutated and a.buffer not in plan.delayed
    )
    main_grads = main_grad_texts(plan)
    groups = groups_of(plan.direction("wgrad"))
    first = operands[0].buffer
    read = {plan.tensor_with(name): step.when for step in plan.wgrad.steps for name in step.reads}

    def kept(argument: Argument) -> str:
        name = argument.buffer
        when = read.get(name, ()) if name == first else argument.when
        test = any_of(when)
        if name == first and name not in read:
            return f"_delayed.shape_of({name})"
        absent = f"_delayed.shape_of({name})" if name == first else "None"
        return f"{name} if {test} else {absent}" if test else name

    called = tuple(
        f"{a.buffer} if {any_of(a.when)} else None" if a.when else a.buffer
        for a in plan.wgrad.arguments
    )
    given = flags if main_grads else tuple(map(gradient, plan.delayed))
    gradients = dict(zip(plan.delayed, given, strict=True))
    return WgradText(
        program=printed,
        weights=tuple(tensor_text(plan, Argument(leaf, False)) for leaf in plan.delayed),
        paths=tuple(paths[leaf].removeprefix("self.") for leaf in plan.delayed),
        main_grads=main_grads,
        kept=tuple(kept(argument) for argument in operands),
        asked=flags,
        operands=tuple(argument.buffer for argument in operands),
        needs=f"({', '.join(flags)},)" if printed.flags or main_grads else "_",
        groups=groups,
        op_arguments=(*called, *printed.flags, *(group.name for group in groups)),
        gradients=tuple(f"({leaf}, {value})" for leaf, value in gradients.items()),
        slots=tuple(_slot(plan, name.buffer, name.buffer in read) for name in operands),
        call_arguments=(
            *(paths[leaf] for leaf in plan.delayed),
            "wgrad_queue=self.wgrad_queue",
            *(f"{group.name}=self.{group.name}" for group in groups),
            *(
                f"{m.name}={main_grad_call(plan, '_delayed', m.argument, m.path, f'self.{m.path}')}"
                for m in main_grads
            ),
            *(
                f"{m.overwrite}=_library.overwrites_main_grad(self.{m.path})"
                for m in main_grads
                if m.overwrite
            ),
        ),
    )


def _slot(plan: ModulePlan, name: str, read: bool) -> str:
    """Constructor of the slot that holds a tensor of the most tokens."""
    words = {d.symbol: Sym(d.keyword if d.constructor else "max_tokens") for d in plan.dims}
    buffer = plan.buffer(name)
    dims = [to_code(substitute(dim, words)) for dim in buffer.shape.flat]
    shape = f"({', '.join(dims)})" if len(dims) > 1 else f"({dims[0]},)"
    dtype = None if buffer.dtype is DType.IO else f"torch.{dtypes.info(buffer.dtype).torch}"
    return f"_delayed.Slot({shape}, {dtype}{'' if read else ', stored=False'})"
