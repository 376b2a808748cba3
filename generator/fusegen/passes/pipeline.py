"""Specs and a selection to plans: the passes in their order, all pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..ir.kernel_set import KernelSet
from ..ir.naming import Cell
from ..ir.plan import ModulePlan, Unsupported
from ..math import Derivations
from ..options.amax_reduction import REDUCED_AMAX
from ..options.backward_calls import BACKWARD_CALLS, ONE_CALL
from ..options.backward_precision import BackwardPrecision
from ..options.cached_input import CACHE_QUANTIZED
from ..options.debug import STATISTICS
from ..options.delay_wgrad import DELAYED_WGRAD
from ..options.gather import WRITTEN_ROWS
from ..options.glu_interleave import INTERLEAVED
from ..options.input_format import QUANTIZED_INPUT
from ..options.main_grad import MainGrad
from ..options.output_format import QUANTIZED_OUTPUT
from ..options.parameters import PER_GROUP
from ..options.router_weight import FP32_ROUTER_WEIGHT
from ..options.save import RECOMPUTE
from ..options.scale_bias import SCALED_BIAS
from ..options.tensor_parallel import OF_GROUPS, PARALLEL
from ..options.weight_cache import ALONE, CACHED, HELD
from ..spec.load import SpecSet
from ..spec.offers import choices_of, module_facts, options_of, refusal
from .again import join_recomputed
from .as_bytes import pass_as_bytes
from .backward import write_backward
from .cached_input import cache_inputs
from .chunk import run_in_chunks, sum_chunks
from .contract import Context, Observer, Pass
from .conversions import conversions
from .cut import cut
from .delay_wgrad import delay_wgrad, delayed_steps
from .draft import EMPTY, Draft, NotPossible, Property
from .exchange import exchange
from .expand import expand
from .fusions import rules_of
from .gather import gather_operands
from .interleave import interleave_halves
from .join_amaxes import join_amaxes
from .join_quantize import join_quantize
from .join_saved import join_saved
from .join_states import join_states
from .kernels import choose_kernels, choose_merged
from .layout import with_layout
from .leave_rows import leave_rows
from .liveness import add_conditions, saved
from .main_grad import keep_in_main_grad
from .math import derive_math
from .parameter_per_group import part_by_group
from .programs import bind_lengths, programs_of
from .quantize import quantize, unquantized
from .quantized_input import take_quantized
from .recompute import recompute_activations
from .rewrite import Facts, Stage, rewrite
from .router_weight import widen_weights
from .scaled_bias import scale_bias
from .seal import seal
from .sharding import module_shardings
from .share_amaxes import share_amaxes
from .statistics import take_statistics
from .sums import fold_sums
from .tensor_parallel import split_over_ranks
from .views import view_again
from .weight_cache import keep_quantized

UNCACHED = Derivations()
"""Keeps no derived program beyond this process."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a selection becomes: the modules that can be made, and why the others cannot."""

    modules: tuple[ModulePlan, ...]
    unsupported: tuple[Unsupported, ...]


def resolve(
    specs: SpecSet,
    arch: str,
    cells: Iterable[Cell],
    derivations: Derivations = UNCACHED,
    observe: Observer | None = None,
) -> Plan:
    """Plan every cell for one architecture, in sorted order; ``observe`` sees each pass."""
    modules: list[ModulePlan] = []
    unsupported: list[Unsupported] = []
    for cell in sorted(set(cells)):
        try:
            modules.append(resolve_module(specs, cell, arch, derivations, observe))
        except NotPossible as reason:
            unsupported.append(Unsupported(str(cell), cell.module, cell.recipe, arch, str(reason)))
    return Plan(tuple(modules), tuple(unsupported))


def resolve_module(
    specs: SpecSet,
    cell: Cell,
    arch_name: str,
    derivations: Derivations = UNCACHED,
    observe: Observer | None = None,
    fuel: int | None = None,
) -> ModulePlan:
    """The plan of one cell.

    Raises:
        NotPossible: the cell cannot be made on the arch; the message is the reason.
        KeyError: an unknown module, recipe or arch.
    """
    context = replace(context_of(specs, cell, arch_name, derivations), fuel=fuel)
    return seal(run_passes(context, observe), context)


