"""Texts of a cell's `torch.autograd.Function`."""

from __future__ import annotations

from dataclasses import dataclass

from ...ir.dtypes import DType
from ...ir.naming import gradient, need
from ...ir.plan import ModulePlan
from ...ir.step import Result
from .conditions import Conditions, any_of, named_conditions
from .directions import LEFT, direction_texts, group_names, handed_in, left_for
from .main_grads import dummy, main_grad_texts
from .words import TensorText, attribute_text

_MANY = 3  # values that are not spelled out one by one


@dataclass(frozen=True, slots=True)
class AutogradText:
    """The function class of autograd.

    Attributes:
        name: of the class.
        twin: name of the class that function transforms use; empty where they are refused, since
            the backward changes what is not the module's own.
        parameters: of ``forward``.
        wanted: positions of the flags among them, and of the tensors they are of, for the twin.
        op_arguments: what the forward op is called with.
        apply_arguments: of ``apply``: those, then what only the backward changes.
        results: of the forward op.
        unpacked: apply_arguments and results, ``_`` for those that the context does not keep.
        incoming: gradients of the outputs.
        alone: whether one output has a gradient, which may be absent; autograd gives those of
            several as zeros where nobody uses the output.
        several: how many outputs there are, of which the first have gradients; 0 where one is all.
        returns: return type of ``forward``.
        needs: flags that the backward reads, and where autograd tells of each.
        saving_needs: those that decide what is kept, where no flag of ``forward`` tells.
        conditions: ``keep_h = ...`` lines that these sources need.
        saved: sources of everything kept for the backward.
        held: copies of weights that the backward reads; they may not change before it.
        carried: state of the backward; it is neither saved nor returned.
        left: source of all that the forward left.
        unpacked_left: names of what that is, where the backward needs them; else empty.
        lets_go: whether the backward's function is handed what was left in a list, to let go of it.
        backward_saved: arguments of the backward op that the forward left.
        backward_rest: its arguments after these.
        calls: whether ``backward`` has an op to call.
        idle: when the op has nothing to compute, as all that is asked for are gradients that come
            in; empty where it always has.
        passed_on: what ``backward`` returns then.
        gradients: what it returns otherwise, one value per argument of ``forward``.
        no_gradients: what it returns where nothing flows back.
    """

    name: str
    twin: str
    parameters: tuple[str, ...]
    wanted: str
    op_arguments: tuple[str, ...]
    apply_arguments: tuple[str, ...]
    results: tuple[str, ...]
    unpacked: tuple[tuple[str, ...], tuple[str, ...]]
    incoming: tuple[str, ...]
    alone: bool
    several: int
    returns: str
    needs: tuple[tuple[str, str], ...]
    saving_needs: tuple[tuple[str, str], ...]
    conditions: tuple[str, ...]
    saved: tuple[str, ...]
    held: tuple[str, ...]
    carried: tuple[str, ...]
    left: str
    unpacked_left: str
    lets_go: bool
    backward_saved: tuple[str, ...]
    backward_rest: tuple[str, ...]
    calls: bool
    idle: str
    passed_on: tuple[str, ...]
    gradients: tuple[str, ...]
    no_gradients: str

    @property
    def saves_results(self) -> bool:
        """Whether the forward op also returns what has no gradient."""
        return len(self.results) > len(self.incoming)

    @property
    def unpacks(self) -> bool:
        """Whether the twin's context reads any result."""
        return self.saves_results or any(name != "_" for name in self.unpacked[1])


