"""Pass 7, kernels: choose a kernel family for every step and name its instantiations."""

from __future__ import annotations

from dataclasses import replace

from ..model.dtypes import IO_DTYPES
from ..model.plan import Kernel, KernelSet, SelectionRule, Step
from ..model.predicate import Predicate
from ..model.primitives import PRINTED, REFERENCE_SLOTS, GemmKind, Primitive
from ..model.shapes import Const, Expr, Shape, mul, product
from ..model.specs import ArchSpec, FamilySpec, KindSpec
from ..naming import ElementKernel, GemmKernel
from .draft import Draft, NotPossible

GEMMS = (Primitive.GEMM, Primitive.GROUPED_GEMM)
_SUMS = (Primitive.COLUMN_SUM, Primitive.GROUP_SUM)


def choose_kernels(draft: Draft, arch: ArchSpec) -> tuple[Draft, tuple[KernelSet, ...]]:
    """Give every step its sizes and its kernel set.

    Raises:
        NotPossible: the arch has no kernels for a step; the message names the primitive.
    """
    sets: dict[str, KernelSet] = {}

    def choose(step: Step) -> Step:
        _check_known(step)
        step = step if step.sizes else with_sizes(draft, step)
        if not arch.has_kernels:
            return step
        chosen = _kernel_set(step, arch)
        sets.setdefault(chosen.name, chosen)
        return replace(step, kernels=chosen.name)

    forward = tuple(choose(step) for step in draft.forward)
    backward = tuple(choose(step) for step in draft.backward)
    return replace(draft, forward=forward, backward=backward), tuple(sets.values())


def _check_known(step: Step) -> None:
    """Refuse what the reference has no code for; it is normative, so no arch can have it either.

    Raises:
        NotPossible: no such step, no such operand, or math that the step does not print.
    """
    name = step.primitive.value
    made_by = f" (made by fusion {step.rule!r})" if step.rule else ""
    if step.primitive in PRINTED:
        results = {result.buffer for result in step.pointwise.results} if step.pointwise else set()
        if results != {*step.writes}:
            raise NotPossible(f"no expression computes {', '.join(step.writes)} of {name}{made_by}")
        return
    if step.primitive not in REFERENCE_SLOTS:
        raise NotPossible(f"the reference has no step {name}{made_by}")
    if step.pointwise:
        raise NotPossible(f"the reference has no {name} with an expression{made_by}")
    for operand in step.inputs:
        if operand.slot not in REFERENCE_SLOTS[step.primitive]:
            raise NotPossible(f"the reference has no {name} with {operand.slot!r}{made_by}")


def with_sizes(draft: Draft, step: Step) -> Step:
    """The step with the sizes its launch needs, and its operation count."""

    def shape(slot: str) -> Shape:
        buffer = step.input(slot)
        assert buffer is not None, f"{step.primitive.value} has no operand {slot}"
        return draft.buffers[buffer].shape

    def sized(tokens: Expr, n: Expr, k: Expr) -> Step:
        groups = shape("groups").dims[0] if step.input("groups") else Const(1)
        sizes = (("tokens", tokens), ("groups", groups), ("n", n), ("k", k))
        flops = mul(Const(2), product((tokens, n, k))) if step.primitive in GEMMS else None
        return replace(step, sizes=sizes, flops=flops)

    if step.primitive in GEMMS:
        a, out = shape("a"), draft.buffers[step.out].shape
        tokens = product(a.flat[:-1])
        match GemmKind(step.kind):
            case GemmKind.FPROP:
                return sized(tokens, out.flat[-1], a.flat[-1])
            case GemmKind.DGRAD:
                return sized(tokens, a.flat[-1], out.flat[-1])
            case GemmKind.WGRAD:
                return sized(tokens, a.flat[-1], shape("b").flat[-1])
    if step.primitive in _SUMS:
        a = shape("a")
        step = sized(product(a.flat[:-1]), a.flat[-1], Const(1))
        return replace(step, flops=a.elements)
    return step


def family_of(primitive: Primitive, arch: ArchSpec) -> tuple[str, FamilySpec]:
    """The family that implements a primitive.

    Raises:
        NotPossible: there is none.
    """
    for name, family in arch.kernels.items():
        if primitive in family.implements:
            return name, family
    raise NotPossible(f"{arch.name} has no kernels for {primitive.value}")


def _kernel_set(step: Step, arch: ArchSpec) -> KernelSet:
    name, family = family_of(step.primitive, arch)
    if step.primitive in GEMMS:
        kind = GemmKind(step.kind)
        if kind not in family.kinds:
            raise NotPossible(f"{arch.name}: kernel family {name} has no {kind.value}")
        return _gemm_set(name, kind, family.kinds[kind])
    base = step.pointwise.kernel if step.pointwise else name
    kernels = tuple(
        Kernel(str(ElementKernel(base, dtype)), name, dtype, pointwise=step.pointwise)
        for dtype in IO_DTYPES
    )
    named = tuple((kernel.dtype, kernel.name) for kernel in kernels)
    return KernelSet(base, name, None, kernels, (SelectionRule(Predicate(()), "", named),))


def _gemm_set(family: str, kind: GemmKind, spec: KindSpec) -> KernelSet:
    kernels = tuple(
        Kernel(str(GemmKernel(family, kind, dtype, point.name)), family, dtype, kind, point)
        for point in spec.points
        for dtype in IO_DTYPES
    )
    rules = tuple(
        SelectionRule(
            rule.when,
            rule.use,
            tuple((dtype, str(GemmKernel(family, kind, dtype, rule.use))) for dtype in IO_DTYPES),
        )
        for rule in spec.select
    )
    return KernelSet(f"{family}_{kind.value}", family, kind, kernels, rules)