def context_of(
    specs: SpecSet, cell: Cell, arch_name: str, derivations: Derivations = UNCACHED
) -> Context:
    """What the passes of a cell may read.

    Raises:
        NotPossible: module, recipe or another option rules one out.
        KeyError: an unknown module, recipe or arch.
    """
    module, recipe = specs.modules[cell.module], specs.recipes[cell.recipe]
    reason = refusal(cell.options, module, recipe, specs.ops)
    if reason:
        raise NotPossible(reason)
    gemms = module_facts(module, specs.ops).gemms or QUANTIZED_OUTPUT in cell.options
    recipe, arch = with_layout(recipe, specs.archs[arch_name], gemms=gemms)
    return Context(cell, specs, module, recipe, arch, cell.options, derivations)


def run_passes(context: Context, observe: Observer | None = None) -> Draft:
    """The draft after every pass that applies; ``observe`` sees each after it ran.

    Raises:
        NotPossible: the cell cannot be made; the message is the reason.
    """
    draft = EMPTY
    for each in PASSES:
        if each.applies(context):
            assert each.needs <= draft.holds, f"{each.name} comes before what it needs"
            assert not each.before & draft.holds, f"{each.name} comes too late"
            before, after = draft, each.run(draft, context)
            draft = replace(after, holds=before.holds | each.gives)
            if observe:
                observe(each, before, draft)
    return draft


def _rewrite(draft: Draft, context: Context, stage: Stage) -> Draft:
    choices = choices_of(context.module, context.specs.ops, context.options)
    facts = Facts(context.arch, context.recipe, choices)
    return rewrite(draft, rules_of(context.specs.fusions), stage, facts, context.fuel)


def _recompute(draft: Draft, context: Context) -> Draft:
    return recompute_activations(draft, every=RECOMPUTE in context.options)


def _join_recomputed(draft: Draft, context: Context) -> Draft:
    return draft if context.recipe.roles else join_recomputed(draft, context.derivations)


def _main_grad(draft: Draft, context: Context) -> Draft:
    return keep_in_main_grad(draft, next(g for g in MainGrad if g.value in context.options))


def _tensor_parallel(draft: Draft, context: Context) -> Draft:
    return split_over_ranks(draft, PARALLEL[context.chosen((*PARALLEL,)) or ""])


def _exact(draft: Draft, context: Context) -> Draft:
    exact, outputs = unquantized(draft)
    return replace(draft, exact=exact, exact_outputs=outputs)


def _quantize(draft: Draft, context: Context) -> Draft:
    chosen = (precision for precision in BackwardPrecision if precision.value in context.options)
    quantized = quantize(
        draft,
        context.recipe,
        context.arch,
        backward=next(chosen, BackwardPrecision.QUANTIZED),
        fresh=not {HELD, CACHED, ALONE} & {*context.options},
        gives_copies=QUANTIZED_OUTPUT in context.options,
    )
    roles = tuple(context.recipe.roles.items())
    return replace(quantized, quantizations=roles, layout=context.arch.layout)


def _weight_cache(draft: Draft, context: Context) -> Draft:
    return keep_quantized(draft, alone=ALONE in context.options)


def _bind_lengths(draft: Draft, context: Context) -> Draft:
    delayed = delayed_steps(draft) if DELAYED_WGRAD in context.options else ()
    return bind_lengths(draft, saved(draft), delayed)


def _kernels(draft: Draft, context: Context) -> Draft:
    draft, kernel_sets = choose_kernels(draft, context.arch, context.recipe)
    return replace(draft, kernel_sets=kernel_sets)


def _programs(draft: Draft, context: Context) -> Draft:
    """Every step moves into the program of its op."""
    return draft.packed(programs_of(draft, context.dims))


def _rewrite_copies(draft: Draft, context: Context) -> Draft:
    """Kernels of steps that are merged are those of the merged step alone.

    Arguments, results and checks of the programs are those of the steps before: a merged step
    reads and writes all of them.
    """
    rewritten = _rewrite(draft.unpacked, context, Stage.COPIES)
    merged, sets = choose_merged(rewritten, context.arch, context.recipe)
    steps = {"forward": merged.forward, "backward": merged.backward}
    programs = [replace(p, steps=steps.get(p.name, p.steps)) for p in draft.programs]
    return _run_by(merged.packed(programs), sets)


