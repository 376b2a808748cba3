"""Quantised copies of a tensor: their buffers, and the step that makes them."""

from __future__ import annotations

from ..ir.buffers import Buffer
from ..ir.dtypes import DType
from ..ir.kernel import LayoutSpec
from ..ir.quantization import Orientation, QuantizationSpec, Role
from ..ir.step import Copy, Operand, Step
from ..steps.copies import Formats, Original, copy_slots, stored_amaxes, stored_copy
from ..steps.quantize import QUANTIZE
from .draft import NotPossible

_PARTS = ("", "_scale", "_amax")
"""What stands behind a copy's name in those of its buffers."""


def make_copy(
    original: Buffer,
    role: Role,
    orientation: Orientation,
    spec: QuantizationSpec,
    layout: LayoutSpec,
    groups: Buffer | None,
) -> tuple[Copy, tuple[Buffer, ...]]:
    """The buffers of one copy, named after their original.

    Raises:
        NotPossible: the layout has no place for such a copy.
    """
    if orientation is Orientation.COLUMNWISE:
        _check_layout(spec, layout)
    name = f"{original.name}_{orientation.value}"
    grouped = groups if role is not Role.WEIGHT else None
    tensor = Original.of(original.shape, role, grouped.shape.dims[0] if grouped else None)
    stored = stored_copy(tensor, role, orientation, Formats({role: spec}, layout))
    buffers = tuple(
        Buffer(f"{name}{part}", each.typed, each.shape)
        for part, each in zip(_PARTS, stored, strict=False)
    )
    copy = Copy(
        original.name,
        role,
        orientation,
        data=buffers[0].name,
        scale=buffers[1].name,
        amax=buffers[2].name if len(buffers) > 2 else None,
        groups=grouped.name if grouped else None,
        atoms=bool(layout.scale_atoms),
        untransposed=(orientation is Orientation.COLUMNWISE and not layout.transposes(spec.format)),
    )
    return copy, buffers


def _check_layout(spec: QuantizationSpec, layout: LayoutSpec) -> None:
    if not layout.transposes(spec.format) and (spec.format is DType.E2M1 or spec.hadamard):
        raise NotPossible("columnwise copies of e2m1, and transformed ones, are transposed alone")
    if spec.hadamard and layout.token_alignment % spec.hadamard.size:
        raise NotPossible(
            f"a transform needs a token_alignment of a multiple of {spec.hadamard.size}, got"
            f" {layout.token_alignment}"
        )


def scratch(
    tensor: Original, copies: tuple[Copy, ...], spec: QuantizationSpec
) -> tuple[tuple[str, Buffer], ...]:
    """(slot, buffer) of the amaxes that kernels need before they can quantise."""
    return tuple(
        (slot, Buffer(f"{copies[0].original}_{slot}", each.typed, each.shape))
        for slot, each in stored_amaxes(tensor, copies, spec)
    )


def quantize_step(
    tensor: Original,
    copies: tuple[Copy, ...],
    kept: tuple[Operand, ...],
    needed: tuple[tuple[str, Buffer], ...],
) -> Step:
    """The step that makes all copies of a tensor.

    Args:
        tensor: the tensor.
        copies: of it.
        kept: operands that outlive the step: scales from a history, random numbers.
        needed: amaxes by slot, as ``scratch`` says.
    """
    groups = copies[0].groups
    return Step(
        primitive=QUANTIZE.name,
        kind=None,
        item="",
        inputs=(
            Operand("a", copies[0].original),
            *([Operand("groups", groups)] if groups else []),
            *kept,
        ),
        outputs=(
            *(operand for copy in copies for operand in copy_slots(copy.orientation.value, copy)),
            *(Operand(slot, buffer.name) for slot, buffer in needed),
        ),
        sizes=(("rows", tensor.rows), ("columns", tensor.columns), ("groups", tensor.parts)),
        copies=copies,
    )
