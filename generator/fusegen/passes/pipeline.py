"""Specs and a selection to plans: the passes in their order, all pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..ir.naming import Cell
from ..ir.plan import Dimension, ModulePlan, Status, Step, Tolerance, Unsupported
from ..ir.primitives import Primitive
from ..ir.shapes import symbols
from ..math import Derivations
from ..options.amax_reduction import REDUCED_AMAX
from ..options.backward_precision import BackwardPrecision
from ..options.debug import STATISTICS
from ..options.delay_wgrad import DELAYED_WGRAD
from ..options.glu_interleave import INTERLEAVED
from ..options.main_grad import MainGrad
from ..options.ranges import NVTX_RANGES
from ..options.save import RECOMPUTE
from ..options.scale_bias import SCALED_BIAS
from ..options.weight_cache import ALONE, CACHED
from ..spec.arch import ArchSpec
from ..spec.kinds import SpecKind
from ..spec.load import SpecSet
from ..spec.module import ModuleSpec
from ..spec.offers import choices_of, refusal
from ..spec.recipe import RecipeSpec
from .as_bytes import pass_as_bytes
from .backward import write_backward
from .conversions import conversions
from .delay_wgrad import delay_wgrad, delayed_steps
from .draft import Draft, NotPossible
from .expand import expand
from .fuse import fuse
from .interleave import interleave_halves
from .kernels import choose_kernels
from .liveness import add_conditions, saved
from .main_grad import keep_in_main_grad
from .math import derive_math
from .merge import merge
from .programs import (
    backward_program,
    forward_program,
    refresh_program,
    tell_lengths,
    wgrad_program,
)
from .quantize import quantize, unquantized
from .recompute import recompute_activations
from .scaled_bias import scale_bias
from .sharding import module_shardings
from .statistics import take_statistics
from .sums import fold_sums
from .weight_cache import keep_quantized

ANEW = Derivations()
"""Keeps no derived program beyond this process."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a selection becomes: the modules that can be made, and why the others cannot."""

    modules: tuple[ModulePlan, ...]
    unsupported: tuple[Unsupported, ...]


def resolve(
    specs: SpecSet, arch: str, cells: Iterable[Cell], derivations: Derivations = ANEW
) -> Plan:
    """Plan every cell for one architecture, in sorted order."""
    modules: list[ModulePlan] = []
    unsupported: list[Unsupported] = []
    for cell in sorted(set(cells)):
        try:
            modules.append(resolve_module(specs, cell, arch, derivations))
        except NotPossible as reason:
            unsupported.append(Unsupported(str(cell), cell.module, cell.recipe, arch, str(reason)))
    return Plan(tuple(modules), tuple(unsupported))


