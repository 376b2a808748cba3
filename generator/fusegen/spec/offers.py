"""Which options a module has: those of the registry that apply to its ops and that it keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from ..ir.dtypes import DType, bits
from ..ir.kernel import GemmKind
from ..ir.naming import gradient
from ..ir.quantization import AmaxSource, Role
from ..options import (
    OPTIONS,
    ModuleFacts,
    Option,
    RecipeFacts,
    excluded,
    of_one_option,
    option_of,
)
from ..steps import definition
from ..steps.definition import Trait
from ..steps.routing import GATHER_ROWS
from .chains import chain_of, outputs_of, reads_of, results_of
from .diagnostics import did_you_mean
from .load import SpecSet
from .module import ModuleSpec
from .op import OpSpec, StepSpec
from .recipe import RecipeSpec


def module_facts(module: ModuleSpec, ops: Mapping[str, OpSpec]) -> ModuleFacts:
    """What decides which options a module has; an op that is not there has none of it."""
    chain = [ops[name] for name in module.ops if name in ops]
    gemms = [op for op in chain if op.has_roles and any(map(_is_gemm, op.forward))]
    return ModuleFacts(
        ops=module.ops,
        quantizes=bool(gemms) or any(map(_quantizes, chain)),
        gemms=bool(gemms),
        chained_gemms=len(gemms) > 1,
        weights=any(map(_reads_weight, gemms)),
        weight_gradients=any(map(_gives_weight_gradient, chain)),
        grouped_bias=any(map(_adds_bias_of_groups, chain)),
        grouped_weights=any(map(_reads_weights_of_groups, gemms)),
        plain_weights=any(_reads_weight(op) and not _reads_weights_of_groups(op) for op in gemms),
        halves=any(op.pointwise and _has_halves(op) for op in chain),
        activated_gemms=any(
            before in gemms and _is_activation(item) for before, item in pairwise(chain)
        ),
        gathered_gemms=any(_gathers(before) and item in gemms for before, item in pairwise(chain)),
        first_of_gemms=_first_of_gemms(module, ops),
        last_of_gemms=_last_of_gemms(module, ops),
        adds_around_gemms=bool(gemms) and _adds_around(chain, gemms),
        given_groups=_given_groups(module, ops),
        gives_rows=_gives_rows(module, ops),
        inner_activations=any(
            recomputes(ops[item.op]) and not item.recompute
            for item in chain_of(module)[:-1]
            if item.op in ops
        ),
        chunks=any(tensor.chunk for op in chain for tensor in op.internal.values()),
        fp32_products=any(map(_gives_fp32_products, chain)),
    )


def recipe_facts(recipe: RecipeSpec) -> RecipeFacts:
    """What decides which options have something to choose under a recipe."""
    return RecipeFacts(
        name=recipe.name,
        quantizes=bool(recipe.roles),
        weights=Role.WEIGHT in recipe.roles,
        history=any(q.scale.source is AmaxSource.HISTORY for q in recipe.roles.values()),
        input_bits=bits(recipe.roles[Role.INPUT].format) if Role.INPUT in recipe.roles else 0,
    )


def refused(option: Option, module: ModuleSpec, ops: Mapping[str, OpSpec]) -> str | None:
    """Why a module has not got an option; None where it has."""
    return _refused(option, module, module_facts(module, ops))


def _refused(option: Option, module: ModuleSpec, facts: ModuleFacts) -> str | None:
    reason = option.applies_to(facts)
    if reason is None and option.name in module.without:
        return f"its spec says without: [{option.name}]"
    return reason


def _choice_refused(word: str, facts: ModuleFacts) -> str | None:
    """Why a module that has an option has not got one of its choices."""
    choices = (choice for option in OPTIONS for choice in option.choices if choice.word == word)
    return next((c.applies_to(facts) for c in choices if c.applies_to), None)


def options_of(module: ModuleSpec, ops: Mapping[str, OpSpec]) -> tuple[Option, ...]:
    """The options of a module, in the registry's order."""
    facts = module_facts(module, ops)
    return tuple(option for option in OPTIONS if _refused(option, module, facts) is None)


