"""Kernels: choose a kernel family for every step and name its instantiations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ..families.family import ATOMS, HADAMARD, UNTRANSPOSED, Config, Demand, offers
from ..families.limits import SHARED_BYTES, SHARED_MEMORY
from ..families.registry import known_family
from ..ir.buffers import Buffer
from ..ir.dtypes import IO_DTYPES, DType
from ..ir.kernel import EndScale, GemmKind, Store
from ..ir.kernel_set import (
    Candidate,
    EpilogueMath,
    Kernel,
    KernelSet,
    KernelUnit,
    SelectionRule,
    Variant,
)
from ..ir.naming import ElementKernel, GemmKernel, GemmUnit
from ..ir.predicate import Predicate
from ..ir.quantization import Orientation, QuantizationSpec, Rounding
from ..ir.step import Operand, Result, Step
from ..spec.arch import ArchSpec, FamilySpec, KindSpec
from ..spec.offered import offered
from ..spec.recipe import RecipeSpec
from ..steps import (
    copies_memory,
    decodes,
    definition,
    is_gemm,
    is_printed,
    made_copies,
    makes_copies,
    observes,
    read_copies,
    reads_decoded,
    takes,
)
from ..steps import sizes as step_sizes
from ..steps.copies import Formats
from ..steps.gathered_gemm import gathers
from ..steps.gemm_pointwise import AUX, OTHER, epilogue
from ..steps.pointwise import ROW_GROUPS
from .draft import Draft, NotPossible

DECODED = Variant((DType.BFLOAT16,), (), ())
"""What multiplies quantised operands of any recipe, once they are decoded."""

CODES = "codes"
"""Trait of what decodes codes as they are, because a GEMM has their scales."""


def choose_kernels(
    draft: Draft, arch: ArchSpec, recipe: RecipeSpec
) -> tuple[Draft, tuple[KernelSet, ...]]:
    """Give every step its sizes, its kernel set and the memory that its kernels need.

    Raises:
        NotPossible: the arch has no kernels for a step; the message names the primitive.
    """
    sets: dict[str, KernelSet] = {}
    needed: dict[str, Buffer] = {}

    def choose(step: Step) -> Step:
        if copies_memory(step):
            return step
        _check_known(step)
        step = step if step.sizes else with_sizes(draft, step)
        if not arch.has_kernels:
            return step
        step, memory = with_scratch(step, draft.buffers, Formats(recipe.roles, arch.layout))
        needed.update(memory)
        chosen = kernel_set(step, draft.buffers, arch, recipe)
        sets.setdefault(chosen.name, chosen)
        return replace(step, kernels=chosen.name, alignment=chosen.row_alignment)

    forward = tuple(choose(step) for step in draft.forward)
    backward = tuple(choose(step) for step in draft.backward)
    quantize_input = tuple(choose(step) for step in draft.quantize_input)
    refresh = tuple(choose(step) for step in draft.refresh)
    draft = replace(
        draft, forward=forward, backward=backward, quantize_input=quantize_input, refresh=refresh
    )
    return draft.with_buffers(needed), tuple(sets.values())


def choose_merged(
    draft: Draft, arch: ArchSpec, recipe: RecipeSpec
) -> tuple[Draft, tuple[KernelSet, ...]]:
    """Give every merged step of forward and backward its kernel set.

    Raises:
        NotPossible: the arch has no kernels for one; who merges asks before.
    """
    sets: dict[str, KernelSet] = {}

    def choose(step: Step) -> Step:
        if not step.parts:
            return step
        chosen = kernel_set(step, draft.buffers, arch, recipe)
        sets[chosen.name] = chosen
        return replace(step, kernels=chosen.name, alignment=chosen.row_alignment)

    forward = tuple(choose(step) for step in draft.forward)
    backward = tuple(choose(step) for step in draft.backward)
    return replace(draft, forward=forward, backward=backward), tuple(sets.values())


def _check_known(step: Step) -> None:
    """Refuse what the reference has no code for; it is normative, so no arch can have it either.

    Raises:
        NotPossible: no such step, no such operand, or math that the step does not print.
    """
    name, made_by = step.primitive, _made_by(step)
    if is_printed(step) or definition(name).formula:
        _check_expression(step)
    elif step.pointwise:
        raise NotPossible(f"the reference has no {name} with an expression{made_by}")
    for operand in () if is_printed(step) else step.inputs:
        clears = operand.slot == ROW_GROUPS and step.pointwise and step.pointwise.grouped
        if not (takes(step, operand.slot) or operand.buffer in step.mutates or clears):
            raise NotPossible(f"the reference has no {name} with {operand.slot!r}{made_by}")


def _check_expression(step: Step) -> None:
    """Refuse a step that its expression does not compute.

    Raises:
        NotPossible: there is none, or it gives other results or reads other scalars.
    """
    name, made_by = step.primitive, _made_by(step)
    results = {result.buffer for result in step.pointwise.results} if step.pointwise else set()
    if results != {*step.writes}:
        raise NotPossible(f"no expression computes {', '.join(step.writes)} of {name}{made_by}")
    given = tuple(attribute for attribute, _ in step.attributes)
    if step.pointwise and given != step.pointwise.attributes:
        raise NotPossible(
            f"{name}{made_by} is given {list(given)}, its expression reads"
            f" {list(step.pointwise.attributes)}"
        )


def with_sizes(draft: Draft, step: Step) -> Step:
    """The step with the sizes its launch needs, and its operation count.

    Raises:
        NotPossible: its operands or results have other shapes than its kind says.
    """
    own = (*step.inputs, *step.outputs)
    shapes = {operand.slot: draft.buffers[operand.buffer].shape for operand in own}
    try:
        return step_sizes.with_sizes(step, shapes)
    except ValueError as error:
        raise NotPossible(f"{step.primitive}{_made_by(step)}: {error}") from None


def with_scratch(
    step: Step, buffers: Mapping[str, Buffer], formats: Formats
) -> tuple[Step, Mapping[str, Buffer]]:
    """The step with the memory that its kernels need by themselves.

    Where its kind has sums that are asked for under some flags only, so is the memory.

    Returns:
        the step, and the buffers by name.
    """
    kind = definition(step.primitive)
    stored = kind.scratch(step, buffers, formats) if kind.scratch else {}
    own = {
        slot: Buffer(f"{step.out}_{slot}", each.typed, each.shape) for slot, each in stored.items()
    }
    if not own:
        return step, {}
    asking = [step.wanted(each.buffer) for each in step.outputs if each.slot in kind.sums]
    when = tuple(dict.fromkeys(flag for flags in asking for flag in flags)) if all(asking) else ()
    conditions = (Result(each.name, when) for each in own.values()) if when else ()
    widened = replace(
        step,
        outputs=(*step.outputs, *(Operand(slot, each.name) for slot, each in own.items())),
        output_when=(*step.output_when, *conditions),
    )
    return widened, {each.name: each for each in own.values()}


def _made_by(step: Step) -> str:
    return f" (made by fusion {step.rule!r})" if step.rule else ""


def variant_of(step: Step, recipe: RecipeSpec, buffers: Mapping[str, Buffer]) -> Variant | None:
    """What a step's kernels are for besides the module's own type; None where that is all."""
    store = _store_of(step, buffers)
    if not step.copies:
        of = gathers(step)
        return Variant((DType.IO,), (), of, store) if of or store is not Store.IO else None
    copies = read_copies(step) if is_gemm(step) else step.copies
    specs = [recipe.roles[copy.role] for copy in copies]
    if reads_decoded(step):
        return replace(DECODED, store=store, ends=_ends_of(step, specs))
    atoms = [ATOMS] if step.copies[0].atoms else []
    if decodes(step):
        copy = step.copies[0]
        columnwise = copy.orientation is Orientation.COLUMNWISE
        transposed = columnwise and not copy.untransposed
        by_group = specs[0].square > 1 and step.input("groups") is not None and not columnwise
        scalings = (specs[0].scaling,) if step.input("a_scale") else ()
        traits = [*([] if scalings else [CODES]), *(["transposed"] if transposed else [])]
        traits += [UNTRANSPOSED] if scalings and copy.untransposed else []
        traits += atoms if scalings else []
        traits += ["by_group"] if by_group and not atoms else []
        return Variant((specs[0].format,), scalings, tuple(traits))
    if observes(step):
        orientation = step.copies[0].orientation
        transform = specs[0].hadamard
        transformed = transform is not None and transform.orientation is orientation
        traits = [orientation.value, *([HADAMARD] if transformed else [])]
        traits += [UNTRANSPOSED] if step.copies[0].untransposed else []
        traits += atoms
        return Variant((specs[0].format,), (specs[0].scaling,), tuple(traits))
    if makes_copies(step):
        spec = specs[0]
        columnwise = any(c.orientation is Orientation.COLUMNWISE for c in step.copies)
        traits = [spec.rounding.value] if spec.rounding is Rounding.STOCHASTIC else []
        traits += [HADAMARD] if spec.hadamard and columnwise else []
        traits += [UNTRANSPOSED] if any(copy.untransposed for copy in step.copies) else []
        traits += atoms
        return Variant((spec.format,), (spec.scaling,), tuple(traits))
    accumulation = recipe.gemm[GemmKind(step.kind)]
    formats = tuple(spec.format for spec in specs)
    return Variant(formats, tuple(spec.scaling for spec in specs), (accumulation.value,), store)


def _ends_of(step: Step, specs: Sequence[QuantizationSpec]) -> tuple[EndScale, ...]:
    """What of each operand's scales a GEMM of decoded operands was left; empty where nothing."""
    ends = tuple(
        spec.end_scale if step.input(f"{slot}_scale") else EndScale.NONE
        for slot, spec in zip("ab", specs, strict=True)
    )
    return ends if any(end is not EndScale.NONE for end in ends) else ()


