"""Cells for the GPU run alone: every option, the combinations users make, every activation.

The committed bundles hold what most users copy. What else a user may ask for by name is planned
here from the specs, so that nothing that is added can be forgotten, and generated into
`build/evidence/<arch>`, a bundle like any other, which is tested and sanitized beside them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import bundles
import further
from entries import LedgerError

from fusegen import api
from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan
from fusegen.options import OPTIONS
from fusegen.spec.cells import with_options
from fusegen.spec.chains import chain_of
from fusegen.spec.editions import CURRENT
from fusegen.spec.fusion import MERGES
from fusegen.spec.load import SpecSet
from fusegen.spec.offers import modules_with
from fusegen.spec.op import OpSpec
from fusegen.steps import definition
from fusegen.steps.definition import Trait
from fusegen.steps.norm_quantize import NORM_QUANTIZE

PLAIN = "bf16"

# An option runs alone on the first of these that offers it, or else on the first that does.
PREFERRED = ("grouped_linear", "swiglu", "grouped_mlp")

TOGETHER: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("linear", ("bf16", "fp8_delayed", "fp8_block"), ("add_to_main_grad", "delayed_wgrad")),
    ("grouped_linear", ("bf16", "fp8_delayed", "mxfp8"), ("add_to_main_grad", "delayed_wgrad")),
    ("linear_cross_entropy", ("bf16",), ("add_to_main_grad",)),
    ("linear_cross_entropy", ("bf16",), ("write_main_grad",)),
    ("linear_cross_entropy", ("bf16",), ("write_16_bit_main_grad",)),
    ("grouped_mlp", ("bf16", "fp8_block"), ("add_to_main_grad", "delayed_wgrad")),
    ("grouped_mlp", ("bf16", "fp8_delayed"), ("add_to_main_grad", "recompute_activations")),
    ("grouped_mlp", ("bf16", "fp8_block"), ("write_main_grad", "delayed_wgrad")),
    (
        "grouped_mlp",
        ("fp8_delayed", "fp8_block", "mxfp8"),
        ("cached_weights", "recompute_activations"),
    ),
    ("grouped_mlp", ("fp8_block",), ("cached_weights", "add_to_main_grad")),
    ("grouped_mlp", ("fp8_current", "fp8_delayed", "fp8_block"), ("held_weights",)),
    ("grouped_mlp", ("fp8_delayed",), ("held_weights", "recompute_activations")),
    ("grouped_mlp", ("fp8_block", "nvfp4"), ("quantized_weights", "add_to_main_grad")),
    ("norm_mlp", ("fp8_delayed", "fp8_block"), ("add_to_main_grad", "recompute_activations")),
    ("layer_norm_mlp", ("mxfp8",), ("add_to_main_grad", "recompute_activations")),
    ("rotary", ("bf16",), ()),
    ("rotary_qkv", ("bf16",), ()),
    ("norm_qkv_interleaved", ("bf16",), ()),
    (
        "norm_qkv_gqa_4",
        ("fp8_delayed", "fp8_block"),
        ("cached_weights", "recompute_activations"),
    ),
    ("grouped_mlp", ("fp8_delayed",), ("reduced_amax", "add_to_main_grad")),
    ("grouped_mlp", ("fp8_delayed",), ("reduced_amax", "recompute_activations")),
    ("grouped_mlp", ("bf16", "fp8_block", "mxfp8"), ("interleaved_32", "scaled_bias")),
    ("grouped_mlp", ("bf16", "fp8_delayed"), ("interleaved_32", "recompute_activations")),
    ("grouped_mlp", ("bf16", "fp8_delayed"), ("parameter_per_group", "recompute_activations")),
    (
        "grouped_mlp",
        ("fp8_block",),
        ("interleaved_32", "scaled_bias", "parameter_per_group", "recompute_activations"),
    ),
    ("grouped_mlp", ("nvfp4",), ("high_precision_backward", "add_to_main_grad")),
    ("grouped_mlp", ("fp8_block",), ("dequantized_backward", "add_to_main_grad")),
    ("grouped_mlp", ("fp8_delayed", "nvfp4"), ("debug", "nvtx_ranges")),
    ("linear_activation", ("fp8_rowwise",), ()),
    (
        "grouped_mlp",
        ("fp8_block",),
        ("add_to_main_grad", "delayed_wgrad", "cached_weights", "recompute_activations"),
    ),
    ("combine_extra", ("bf16",), ()),
    ("moe_permute", ("bf16",), ()),
    ("moe_layer", ("fp8_current", "fp8_rowwise", "mxfp8", "nvfp4"), ()),
    ("gated_shared_moe_layer", ("bf16", "fp8_block"), ()),
    ("moe_layer", ("bf16", "fp8_block"), ("interleaved_32", "scaled_bias", "add_to_main_grad")),
    ("moe_layer_srelu", ("bf16",), ()),
    ("router_olmoe", ("bf16",), ()),
    ("router_llama4", ("bf16",), ()),
    ("router_deepseek_v2", ("bf16",), ()),
    ("router_deepseek_v4", ("bf16",), ()),
    ("router_longcat", ("bf16",), ()),
    ("routed_moe_layer_mixtral", ("bf16",), ()),
    ("routed_shared_moe_layer_deepseek_v3", ("bf16", "fp8_block"), ()),
    ("linear", ("fp8_delayed", "mxfp8"), ("quantized_input", "quantized_output")),
    ("rms_norm", ("fp8_block", "fp8_delayed", "nvfp4"), ("quantized_output",)),
    ("swiglu", ("fp8_block",), ("quantized_output",)),
    ("gather", ("fp8_block",), ("quantized_output",)),
)
"""Module, recipes and options of what users combine, or ask of a module whose programs differ."""


def option_words() -> tuple[str, ...]:
    """Every choice besides the first of its option, sorted."""
    return tuple(sorted(word for option in OPTIONS for word in option.further))


def activations(specs: SpecSet) -> tuple[str, ...]:
    """Every op that is an expression, sorted."""
    return tuple(sorted(name for name, op in specs.ops.items() if op.pointwise))


def merges(plan: ModulePlan) -> bool:
    """Whether an expression and the quantisation of its result are one step, both ways."""
    return kinds_of(plan) >= {
        kind for parts, kind in MERGES.items() if Trait.PRINTED in definition(parts[0]).traits
    }


def kinds_of(plan: ModulePlan) -> set[str]:
    """What the steps of a plan do."""
    return {step.primitive for step in (*plan.forward.steps, *plan.backward.steps)}


# ---- cells


def cells(specs: SpecSet, arch: str) -> tuple[Cell, ...]:
    """All cells that this plan asks for on an architecture, whoever else has them.

    Args:
        specs: the built-in ones and those of `further_specs`.

    Raises:
        LedgerError: an option that no recipe can be generated with, an activation that no module
            has, or a combination that cannot be made.
    """
    found = {
        *_alone(specs, arch),
        *_together(specs, arch),
        *_activated(specs, arch),
        *_normed(specs, arch),
    }
    return tuple(sorted(found))


def _alone(specs: SpecSet, arch: str) -> Iterator[Cell]:
    """Every option by itself, under every recipe that knows it."""
    order = [name for name in PREFERRED if name in specs.modules]
    order += [name for name in specs.modules if name not in order]
    for word in option_words():
        offering = modules_with(word, specs)
        module = next(name for name in order if name in offering)
        made = [
            cell
            for recipe in specs.recipes
            if further.plan_of(specs, arch, cell := Cell(module, recipe, (word,)))
        ]
        if not made:
            raise LedgerError(f"option {word}: no recipe can be generated with it on {arch}")
        yield from made


def _together(specs: SpecSet, arch: str) -> Iterator[Cell]:
    for module, recipes, words in TOGETHER:
        for cell in with_options(specs, [Cell(module, recipe) for recipe in recipes], words):
            if further.plan_of(specs, arch, cell) is None:
                raise LedgerError(f"{cell}: cannot be made on {arch}")
            yield cell


def _activated(specs: SpecSet, arch: str) -> Iterator[Cell]:
    """Every activation alone, and every expert MLP plain and where it merges with quantisation."""
    alone = {module.op: name for name, module in specs.modules.items() if module.op}
    for name in activations(specs):
        if name not in alone:
            raise LedgerError(f"op {name}: no module has it alone; add specs/modules/{name}.yaml")
        yield Cell(alone[name], PLAIN)
    for module in expert_mlps(specs).values():
        for recipe in specs.recipes:
            plan = further.plan_of(specs, arch, cell := Cell(module, recipe))
            if plan is not None and (recipe == PLAIN or merges(plan)):
                yield cell


def _normed(specs: SpecSet, arch: str) -> Iterator[Cell]:
    """Every norm before a linear layer, where it merges with quantisation."""
    for name, module in specs.modules.items():
        ops = [item.op for item in chain_of(module)]
        if len(ops) != 2 or ops[1] != "linear":
            continue
        for recipe in specs.recipes:
            plan = further.plan_of(specs, arch, cell := Cell(name, recipe))
            if plan is not None and NORM_QUANTIZE.name in kinds_of(plan):
                yield cell


def expert_mlps(specs: SpecSet) -> dict[str, str]:
    """Modules of linear, activation, linear, by their activation; the first of each."""
    known = set(activations(specs))
    found: dict[str, str] = {}
    for name, module in specs.modules.items():
        ops = [item.op for item in chain_of(module)]
        if len(ops) == 3 and ops[1] in known:
            found.setdefault(ops[1], name)
    return found


# ---- specs and bundle


def further_specs(specs: SpecSet) -> dict[str, Any]:
    """An expert MLP for every activation that no built-in module puts between two GEMMs.

    Not for one of elements of any shape, such as silu's: a GEMM asks for rows and columns.  Nor for
    one with a parameter, whose gradient is a sum over all rows, with a second result, or that gives
    what it takes.
    """
    missing = [name for name in activations(specs) if name not in expert_mlps(specs)]
    fitting = [name for name in missing if _fits_experts(specs.ops[name])]
    return {f"expert_{name}": _expert(specs, name) for name in fitting}


def _fits_experts(activation: OpSpec) -> bool:
    inputs = list(activation.inputs.values())
    has_rows = len(inputs) == 1 and len(inputs[0].shape.flat) == 2
    computes = not {*activation.pointwise.values()} & {*activation.inputs}
    return has_rows and computes and not activation.parameters and len(activation.outputs) == 1


def _expert(specs: SpecSet, activation: str) -> dict[str, Any]:
    first = next(iter(specs.ops[activation].inputs.values()))
    width = "2 * F" if first.halves else "F"
    return {
        "edition": CURRENT,
        "module": f"expert_{activation}",
        "class": f"Expert{activation.title().replace('_', '')}",
        "summary": f"Two GEMMs with {activation} between them",
        "dims": {"T": "tokens", "E": "num_groups", "H": "hidden", "F": "intermediate"},
        "inputs": {
            "x": {"shape": ["T", "H"], "role": "input"},
            "split_sizes": {"shape": ["E"], "dtype": "int64"},
        },
        "chain": [
            {"op": "grouped_linear", "as": "fc1", "out": "h", "dims": {"K": "H", "N": width}},
            {"op": activation, "as": "act", "out": "a", "dims": {"D": "F"}},
            {"op": "grouped_linear", "as": "fc2", "dims": {"K": "F", "N": "H"}},
        ],
    }


def write_further_specs(folder: Path) -> None:
    """Those modules as YAML."""
    for name, module in further_specs(api.load_specs()).items():
        further.write_yaml(folder / "modules" / f"{name}.yaml", module)


def generate(archs: Sequence[str]) -> None:
    """Bring the bundles of these architectures in `build/evidence` up to the specs.

    Raises:
        LedgerError: somebody edited one, or something cannot be planned; see `cells`.
    """
    out = bundles.BUILD / bundles.EVIDENCE
    folder = further.specs_of(out)
    shutil.rmtree(folder, ignore_errors=True)
    write_further_specs(folder)
    specs = api.load_specs(api.Folders(specs=(folder,)))
    wanted = {arch: uncommitted(cells(specs, arch), arch) for arch in archs}
    further.generate(out, wanted, (folder,))


def uncommitted(cells: Iterable[Cell], arch: str) -> list[Cell]:
    """Those that the committed bundle of an architecture does not hold."""
    committed = {path.stem for path in (bundles.GENERATED / arch).glob("*__*.py")}
    return [cell for cell in cells if str(cell) not in committed]