def autograd_text(plan: ModulePlan, arguments: tuple[TensorText, ...]) -> AutogradText:
    """How autograd calls the ops of a module, whose forward has these arguments."""
    given = {argument.name for argument in arguments}
    known = given | {*plan.results}
    told = {a.flag: f"needs[{index}]" for index, a in enumerate(arguments) if a.flag}
    returning = plan.differentiated if plan.passed_on else plan.delayed
    read_flags = {*plan.backward.flags, *map(need, returning)}
    scalars = tuple(attribute.name for attribute in plan.attributes)
    read = tuple(a.buffer for a in plan.backward.arguments if a.buffer in plan.kept)
    held = tuple(name for name in read if name in plan.caches)
    passed = tuple(name for name in read if name not in given)
    groups = group_names(plan.direction("forward"))
    later_groups = group_names(plan.direction("backward"))
    queued = {"wgrad_queue": "WgradQueue", "wgrad_weights": "tuple[Tensor, ...]"}
    queue = queued if plan.wgrad else {}
    main_grads = () if plan.wgrad else main_grad_texts(plan)
    asked = {each.dummy: "bool | tuple[Tensor]" for each in main_grads}
    asked |= {each.overwrite: "bool" for each in main_grads if each.overwrite}
    buffers = tuple(each.name for each in main_grads)
    words = (*queue, *buffers, *asked)
    further = tuple(name for name in later_groups if name not in groups)
    op_arguments = (*(a.name for a in arguments), *plan.forward.flags, *scalars, *groups)
    apply_arguments = (*op_arguments, *passed, *further, *words)
    asked_of_inputs = {f for r in plan.saved if r.buffer in known for f in r.when}
    untold = asked_of_inputs - {*plan.forward.flags}
    saved = tuple(result.buffer for result in plan.saved)
    conditions = named_conditions(
        plan.forward,
        lambda names: (_saved_source(plan, each, names) for each in plan.saved),
        saved=plan.saved,
    )
    results = tuple(result.buffer for result in plan.forward.results)
    given_back = len(dict.fromkeys((*plan.outputs, *plan.results)))
    carried = (*(name for name in read if name not in held), *later_groups, *words)
    kept = {*saved, *held, *carried, *scalars}
    kept |= {flag for result in plan.saved if _conditional(plan, result) for flag in result.when}
    backward = {argument.buffer for argument in plan.backward.arguments}

    def returned(leaves: tuple[str, ...]) -> tuple[str, ...]:
        sources = (_gradient_source(plan, a) if a.name in leaves else "None" for a in arguments)
        return _short(*sources, *("None" for _ in apply_arguments[len(arguments) :]))

    left = f'_library.unchanged("{plan.cell}", ctx)' if held else "ctx.saved_tensors"
    typed = plan.own_type_argument(plan.backward)
    several = any(each.name == "backward" for each in direction_texts(plan))
    unpacks = (
        bool(plan.wgrad) or (bool(main_grads) and typed != gradient(plan.outputs[0])) or several
    )
    direction = plan.direction("backward")
    assert direction is not None, "a plan has a backward"
    boxed = left_for(plan, direction)
    given_in = (name for name in handed_in(plan, direction) if name not in plan.incoming)
    local = {*saved, *held, *buffers}
    sources = [LEFT] if boxed else []
    sources += [name if name in local else f"ctx.{name}" for name in given_in]
    if boxed:
        left = f"[*{left}]"
    return AutogradText(
        name=f"_{plan.class_name}",
        twin="" if main_grads or plan.wgrad or plan.process_groups else f"_{plan.class_name}Twin",
        parameters=(
            *(f"{a.name}: {a.annotation}" for a in arguments),
            *(f"{flag}: bool" for flag in plan.forward.flags),
            *(f"{a.name}: {attribute_text(a).annotation}" for a in plan.attributes),
            *(f"{name}: ProcessGroup | None" for name in groups),
            *(f"{name}: Tensor" for name in passed),
            *(f"{name}: ProcessGroup | None" for name in further),
            *(f"{name}: {kind}" for name, kind in queue.items()),
            *(f"{name}: Tensor | Callable[[], Tensor] | None" for name in buffers),
            *(f"{name}: {asked[name]}" for name in asked),
        ),
        wanted=_wanted(plan, arguments),
        op_arguments=op_arguments,
        apply_arguments=apply_arguments,
        results=results,
        unpacked=(_only(kept, apply_arguments), _only(kept, results)),
        incoming=plan.incoming,
        alone=len(plan.incoming) == 1,
        several=given_back if given_back > 1 else 0,
        returns="tuple[Tensor, ...]" if given_back > 1 else "Tensor",
        needs=tuple(each for each in told.items() if each[0] in read_flags),
        saving_needs=tuple(each for each in told.items() if each[0] in untold),
        conditions=conditions.lines,
        saved=tuple(_saved_source(plan, result, conditions) for result in plan.saved),
        held=held,
        carried=carried,
        left=left,
        unpacked_left=LEFT if boxed else f"({', '.join((*saved, *held))},)" if unpacks else "",
        lets_go=bool(boxed),
        backward_saved=(sources[0],)
        if several
        else tuple(name for name in (*saved, *held) if name in backward)
        if unpacks
        else (f"*{left}",),
        backward_rest=(
            *(
                sources[1:]
                if several
                else (*(f"ctx.{name}" for name in read if name not in held), *buffers)
            ),
            *plan.backward.flags,
            *(f"ctx.{name}" for name in (*scalars, *later_groups)),
        ),
        calls=bool(plan.backward.steps),
        idle=_idle(plan),
        passed_on=returned(plan.passed_on),
        gradients=returned(plan.differentiated),
        no_gradients=f"(None,) * {len(apply_arguments)}",
    )


