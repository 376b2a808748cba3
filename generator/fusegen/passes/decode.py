"""Quantised copies decoded again: what a copy stands for, and GEMMs without an instruction.

Scales that are constant along the contraction, of tensors, groups or rows, are left for the GEMM's
end, in fp32: codes alone are exact in bfloat16.  Other scales vary along it, and the operand is
decoded by them, which is exact where they are powers of two, or E4M3 times E2M1, and rounds once
otherwise; a second, fp32 scale over a tensor or group of such blocks is left for the end, too.  So
a GEMM of any formats and scales is that of 16-bit operands, whatever instructions there are, and
its sums are kept in fp32, whatever less a recipe allows.  Transposed copies are transposed back;
those of rows in groups keep the padded space they lie in, and the GEMM runs over the padded groups.
Of a recipe all copies are transposed, or none is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..ir.buffers import Buffer
from ..ir.dtypes import DType
from ..ir.kernel import EndScale, LayoutSpec
from ..ir.kernel_set import Variant
from ..ir.quantization import Orientation, QuantizationSpec
from ..ir.shapes import Const, Expr, Shape
from ..ir.step import Copy, Operand, Step
from ..spec.arch import ArchSpec
from ..spec.recipe import RecipeSpec
from ..steps import is_gemm
from ..steps.copies import Original, copy_slots, decoded_rows
from ..steps.dequantize import DEQUANTIZE, DEQUANTIZE_GROUPS, PADDED_SIZES
from .draft import NotPossible
from .kernels import DECODED, demand_of, family_of, variant_of


def whole_copy(original: Buffer, copy: Copy, out: str) -> Step:
    """What a rowwise copy stands for, tensor scale included."""
    tensor = Original.of(original.shape, copy.role, None)
    groups = [Operand("groups", copy.groups)] if copy.groups else []
    return Step(
        primitive=DEQUANTIZE.name,
        kind=None,
        item="",
        inputs=(*copy_slots("a", copy), *groups),
        outputs=(Operand("out", out),),
        sizes=_sizes(tensor.parts, tensor.rows, tensor.columns),
        copies=(copy,),
    )


def _sizes(matrices: Expr, lines: Expr, length: Expr) -> tuple[tuple[str, Expr], ...]:
    return (("matrices", matrices), ("lines", lines), ("length", length))


def why_emulated(
    step: Step, arch: ArchSpec, recipe: RecipeSpec, buffers: Mapping[str, Buffer]
) -> str:
    """Why a GEMM reads decoded operands; empty where it does not."""
    if not (arch.has_kernels and is_gemm(step) and step.copies):
        return ""
    variant = variant_of(step, recipe, buffers)
    missing = _missing(step, arch, recipe, variant)
    store = variant.store if variant else DECODED.store
    if not missing or _missing(step, arch, recipe, replace(DECODED, store=store)):
        return ""
    return f"{missing}; operands are decoded to bfloat16"


def _missing(step: Step, arch: ArchSpec, recipe: RecipeSpec, variant: Variant | None) -> str:
    try:
        family_of(demand_of(step, variant, recipe), arch)
    except NotPossible as reason:
        return str(reason)
    return ""


def decode_operands(
    step: Step, buffers: Mapping[str, Buffer], layout: LayoutSpec, recipe: RecipeSpec
) -> tuple[tuple[Step, ...], tuple[Buffer, ...]]:
    """Steps that decode a GEMM's copies, then the GEMM of what they give; new buffers."""
    decoded = [_decode(copy, recipe.roles[copy.role], buffers, layout) for copy in step.copies]
    along_tokens = _is_transposed(step.copies[0])
    if along_tokens and step.input("groups"):
        decoded[0] = _with_padded_sizes(*decoded[0], buffers)
    steps = [replace(each, item=step.item) for each, _ in decoded]
    made = tuple(buffer for _, each in decoded for buffer in each)
    tokens = made[0].shape.dims[0]
    inputs = [Operand(slot, each.out) for slot, each in zip("ab", steps, strict=True)]
    used = {operand.buffer for each in steps for operand in each.inputs}
    inputs += [
        o for o in step.inputs if o.slot not in ("a", "b", "groups") and o.buffer not in used
    ]
    sizes = step.sizes
    groups = step.input("groups")
    if along_tokens:
        sizes = tuple((name, tokens if name == "tokens" else size) for name, size in sizes)
        groups = made[1].name if groups else None
    inputs += [Operand("groups", groups)] if groups else []
    return (*steps, replace(step, inputs=tuple(inputs), sizes=sizes)), made


def _decode(
    copy: Copy, spec: QuantizationSpec, buffers: Mapping[str, Buffer], layout: LayoutSpec
) -> tuple[Step, tuple[Buffer, ...]]:
    tensor = Original.of_copy(copy, buffers)
    transposed = _is_transposed(copy)
    rows = decoded_rows(tensor, copy, layout)
    out = Buffer(
        f"{copy.data}_decoded", DType.BFLOAT16, Shape(None, (*tensor.stack, rows, tensor.columns))
    )
    step = Step(
        primitive=DEQUANTIZE.name,
        kind=None,
        item="",
        inputs=tuple(copy_slots("a", copy)[: 2 if spec.end_scale is EndScale.NONE else 1]),
        outputs=(Operand("out", out.name),),
        sizes=_sizes(
            tensor.matrices or Const(1),
            tensor.columns if transposed else rows,
            rows if transposed else tensor.columns,
        ),
        copies=(copy,),
    )
    if not copy.groups:
        return step, (out,)
    grouped = replace(step, inputs=(*step.inputs, Operand("groups", copy.groups)))
    if not transposed:
        return (grouped if _by_group(copy, spec, layout) else step), (out,)
    return replace(
        grouped,
        primitive=DEQUANTIZE_GROUPS.name,
        sizes=(("rows", tensor.rows), ("columns", tensor.columns), ("groups", tensor.parts)),
    ), (out,)


def _is_transposed(copy: Copy) -> bool:
    return copy.orientation is Orientation.COLUMNWISE and not copy.untransposed


def _by_group(copy: Copy, spec: QuantizationSpec, layout: LayoutSpec) -> bool:
    """Whether a row is decoded by a scale that is found by its group, too."""
    token_major = layout.token_major and spec.along_tokens(copy.role, copy.orientation)
    moved = token_major or copy.atoms
    of_rows = spec.block[0] != 1 or copy.untransposed
    return spec.end_scale is EndScale.NONE and (of_rows or moved)


def _with_padded_sizes(
    step: Step, made: tuple[Buffer, ...], buffers: Mapping[str, Buffer]
) -> tuple[Step, tuple[Buffer, ...]]:
    """The step that decodes a GEMM's first operand tells the sizes of its padded groups, too."""
    copy = step.copies[0]
    assert copy.groups is not None, copy
    sizes = replace(buffers[copy.groups], name=f"{copy.original}_{PADDED_SIZES}", optional=False)
    outputs = (*step.outputs, Operand(PADDED_SIZES, sizes.name))
    return replace(step, outputs=outputs), (*made, sizes)