def _run_by(draft: Draft, further: Iterable[KernelSet]) -> Draft:
    """The draft with the kernels that its steps name, of those that it has and of further ones."""
    used = {step.kernels for program in draft.programs for step in program.steps}
    known = {each.name: each for each in (*draft.kernel_sets, *further)}
    return replace(draft, kernel_sets=tuple(each for each in known.values() if each.name in used))


def _gather(draft: Draft, context: Context) -> Draft:
    if WRITTEN_ROWS in context.options:
        return draft
    return _run_by(*gather_operands(draft, context.arch, context.recipe))


def _leave_rows(draft: Draft, context: Context) -> Draft:
    return _run_by(*leave_rows(draft, context.arch, context.recipe))


def _join_quantize(draft: Draft, context: Context) -> Draft:
    """Arguments, results and checks of the programs are those of the steps before."""
    programs, sets = join_quantize(draft, context.arch, context.recipe)
    return _run_by(draft.packed(programs), sets)


def _cut(draft: Draft, context: Context) -> Draft:
    offered = BACKWARD_CALLS in options_of(context.module, context.specs.ops)
    return cut(draft, context.dims, freeing=offered and ONE_CALL not in context.options)


def _chunk(draft: Draft, context: Context) -> Draft:
    """Arguments, results and checks of the programs are those of the steps before."""
    looped, further = run_in_chunks(draft, context.arch, context.recipe)
    sets = {each.name: each for each in (*draft.kernel_sets, *further)}
    return replace(looped, kernel_sets=tuple(sets.values()))


def _conversions(draft: Draft, context: Context) -> Draft:
    """A module that does nothing but quantise a tensor of a role that the recipe names has them."""
    if draft.exact or not draft.directions[0].programs[0].steps:
        return draft
    offered, further = conversions(context.recipe, context.arch)
    sets = {each.name: each for each in (*draft.kernel_sets, *further)}
    return replace(draft, conversions=offered, kernel_sets=tuple(sets.values()))


def _sharding(draft: Draft, context: Context) -> Draft:
    return replace(draft, shardings=module_shardings(seal(draft, context).unmerged))


def _of(*properties: Property) -> frozenset[Property]:
    return frozenset(properties)