def words_of(module: ModuleSpec, ops: Mapping[str, OpSpec]) -> tuple[str, ...]:
    """The words that cells of a module may be named after, in the registry's order."""
    facts = module_facts(module, ops)
    words = (word for option in options_of(module, ops) for word in option.further)
    return tuple(word for word in words if _choice_refused(word, facts) is None)


def not_offered(word: str, module: ModuleSpec, ops: Mapping[str, OpSpec]) -> str | None:
    """What to say of a word that is no choice of a module; None where it is one."""
    option = option_of(word)
    if option is None:
        words = [known for each in options_of(module, ops) for known in each.words]
        return f"module {module.name!r} offers no option {word!r}{did_you_mean(word, words)}"
    facts = module_facts(module, ops)
    reason = _refused(option, module, facts) or _choice_refused(word, facts)
    return reason and f"module {module.name!r} offers no option {word!r}: {reason}"


def modules_with(word: str, specs: SpecSet) -> tuple[str, ...]:
    """Names of the modules that offer a choice, sorted."""
    named = specs.modules.items()
    return tuple(name for name, each in named if not_offered(word, each, specs.ops) is None)


def refusal(
    words: Sequence[str], module: ModuleSpec, recipe: RecipeSpec, ops: Mapping[str, OpSpec]
) -> str | None:
    """Why a cell of these choices cannot be: module, recipe or another choice rules one out.

    Args:
        words: choices besides the defaults, which no cell is named after.
    """
    facts = recipe_facts(recipe)
    chosen = [option for option in OPTIONS if {*option.words} & {*words}]
    defaults = (option.default for option in chosen if option.default in words)
    reasons = [
        *(not_offered(word, module, ops) for word in words),
        of_one_option(words),
        *(f"{word!r} is what a cell has without a word for it; leave it out" for word in defaults),
        *(option.applies_under(facts) for option in chosen),
        excluded(words),
        *(_chunks_refused(ops[name], recipe) for name in module.ops if name in ops),
    ]
    return next((reason for reason in reasons if reason), None)


def _chunks_refused(op: OpSpec, recipe: RecipeSpec) -> str | None:
    """Why an op that has a chunk of a tensor's rows at a time cannot be under a recipe."""
    tensor = next((name for name, spec in op.internal.items() if spec.chunk), None)
    if tensor is None or not recipe.roles:
        return None
    return (
        f"recipe {recipe.name!r} quantises what op {op.name!r} has a chunk of the rows of at a"
        " time: scales would depend on where rows are cut, and no kernel reads a part of quantised"
        " rows; take a recipe that quantises nothing, such as bf16, or an op that keeps"
        f" {tensor!r} whole"
    )


def choices_of(
    module: ModuleSpec, ops: Mapping[str, OpSpec], words: Sequence[str]
) -> dict[str, str]:
    """The choice of each option of a module, by the option's name, where these words are chosen."""
    return {
        option.name: next((word for word in words if word in option.words), option.default)
        for option in options_of(module, ops)
    }


def _is_gemm(step: StepSpec) -> bool:
    return Trait.GEMM in definition(step.primitive).traits


def _quantizes(op: OpSpec) -> bool:
    return any(Trait.QUANTIZES in definition(step.primitive).traits for step in op.forward)


def _gathers(op: OpSpec) -> bool:
    return any(step.primitive == GATHER_ROWS.name for step in op.forward)


def _is_activation(op: OpSpec) -> bool:
    """Whether it is an expression, other than a sum or a product, of one tensor and of numbers for
    its rows.
    """
    whole = [tensor for tensor in op.inputs.values() if tensor.broadcast is None]
    calls = any("(" in text for text in op.pointwise.values())
    return calls and len(whole) == 1 and not op.parameters


def recomputes(op: OpSpec) -> bool:
    """Whether a backward may make what the op gives again."""
    steps = (definition(step.primitive) for step in op.forward)
    return bool(op.pointwise) or any(Trait.RECOMPUTED in step.traits for step in steps)


def _reads_weight(op: OpSpec) -> bool:
    gemms = (step for step in op.forward if _is_gemm(step))
    return any(step.get("b") in op.parameters for step in gemms)