def _store_of(step: Step, buffers: Mapping[str, Buffer]) -> Store:
    """A GEMM that changes a buffer of the caller's leaves its result there, in that type."""
    if not is_gemm(step):
        return Store.IO
    if epilogue(step):
        return _store_of_epilogue(step)
    if step.input("add_scales"):
        return Store.SCALED_BIAS
    narrow = buffers[step.out].dtype is DType.IO
    if step.input("accumulate"):
        return Store.ADD_IO if narrow else Store.ADD
    return Store.IO if narrow else Store.FP32


def _store_of_epilogue(step: Step) -> Store:
    """A GEMM goes on with its result, and may leave that as it was, too."""
    if made_copies(step):
        return Store.CODES
    aux = any(each.slot == AUX for each in step.outputs)
    if any(each.gated for each in epilogue(step)):
        return Store.GATED_AUX if aux else Store.GATED
    return Store.BINARY if step.input(OTHER) else Store.UNARY_AUX if aux else Store.UNARY


def family_of(demand: Demand, arch: ArchSpec) -> tuple[str, FamilySpec]:
    """The family that does what a step asks for.

    Raises:
        NotPossible: there is none.
    """
    variant = demand.variant
    of = f" of {variant}" if variant and str(variant) else ""
    missing = f"{demand.primitive}{of}"
    for name, family in arch.kernels.items():
        if not offers(family, demand):
            continue
        known = known_family(family.template or name)
        refused = known.accepts(demand, arch.layout) if known else None
        if not refused:
            return name, family
        missing = refused
    raise NotPossible(f"{arch.name} has no kernels for {missing}")