PASSES: tuple[Pass, ...] = (
    Pass(
        "expand",
        "The chain of a module becomes forward steps; tensors get their names.",
        lambda _, context: expand(context.module, context.specs.ops),
        gives=_of(Property.EXPANDED),
    ),
    Pass(
        "backward",
        "The ops' backward rules in reverse order; gradients from several readers are added up.",
        lambda draft, _: write_backward(draft),
        needs=_of(Property.EXPANDED),
        gives=_of(Property.DIFFERENTIATED),
    ),
    Pass(
        "scaled_bias",
        "The last grouped GEMM's bias is multiplied by scales of rows.",
        lambda draft, _: scale_bias(draft),
        needs=_of(Property.DIFFERENTIATED),
        before=_of(Property.MATH),
        options=(SCALED_BIAS,),
    ),
    Pass(
        "router_weight",
        "A router's weight is in fp32: GEMMs multiply its parts, whose products are added up.",
        lambda draft, _: widen_weights(draft),
        needs=_of(Property.DIFFERENTIATED),
        before=_of(Property.MATH),
        options=(FP32_ROUTER_WEIGHT,),
    ),
    Pass(
        "math",
        "Pointwise expressions are derived and printed, so that a backward step reads only what its"
        " formula needs, and writes no gradient that is another one.",
        lambda draft, context: derive_math(draft, context.derivations),
        needs=_of(Property.DIFFERENTIATED),
        gives=_of(Property.MATH),
    ),
    Pass(
        "interleave",
        "Halves of a row alternate in blocks of columns.",
        lambda draft, _: interleave_halves(draft),
        needs=_of(Property.MATH),
        before=_of(Property.KERNELS),
        options=(INTERLEAVED,),
    ),
    Pass(
        "rewrite_ops",
        "Fusions of steps of ops apply: joint, then forward, then backward ones.",
        lambda draft, context: _rewrite(draft, context, Stage.OPS),
        needs=_of(Property.MATH),
        before=_of(Property.EXACT, Property.QUANTIZED),
    ),
    Pass(
        "recompute",
        "Steps of the forward stand in the backward, too, where that spares saving what they give.",
        _recompute,
        needs=_of(Property.MATH),
        before=_of(Property.QUANTIZED),
    ),
    Pass(
        "join_recomputed",
        "An activation that is made again is one more result of its gradient's step, where nothing"
        " is quantised.",
        _join_recomputed,
        needs=_of(Property.MATH),
        before=_of(Property.QUANTIZED),
    ),
    Pass(
        "cached_input",
        "What activations read of a GEMM's result is saved as a quantised copy.",
        lambda draft, _: cache_inputs(draft),
        needs=_of(Property.MATH),
        before=_of(Property.QUANTIZED),
        options=(CACHE_QUANTIZED,),
    ),
    Pass(
        "parameter_per_group",
        "Parameters of which each group has a part become one for each group.",
        lambda draft, _: part_by_group(draft),
        needs=_of(Property.DIFFERENTIATED),
        before=_of(Property.QUANTIZED),
        options=(PER_GROUP,),
    ),
    Pass(
        "main_grad",
        "GEMMs that give weights' gradients change buffers of the caller's.",
        _main_grad,
        needs=_of(Property.DIFFERENTIATED),
        before=_of(Property.QUANTIZED),
        options=tuple(each.value for each in MainGrad if each is not MainGrad.RETURNED),
    ),
    Pass(
        "tensor_parallel",
        "What has a dimension that ranks split is followed, and what they have to exchange for it.",
        _tensor_parallel,
        needs=_of(Property.MATH),
        before=_of(Property.QUANTIZED),
        options=(*PARALLEL,),
    ),
    Pass(
        "exact",
        "The forward in high precision is put on record, to measure a recipe's error against.",
        _exact,
        needs=_of(Property.MATH),
        gives=_of(Property.EXACT),
        before=_of(Property.QUANTIZED),
    ),
    Pass(
        "quantize",
        "Operands of GEMMs are put into the recipe's formats, or decoded from them.",
        _quantize,
        needs=_of(Property.EXACT),
        gives=_of(Property.QUANTIZED),
    ),
    Pass(
        "quantized_input",
        "The step that quantises the first input moves into a program of its own.",
        lambda draft, _: take_quantized(draft),
        needs=_of(Property.QUANTIZED),
        before=_of(Property.FLAGGED),
        options=(QUANTIZED_INPUT,),
    ),
    Pass(
        "weight_cache",
        "Steps that quantise parameters move into the program `refresh`.",
        _weight_cache,
        needs=_of(Property.QUANTIZED),
        before=_of(Property.FLAGGED),
        options=(CACHED, ALONE),
    ),
    Pass(
        "sums",
        "A bias gradient becomes one more result of the step that quantises the same tensor.",
        lambda draft, context: fold_sums(draft, context.arch),
        needs=_of(Property.QUANTIZED),
        before=_of(Property.FLAGGED),
    ),
    Pass(
        "sum_chunks",
        "Sums over rows that are there in chunks are added up in fp32, and rounded once.",
        lambda draft, _: sum_chunks(draft),
        needs=_of(Property.QUANTIZED),
        before=_of(Property.FLAGGED),
    ),
    Pass(
        "views",
        "What is read in other dimensions is saved once, and has these again in the backward.",
        lambda draft, _: view_again(draft),
        needs=_of(Property.QUANTIZED),
        before=_of(Property.FLAGGED),
    ),
    Pass(
        "liveness",
        "Each backward step gets the flags under which it runs; what no gradient needs goes.",
        lambda draft, _: add_conditions(draft),
        needs=_of(Property.QUANTIZED),
        gives=_of(Property.FLAGGED),
    ),
    Pass(
        "share_amaxes",
        "Amaxes of delayed scaling are reduced over ranks before they move its state on.",
        lambda draft, _: share_amaxes(draft),
        needs=_of(Property.FLAGGED),
        before=_of(Property.SAVED),
        options=(REDUCED_AMAX,),
    ),
    Pass(
        "bind_lengths",
        "Steps that decode padded copies read a weight that binds the symbol of their length.",
        _bind_lengths,
        needs=_of(Property.FLAGGED),
        before=_of(Property.SAVED),
    ),
    Pass(
        "saved",
        "What the backward reads of the forward is saved, once, each under its own flags.",
        lambda draft, _: replace(draft, saved=saved(draft)),
        needs=_of(Property.FLAGGED),
        gives=_of(Property.SAVED),
    ),
    Pass(
        "statistics",
        "A step behind each that quantises writes numbers for people.",
        lambda draft, context: take_statistics(draft, context.recipe, context.arch),
        needs=_of(Property.SAVED),
        before=_of(Property.KERNELS),
        options=(STATISTICS,),
    ),
    Pass(
        "kernels",
        "The variant of each step, and the architecture's kernels that run it.",
        _kernels,
        needs=_of(Property.SAVED),
        gives=_of(Property.KERNELS),
    ),
    Pass(
        "delay_wgrad",
        "GEMMs that give weights' gradients move into the program `wgrad`.",
        lambda draft, _: delay_wgrad(draft),
        needs=_of(Property.KERNELS),
        before=_of(Property.PROGRAMS),
        options=(DELAYED_WGRAD,),
    ),
    Pass(
        "as_bytes",
        "Scales of E8M0 cross as bytes between programs of which one changes something.",
        lambda draft, _: pass_as_bytes(draft),
        needs=_of(Property.KERNELS),
        before=_of(Property.PROGRAMS),
    ),
    Pass(
        "join_states",
        "Amax histories and scales that one op moves on lie in one tensor; so do its statistics.",
        lambda draft, _: join_states(draft),
        needs=_of(Property.KERNELS),
        before=_of(Property.PROGRAMS),
    ),
    Pass(
        "join_saved",
        "Saved copies, or their scales alone, lie in one tensor where an op would take more than"
        " 16.",
        lambda draft, context: join_saved(draft, context.dims),
        needs=_of(Property.KERNELS),
        before=_of(Property.PROGRAMS),
    ),
    Pass(
        "join_amaxes",
        "Second-level amaxes that are saved lie in one tensor.",
        lambda draft, _: join_amaxes(draft),
        needs=_of(Property.KERNELS),
        before=_of(Property.PROGRAMS),
    ),
    Pass(
        "programs",
        "Arguments and results of each op, where dimensions are read, and argument checks.",
        _programs,
        needs=_of(Property.KERNELS),
        gives=_of(Property.PROGRAMS),
    ),
    Pass(
        "rewrite_copies",
        "Fusions of steps that make copies apply: a step and the quantisation of what it gives"
        " become one.",
        _rewrite_copies,
        needs=_of(Property.PROGRAMS),
        before=_of(Property.CUT),
    ),
    Pass(
        "gather",
        "GEMMs read the rows of tokens where those lie, if the architecture has kernels for it.",
        _gather,
        needs=_of(Property.PROGRAMS),
        before=_of(Property.CUT),
    ),
    Pass(
        "leave_rows",
        "Rows past the groups that nobody reads are not written.",
        _leave_rows,
        needs=_of(Property.PROGRAMS),
        before=_of(Property.CUT),
        options=OF_GROUPS,
    ),
    Pass(
        "join_quantize",
        "Steps that quantise tensors by the same kernel, none of which waits for another, become"
        " one.",
        _join_quantize,
        needs=_of(Property.PROGRAMS),
        before=_of(Property.CUT),
    ),
    Pass(
        "chunk",
        "Steps that hand on a chunk of a tensor's rows at a time become one, which runs in a loop.",
        _chunk,
        needs=_of(Property.PROGRAMS),
        before=_of(Property.CUT),
    ),
    Pass(
        "exchange",
        "What enters and leaves a direction passes through the collectives of ranks that have parts"
        " of its weights.",
        lambda draft, _: exchange(draft),
        needs=_of(Property.PROGRAMS),
        before=_of(Property.CUT),
        options=(*PARALLEL,),
    ),
    Pass(
        "cut",
        "Programs become segments: ops, and collectives between them; a backward where memory can"
        " go, each of its ops in the order that needs least.",
        _cut,
        needs=_of(Property.PROGRAMS),
        gives=_of(Property.CUT),
    ),
    Pass(
        "conversions",
        "A module that only quantises gets the ops of `quantize` and `dequantize`.",
        _conversions,
        needs=_of(Property.CUT),
    ),
    Pass(
        "sharding",
        "The ways in which ranks may run the ops on shards.",
        _sharding,
        needs=_of(Property.CUT),
    ),
)
"""Every pass in its order, which is checked wherever they run."""