def resolve_module(
    specs: SpecSet, cell: Cell, arch_name: str, derivations: Derivations = ANEW
) -> ModulePlan:
    """The plan of one cell.

    Raises:
        NotPossible: the cell cannot be made on the arch; the message is the reason.
        KeyError: an unknown module, recipe or arch.
    """
    module, recipe = specs.modules[cell.module], specs.recipes[cell.recipe]
    arch = specs.archs[arch_name]
    words = cell.options
    reason = refusal(words, module, recipe, specs.ops)
    if reason:
        raise NotPossible(reason)
    draft = write_backward(expand(module, specs.ops))
    if SCALED_BIAS in words:
        draft = scale_bias(draft)
    draft = derive_math(draft, derivations)
    if INTERLEAVED in words:
        draft = interleave_halves(draft)
    choices = choices_of(module, specs.ops, words)
    draft = fuse(draft, specs.fusions, arch.name, recipe, choices)
    if RECOMPUTE in words:
        draft = recompute_activations(draft)
    main_grad = next((each for each in MainGrad if each.value in words), None)
    if main_grad:
        draft = keep_in_main_grad(draft, main_grad)
    quantizes = all(step.primitive is Primitive.QUANTIZE for step in draft.forward)
    exact, exact_output = unquantized(draft)
    precision = (each for each in BackwardPrecision if each.value in words)
    draft = quantize(
        draft,
        recipe,
        arch,
        reduced=REDUCED_AMAX in words,
        backward=next(precision, BackwardPrecision.QUANTIZED),
    )
    if CACHED in words or ALONE in words:
        draft = keep_quantized(draft, alone=ALONE in words)
    draft = fold_sums(draft, arch)
    draft = add_conditions(draft)
    waiting = delayed_steps(draft) if DELAYED_WGRAD in words else ()
    draft = tell_lengths(draft, saved(draft), waiting)
    kept = saved(draft)
    if STATISTICS in words:
        draft = take_statistics(draft, recipe, arch)
    draft, kernel_sets = choose_kernels(draft, arch, recipe)
    if DELAYED_WGRAD in words:
        draft = delay_wgrad(draft)
    draft = pass_as_bytes(draft)
    dims = module_dims(module, specs)
    quantizes = quantizes and bool(draft.forward)  # no tensor of a role that the recipe names
    offered, further = conversions(recipe, arch) if quantizes else ((), ())
    forward = forward_program(draft, kept, dims)
    backward = backward_program(draft, kept, dims)
    merged = merge(forward, backward, draft.buffers, specs.fusions, arch, recipe, choices)
    steps = (*merged.forward.steps, *merged.backward.steps, *draft.refresh, *draft.wgrad)
    used = {step.kernels for step in steps}
    own = (each for each in (*kernel_sets, *merged.kernel_sets) if each.name in used)
    plan = ModulePlan(
        cell=str(cell),
        module=cell.module,
        recipe=cell.recipe,
        arch=arch.name,
        status=Status.EMULATED if draft.emulated else Status.NATIVE,
        reason=draft.emulated or _reason(arch),
        summary=module.summary or specs.ops[module.op or ""].summary,
        class_name=module.class_,
        dims=_dimensions(module, draft, specs),
        inputs=draft.inputs,
        parameters=draft.parameters,
        differentiated=tuple(leaf for leaf, _ in draft.gradients),
        arguments=draft.arguments,
        outputs=draft.outputs,
        states=draft.states,
        main_grads=draft.main_grads,
        reductions=draft.reductions,
        attributes=draft.attributes,
        buffers=(*draft.buffers.values(), *merged.buffers),
        forward=merged.forward,
        backward=merged.backward,
        refresh=refresh_program(draft, dims) if draft.refresh else None,
        wgrad=wgrad_program(draft, kept, dims) if draft.wgrad else None,
        saved=kept,
        kernel_sets=tuple({each.name: each for each in (*own, *further)}.values()),
        conversions=offered,
        exact=exact,
        exact_output=exact_output,
        quantizations=tuple(recipe.roles.items()),
        layout=arch.layout,
        tolerance=_tolerance(recipe),
        sources=_sources(specs, module, recipe, arch, steps),
        ranges=NVTX_RANGES in words,
    )
    return replace(plan, shardings=module_shardings(plan.unmerged))


def _reason(arch: ArchSpec) -> str:
    return "compiled kernels" if arch.has_kernels else "the reference itself"


def module_dims(module: ModuleSpec, specs: SpecSet) -> dict[str, str]:
    """Symbols and keywords of a module; those of its op where it is a single one."""
    return dict(module.dims or specs.ops[module.op or ""].dims)


def _dimensions(module: ModuleSpec, draft: Draft, specs: SpecSet) -> tuple[Dimension, ...]:
    in_parameters = {
        name
        for parameter in draft.parameters
        for dim in draft.buffers[parameter.buffer].shape.flat
        for name in symbols(dim)
    }
    dims = module_dims(module, specs).items()
    return tuple(Dimension(symbol, word, symbol in in_parameters) for symbol, word in dims)


def _tolerance(recipe: RecipeSpec) -> Tolerance:
    given = recipe.tolerance
    return Tolerance(given.gemm, given.end_to_end, given.float32)


def _sources(
    specs: SpecSet,
    module: ModuleSpec,
    recipe: RecipeSpec,
    arch: ArchSpec,
    steps: tuple[Step, ...],
) -> tuple[str, ...]:
    ops = dict.fromkeys(module.ops)
    rules = dict.fromkeys(step.rule for step in steps if step.rule)
    keys = [(SpecKind.MODULES, module.name), *((SpecKind.OPS, op) for op in ops)]
    keys += [(SpecKind.FUSIONS, rule) for rule in rules]
    keys += [(SpecKind.RECIPES, recipe.name), (SpecKind.ARCHS, arch.name)]
    return tuple(specs.source(kind, name).file for kind, name in keys)