def _wanted(plan: ModulePlan, arguments: tuple[TensorText, ...]) -> str:
    tensors = {argument.flag: index for index, argument in enumerate(arguments) if argument.flag}
    first = len(arguments)
    flags = enumerate(plan.forward.flags, first)
    return str(tuple((index, tensors[flag]) for index, flag in flags if flag in tensors))


def _only(kept: set[str], names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name if name in kept else "_" for name in names)


def _conditional(plan: ModulePlan, result: Result) -> bool:
    """Whether what is kept may be there without being asked for."""
    given = {argument.buffer for argument in plan.forward.arguments}
    always = {result.buffer for result in plan.forward.results if not result.when}
    there = result.buffer in {*given, *always, *plan.results} or not plan.returns_none("forward")
    return bool(result.when) and there


def _saved_source(plan: ModulePlan, result: Result, conditions: Conditions) -> str:
    if not _conditional(plan, result):
        return result.buffer
    return f"{result.buffer} if {conditions.text(result.when)} else None"


def _short(*sources: str) -> tuple[str, ...]:
    """The same with many equal values at the end as one."""
    given = next((i for i in range(len(sources), 0, -1) if sources[i - 1] != "None"), 0)
    absent = len(sources) - given
    return sources if absent < _MANY else (*sources[:given], f"*(None,) * {absent}")


def _idle(plan: ModulePlan) -> str:
    """The condition that nothing is asked for that an op computes; empty where this cannot be."""
    computed = tuple(need(leaf) for leaf in plan.differentiated if leaf not in plan.passed_on)
    if not plan.passed_on or not computed:
        return ""
    return f"not {computed[0]}" if len(computed) == 1 else f"not ({any_of(computed)})"


def _gradient_source(plan: ModulePlan, argument: TensorText) -> str:
    """A gradient as ``backward`` returns it; an empty stand-in becomes None again.

    So does what is there for another argument, or comes in, where nobody asks for it.
    """
    if argument.name in plan.delayed:
        return "None"
    if argument.name in dict(plan.main_grads):
        buffer = dict(plan.main_grads)[argument.name]
        asked = f"ctx.{dummy(argument.name)}"
        wanted = f"{asked} and {argument.flag}"
        own = plan.buffer(argument.name).dtype is DType.IO
        typed = plan.own_type_argument(plan.backward) if own else buffer
        return f"_library.dummy_grad({typed}, {buffer}, {asked}) if {wanted} else None"
    name = dict(plan.gradients)[argument.name]
    there = argument.name in plan.passed_on or [each for _, each in plan.gradients].count(name) > 1
    there = there or (bool(plan.backward.flags) and not plan.returns_none("backward"))
    return f"{name} if {argument.flag} else None" if there else name