def demand_of(step: Step, variant: Variant | None, recipe: RecipeSpec) -> Demand:
    """What a step asks of its family, beyond what its variant says, too."""
    specs = [recipe.roles[copy.role] for copy in made_copies(step)]
    maths = epilogue(step) if is_gemm(step) else ()
    return Demand(
        step.primitive,
        GemmKind(step.kind) if is_gemm(step) else None,
        variant,
        history=max((spec.scale.history for spec in specs), default=0),
        gated_cost=max((each.math.cost for each in maths if each.gated), default=0),
    )


def kernel_set(
    step: Step, buffers: Mapping[str, Buffer], arch: ArchSpec, recipe: RecipeSpec
) -> KernelSet:
    """The kernels that can run a step on these buffers.

    Raises:
        NotPossible: the arch has none; the message lists what it has.
    """
    variant = variant_of(step, recipe, buffers)
    try:
        name, family = family_of(demand_of(step, variant, recipe), arch)
    except NotPossible as missing:
        raise NotPossible(f"{missing}; {offered(step.primitive, arch)}") from None
    template = family.template or name
    if is_gemm(step):
        kind = GemmKind(step.kind)
        if kind not in family.kinds:
            raise NotPossible(f"{arch.name}: kernel family {name} has no {kind.value}")
        words = replace(variant, formats=()) if variant and reads_decoded(step) else variant
        chosen = _gemm_set(name, template, kind, arch, words, epilogue(step))
        return replace(chosen, row_alignment=family.row_alignment)
    base = step.pointwise.kernel if step.pointwise else name
    base = f"{base}_quantize" if step.parts and step.pointwise else base
    base = f"{base}_{variant}" if variant else base
    kernels = tuple(Kernel(str(ElementKernel(base, dtype)), dtype) for dtype in IO_DTYPES)
    known = known_family(template)
    stated = known.constants(None, None, variant, arch.limits) if known else ()
    unit = KernelUnit(
        base, template, kernels, constants=stated, pointwise=step.pointwise, variant=variant
    )
    rules = (SelectionRule(Predicate(()), (Candidate("", _by_type(kernels)),)),)
    return KernelSet(base, template, None, (unit,), rules, family.row_alignment)


