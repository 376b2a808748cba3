"""The last step: a draft that every pass has seen becomes a plan, which nothing changes again."""

from __future__ import annotations

from ..ir.plan import Dimension, ModulePlan, Status, Tolerance
from ..ir.shapes import symbols
from ..spec.kinds import SpecKind
from .contract import Context
from .draft import Draft
from .liveness import joined_results


def seal(draft: Draft, context: Context) -> ModulePlan:
    """The plan of a draft whose programs are cut into segments."""
    cell, module, recipe, arch = context.cell, context.module, context.recipe, context.arch
    given = recipe.tolerance
    return ModulePlan(
        cell=str(cell),
        module=cell.module,
        recipe=cell.recipe,
        arch=arch.name,
        status=Status.EMULATED if draft.emulated else Status.NATIVE,
        reason=draft.emulated or _reason(context),
        summary=module.summary or context.specs.ops[module.op or ""].summary,
        class_name=module.class_,
        dims=_dimensions(draft, context),
        inputs=draft.inputs,
        parameters=draft.parameters,
        gradients=draft.gradients,
        arguments=draft.arguments,
        outputs=draft.outputs,
        input_copies=draft.input_copies,
        output_copies=draft.output_copies,
        states=draft.states,
        joined=draft.joined,
        main_grads=draft.main_grads,
        attributes=draft.attributes,
        buffers=tuple(draft.buffers.values()),
        directions=draft.directions,
        saved=joined_results(draft, draft.saved),
        kernel_sets=draft.kernel_sets,
        conversions=draft.conversions,
        exact=draft.exact,
        exact_outputs=draft.exact_outputs,
        quantizations=draft.quantizations,
        layout=draft.layout,
        tolerance=Tolerance(given.gemm, given.end_to_end, given.float32),
        sources=_sources(draft, context),
        shardings=draft.shardings,
        rewrites=draft.rewrites,
        split=draft.split,
    )


def _reason(context: Context) -> str:
    return "compiled kernels" if context.arch.has_kernels else "the reference itself"


def _dimensions(draft: Draft, context: Context) -> tuple[Dimension, ...]:
    in_parameters = {
        name
        for parameter in draft.parameters
        for dim in draft.buffers[parameter.buffer].shape.flat
        for name in symbols(dim)
    }
    dims = context.dims.items()
    return tuple(Dimension(symbol, word, symbol in in_parameters) for symbol, word in dims)


def _sources(draft: Draft, context: Context) -> tuple[str, ...]:
    """Files of every spec that the plan was made from."""
    ops = dict.fromkeys(context.module.ops)
    programs = (program for direction in draft.directions for program in direction.programs)
    steps = (step for program in programs for step in program.steps)
    rules = dict.fromkeys(step.rule for step in steps if step.rule)
    rules |= dict.fromkeys(each.rule for each in draft.rewrites if not each.reason)
    keys = [(SpecKind.MODULES, context.module.name), *((SpecKind.OPS, op) for op in ops)]
    keys += [(SpecKind.FUSIONS, rule) for rule in rules]
    keys += [(SpecKind.RECIPES, context.recipe.name), (SpecKind.ARCHS, context.arch.name)]
    return tuple(context.specs.source(kind, name).file for kind, name in keys)
