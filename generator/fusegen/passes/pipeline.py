"""Specs and a selection to plans: the passes in their order, all pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..ir.naming import Cell
from ..ir.plan import Dimension, ModulePlan, Status, Step, Tolerance, Unsupported
from ..ir.shapes import symbols
from ..math import Derivations
from ..spec.arch import ArchSpec
from ..spec.kinds import SpecKind
from ..spec.load import SpecSet
from ..spec.module import BackwardPrecision, MainGrad, ModuleSpec, OptionName
from ..spec.recipe import RecipeSpec
from ..steps import quantizes as makes_copies
from .as_bytes import pass_as_bytes
from .backward import write_backward
from .conversions import conversions
from .delay_wgrad import delay_wgrad, delayed_steps
from .draft import Draft, NotPossible
from .expand import chain_of, expand
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
    options = chosen_options(module, cell)
    draft = write_backward(expand(module, specs.ops))
    if OptionName.SCALE_BIAS in options:
        draft = scale_bias(draft)
    draft = derive_math(draft, derivations)
    if OptionName.GLU_INTERLEAVE in options:
        draft = interleave_halves(draft)
    choices = {name: words[0] for name, words in module.options.items()} | options
    draft = fuse(draft, specs.fusions, arch.name, recipe, choices)
    if OptionName.SAVE in options:
        draft = recompute_activations(draft)
    if OptionName.MAIN_GRAD in options:
        draft = keep_in_main_grad(draft, MainGrad(options[OptionName.MAIN_GRAD]))
    quantizes = all(makes_copies(step) for step in draft.forward)
    exact, exact_output = unquantized(draft)
    draft = quantize(
        draft,
        recipe,
        arch,
        reduced=OptionName.AMAX_REDUCTION in options,
        backward=BackwardPrecision(
            options.get(OptionName.BACKWARD_PRECISION, BackwardPrecision.QUANTIZED)
        ),
    )
    if OptionName.WEIGHT_CACHE in options:
        alone = options[OptionName.WEIGHT_CACHE] == "quantized_weights"
        draft = keep_quantized(draft, recipe, alone=alone)
    draft = fold_sums(draft, arch)
    draft = add_conditions(draft)
    waiting = delayed_steps(draft) if OptionName.DELAY_WGRAD in options else ()
    draft = tell_lengths(draft, saved(draft), waiting)
    kept = saved(draft)
    if OptionName.DEBUG in options:
        draft = take_statistics(draft, recipe, arch)
    draft, kernel_sets = choose_kernels(draft, arch, recipe)
    if OptionName.DELAY_WGRAD in options:
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
        ranges=OptionName.RANGES in options,
    )
    return replace(plan, shardings=module_shardings(plan.unmerged))


_IMPLEMENTED = {
    OptionName.AMAX_REDUCTION: ("reduced_amax",),
    OptionName.BACKWARD_PRECISION: (
        BackwardPrecision.HIGH.value,
        BackwardPrecision.DEQUANTIZED.value,
    ),
    OptionName.DEBUG: ("debug",),
    OptionName.DELAY_WGRAD: ("delayed_wgrad",),
    OptionName.GLU_INTERLEAVE: ("interleaved_32",),
    OptionName.MAIN_GRAD: tuple(each.value for each in MainGrad if each is not MainGrad.RETURNED),
    OptionName.RANGES: ("nvtx_ranges",),
    OptionName.SCALE_BIAS: ("scaled_bias",),
    OptionName.SAVE: ("recompute_activations",),
    OptionName.WEIGHT_CACHE: ("cached_weights", "quantized_weights"),
}
"""Choices that a pass knows, by their words; the first choice of an option needs none."""


def chosen_options(module: ModuleSpec, cell: Cell) -> dict[OptionName, str]:
    """What the cell asks for besides the first choice of every option.

    Raises:
        NotPossible: the module does not offer it, or no pass knows it.
    """
    chosen: dict[OptionName, str] = {}
    for word in cell.options:
        option = next((name for name, words in module.options.items() if word in words), None)
        if option is None:
            raise NotPossible(f"module {module.name!r} offers no option {word!r}")
        if word not in _IMPLEMENTED.get(option, ()):
            raise NotPossible(f"no pass implements option {option.value}: {word}")
        chosen[option] = word
    return chosen


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
    ops = dict.fromkeys(item.op for item in chain_of(module))
    rules = dict.fromkeys(step.rule for step in steps if step.rule)
    keys = [(SpecKind.MODULES, module.name), *((SpecKind.OPS, op) for op in ops)]
    keys += [(SpecKind.FUSIONS, rule) for rule in rules]
    keys += [(SpecKind.RECIPES, recipe.name), (SpecKind.ARCHS, arch.name)]
    return tuple(specs.source(kind, name).file for kind, name in keys)