def _by_type(kernels: tuple[Kernel, ...]) -> tuple[tuple[DType, str], ...]:
    return tuple((kernel.dtype, kernel.name) for kernel in kernels)


def _gemm_set(
    family: str,
    template: str,
    kind: GemmKind,
    arch: ArchSpec,
    variant: Variant | None,
    maths: tuple[EpilogueMath, ...],
) -> KernelSet:
    spec = arch.kernels[family].kinds[kind]
    words = "_".join((*([str(variant)] if variant else []), *(each.name for each in maths)))
    units = tuple(
        replace(
            _gemm_unit(GemmUnit(family, kind, point.name, words), template, point, arch, variant),
            epilogue=maths,
        )
        for point in spec.points
    )
    rules = tuple(_rules(spec, units, arch))
    name = GemmUnit(family, kind, "", words).stem
    return KernelSet(name, template, kind, units, rules, measured=spec.measured)


def _rules(spec: KindSpec, units: Sequence[KernelUnit], arch: ArchSpec) -> Iterator[SelectionRule]:
    """The rules of a spec: all but the last also ask for memory that some GPU has not."""
    of_point = {unit.point: unit for unit in units}
    works = {point.name: point.work for point in spec.points}
    least = arch.least_limits.get(SHARED_MEMORY, 0)
    for index, each in enumerate(spec.select):
        candidates = tuple(
            Candidate(point, _by_type(of_point[point].kernels), each.least[point], works[point])
            if point in each.least
            else Candidate(point, _by_type(of_point[point].kernels))
            for point in each.points
        )
        taken = max(dict(of_point[point].constants).get(SHARED_BYTES, 0) for point in each.points)
        lacking = taken > least and index < len(spec.select) - 1
        yield SelectionRule(each.when, candidates, taken if lacking else 0)


def _gemm_unit(
    name: GemmUnit, template: str, point: Config, arch: ArchSpec, variant: Variant | None
) -> KernelUnit:
    """The unit of one configuration, with what its family derives of it."""
    known = known_family(template)
    stated = known.constants(point, name.kind, variant, arch.limits) if known else ()
    return KernelUnit(
        str(name),
        template,
        tuple(Kernel(str(GemmKernel(name, dtype)), dtype) for dtype in IO_DTYPES),
        name.kind,
        point=point.name,
        config=point.cpp(arch.limits),
        constants=stated,
        variant=variant,
    )