def _gives_fp32_products(op: OpSpec) -> bool:
    gemms = (step for step in op.forward if _is_gemm(step) and step.get("b") in op.parameters)
    wide = {name for name, tensor in op.tensors.items() if tensor.dtype is DType.FLOAT32}
    return not op.has_roles and any(step.get("out") in wide for step in gemms)


def _reads_weights_of_groups(op: OpSpec) -> bool:
    gemms = (step for step in op.forward if _is_gemm(step) and step.get("groups"))
    return any(step.get("b") in op.parameters for step in gemms)


def _first_of_gemms(module: ModuleSpec, ops: Mapping[str, OpSpec]) -> bool:
    """Whether GEMMs of the first op, and nothing else, read the module's first input."""
    if any(name not in ops for name in module.ops):
        return False
    first, *others = chain_of(module)
    op = ops[first.op]
    given = module.inputs or op.inputs
    if not op.inputs or not given:
        return False
    own, name = next(iter(op.inputs)), next(iter(given))
    readers = [step for step in (*op.forward, *op.backward) if own in dict(step.slots).values()]
    later = (reads_of(item, ops[item.op], "", given).values() for item in others)
    return (
        op.has_roles
        and any(map(_is_gemm, readers))
        and all(map(_is_gemm, readers))
        and first.with_.get(own, name) == name
        and not any(name in reads for reads in later)
        and name not in outputs_of(module, ops)
    )


def _last_of_gemms(module: ModuleSpec, ops: Mapping[str, OpSpec]) -> bool:
    """Whether a GEMM of the last op gives the module's one output."""
    if any(name not in ops for name in module.ops):
        return False
    op = ops[chain_of(module)[-1].op]
    given = tuple(results_of(module, len(chain_of(module)) - 1, op).values())
    written = {step.get("out") for step in op.forward if _is_gemm(step)}
    alone = len(op.outputs) == 1 and outputs_of(module, ops) == given
    return op.has_roles and alone and written == {*op.outputs}


def _adds_around(chain: Sequence[OpSpec], gemms: Sequence[OpSpec]) -> bool:
    """Whether ops before the first GEMM, and behind the last, move rows and add them up alone."""
    places = [place for place, op in enumerate(chain) if op in gemms]
    outside = (*chain[: places[0]], *chain[places[-1] + 1 :])
    kinds = (definition(step.primitive) for op in outside for step in op.forward)
    return not any(op.pointwise for op in outside) and all(k.linear or k.counted for k in kinds)


def _given_groups(module: ModuleSpec, ops: Mapping[str, OpSpec]) -> bool:
    """Whether the sizes of the groups that a GEMM's rows are in come from the caller."""
    chain = [each for each in chain_of(module) if each.op in ops]
    for item in chain:
        op = ops[item.op]
        own = {step.get("groups") for step in op.forward if _is_gemm(step)} - {None}
        given = module.inputs or op.inputs
        if any(item.with_.get(name, name) in given for name in own if name):
            return True
    return False


def _gives_rows(module: ModuleSpec, ops: Mapping[str, OpSpec]) -> bool:
    """Whether it gives one tensor of rows, which its last op writes and no backward reads."""
    if any(name not in ops for name in module.ops):
        return False
    op = ops[chain_of(module)[-1].op]
    if not op.outputs:
        return False
    names = outputs_of(module, ops)
    given = tuple(results_of(module, len(chain_of(module)) - 1, op).values())
    (name, output), *others = op.outputs.items()
    rows = len(output.shape.dims) + bool(output.shape.leading) > 1
    read = any(name in dict(step.slots).values() for step in op.backward)
    alone = names == given and not others and not read and not _quantizes(op)
    return alone and rows and output.dtype is DType.IO


def _gives_weight_gradient(op: OpSpec) -> bool:
    gradients = {gradient(name) for name in op.parameters}
    gemms = (step for step in op.backward if _is_gemm(step))
    return any(s.kind == GemmKind.WGRAD.value and s.get("out") in gradients for s in gemms)


def _adds_bias_of_groups(op: OpSpec) -> bool:
    return any(_is_gemm(s) and s.get("groups") and s.get("add") for s in op.forward)


def _has_halves(op: OpSpec) -> bool:
    return any(tensor.halves for tensor in op.tensors.values())
